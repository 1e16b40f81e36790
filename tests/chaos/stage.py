"""Lanes that play many scenes, with their zygotes, servers and references. Used by the matrices, by pytest
and by random_kills.py.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import shutil
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.chaos.play import BUCKET, Played, Player, reference
from tests.chaos.pod import start_zygote
from tests.chaos.runs import Reference, Verdict, judge
from tests.chaos.scene import Cell, Scene
from tests.support import s3server
from tests.support.s3server import S3Server


@dataclass(frozen=True, kw_only=True, slots=True)
class Act:
    """A scene that was played. `logs` only where something is wrong."""

    scene: Scene
    verdict: Verdict
    codes: tuple[int | None, ...]
    logs: str = ""


class Stage:
    """`compiled`: whether scenes will compile; else the compiler is imported for the first one that does. The
    folder of compiled kernels is shared by all of them."""

    def __init__(self, folder: Path, *, lanes: int = 1, compiled: bool = False, s3: bool = False) -> None:
        self._folder = folder
        self._lanes = lanes
        self._compiled = compiled
        self._s3 = s3
        self._references: dict[Cell, Reference] = {}
        self._turns: dict[Cell, threading.Lock] = {}
        self._turn = threading.Lock()

    @contextlib.contextmanager
    def open(self) -> Iterator[Stage]:
        with contextlib.ExitStack() as stack:
            server: S3Server | None = None
            if self._s3:
                server = stack.enter_context(s3server.running(self._folder / "s3"))
                server.make_bucket(BUCKET)
            kernels = {"TORCHINDUCTOR_CACHE_DIR": str(self._folder / "inductor")}
            zygotes = self._zygotes = [start_zygote(seed, **kernels) for seed in range(self._lanes + 1)]
            for zygote in zygotes:
                stack.callback(zygote.close)
            if self._compiled:
                self._import_compiler()
            self.players = [
                Player(self._folder / f"lane-{lane}", zygotes[lane : lane + 2], server)
                for lane in range(self._lanes)
            ]
            for player in self.players:
                stack.callback(player.close)
            yield self

    def play(self, scene: Scene, lane: int = 0) -> Act:
        wanted = self.reference(scene.cell, lane)
        with self.players[lane].playing(scene) as played:
            verdict = judge(played, wanted)
            codes = tuple(attempt.code for attempt in played.attempts)
            logs = _logs(played) if verdict.problems or verdict.saved < verdict.noticed else ""
        return Act(scene=scene, verdict=verdict, codes=codes, logs=logs)

    def _import_compiler(self) -> None:
        for zygote in self._zygotes:
            zygote.preload("torch._inductor.compile_fx")
        self._compiled = True

    def reference(self, cell: Cell, lane: int = 0) -> Reference:
        with self._turn:
            if cell.compile and not self._compiled:
                self._import_compiler()
            turn = self._turns.setdefault(cell, threading.Lock())
        with turn:
            if cell not in self._references:
                with self.players[lane].playing(reference(cell)) as played:
                    self._references[cell] = Reference.of(played)
        return self._references[cell]

    def play_all(self, scenes: Sequence[Scene]) -> Iterator[Act]:
        """In order; as many at a time as there are lanes."""
        free = list(range(self._lanes))

        def one(scene: Scene) -> Act:
            lane = free.pop()
            try:
                return self.play(scene, lane)
            finally:
                free.append(lane)

        with ThreadPoolExecutor(self._lanes) as pool:
            yield from pool.map(one, scenes)


@contextlib.contextmanager
def stage(**options: Any) -> Iterator[Stage]:
    """In a folder of its own, which is gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="spottrain-chaos-"))
    try:
        with Stage(folder, **options).open() as opened:
            yield opened
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@functools.cache
def shared() -> Stage:
    """One for all tests of a pytest run, because its zygotes take seconds to start."""
    left_open = contextlib.ExitStack()
    atexit.register(left_open.close)
    return left_open.enter_context(stage())


def _logs(played: Played) -> str:
    parts = []
    for attempt in played.attempts:
        blows = "; ".join(map(str, attempt.struck)) or "left alone"
        parts.append(f"--- attempt {attempt.number} ({blows}) ended with {attempt.code}\n{attempt.log}")
    return "\n".join(parts)

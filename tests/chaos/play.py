"""Plays a scene: starts its attempts one after another, strikes at the points, waits for the end of each.

One `Player` per lane. Every wait is bounded: an attempt that does not end in time is killed, and hung.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from spottrain.contract import Env, TerminationMessage

from tests.chaos.faults import plan, with_outages
from tests.chaos.judge import Found, look
from tests.chaos.order import VARIABLE
from tests.chaos.pod import FreshPod, Pod
from tests.chaos.scene import Blow, Cell, Scene
from tests.support import s3server
from tests.support.faultproxy import FaultProxy, plain
from tests.support.s3server import S3Server
from tests.support.zygote import Zygote

SCRIPTS: Final = {False: Path(__file__).with_name("script.py"), True: Path(__file__).with_name("own_loop.py")}
"""By whether the loop is a custom one."""
BUCKET: Final = "chaos"
PATIENCE: Final = 120.0
"""Seconds for an attempt: many times what one takes on a busy machine."""


@dataclass(kw_only=True, slots=True, eq=False)
class Attempt:
    """`struck`: the signals that met a living pod; `code`: None where it hung."""

    number: int
    pod: Pod
    folder: Path
    before: Found
    struck: list[Blow] = field(default_factory=list)
    hung: bool = False

    @property
    def code(self) -> int | None:
        return None if self.hung else self.pod.code

    @property
    def record(self) -> str:
        return str(self.folder / f"attempt-{self.number}")

    @property
    def message(self) -> TerminationMessage | None:
        path = Path(f"{self.record}.message")
        return TerminationMessage.from_json(path.read_text()) if path.exists() else None

    @property
    def log(self) -> str:
        return self.pod.log.read_text() if self.pod.log.exists() else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Played:
    """`founds`: what the store held after each attempt; of attempts at the same time, after the last."""

    scene: Scene
    attempts: tuple[Attempt, ...]
    founds: tuple[Found, ...]
    folder: Path
    proxy: FaultProxy | None

    @property
    def found(self) -> Found:
        return self.founds[-1]


class Player:
    """`zygotes` take turns, so that attempts differ in what a process is born with."""

    def __init__(
        self, folder: Path, zygotes: Sequence[Zygote], server: S3Server | None = None, *, env: Any = None
    ) -> None:
        self._folder = folder
        self._zygotes = itertools.cycle(zygotes)
        self._numbers = itertools.count(1)
        self._server = server
        self._env: dict[str, str] = dict(env or {})
        self._open = contextlib.ExitStack()
        self._proxy: FaultProxy | None = None
        self._outage_ends = 0.0
        if server is not None:
            self._proxy = self._open.enter_context(FaultProxy(server.port).running(clients=2))

    def close(self) -> None:
        self._open.close()

    @contextlib.contextmanager
    def playing(self, scene: Scene) -> Iterator[Played]:
        """What the scene leaves is there until the end of the block."""
        folder = self._folder / f"scene-{next(self._numbers)}"
        folder.mkdir(parents=True)
        root = self._place(scene, folder)
        try:
            yield self._play(scene, folder, root)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.rmtree(root, ignore_errors=True)

    def _place(self, scene: Scene, folder: Path) -> Path:
        if not scene.on_s3:
            return folder / "store"
        assert self._server is not None and self._proxy is not None, "scenes on S3 want a server"
        self._proxy.reset(with_outages(plan(scene.faults) if scene.faults else plain, self._dark_until))
        return self._server.folder / BUCKET / f"{self._folder.name}-{folder.name}"

    def _play(self, scene: Scene, folder: Path, root: Path) -> Played:
        attempts: list[Attempt] = []
        founds: list[Found] = []
        ghosts: list[threading.Thread] = []
        for number, blows in enumerate([*scene.blows, ()], 1):
            attempt = self._start(scene, number, blows, folder, root)
            attempts.append(attempt)
            overtaken = threading.Event()
            runner = threading.Thread(target=_run, args=[attempt, blows, overtaken])
            runner.start()
            overtaken.wait(PATIENCE + 30)
            if any(blow.signal == "NEXT" for blow in blows):
                ghosts.append(runner)
                continue
            for thread in [runner, *ghosts]:
                thread.join()
            founds.append(self._look(scene, root))
            if attempt.code == 0 or attempt.hung:
                break
        return Played(
            scene=scene,
            attempts=tuple(attempts),
            founds=tuple(founds),
            folder=folder,
            proxy=self._proxy if scene.on_s3 else None,
        )

    def _dark_until(self) -> float:
        return self._outage_ends

    def _look(self, scene: Scene, root: Path) -> Found:
        if scene.on_s3 and self._proxy is not None:
            self._proxy.settle()
        return look(root)

    def _start(self, scene: Scene, number: int, blows: Sequence[Blow], folder: Path, root: Path) -> Attempt:
        record, bell = folder / f"attempt-{number}", folder / f"bell-{number}"
        os.mkfifo(bell)
        points = tuple(blow.point for blow in blows if blow.point is not None)
        order = scene.cell.order(str(record), str(bell), points, scene.pause)
        uri, more = str(root), {}
        if scene.on_s3:
            assert self._proxy is not None
            uri = f"s3://{BUCKET}/{root.name}"
            more = s3server.credentials() | {Env.CHECKPOINT_ENDPOINT: self._proxy.endpoint((number + 1) % 2)}
        env = scene.environment(number, uri, f"{record}.message") | more | self._env
        env[VARIABLE] = order.to_json()
        before = Found() if scene.race else look(root)
        self._outage_ends = time.monotonic() + scene.outage if number == scene.outage_at else 0.0
        script, log = SCRIPTS[scene.cell.own_loop], Path(f"{record}.log")
        if scene.fresh and blows:
            pod: Pod = FreshPod(script, env, folder=folder, log=log)
        else:
            zygote = next(self._zygotes)
            pod = Pod(zygote, script, env, folder=folder, log=log, nproc=scene.cell.ranks)
        return Attempt(number=number, pod=pod, folder=folder, before=before)


def _run(attempt: Attempt, blows: Sequence[Blow], overtaken: threading.Event) -> None:
    """Strikes, and waits for the end."""
    pod, give_up = attempt.pod, time.monotonic() + PATIENCE
    bell = os.open(attempt.folder / f"bell-{attempt.number}", os.O_RDWR | os.O_NONBLOCK)
    try:
        for blow in blows:
            if blow.at not in ("", "start") and not pod.wait(give_up - time.monotonic(), bell):
                break
            if blow.delay and pod.wait(blow.delay) is None:
                break
            if blow.signal == "NEXT":
                overtaken.set()
            else:
                attempt.struck.append(blow)
                pod.send(signal.Signals[f"SIG{blow.signal}"], blow.target)
        while (rung := pod.wait(give_up - time.monotonic())) is not None:
            if not rung and time.monotonic() >= give_up:
                attempt.hung = True
                pod.send(signal.SIGKILL, "node")
                give_up += 30
    finally:
        overtaken.set()
        os.close(bell)
        pod.clear()


def reference(cell: Cell) -> Scene:
    """The run that nothing interrupts."""
    return Scene(name=f"reference: {cell.name}", cell=cell, pause=0.0, interval="1h")

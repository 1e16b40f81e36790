"""What the script of a scene is told, and how it tells of its moments. Read by `script.py` in the trainer,
by its uploader, and by `play.py`, which makes it. Standard library only: the uploader has no torch.

A point is a place in the code of a run. When it is reached the script rings the bell, a FIFO that the player
listens to, and stands still for `hold` seconds, so that a signal meets it just there.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

VARIABLE: Final = "CHAOS"


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """Reached for the first time at `step` or later."""

    at: str
    step: int = 0
    hold: float = 0.0
    rank: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """`record`: prefix of the files that this attempt writes; `bell`: path of the FIFO."""

    record: str
    bell: str
    steps: int
    batch: int = 16
    micro: int = 16
    workers: int = 0
    evaluation: bool = False
    drop_last: bool = False
    stateful_schedule: bool = False
    pause: float = 0.0
    """Seconds that a forward pass takes longer."""
    points: tuple[Point, ...] = ()

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Order:
        raw = json.loads(env[VARIABLE])
        return cls(**raw | {"points": tuple(Point(**point) for point in raw["points"])})


class Teller:
    """One rank's pen and bell."""

    def __init__(self, order: Order, rank: int) -> None:
        self.order = order
        self.rank = rank
        self._left = [point for point in order.points if point.rank == rank]
        self._armed = Path(f"{order.record}-armed")

    def write(self, name: str, facts: Mapping[str, Any]) -> None:
        """One line, whole or not at all, into this rank's file `name`."""
        path = f"{self.order.record}-{self.rank}.{name}.jsonl"
        file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            os.write(file, json.dumps(facts).encode() + b"\n")
        finally:
            os.close(file)

    def reached(self, at: str, step: int = 0) -> None:
        for point in self._left:
            if point.at == at and step >= point.step:
                self._left.remove(point)
                self._ring(point, step)
                return

    def awaits(self, at: str) -> bool:
        return any(point.at == at for point in self._left)

    def _ring(self, point: Point, step: int) -> None:
        with contextlib.suppress(OSError):  # nobody listens any more
            bell = os.open(self.order.bell, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.write(bell, f"{point.at} {step}\n".encode())
            os.close(bell)
        time.sleep(point.hold)

    # --- the loader, whose processes do not know the step ---------------------------------------------
    def arm_loader(self, step: int) -> None:
        """After `step` steps: the next sample that anyone fetches is the point."""
        for point in self._left:
            if point.at == "loader" and step >= point.step:
                self._left.remove(point)
                self._armed.write_text(json.dumps(asdict(point)))
                return

    def fetched(self) -> None:
        try:
            point = Point(**json.loads(self._armed.read_text()))
            self._armed.unlink()
        except (OSError, ValueError):
            return
        self._ring(point, point.step)


def tell_of_uploads(store: Any, teller: Teller) -> None:
    """Has the store class tell of each upload of a shard: `upload`, before and, half-way, nothing."""
    upload: Callable[..., Any] = store.upload

    def told(self: Any, key: str, body: memoryview, **more: Any) -> Any:
        if key.endswith(".safetensors"):
            teller.reached("upload", step_of(key))
        return upload(self, key, body, **more)

    store.upload = told


def step_of(key: str) -> int:
    """Of `checkpoints/t000001-s000000012-nonce/...`."""
    return int(key.split("-s", 1)[1][:9]) if "-s" in key else 0

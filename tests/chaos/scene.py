"""What happens in a scene, as data: which training, on what store, and which blows hit which attempt."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from spottrain.contract import Env

from tests.chaos.order import Order, Point

BATCH = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """A way to train. Equal cells train alike, bit by bit."""

    precision: str = "fp32"
    accumulation: int = 1
    compile: bool = False
    workers: int = 0
    ranks: int = 1
    evaluation: bool = False
    steps: int = 60
    own_loop: bool = False
    """A custom loop with work after each epoch (`own_loop.py`), else a Trainer (`script.py`)."""

    @property
    def name(self) -> str:
        words = [
            self.precision,
            f"accumulation {self.accumulation}",
            "compiled" if self.compile else "eager",
            f"{self.workers} workers",
            f"{self.ranks} rank{'s' * (self.ranks > 1)}",
        ]
        return ", ".join(words + ["evaluated"] * self.evaluation + ["custom loop"] * self.own_loop)

    @property
    def training(self) -> str:
        settings = {"precision": self.precision, "compile": self.compile, "microBatchSize": self.micro}
        return json.dumps(settings)

    @property
    def micro(self) -> int:
        return BATCH // (self.accumulation * self.ranks)

    def order(self, record: str, bell: str, points: tuple[Point, ...], pause: float) -> Order:
        return Order(
            record=record,
            bell=bell,
            steps=self.steps,
            batch=BATCH,
            micro=self.micro,
            workers=self.workers,
            evaluation=self.evaluation,
            drop_last=self.compile,  # a second shape is compiled in another way, and adds up in another order
            stateful_schedule=self.accumulation > 1,
            pause=pause / self.accumulation,
            points=points,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Blow:
    """One signal. Counted from the point at which it is due, or (`at` empty) from the blow before."""

    signal: str
    """TERM, KILL, STOP or CONT; NEXT: none, but the next attempt is started while this one runs on."""
    target: str = "pod"
    """See `Pod.send`."""
    at: str = ""
    step: int = 0
    hold: float = 0.0
    rank: int = 0
    delay: float = 0.0
    """Seconds."""

    @property
    def point(self) -> Point | None:
        if not self.at:
            return None
        return Point(at=self.at, step=self.step, hold=self.hold, rank=self.rank)

    def __str__(self) -> str:
        where = f"at {self.at} {self.step}" if self.at else "then"
        return f"{where} +{self.delay * 1000:.0f} ms SIG{self.signal} to {self.target}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """`blows`: for each attempt but the last, which is left alone. `faults`: seed of the proxy, or empty."""

    name: str
    cell: Cell
    blows: tuple[tuple[Blow, ...], ...] = ()
    on_s3: bool = False
    faults: str = ""
    interval: str = "3steps"
    keep: int = 3
    pause: float = 0.003
    fresh: bool = False
    """Whether attempts that are hit start as real processes; the signal comes in their first two seconds."""
    outage: float = 0.0
    """Seconds from the start of attempt `outage_at` in which the store cannot be reached."""
    outage_at: int = 1
    env: dict[str, str] = field(default_factory=dict)

    @property
    def race(self) -> bool:
        """Whether two attempts run at the same time."""
        return any(blow.signal == "NEXT" for blows in self.blows for blow in blows)

    def environment(self, attempt: int, uri: str, message: str) -> dict[str, Any]:
        return {
            Env.JOB_NAME: "job",
            Env.JOB_UID: "uid",
            Env.ATTEMPT: str(attempt),
            Env.CHECKPOINT_URI: uri,
            Env.CHECKPOINT_INTERVAL: self.interval,
            Env.CHECKPOINT_KEEP: str(self.keep),
            Env.COMPILE_CACHE: "off",
            Env.TRAINING: self.cell.training,
            Env.TERMINATION_MESSAGE: message,
            **self.env,
        }

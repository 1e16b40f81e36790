"""Plays the training loops of loop_shapes.md, undisturbed and with four stops.

    python -m tests.runs.loop_shapes [NAME...]

prints a line of JSON for each shape: how the undisturbed training ended, and the one that was stopped.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import queue
import random
import re
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy
import spottrain
import spottrain.training.run  # this and what follows once, not in each attempt
import torch
import torch._dynamo
import torch.distributed.fsdp
from spottrain.contract import EXIT_CODE_OF, Env
from spottrain.core.preemption import Preemption
from spottrain.errors import RunError
from spottrain.lifecycle.session import RunEnded, Session
from spottrain.storage.open import open_store
from spottrain.training import engine
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, WeightedRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.support.snapshots import InProcessTransfer

STOPS: Final = (3, 7, 8, 9)
"""A pass has eight steps."""
LIMIT: Final = 70
"""Steps after which a loop is taken to have no end."""

PAGE: Final = Path(__file__).with_suffix(".md")


class Shape(NamedTuple):
    """A loop. `result`: exact, refused, or failed; `says`: what the error says."""

    code: str
    result: str
    says: str


def shapes() -> dict[str, Shape]:
    """The shapes of the page, by name."""
    found = re.findall(
        r"^## (\S+)\n\n(\w+)(?:: (.*?)|\.)\n\n```python\n(.*?)```", PAGE.read_text(), re.M | re.S
    )
    return {name: Shape(code, result, says) for name, result, says, code in found}


class Noisy(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, noise: float) -> None:
        self.noise = noise

    def __len__(self) -> int:
        return 32

    def __getitem__(self, i: int) -> torch.Tensor:
        x = torch.tensor([float(i), 1.0])
        return x + self.noise * torch.rand(2) if self.noise else x


class Turning(Sampler[int]):
    """Has a state of its own: each order begins one further."""

    turn = 0

    def __len__(self) -> int:
        return 32

    def __iter__(self) -> Iterator[int]:
        self.turn += 1
        yield from ((i + self.turn) % 32 for i in range(32))


NAMES: Final = {
    each.__name__: each
    for each in (
        *(spottrain, torch, itertools, random, numpy, queue),
        *(DataLoader, StatefulDataLoader, BatchSampler, RandomSampler, WeightedRandomSampler, Turning),
    )
}
"""What the loops name."""


class Attempt:
    """One attempt at a training, in a session of its own."""

    def __init__(self, uri: str, stop: int | None) -> None:
        self.used: list[str] = []
        """Of each step: the samples and the loss."""
        self.other: list[str] = []
        self._stop = stop
        self.session = Session({Env.CHECKPOINT_URI: uri, Env.CHECKPOINT_INTERVAL: "1h"}, Preemption(grace=60))
        self.session.prepare("shape")
        spottrain.seed(3)
        self._model = torch.nn.Sequential(
            torch.nn.Linear(2, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.3)
        )
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3)
        self.run: Any = None

    def begin(self, **options: Any) -> Any:
        self.run = spottrain.Run(
            model=self._model, optimizer=self._optimizer, session=self.session, **options
        )
        return self.run

    def train(self, batch: torch.Tensor) -> torch.Tensor:
        self._optimizer.zero_grad()
        loss: torch.Tensor = self._model(batch).square().mean()
        torch.autograd.backward(loss)
        self._optimizer.step()
        self.used.append(f"{[int(x) for x in batch[:, 0]]} {float(loss.detach()):.9g}")
        if self.run._position.step + 1 == self._stop:
            self.session.preemption.stop_by(time.time() + 60, "test")
        if len(self.used) > LIMIT:
            raise RuntimeError("the loop has no end")
        return loss

    def validate(self) -> None:
        """Draws random numbers."""
        self.other.append(f"{self.run._position.step} {float(torch.rand(())):.9g}")

    def play(self, code: str) -> dict[str, Any]:
        """Runs the loop, and `finish` after it. Returns how it ended."""
        dataset, steady = Noisy(0.5), Noisy(0.0)

        def pick(indices: Any) -> torch.Tensor:
            return torch.stack([steady[int(i)] for i in indices])

        names = {
            **NAMES,
            "Run": self.begin,
            "train": self.train,
            "validate": self.validate,
            "dataset": dataset,
            "steady": steady,
            "pick": pick,
            "draw": lambda: pick(torch.randint(32, (4,))),
        }
        said = ""
        try:
            exec(code, names)
            self.run.finish(ended_early=names.get("EARLY"))
        except RunEnded:
            said = self.session.message.message if self.session.message else ""
        except RunError as error:
            code_of = self.session.fail(error, "shape")
            return {"code": int(code_of), "says": str(error), "used": self.used, "other": self.other}
        except Exception:
            return {"code": -1, "says": traceback.format_exc(), "used": self.used, "other": self.other}
        outcome = self.session.outcome
        return {"code": int(EXIT_CODE_OF[outcome]), "says": said, "used": self.used, "other": self.other}


def attempt(uri: str, stop: int | None, code: str) -> dict[str, Any]:
    return Attempt(uri, stop).play(code)


def played(code: str, stops: tuple[int, ...]) -> dict[str, Any]:
    """The training with these stops. Returns how its last attempt ended, and what all of them used."""
    used: list[str] = []
    other: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for stop in (*stops, None):
            end = in_child(partial(attempt, f"{folder}/store", stop, code))
            used += end["used"]
            other += end["other"]
            if end["code"] != 75:
                break
        weights = Path(folder, "store", "final", "model.safetensors")
        digest = zlib.crc32(weights.read_bytes()) if weights.exists() else 0
    return end | {"used": used, "other": other, "digest": digest}


def in_child(play: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns the result of `play` in a child process, which leaves nothing behind."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.dup2(2, 1)
            with open(writing, "w") as pipe:
                json.dump(play(), pipe)
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading) as pipe:
        found: dict[str, Any] = json.load(pipe)
    os.waitpid(pid, 0)
    return found


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # else each attempt copies, and looks through, all objects of torch
    engine.Transfer = lambda where: InProcessTransfer(open_store(**where))  # type: ignore[attr-defined,assignment]
    for name, shape in shapes().items():
        if not names or name in names:
            stopped = played(shape.code, STOPS) if shape.result == "Exact" else None
            print(json.dumps({"name": name, "alone": played(shape.code, ()), "stopped": stopped}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

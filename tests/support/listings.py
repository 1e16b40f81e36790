"""What the checkpoint listings of the articles do, told again in as few lines as show it; and, last, the same
scenes for ours. Used by tests/runs/test_listings.py alone.

docs/techniques.md has a row for each. Only the behaviour is the articles', none of the text.
"""

from __future__ import annotations

import copy
import inspect
import io
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import torch
from spottrain.checkpoint.manager import CheckpointManager
from spottrain.checkpoint.saver import Save
from spottrain.checkpoint.upload import InProcessTransfer
from spottrain.contract import Env
from spottrain.core.preemption import Preemption
from spottrain.core.run_config import RunConfig
from spottrain.errors import StoreDenied
from spottrain.lifecycle.session import Session
from spottrain.storage.base import Object, never
from spottrain.storage.local import FolderStore
from torch.utils._python_dispatch import TorchDispatchMode

T = TypeVar("T")

LEAVES_WITH_0: Final = """\
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("training", flush=True)
time.sleep(60)
"""
"""A program: whoever waits for it cannot tell an interruption from the end of the work."""


# --- 001: saving in the handler -------------------------------------------------------------------------
class Halfway(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls `act` when Adam has moved the first of two parameters, and both moments of the second."""

    def __init__(self, act: Callable[[], object]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.act, self.moved = act, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.addcdiv_.default:
            self.moved += 1
            if self.moved == 2:
                self.act()
        return func(*args, **(kwargs or {}))


class SavesInHandler:
    """A tiny training whose signal handler takes the state there and then, and exits."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = torch.nn.Linear(3, 1)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.step = 0
        self.saved: dict[str, Any] = {}

    def state(self) -> dict[str, Any]:
        parts = {"step": self.step, "model": self.model.state_dict(), "adam": self.optimizer.state_dict()}
        return copy.deepcopy(parts)

    def handle(self, signum: int, frame: FrameType | None) -> None:
        self.saved = self.state()
        sys.exit(0)

    def train_step(self) -> None:
        self.model(torch.ones(1, 3)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1


# --- 001: two kinds of files ----------------------------------------------------------------------------
class TwoKinds:
    """Periodic files, numbered; and one for emergencies, which is looked for first and never removed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.urgent = folder / "urgent.pt"

    def write(self, step: int, *, urgent: bool = False) -> None:
        torch.save({"step": step}, self.urgent if urgent else self.folder / f"at{step:06d}.pt")

    def read(self) -> int:
        newest = sorted(self.folder.glob("at*.pt"))[-1]
        return int(torch.load(self.urgent if self.urgent.exists() else newest)["step"])


# --- 001 and 002: what is in the file -------------------------------------------------------------------
class Trained(NamedTuple):
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler


def start_training(seed: int = 1) -> Trained:
    """As the script begins, in every attempt."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    return Trained(model, torch.optim.Adam(model.parameters(), lr=0.1), scaler)


def train(it: Trained, steps: int) -> list[list[bool]]:
    """Which inputs dropout let through, in each step."""
    kept = []
    for _ in range(steps):
        passed = it.model[0](torch.ones(1, 8))  # type: ignore[index]
        kept.append((passed[0] != 0).tolist())
        loss = it.scaler.scale(it.model[1](passed).sum())  # type: ignore[index]
        loss.backward()  # type: ignore[no-untyped-call]
        it.scaler.step(it.optimizer)
        it.scaler.update()
        it.optimizer.zero_grad()
    return kept


def save_weights_and_optimizer(it: Trained) -> bytes:
    """Neither loss scale nor random state."""
    file = io.BytesIO()
    torch.save([it.model.state_dict(), it.optimizer.state_dict()], file)
    return file.getvalue()


def load_weights_and_optimizer(it: Trained, body: bytes) -> None:
    weights, moments = torch.load(io.BytesIO(body))
    it.model.load_state_dict(weights)
    it.optimizer.load_state_dict(moments)


# --- 002: one key -----------------------------------------------------------------------------------------
class Place(Protocol):
    """Where the one file is."""

    def read(self) -> bytes: ...
    def write(self, body: bytes) -> None: ...


class Mount:
    """A folder, or a bucket behind a mount: a file is written where it lies, from its start to its end.

    `killed_at`: the bytes that get there before the process is gone.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.killed_at: int | None = None

    def read(self) -> bytes:
        return self.path.read_bytes()

    def write(self, body: bytes) -> None:
        self.path.write_bytes(body[: self.killed_at])


class Shut(Mount):
    """Its credentials to read have expired."""

    def read(self) -> bytes:
        raise StoreDenied("403")


def save(place: Place, step: int) -> None:
    file = io.BytesIO()
    torch.save({"step": step}, file)
    place.write(file.getvalue())


def load_or_0(place: Place) -> int:
    """Whatever goes wrong is taken for "there is none yet"."""
    try:
        return int(torch.load(io.BytesIO(place.read()))["step"])
    except Exception:
        return 0


def train_one_key(place: Place, *, steps: int, every: int) -> Iterator[int]:
    """The loop around it. Gives the number of each step, which is done when the next is asked for."""
    begin = load_or_0(place)
    for step in range(begin, begin + steps):
        yield step
        if step % every == 0:
            save(place, step)


def go_on_counting(batches: Iterable[T], step: int) -> Iterator[tuple[int, T]]:
    """The count goes on at `step`; the data do not."""
    return enumerate(batches, start=step)


# --- 002: durable when? -----------------------------------------------------------------------------------
class SavedWhenQueued:
    """Uploads later, and calls a step saved at once."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.saved_step: int | None = None
        self.queue: list[int] = []

    def save(self, step: int) -> None:
        self.queue.append(step)
        self.saved_step = step

    def upload(self) -> None:
        while self.queue:
            save(self.place, self.queue.pop(0))


# --- ours: a real run that is told to stop in the middle of an optimizer step ----------------------------
SCRIPT: Final = f"""\
from __future__ import annotations
import json, os, signal, sys, zlib
from contextlib import nullcontext
import torch, spottrain
from torch.utils._python_dispatch import TorchDispatchMode

STOP_IN = int(os.environ.get("STOP_IN", "0"))


{inspect.getsource(Halfway)}

class Adam(torch.optim.Adam):
    def step(self, closure=None):
        told = Halfway(lambda: os.kill(os.getpid(), signal.SIGTERM))
        with told if trainer.step + 1 == STOP_IN else nullcontext():
            super().step()
        tell("whole", step=trainer.step + 1, weights=[p.tolist() for p in model.parameters()])


class Numbered(torch.utils.data.Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, i):
        return i, torch.ones(8)


def tell(what, **facts):
    sys.stdout.write(f"{{what}} {{json.dumps(facts)}}\\n")  # in one piece: other threads write as well
    sys.stdout.flush()


def state():
    return {{"scale": trainer.scaler.get_scale(), "random": zlib.crc32(torch.get_rng_state().numpy())}}


def loss(model, batch):
    tell("begin", step=trainer.step, samples=batch[0].tolist(), **state())
    return model(batch[1]).float().mean()


spottrain.seed(1)
model = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
trainer = spottrain.Trainer(
    model=model,
    optimizer=Adam(model.parameters(), lr=0.1),
    train_dataset=Numbered(),
    loss_fn=loss,
    max_steps=8,
    global_batch_size=2,
    precision="fp16",
)
trainer.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
try:
    trainer.fit()
finally:
    tell("left", step=trainer.step, **state())
"""


# --- ours: checkpoints without a process ----------------------------------------------------------------
def attempt(store: FolderStore, number: int) -> CheckpointManager:
    """Nobody watches HEAD in here: a watcher that is superseded ends its process, which is pytest's."""
    session = Session({}, Preemption(grace=30.0))
    session.run = RunConfig.from_env({Env.JOB_UID: "u"}, script="train.py")
    session.attempt = number
    session.fail_now = lambda error: None  # type: ignore[method-assign, assignment, return-value]
    return CheckpointManager(session, store, transfer=lambda: InProcessTransfer(store), watch_seconds=1e6)


def claimed(store: FolderStore, number: int) -> CheckpointManager:
    it = attempt(store, number)
    it.claim()
    return it


def state_at(it: CheckpointManager, step: int) -> Callable[[], Save]:
    return lambda: it.saver.snapshot({"weights": torch.full((4,), float(step))}, {}, step)


def restored_step(store: FolderStore, number: int) -> int | None:
    it = attempt(store, number)
    found = it.choice.restore(it.claim())
    return None if found is None else found.entry.step


class Killed(BaseException):
    """Of a process, at this point."""


class Cut(FolderStore):
    """Kills the process, when told to, with half of an upload under its key."""

    cutting = False

    def upload(self, key: str, body: memoryview, *, cancelled: Callable[[], bool] = never) -> list[str]:
        if not self.cutting:
            return super().upload(key, body, cancelled=cancelled)
        self.cutting = False
        super().upload(key, body[: len(body) // 2])
        raise Killed


class Denied(FolderStore):
    def get(self, key: str) -> Object | None:
        raise StoreDenied(f"{key}: 403; check the credentials")


class Gated(FolderStore):
    """Uploads wait for `gate`."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.gate = threading.Event()

    def upload(self, key: str, body: memoryview, *, cancelled: Callable[[], bool] = never) -> list[str]:
        assert self.gate.wait(30), "nobody opened the gate"
        return super().upload(key, body, cancelled=cancelled)

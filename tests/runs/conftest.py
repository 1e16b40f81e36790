"""Builders for tests that start `spottrain run` as a real process on a folder store."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from spottrain.contract import Env
from spottrain.lifecycle.topology import LOOPBACK, Gang, reserve_port

from tests.runs.zygote import Run, Zygote

SCRIPT = """\
import os, sys, time
import torch, spottrain

spottrain.seed(3)
PAUSE = float(os.environ.get("PAUSE", "0"))


class Augmented(torch.utils.data.Dataset):
    def __len__(self):
        return 50

    def __getitem__(self, i):
        generator = torch.Generator().manual_seed(i)
        x = torch.randn(4, generator=generator)
        return x + 0.01 * torch.randn(4), x.sum()


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, int(os.environ.get("WIDTH", "16")))
        self.norm = torch.nn.BatchNorm1d(self.first.out_features)
        self.drop = torch.nn.Dropout(0.1)
        self.last = torch.nn.Linear(self.first.out_features, 1)

    def forward(self, x):
        return self.last(self.drop(self.norm(self.first(x)).relu())).squeeze(-1)


def loss(model, batch):
    time.sleep(PAUSE)
    if not model.training:
        print("in-evaluation", flush=True)
        time.sleep(float(os.environ.get("EVAL_PAUSE", "0")))
    return torch.nn.functional.mse_loss(model(batch[0]).float(), batch[1])


model = Model()
trainer = spottrain.Trainer(
    model=model,
    optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
    train_dataset=Augmented(),
    eval_dataset=Augmented() if "EVAL" in os.environ else None,
    loss_fn=loss,
    max_steps=24,
    global_batch_size=8,
    log_every=1,
    num_workers=int(os.environ.get("WORKERS", "0")),
    drop_last="DROP_LAST" in os.environ,
    deterministic=True,
)
trainer.fit()
print("after fit")
"""

# Uploads are made by a process of their own, which reads this when it starts: so a test makes them slow or
# broken. `puts`: the shards so far.
UPLOADS = """\
import time
from spottrain.errors import StoreUnavailable
from spottrain.storage.local import FolderStore
upload = FolderStore.upload
puts = []
def slow(self, key, body, **more):
    if key.endswith(".safetensors"):
        puts.append(key)
        print("putting", key, flush=True)
        {act}
    return upload(self, key, body, **more)
FolderStore.upload = slow
"""


# The same of the process that stores what ranks print.
SCRIBE = """\
import functools, os, sys, time
if "spottrain.lifecycle.log_capture" in sys.orig_argv:
    import spottrain.lifecycle.log_capture.parts as book
    from spottrain.errors import StoreUnavailable
    from spottrain.storage.local import FolderStore
    put_if_absent = FolderStore.put_if_absent
    def put(self, key, body):
        {act}
        return put_if_absent(self, key, body)
    FolderStore.put_if_absent = put
    book.Limits = functools.partial(book.Limits, every={every})
"""


def harm_scribe(folder: Path, act: str = "pass", every: float = 0.2) -> dict[str, str]:
    """Environment in which parts come so often, and `act` is done before each of them is stored."""
    (folder / "scribe").mkdir(exist_ok=True)
    (folder / "scribe" / "sitecustomize.py").write_text(SCRIBE.format(act=act, every=every))
    return {"PYTHONPATH": str(folder / "scribe")}


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    zygote = Zygote()
    yield zygote
    zygote.close()


class Lab:
    """One folder with a checkpoint URI, scripts and the runs made in it."""

    def __init__(self, zygote: Zygote, folder: Path) -> None:
        self.folder = folder
        self._zygote = zygote
        self._runs: list[Run] = []
        self._open = contextlib.ExitStack()

    def run(
        self,
        script: str = SCRIPT,
        *,
        at: str = "store",
        attempt: int | None = None,
        training: str = "{}",
        interval: str = "7steps",
        args: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
        uploads: str = "",
        nproc: int = 1,
    ) -> Run:
        """Starts `spottrain run` on `script` as job `job`; `at` names the checkpoint folder.

        `uploads`: a statement that is executed before the upload of each shard.
        """
        words = self._write(script, args)
        env = self._env(at, attempt, interval, training) | self._harm(uploads) | (env or {})
        return self.start(words if nproc == 1 else ["--nproc", str(nproc), *words], env)

    def ranks(
        self,
        count: int,
        script: str,
        *,
        at: str = "store",
        attempt: int | None = None,
        training: str = "{}",
        interval: str = "7steps",
        env: dict[str, str] | None = None,
    ) -> list[Run]:
        """The same as one run for each rank of a pod, without a launcher: torch is imported already."""
        words = self._write(script, ())
        basic = self._env(at, attempt, interval, training) | (env or {})
        port = self._open.enter_context(reserve_port()).getsockname()[1]
        gang = Gang(nproc=count, host=LOOPBACK)
        return [self.start(words, basic | gang.env_of(rank, port)) for rank in range(count)]

    def _write(self, script: str, args: tuple[str, ...]) -> list[str]:
        path = self.folder / "train.py"
        path.write_text(script)
        return [str(path), *args]

    def _harm(self, act: str) -> dict[str, str]:
        if not act:
            return {}
        folder = self.folder / f"harm-{len(self._runs) + 1}"
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(UPLOADS.format(act=act))
        return {"PYTHONPATH": str(folder)}

    def _env(self, at: str, attempt: int | None, interval: str, training: str) -> dict[str, str]:
        return {
            Env.JOB_NAME: "job",
            Env.JOB_UID: f"uid-{at}",
            Env.ATTEMPT: str(attempt or len(self._runs) + 1),
            Env.CHECKPOINT_URI: str(self.folder / at) if at else "",
            Env.CHECKPOINT_INTERVAL: interval,
            Env.TRAINING: training,
        }

    def start(self, argv: list[str], env: dict[str, str]) -> Run:
        """`spottrain run ARGV...` in the lab's folder."""
        run = Run(self._zygote, self.folder, argv, env, len(self._runs) + 1)
        self._runs.append(run)
        return run

    def close(self) -> None:
        for run in self._runs:
            if run.code is None:
                run.send(signal.SIGKILL)
                run.end()
        self._open.close()


@pytest.fixture
def lab(zygote: Zygote, tmp_path: Path) -> Iterator[Lab]:
    lab = Lab(zygote, tmp_path)
    yield lab
    lab.close()

"""Builders for tests that start `spottrain run` as a real process on a folder store."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from spottrain.contract import Env, Progress
from spottrain.lifecycle.topology import LOOPBACK, Gang, reserve_port

from tests.runs.launched import Launched, Run, Watched
from tests.support.zygote import Zygote

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

# Says for each of the texts in CASES how `attempt(text)` is refused.
TRIES = """
import json
from spottrain.errors import ConfigurationError
for text in json.loads(os.environ["CASES"]):
    try:
        attempt(text)
        print("not refused:", text)
    except ConfigurationError as error:
        print("refused:", error)
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
if "spottrain.lifecycle.log_capture.relay" in sys.orig_argv:
    import spottrain.lifecycle.log_capture.uploader as book
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
        self.logs = "off"
        """With `keep` the process that trains has a parent that stores its output, as in a pod."""
        self._zygote = zygote
        self._runs: list[Run] = []
        self._alone: dict[str, Run] = {}
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

    @property
    def head(self) -> Any:
        """HEAD of the checkpoint folder `store`."""
        return json.loads((self.folder / "store" / "HEAD").read_text())

    def take(self, folder: Path) -> None:
        """Copies another lab's checkpoint folder; `at` is its name."""
        shutil.copytree(folder, self.folder / folder.name)

    def alone(self, script: str, env: Mapping[str, str] | None = None) -> Run:
        """The script's run that nothing interrupts; made once."""
        key = script + json.dumps(dict(env or {}))
        if key not in self._alone:
            at = f"alone-{len(self._alone) + 1}"
            self._alone[key] = self.run(script, at=at, attempt=1, interval="1h", env=dict(env or {})).done()
        return self._alone[key]

    def refusals(self, script: str, cases: Sequence[str]) -> list[str]:
        """How the script's `attempt(text)` refuses each of these, in one process."""
        run = self.run(script + TRIES, env={"CASES": json.dumps(cases)}).done()
        return re.findall(r"^(?:not )?refused: (.*)", run.log, re.M)

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
            Env.LOGS: self.logs,
        }

    def start(self, argv: list[str], env: dict[str, str], *, verb: str = "run") -> Run:
        """`spottrain VERB ARGV...` in the lab's folder."""
        run = Run(self._zygote, self.folder, [verb, *argv], env, len(self._runs) + 1)
        self._runs.append(run)
        return run

    def close(self) -> None:
        for run in self._runs:
            if run.code is None:
                run.send(signal.SIGKILL)
                run.end()
        self._open.close()


def served(run: Watched, path: str = "progress") -> str:
    """What the run, which has Env.PROGRESS_PORT, answers to a GET."""
    port = run.until("event=progress-served").log.split("event=progress-served port=")[1].split()[0]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=10) as answer:
        return str(answer.read().decode())


def progress_of(run: Watched) -> Progress:
    return Progress.from_json(served(run))


def weights_that_could_not_be_left_are_left_by_the_next_attempt(lab: Lab, script: str) -> None:
    """It trains nothing, for the job had done all its steps."""
    says_again_that_it_is_done(lab, script, lab.run(script, attempt=1).done())


def says_again_that_it_is_done(lab: Lab, script: str, first: Run) -> None:
    """`first` has trained in the lab's folder, and could not say at its end that it is done."""
    head = lab.folder / "store" / "HEAD"
    head.write_text(head.read_text().replace('"done"', '"active"'))
    again = lab.run(script, attempt=2).done()
    assert not again.losses and again.digest == first.digest
    assert '"done"' in head.read_text()


@pytest.fixture(scope="module")
def others(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """For runs that several tests of a file compare theirs with."""
    lab = Lab(zygote, tmp_path_factory.mktemp("others"))
    yield lab
    lab.close()


@pytest.fixture
def lab(zygote: Zygote, tmp_path: Path) -> Iterator[Lab]:
    lab = Lab(zygote, tmp_path)
    yield lab
    lab.close()


Start = Callable[..., Launched]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a command in a folder with a script, train.py, as a process from its first instruction on."""
    with contextlib.ExitStack() as started:

        def start(script: str, *command: str, **env: str) -> Launched:
            (tmp_path / "train.py").write_text(script)
            run = Launched(tmp_path, command, **env)
            started.callback(run.close)
            return run

        yield start

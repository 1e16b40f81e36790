"""Runs an example as its manifest says, kills it, starts it again, and judges how it ends.

A `Kind` is a manifest of examples/: its script, arguments, workers and interval are read from there. To add
one, write `examples/NAME.yaml`, add `Kind(name="NAME")` to `KINDS`, and a row to examples/README.md. Where
lines of the script are spottrain's, `page` has a diff block of the script, from which the plain script is
made. What starts, counts or stores differently overrides `argv`, `reached`, `resumed` or `digest`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml
from spottrain.contract import Env, ExitCode
from spottrain.lifecycle.topology import LOOPBACK

from tests.runs.launched import Run
from tests.support.ports import free_port
from tests.support.zygote import Zygote

ROOT: Final = Path(__file__).parents[2]
EXAMPLES: Final = ROOT / "examples"
IN_IMAGE: Final = "/opt/spottrain/examples/"
GRACE_SECONDS: Final = 30
END_SECONDS: Final = 180.0
DELETED_AFTER_SECONDS: Final = 5.0
"""Longer than the operator waits, so that pods that stop by themselves are seen to do so."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    name: str
    """Of the manifest, without .yaml."""
    page: str = ""
    """Page with the diff between the plain script and this one; "": the script is unchanged."""
    exact: bool = True
    """Whether the final weights are promised to be those of a run that nobody disturbed."""
    preload: tuple[str, ...] = ()
    """Modules to import once for all attempts, such as ("transformers",)."""
    env: Mapping[str, str] = field(default_factory=dict)

    # --- what the manifest says -----------------------------------------------------------------------
    @property
    def spec(self) -> dict[str, Any]:
        found: dict[str, Any] = yaml.safe_load((EXAMPLES / f"{self.name}.yaml").read_text())["spec"]
        return found

    @property
    def workers(self) -> int:
        return int(self.spec.get("workers", 1))

    @property
    def args(self) -> list[str]:
        """Those of the container, with the scripts of this checkout."""
        container = self.spec["template"]["spec"]["containers"][0]
        return [word.replace(IN_IMAGE, f"{EXAMPLES}/") for word in container["args"]]

    @property
    def script(self) -> Path:
        return next(Path(word) for word in self.args if word.endswith(".py"))

    # --- what a kind of another sort overrides -----------------------------------------------------------
    def argv(self, folder: Path) -> list[str]:
        """The words after `spottrain`, as the image's entry point runs them."""
        return ["run", *self.args]

    def reached(self, pod: Run) -> int:
        """Optimizer steps that the running first pod has done."""
        port = re.search(r"event=progress-served (?:rank=0 )?port=(\d+)", pod.log)
        if port is None:
            return 0
        url = f"http://{LOOPBACK}:{port[1]}/progress"
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
            return int(json.load(answer)["step"])
        return 0

    def resumed(self, pod: Run) -> int:
        """The step at which this attempt began."""
        found = re.search(r"event=restored (?:rank=0 )?step=(\d+)", pod.log)
        return int(found[1]) if found else 0

    def digest(self, pod: Run, folder: Path) -> str:
        """SHA-256 of the final weights, when the job is done."""
        return pod.digest

    def of_script(self, text: str, folder: Path) -> Kind:
        """The kind with another script, written to `folder`."""
        path = folder / self.script.name
        path.write_text(text)
        return _WithScript(**vars(self), other=path)

    # --- lines --------------------------------------------------------------------------------------------
    def plain(self) -> str:
        """The script without spottrain."""
        return undone(self.script.read_text(), self.diff) if self.page else self.script.read_text()

    @property
    def lines(self) -> int:
        return changed_lines(self.diff) if self.page else 0

    @property
    def diff(self) -> str:
        """The block of the page that ends in this script."""
        blocks: list[str] = re.findall(r"```diff\n(.*?)```", (ROOT / self.page).read_text(), re.DOTALL)
        return next(each for each in blocks if f"+++ examples/{self.script.name}\n" in each)


@dataclass(frozen=True, kw_only=True)
class _WithScript(Kind):
    other: Path

    def argv(self, folder: Path) -> list[str]:
        return ["run", *(str(self.other) if word == str(self.script) else word for word in self.args)]


OWN_LOOPS: Final = tuple(
    Kind(name=name, page="examples/README.md")
    for name in (
        "image-classification",
        "language-model",
        "gan",
        "ddp",
        "ddp-nproc",
        "fsdp2",
        "nanogpt-shape",
    )
)
LIBRARIES: Final = (
    Kind(name="hf-trainer", preload=("transformers.trainer",)),
    Kind(name="lightning-fit", preload=("lightning.pytorch",)),
    Kind(name="accelerate-loop", page="examples/README.md", preload=("accelerate",)),
)
KINDS: Final = {kind.name: kind for kind in (*OWN_LOOPS, *LIBRARIES)}


# --- the plain script --------------------------------------------------------------------------------------
def undone(script: str, diff: str) -> str:
    """`script` before the changes of `diff`, which has `@@` before each hunk, without line numbers."""
    for hunk in _hunks(diff):
        after = "".join(f"{line[1:]}\n" for line in hunk if not line.startswith("-"))
        before = "".join(f"{line[1:]}\n" for line in hunk if not line.startswith("+"))
        assert script.count(after) == 1, f"{script.count(after)} places of the script are:\n{after}"
        script = script.replace(after, before)
    return script


def changed_lines(diff: str) -> int:
    """Lines added, removed or replaced; a replaced one counts once."""
    count = 0
    for hunk in _hunks(diff):
        for run in re.findall(r"[-+]+", "".join(line[:1] or " " for line in hunk)):
            count += max(run.count("-"), run.count("+"))
    return count


def _hunks(diff: str) -> Iterator[list[str]]:
    for text in re.split(r"^@@.*\n", diff, flags=re.MULTILINE)[1:]:
        yield text.splitlines()


# --- attempts ----------------------------------------------------------------------------------------------
class Attempt:
    """All pods of one attempt, each a session of processes."""

    def __init__(self, zygote: Zygote, kind: Kind, folder: Path, number: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.kind, self.folder = kind, folder
        self._port = free_port()
        self.pods = [
            Run(zygote, folder, kind.argv(folder), self._env(number, index), 10 * number + index)
            for index in range(kind.workers)
        ]

    def _env(self, number: int, index: int) -> dict[str, str]:
        spec, checkpoint = self.kind.spec, self.kind.spec["checkpoint"]
        gang: dict[str, str] = {
            Env.WORKERS: str(self.kind.workers),
            Env.WORKER_INDEX: str(index),
            Env.RENDEZVOUS: f"{LOOPBACK}:{self._port}",
        }
        return {
            Env.JOB_NAME: self.kind.name,
            Env.JOB_UID: f"uid-{self.folder.name}",
            Env.ATTEMPT: str(number),
            Env.CHECKPOINT_URI: str(self.folder / "store"),
            Env.CHECKPOINT_INTERVAL: checkpoint.get("interval", "auto"),
            Env.TRAINING: json.dumps(spec.get("training", {})),
            Env.GRACE_SECONDS: str(GRACE_SECONDS),
            Env.PROGRESS_PORT: "0",
            Env.LOGS: "off",
            **(gang if self.kind.workers > 1 else {}),
            **self.kind.env,
        }

    @property
    def first(self) -> Run:
        return self.pods[0]

    @property
    def log(self) -> str:
        return "\n".join(f"--- pod {index}\n{pod.log}" for index, pod in enumerate(self.pods))

    @property
    def running(self) -> bool:
        return any(pod.code is None for pod in self.pods)

    def until_step(self, step: int) -> int:
        """Waits until so many steps are done, or it has ended. Returns how many are."""
        give_up = time.monotonic() + END_SECONDS
        while self.running and (done := self.kind.reached(self.first)) < step:
            assert time.monotonic() < give_up, f"{done} of {step} steps:\n{self.log}"
            time.sleep(0.01)
        return self.kind.reached(self.first)

    def kill(self, signum: signal.Signals, pod: int = 0) -> None:
        """SIGTERM to a pod's first process, as the kubelet sends it; SIGKILL to all of its processes."""
        if self.pods[pod].code is not None:
            return
        pids = [self.pods[pod].pid] if signum is signal.SIGTERM else processes(self.pods[pod].pid)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)

    def wait(self) -> list[int]:
        """Returns all exit codes. Once a pod has not ended well, the operator deletes the others."""
        try:
            give_up = time.monotonic() + END_SECONDS
            while all(pod.code in (None, ExitCode.DONE) for pod in self.pods) and self._runs_until(give_up):
                time.sleep(0.01)
            give_up = time.monotonic() + DELETED_AFTER_SECONDS
            while self._runs_until(give_up):
                time.sleep(0.01)
            for index in range(len(self.pods)):
                self.kill(signal.SIGTERM, index)
            return [pod.end(END_SECONDS) for pod in self.pods]
        finally:
            self.close()

    def _runs_until(self, give_up: float) -> bool:
        return self.running and time.monotonic() < give_up

    def close(self) -> None:
        for pod in self.pods:
            for pid in processes(pod.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def processes(session: int) -> list[int]:
    """All processes of a session."""
    found = []
    for entry in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            if int(stat[3]) == session and stat[0] != "Z":
                found.append(int(entry))
    return found


def play(zygote: Zygote, kind: Kind, folder: Path) -> Played:
    """The example with nobody to disturb it."""
    attempt = Attempt(zygote, kind, folder, 1)
    codes = attempt.wait()
    assert codes == [ExitCode.DONE] * kind.workers, f"{codes}:\n{attempt.log}"
    return Played(kind.digest(attempt.first, folder), attempt.first.message.step or 0)


@dataclass(frozen=True, slots=True)
class Played:
    digest: str
    steps: int

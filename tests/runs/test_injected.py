"""A runtime that was injected into an image with torch alone trains, stops and resumes like any other."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from spottrain.cli.inject import inject
from spottrain.contract import Env, ExitCode, Outcome, Reason
from spottrain_operator.api import injected

from tests.runs.conftest import SCRIPT, Lab
from tests.runs.launched import WAITS, Launched
from tests.support.pid1 import HELD, NAMESPACE, holds_signals, needs_root, once, pid_1_below
from tests.support.plainenv import plain_python

Begin = Callable[..., Launched]
ACCELERATE = "--num_machines=1 --mixed_precision=no --dynamo_backend=no --main_process_port=0"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plain_python(tmp_path_factory.mktemp("image"))


@pytest.fixture(scope="module")
def python_of_accelerate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plain_python(tmp_path_factory.mktemp("image"), "accelerate")


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("volume")
    inject(folder)
    return folder / "launch.py"


@pytest.fixture
def begin(tmp_path: Path, python: Path, launcher: Path) -> Iterator[Begin]:
    """Starts `python LAUNCHER WORDS...` in a folder of its own. All of them share one checkpoint URI."""
    open_: list[Launched] = []

    def begin(script: str, *words: str, before: list[str] | None = None, **env: str) -> Launched:
        folder = tmp_path / str(len(open_))
        folder.mkdir()
        (folder / "train.py").write_text(script)
        basic: dict[str, str] = {Env.CHECKPOINT_URI: str(tmp_path / "store"), Env.JOB_UID: "uid"}
        command = [*(before or []), str(python), str(launcher), *(words or ["train.py"])]
        open_.append(Launched(folder, command, **(basic | env)))
        return open_[-1]

    yield begin
    for each in open_:
        each.close()


def rendered(words: str, launcher: Path) -> list[str]:
    """The operator's command for the trainer, with the volume where it is on this machine."""
    return [word.replace(injected.LAUNCHER, str(launcher)) for word in injected.launched(words.split())]


def test_what_the_script_prints_is_kept_by_the_injected_log_capture(begin: Begin, tmp_path: Path) -> None:
    begin('print("words of the script")', **{Env.LOGS: "keep", Env.ATTEMPT: "1"}).done()
    [part] = (tmp_path / "store" / "logs").rglob("*.log")
    assert "words of the script" in part.read_text()


SAYS = 'import os, spottrain; print("rank", os.environ.get("RANK", 0), spottrain.__file__, flush=True)\n'


def image(python: Path, words: str) -> dict[str, str]:
    """The image's python is first on the path, and the pod has two GPUs, or one where one process trains."""
    path, gpus = f"{python.parent}:{os.environ['PATH']}", "1" if "-m train" in words else "2"
    return {Env.JOB_UID: "uid", Env.GPUS: gpus, "PATH": path, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "60"}


def stopped(folder: Path, python: Path, launcher: Path, words: str) -> Launched:
    """Attempt 1. Accelerate alone passes no signal on, so the deadline file says when to stop."""
    (folder / "train.py").write_text(SAYS + SCRIPT)
    file, env = folder / "deadline", image(python, words)
    env |= {Env.ATTEMPT: "1", Env.DEADLINE_FILE: str(file), "PAUSE": "0.1"}
    first = Launched(folder, rendered(words, launcher), **env)
    try:
        first.until(" step=5/24")
        if "--cpu" in words:
            file.write_text((datetime.now(UTC) + timedelta(seconds=20)).isoformat())
        else:
            first.send()
        assert first.end() != 0, first.log
    finally:
        first.close()
    assert first.message.outcome is Outcome.INTERRUPTED, first.log
    return first


def losses(log: str) -> list[str]:
    return re.findall(r" step=\d+/24 .*\bloss=(\S+)", log)


def test_a_module_trains_as_with_the_installed_runtime_and_stops(
    tmp_path: Path, others: Lab, python: Path, launcher: Path
) -> None:
    first = stopped(tmp_path, python, launcher, "python -u -m train")
    assert first.message.durableStep == first.message.step and len(losses(first.log)) >= 5
    assert losses(others.alone(SCRIPT).log)[: len(losses(first.log))] == losses(first.log)
    assert re.search(r"rank 0 \S+/volume\S*/lib/spottrain/__init__.py", first.log)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        ("python -u -m train", 1),
        ("python -m spottrain run --nproc 2 train.py", 2),
        ("python -m torch.distributed.run --standalone --nproc-per-node 2 train.py", 2),
        (f"python -m accelerate.commands.launch --multi_gpu --num_processes=2 {ACCELERATE} train.py", 2),
        (f"python -m accelerate.commands.launch --cpu --num_processes=1 {ACCELERATE} train.py", 1),
    ],
    ids=["module", "launcher", "torchrun", "accelerate", "accelerate-one"],
)
def test_what_the_operator_makes_of_a_command_stops_and_goes_on(
    tmp_path: Path, request: pytest.FixtureRequest, others: Lab, launcher: Path, words: str, ranks: int
) -> None:
    """A process that accelerate starts alone must not count the GPUs."""
    python = request.getfixturevalue("python_of_accelerate" if "accelerate" in words else "python")
    step = stopped(tmp_path, python, launcher, words).message.step
    env = image(python, words) | {Env.ATTEMPT: "2"}
    second = Launched(tmp_path, rendered(words, launcher), **env).done()
    assert second.message.outcome is Outcome.DONE and second.message.startStep == step
    steps = [int(step) for step in re.findall(r" step=(\d+)/24 .*\bloss=", second.log)]
    assert steps == list(range(1, 25)), "the log is of both: each step was done once"
    started = re.findall(r"rank (\d) \S+/volume\S*/lib/spottrain/__init__.py", second.log)
    assert sorted(started) == sorted(2 * [str(rank) for rank in range(ranks)]), "by the launcher, in both"
    if "-m train" in words:
        assert losses(second.log) == losses(others.alone(SCRIPT).log), "bit for bit as the installed runtime"


PACKAGES = """
import sys, os
before = [p for p in sys.path if p != os.path.dirname(os.path.abspath(__file__))]
injected = os.path.dirname(before[-1])
assert before[-1] == injected + "/lib" and not any(p.startswith(injected) for p in before[:-1]), before
import jmespath, urllib3
print("jmespath of", jmespath.WHOSE, "urllib3 at", urllib3.__file__)
print("argv", sys.argv)
"""


def test_packages_of_the_image_come_before_those_of_the_launcher(begin: Begin, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "jmespath.py").write_text("WHOSE = 'the image'")
    run = begin(PACKAGES, "train.py", "--lr", "1", PYTHONPATH=str(own)).done()
    assert "jmespath of the image" in run.log
    assert re.search(r"urllib3 at \S+/volume\S*/lib/urllib3/", run.log)
    assert "argv ['train.py', '--lr', '1']" in run.log


def test_a_module_is_run_as_python_does_it(begin: Begin) -> None:
    run = begin("import sys; print('main is', __name__, __spec__.name)", "-m", "train").done()
    assert "main is __main__ train" in run.log


def test_an_error_of_the_script_keeps_its_exit_code(begin: Begin) -> None:
    run = begin("import sys; sys.exit(7)").ends(7)
    assert run.message.outcome is Outcome.FAILED


@needs_root
@pytest.mark.parametrize(("after", "held"), [(0.0, True), (0.2, False), (1.0, True)])
def test_a_signal_at_pid_1_ends_it_with_75(begin: Begin, after: float, held: bool) -> None:
    """`held`: by `env --block-signal`; else from the launcher's first statement on."""
    env = ["env", *HELD[:-1]] if held else []
    run = begin(WAITS, before=[*NAMESPACE, *env])
    pid = pid_1_below(run.pid)
    once(lambda: holds_signals(pid), "held SIGTERM")
    time.sleep(after)
    os.kill(pid, signal.SIGTERM)
    assert run.end() == ExitCode.INTERRUPTED, run.log
    assert run.message.outcome is Outcome.INTERRUPTED


OLDER = """
import runpy, sys
sys.version_info = (3, 9, 18, "final", 0)
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def test_a_python_that_is_too_old_gets_a_sentence(tmp_path: Path, launcher: Path) -> None:
    run = Launched(tmp_path, [sys.executable, "-c", OLDER, str(launcher)]).ends(ExitCode.BAD_CONFIGURATION)
    assert "is Python 3.9.18, and spottrain needs 3.11 or newer" in run.log
    assert run.message.outcome is Outcome.BAD_CONFIGURATION
    assert run.message.reason == Reason.BAD_CONFIGURATION
    assert run.message.message in run.log

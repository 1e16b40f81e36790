"""`spottrain inject` writes a folder of Python source that needs nothing but itself and torch."""

from __future__ import annotations

import ast
import signal
import subprocess
import sys
from importlib.metadata import PathDistribution, distribution
from pathlib import Path

import pytest
from spottrain.cli import inject as command
from spottrain.cli.inject import inject, needed_packages
from spottrain.contract import EXIT_CODE_OF, LAUNCHER, Env, Outcome, Reason
from spottrain.core.startup_signals import SIGNALS

from tests.support.sentences import Told

LAUNCH = Path(command.__file__).with_name("launch.py")


@pytest.fixture(scope="module")
def injected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("injected") / "deep" / "spottrain"
    names = inject(folder)
    assert {"boto3", "botocore", "s3transfer", "urllib3", "jmespath", "python-dateutil", "six"} <= set(names)
    assert not {"torch", "numpy", "kopf", "google-cloud-storage"} & set(names)
    return folder


def test_the_folder_has_the_package_and_what_boto3_needs_as_source_that_all_may_read(injected: Path) -> None:
    assert {path.name for path in injected.iterdir()} == {"launch.py", "lib"}
    lib = injected / "lib"
    assert (lib / "spottrain" / "training" / "trainer.py").is_file() and (lib / "botocore" / "data").is_dir()
    files = [path for path in injected.rglob("*") if path.is_file()]
    assert not [path for path in files if path.suffix in (".so", ".pyc")]
    assert all(path.stat().st_mode & 0o777 == 0o644 for path in files)
    assert all(path.stat().st_mode & 0o777 == 0o755 for path in injected.rglob("*") if path.is_dir())
    assert (injected / "launch.py").read_text() == LAUNCH.read_text()


def test_it_brings_the_metadata_with_the_entry_points(injected: Path) -> None:
    [folder] = (injected / "lib").glob("spottrain-*.dist-info")
    found, ours = PathDistribution(folder), distribution("spottrain")
    assert found.version == ours.version
    assert {str(each) for each in found.entry_points} == {str(each) for each in ours.entry_points}


def test_a_second_call_replaces_the_folder_and_says_how_to_start_a_script(
    injected: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (injected / "lib" / "left_over.py").touch()
    (injected / "notes.txt").touch()
    assert command.main([str(injected)]) == 0
    assert {path.name for path in injected.iterdir()} == {"launch.py", "lib", "notes.txt"}
    assert not (injected / "lib" / "left_over.py").exists()
    assert f"python {injected}/launch.py SCRIPT" in capsys.readouterr().out


def test_a_package_with_compiled_parts_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Told
) -> None:
    monkeypatch.setattr(command, "NEEDED", ("numpy",))
    told(lambda: inject(tmp_path))
    assert not list(tmp_path.iterdir())


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, told: Told) -> None:
    monkeypatch.setattr(command, "NEEDED", ("no-such-package",))
    told(lambda: needed_packages())


def test_a_welcome_package_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "WELCOME", ("no-such-package",))
    assert "boto3" in {each.name for each in needed_packages()}


def test_a_folder_that_cannot_be_written_is_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert command.main([str(tmp_path / "file")]) == 1
    assert "cannot write the runtime to" in capsys.readouterr().err


def test_the_launcher_blocks_signals_before_any_other_import() -> None:
    """As `spottrain.cli.entry` does; at PID 1 the kernel throws a signal without a handler away."""
    body = ast.parse(LAUNCH.read_text()).body
    mask = next(n for n, each in enumerate(body) if ast.unparse(each).startswith("_signal.pthread_sigmask("))
    before = [ast.unparse(each) for each in body[1:mask]]
    assert before == ["from __future__ import annotations", "import _signal"]
    shows = f"import runpy, signal; runpy.run_path({str(LAUNCH)!r}); print(signal.pthread_sigmask(0, []))"
    shown = subprocess.run([sys.executable, "-c", shows], capture_output=True, text=True, check=True).stdout
    assert all(signal.Signals(signum).name in shown for signum in SIGNALS)


def test_the_launcher_knows_the_words_of_the_contract() -> None:
    """It may not import them before Python is known to be new enough."""
    source = LAUNCH.read_text()
    code = int(EXIT_CODE_OF[Outcome.BAD_CONFIGURATION])
    assert f'os.environ["{LAUNCHER}"]' in source
    assert f'os.environ.get("{Env.TERMINATION_MESSAGE}")' in source
    assert f"BAD_CONFIGURATION = {code}" in source
    assert f'{{"outcome": "{Outcome.BAD_CONFIGURATION}", "reason": "{Reason.BAD_CONFIGURATION}"' in source

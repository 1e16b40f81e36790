"""A time in the file of the advice to save makes one save more, and stops nothing."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from spottrain.contract import Env, ExitCode
from spottrain.lifecycle.topology import LOOPBACK, Gang, reserve_port

from tests.runs.conftest import SCRIPT, Lab
from tests.runs.launched import Run
from tests.runs.test_run_ranks import SCRIPT as RANKS
from tests.support.heavy import sample

NOW = datetime.now(UTC)
SLOW = {"PAUSE": "0.05"}


def advise(file: Path, minutes: int) -> None:
    """Whole, as the downward API writes it."""
    new = file.with_suffix(".new")
    new.write_text((NOW + timedelta(minutes=minutes)).isoformat())
    new.rename(file)


def advised(run: Run) -> list[int]:
    """Steps at which a save was made for it."""
    lines = [line for line in run.log.splitlines() if "event=save-advised" in line and "skipped" not in line]
    return [int(line.split("step=")[1].split()[0]) for line in lines]


def committed(run: Run) -> list[int]:
    lines = [line for line in run.log.splitlines() if "event=committed" in line]
    return [int(line.split("step=")[1].split()[0]) for line in lines]


def test_each_new_advice_makes_one_save_and_the_training_goes_on(lab: Lab) -> None:
    file = lab.folder / "save-advised"
    advise(file, 0)
    run = lab.run(interval="1000steps", training='{"maxSteps": 260}', env=_at(file)).until("step=10/")
    assert "save-advised" not in run.log, "what stood there when the training began is not new"
    run.until("step=105/")
    advise(file, 1)
    run.until("event=save-advised").until("event=committed")
    assert run.log.count("event=save-advised") == 1 and "event=sigterm" not in run.log
    run.until(f"step={advised(run)[0] + 101}/")
    advise(file, 2)
    run.done()
    assert len(advised(run)) == 2 and committed(run) == [*advised(run), 260]


def _at(file: Path) -> dict[str, str]:
    return {Env.SAVE_ADVISED_FILE: str(file), "PAUSE": "0.01"}


@pytest.mark.heavy
def test_an_advice_shortly_after_a_save_is_left_with_a_line(lab: Lab) -> None:
    file = lab.folder / "save-advised"
    run = lab.run(interval="1h", env=SLOW | {Env.SAVE_ADVISED_FILE: str(file)}).until("step=3/")
    advise(file, 1)
    run.until("event=committed")
    advise(file, 2)
    run.until("skipped=")
    run.done()
    assert len(advised(run)) == 1 and committed(run) == [*advised(run), 24]
    assert 'skipped="there is little to lose: ' in run.log


@pytest.mark.heavy
def test_an_advice_during_a_save_is_left_with_a_line(lab: Lab) -> None:
    file = lab.folder / "save-advised"
    wait = "while not __import__('os').path.exists('go'): time.sleep(0.01)"
    run = lab.run(interval="3steps", uploads=wait, env=SLOW | {Env.SAVE_ADVISED_FILE: str(file)})
    run.until("event=saving step=3 ")
    advise(file, 1)
    run.until("event=save-advised").until('skipped="a save is under way"')
    (lab.folder / "go").touch()
    run.done()
    assert advised(run) == []


@pytest.mark.heavy
def test_without_a_checkpoint_uri_an_advice_changes_nothing(lab: Lab) -> None:
    file = lab.folder / "save-advised"
    run = lab.run(SCRIPT, at="", env=SLOW | {Env.SAVE_ADVISED_FILE: str(file)}).until("step=3/")
    advise(file, 1)
    run.done()


@pytest.mark.parametrize("pod", sample((0, 1)))
def test_of_two_pods_either_can_be_advised_and_all_ranks_save_once(lab: Lab, pod: int) -> None:
    file = lab.folder / "save-advised"
    runs = _pods(lab, {pod: {Env.SAVE_ADVISED_FILE: str(file)}})
    runs[0].until(" step=3/")
    advise(file, 1)
    runs[0].until("event=save-advised").until("event=committed")
    assert [run.end() for run in runs] == [ExitCode.DONE] * 2, runs[0].log
    assert len(advised(runs[0])) == 1 and committed(runs[0]) == [*advised(runs[0]), 20]
    assert "event=save-advised" not in runs[1].log


def _pods(lab: Lab, more: dict[int, dict[str, str]]) -> list[Run]:
    """One rank in each of two pods."""
    (lab.folder / "train.py").write_text(RANKS)
    with reserve_port() as reserved:
        port = reserved.getsockname()[1]
        basic = lab._env("store", 1, "1h", "{}") | SLOW
        return [
            lab.start(
                ["train.py"],
                basic
                | Gang(nproc=1, workers=2, index=index, host=LOOPBACK).env_of(0, port)
                | more.get(index, {}),
            )
            for index in (0, 1)
        ]

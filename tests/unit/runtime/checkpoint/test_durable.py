"""Training goes on during an upload; a step counts as durable from its commit on."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from spottrain.checkpoint.manager import CheckpointManager
from spottrain.errors import Superseded

from tests.unit.runtime.checkpoint.test_saves import make, taking


@pytest.fixture
def it(tmp_path: Path) -> Iterator[CheckpointManager]:
    it, _ = make(tmp_path)
    yield it
    it.release()


def test_training_goes_on_at_once_and_a_step_is_durable_when_head_names_it(tmp_path: Path) -> None:
    it, store = make(tmp_path)
    board = it.context.board
    store.gate.clear()
    save = taking(it, 500)()
    it.start(save)  # returns while nothing is uploaded yet
    board.update(step=520)
    assert it.busy_with == 500 and board.facts.lost_steps == 520
    assert "durable" not in board.metrics() and board.progress().durableStep is None
    assert json.loads((tmp_path / "HEAD").read_text())["checkpoints"] == []
    store.gate.set()
    assert save.finished.wait(30)
    assert board.facts.lost_steps == 20
    progress = board.progress()
    assert progress.durableStep == 500 and progress.durableTime
    assert "spottrain_durable_step 500" in board.metrics()
    it.release()


def test_a_commit_that_fails_makes_nothing_durable(
    it: CheckpointManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> NoReturn:
        raise Superseded("attempt 2 owns HEAD")

    with monkeypatch.context() as patched:
        patched.setattr(it._owner, "commit", fail)
        with pytest.raises(Superseded):
            it.save_now(taking(it, 500))
    assert list(tmp_path.glob("checkpoints/*/manifest.json")), "all of it is there but for the commit"
    assert not it.context.board.facts.durable_step


def test_the_age_of_what_is_durable_is_shown(it: CheckpointManager) -> None:
    it.save_now(taking(it, 500))
    board = it.context.board
    assert board.facts.durable_time is not None
    board.update(durable_time=board.facts.durable_time - 90)
    shown = re.search(r"^spottrain_durable_age_seconds (\S+)", board.metrics(), re.MULTILINE)
    assert shown and float(shown[1]) >= 90

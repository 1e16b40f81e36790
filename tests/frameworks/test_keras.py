"""Keras, unchanged, by `spottrain sync`: each attempt begins after the last epoch that was stored whole."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from spottrain.contract import Outcome

from tests.frameworks.folder import Synced, content, newest

EPOCHS = 40
ENDS = (Outcome.INTERRUPTED, Outcome.INTERRUPTED_LOST)
"""The second, if the signal came while Keras wrote."""


@pytest.fixture
def opened() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def epochs(run: Synced) -> list[int]:
    return [int(each) for each in re.findall(rf"^Epoch (\d+)/{EPOCHS}$", run.log, re.MULTILINE)]


def stored(store: Path) -> int:
    """Epochs done in the newest committed checkpoint."""
    return int(json.loads(content(store, "training_metadata.json"))["epoch"])


def test_a_restart_begins_after_the_last_epoch_that_was_stored(
    python: Path, tmp_path: Path, opened: contextlib.ExitStack
) -> None:
    def start(attempt: int) -> Synced:
        run = Synced("keras-fit", python, tmp_path, attempt, at="store", EPOCHS=str(EPOCHS))
        opened.callback(run.close)
        return run

    store = tmp_path / "store"
    first = start(1).commits(2).send()
    first.end()
    assert first.message.outcome in ENDS
    done = stored(store)
    second = start(2).until("Epoch ")
    assert epochs(second)[0] == done + 1 > 1
    second.commits(2).killed()
    done = stored(store)
    third = start(3).done()
    assert epochs(third)[0] == done + 1 > epochs(second)[0]
    assert {"best.keras", "final.keras", "latest.weights.h5"} <= newest(store)[1].files.keys()

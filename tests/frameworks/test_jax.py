"""JAX with Orbax, unchanged, by `spottrain sync`: each attempt begins at the last whole checkpoint."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from spottrain.contract import Outcome

from tests.frameworks.folder import Synced, newest

STEPS = 600
EVERY = 20
ENDS = (Outcome.INTERRUPTED, Outcome.INTERRUPTED_LOST)
"""The second, if the signal came while Orbax wrote."""


@pytest.fixture
def opened() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def losses(run: Synced) -> dict[int, str]:
    return {
        int(step): loss for step, loss in re.findall(r"^step=(\d+)/\d+ loss=(\S+)", run.log, re.MULTILINE)
    }


def begun(run: Synced) -> int:
    return int(run.until("begins at step").log.split("begins at step ")[1].split()[0])


def stored(store: Path) -> int:
    """The newest step of the newest committed checkpoint."""
    return max(int(path.split("/")[0]) for path in newest(store)[1].files)


def test_a_restart_begins_at_the_last_whole_checkpoint(
    python: Path, tmp_path: Path, opened: contextlib.ExitStack
) -> None:
    def start(attempt: int, *, at: str = "store", pause: str = "0.03") -> Synced:
        env = {"STEPS": str(STEPS), "SECONDS_PER_STEP": pause, "JAX_PLATFORMS": "cpu"}
        run = Synced("jax-orbax", python, tmp_path, attempt, at=at, **env)
        opened.callback(run.close)
        return run

    plain = start(1, at="plain", pause="0").done()
    assert sorted(losses(plain)) == list(range(EVERY, STEPS + 1, EVERY))
    store = tmp_path / "store"
    first = start(1).commits(2).send()
    first.end()
    on_disk = [
        int(each.name)
        for each in (tmp_path / "store-1" / "checkpoints").glob("[0-9]*")
        if each.name.isdigit()
    ]
    assert stored(store) == max(on_disk), "what was whole at SIGTERM is stored"
    assert first.message.outcome in ENDS
    second = start(2)
    assert begun(second) == stored(store) > 0
    second.commits(2).killed()
    third = start(3)
    assert begun(third) == stored(store) > begun(second)
    third.done()
    assert stored(store) == STEPS
    for run in (first, second, third):
        assert losses(run).items() <= losses(plain).items()

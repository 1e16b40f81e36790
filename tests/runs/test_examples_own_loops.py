"""Examples with a loop of their own: each is stopped, killed and started by its manifest's command."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from spottrain.contract import ExitCode

from tests.support.examples import OWN_LOOPS, Attempt, Kind, Played, play
from tests.support.zygote import Zygote


@pytest.fixture(params=OWN_LOOPS, ids=lambda kind: kind.name, scope="module")
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


@pytest.fixture(scope="module")
def whole(zygote: Zygote, kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    yield play(zygote, kind, tmp_path_factory.mktemp("whole"))


def test_it_ends_with_the_same_weights_after_two_stops_and_a_kill(
    zygote: Zygote, kind: Kind, whole: Played, tmp_path: Path
) -> None:
    first = stopped(Attempt(zygote, kind, tmp_path, 1), 0.15 * whole.steps)
    second = Attempt(zygote, kind, tmp_path, 2)
    second.until_step(int(0.5 * whole.steps))
    second.kill(signal.SIGKILL, pod=kind.workers - 1)
    assert second.wait()[-1] == -signal.SIGKILL, second.log
    assert kind.resumed(second.first) == first, "no step was lost after SIGTERM"
    third = stopped(Attempt(zygote, kind, tmp_path, 3), 0.8 * whole.steps)
    last = Attempt(zygote, kind, tmp_path, 4)
    assert last.wait() == [ExitCode.DONE] * kind.workers, last.log
    assert kind.resumed(last.first) == third
    assert kind.digest(last.first, tmp_path) == whole.digest


def stopped(attempt: Attempt, step: float) -> int:
    """One pod is told to stop: all save the same step. Returns it."""
    reached = attempt.until_step(int(step))
    attempt.kill(signal.SIGTERM, pod=attempt.kind.workers - 1)
    assert attempt.wait() == [ExitCode.INTERRUPTED] * attempt.kind.workers, attempt.log
    message = attempt.first.message
    assert message.step is not None and message.durableStep == message.step >= reached > 0
    return message.step


def test_the_script_without_spottrains_lines_trains_too(zygote: Zygote, kind: Kind, tmp_path: Path) -> None:
    """So the diff in the docs leads from a script that works to the example."""
    plain = kind.plain()
    assert "spottrain" not in plain and 0 < kind.lines <= 5
    for data in kind.script.parent.glob("*.gz"):
        (tmp_path / data.name).symlink_to(data)
    alone = kind.of_script(plain, tmp_path)
    attempt = Attempt(zygote, alone, tmp_path, 1)
    assert attempt.wait() == [ExitCode.DONE] * kind.workers, attempt.log
    assert attempt.first.message.outcome == "untrained"

"""The examples with libraries: the command of each manifest, stopped with a deadline, and killed."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from spottrain.contract import Env, ExitCode

from tests.support.examples import LIBRARIES, Attempt, Kind, play
from tests.support.zygote import Zygote


@pytest.fixture(params=LIBRARIES, ids=lambda kind: kind.name, scope="module")
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


@pytest.fixture(scope="module")
def zygote(kind: Kind) -> Iterator[Zygote]:
    zygote = Zygote()
    zygote.preload(*kind.preload)
    yield zygote
    zygote.close()


def test_the_weights_are_those_of_a_run_that_was_not_interrupted(
    zygote: Zygote, kind: Kind, tmp_path: Path
) -> None:
    whole = play(zygote, kind, tmp_path / "whole")
    folder, deadline = tmp_path / "job", tmp_path / "deadline"
    first = Attempt(zygote, replace(kind, env={Env.DEADLINE_FILE: str(deadline)}), folder, 1)
    first.until_step(int(0.2 * whole.steps))
    deadline.write_text(str(time.time() + 20))
    first.kill(signal.SIGTERM)
    assert first.wait() == [ExitCode.INTERRUPTED], first.log
    step = first.first.message.step
    assert step is not None and first.first.message.durableStep == step > 0
    second = Attempt(zygote, kind, folder, 2)
    second.until_step(int(0.6 * whole.steps))
    second.kill(signal.SIGKILL)
    assert second.wait() == [-signal.SIGKILL], second.log
    assert kind.resumed(second.first) == step, "no step is lost with a notice"
    last = Attempt(zygote, kind, folder, 3)
    assert last.wait() == [ExitCode.DONE], last.log
    assert kind.resumed(last.first) >= step
    assert kind.digest(last.first, folder) == whole.digest


@pytest.mark.parametrize("kind", [each for each in LIBRARIES if each.page], indirect=True)
def test_the_script_without_spottrains_lines_trains_too(zygote: Zygote, kind: Kind, tmp_path: Path) -> None:
    assert 0 < kind.lines <= 5
    attempt = Attempt(zygote, kind.of_script(kind.plain(), tmp_path), tmp_path, 1)
    assert attempt.wait() == [ExitCode.DONE], attempt.log
    assert attempt.first.message.outcome == "untrained"

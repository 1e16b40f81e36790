"""Each example is stopped, told a deadline, killed and started by its manifest's command."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from spottrain.contract import Env, ExitCode

from tests.support.examples import KINDS, Attempt, Kind, Played, play
from tests.support.heavy import sample
from tests.support.zygote import Zygote

SHORT = replace(KINDS["gan"], env={"EPOCHS": "4"})
"""What `make test` plays: two networks, two optimizers, and a tensor of the script's own."""
PLAYED = sample([SHORT, *KINDS.values()], SHORT)
WITH_DIFF = sample([SHORT, *(kind for kind in KINDS.values() if kind.page)], SHORT)


@pytest.fixture(scope="module")
def zygote(zygote: Zygote, kind: Kind) -> Iterator[Zygote]:
    child = zygote.child(*kind.preload)
    yield child
    child.close()


@pytest.fixture(scope="module")
def whole(zygote: Zygote, kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> Played:
    return play(zygote, kind, tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("kind", PLAYED, ids=lambda kind: kind.name, scope="module")
def test_it_ends_with_the_same_weights_after_a_stop_a_kill_and_a_deadline(
    zygote: Zygote, kind: Kind, whole: Played, tmp_path: Path
) -> None:
    folder, deadline = tmp_path / "job", tmp_path / "deadline"
    first = stopped(Attempt(zygote, kind, folder, 1), 0.15 * whole.steps)
    second = Attempt(zygote, kind, folder, 2)
    second.until_step(int(0.5 * whole.steps))
    second.kill(signal.SIGKILL, pod=kind.workers - 1)
    assert second.wait()[-1] == -signal.SIGKILL, second.log
    assert kind.resumed(second.first) == first, "no step was lost after SIGTERM"
    told = replace(kind, env={**kind.env, Env.DEADLINE_FILE: str(deadline)})
    third = stopped(Attempt(zygote, told, folder, 3), 0.8 * whole.steps, deadline)
    last = Attempt(zygote, kind, folder, 4)
    assert last.wait() == [ExitCode.DONE] * kind.workers, last.log
    assert kind.resumed(last.first) == third
    assert kind.digest(last.first, folder) == whole.digest


def stopped(attempt: Attempt, step: float, deadline: Path | None = None) -> int:
    """One pod is told to stop: all save the same step. Returns it."""
    reached = attempt.until_step(int(step))
    if deadline:
        deadline.write_text(str(time.time() + 20))
    attempt.kill(signal.SIGTERM, pod=attempt.kind.workers - 1)
    assert attempt.wait() == [ExitCode.INTERRUPTED] * attempt.kind.workers, attempt.log
    message = attempt.first.message
    assert message.step is not None and message.durableStep == message.step >= reached > 0
    return message.step


@pytest.mark.parametrize("kind", WITH_DIFF, ids=lambda kind: kind.name, scope="module")
def test_the_script_without_spottrains_lines_trains_too(zygote: Zygote, kind: Kind, tmp_path: Path) -> None:
    """So the diff in the docs leads from a script that works to the example."""
    plain = kind.plain()
    assert "import spottrain" not in plain and 0 < kind.lines <= 6
    for data in kind.script.parent.glob("*.gz"):
        (tmp_path / data.name).symlink_to(data)
    attempt = Attempt(zygote, kind.of_script(plain, tmp_path), tmp_path, 1)
    assert attempt.wait() == [ExitCode.DONE] * kind.workers, attempt.log
    assert attempt.first.message.outcome == "untrained"

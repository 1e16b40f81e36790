"""Trackers: one run over all attempts, no step twice; one that fails or hangs does not touch the training.

The three real ones are tested in tests/runs where they are installed; here is a small
fake of the protocol.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import pytest
from spottrain.contract import Outcome
from spottrain.distributed.world import World
from spottrain.errors import ConfigurationError
from spottrain.techniques import trackers
from spottrain.techniques.trackers import QUEUED, Trackers, run_id

from tests.support.sentences import Told


class Fake:
    """Fake of the protocol `Tracker`: keeps what it was told."""

    name = "fake"

    def __init__(self, *, fails: range = range(0), gate: threading.Event | None = None) -> None:
        self.calls: list[Any] = []
        self._fails, self._gate = fails, gate

    def begin(self, run_id: str, resumed_step: int) -> None:
        if self._gate is not None:
            self._gate.wait(30)
        self.calls.append(("begin", run_id, resumed_step))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step in self._fails:
            raise ConnectionError(f"503 at {step}")
        self.calls.append((step, dict(values)))

    def close(self) -> None:
        self.calls.append("close")


def logged(fake: Fake, steps: range, **words: Any) -> Trackers:
    it = Trackers([fake], **words)
    it.begin("run", 0)
    for step in steps:
        it.log(step, {"loss": step / 2})
    it.close()
    return it


def test_everything_arrives_in_order_and_a_sound_tracker_logs_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake = Fake()
    logged(fake, range(1, 4))
    assert fake.calls == [("begin", "run", 0), *((n, {"loss": n / 2}) for n in (1, 2, 3)), "close"]
    assert "tracker" not in capsys.readouterr().out


def test_a_tracker_with_ended_gets_the_first_outcome_before_it_is_closed() -> None:
    class Told(Fake):
        def ended(self, outcome: Outcome) -> None:
            self.calls.append(outcome)

    fake, plain = Told(), Fake()
    it = Trackers([fake, plain])
    it.begin("run", 0)
    it.close(Outcome.FAILED)
    it.close(Outcome.DONE)
    assert fake.calls == [("begin", "run", 0), Outcome.FAILED, "close"]
    assert plain.calls == [("begin", "run", 0), "close"]


@pytest.mark.parametrize("source", ["argument", "environment"])
def test_only_rank_0_logs_and_all_keep_the_same_state(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes, states = [Fake(), Fake()], []
    for rank, fake in enumerate(fakes):
        words = {"world": World(rank=rank, size=2)} if source == "argument" else {}
        for name, value in {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2}.items():
            monkeypatch.setenv(name, str(value))
        states.append(logged(fake, range(1, 4), **words).state_dict())
    assert states[0] == states[1] == {"run": "run"}
    assert len(fakes[0].calls) == 5 and fakes[1].calls == []


@pytest.mark.parametrize("given", ["wandb", 3, [1], Fake()], ids=["a name", "a number", "numbers", "one"])
def test_what_is_no_list_of_trackers_is_one_sentence(given: Any, told: Told) -> None:
    told(lambda: Trackers(given))


def test_values_that_are_no_finite_number_are_left_out() -> None:
    fake = Fake()
    it = Trackers([fake])
    it.log(1, {"loss": float("nan"), "lr": 0.1, "speed": None})
    it.log(2, {"loss": float("inf")})
    it.close()
    assert fake.calls == [(1, {"lr": 0.1}), "close"]


# --- failures -------------------------------------------------------------------------------------------
def test_a_failure_is_logged_once_and_the_rest_arrives(capsys: pytest.CaptureFixture[str]) -> None:
    fake = Fake(fails=range(2, 4))
    logged(fake, range(1, 6))
    assert [call[0] for call in fake.calls[1:-1]] == [1, 4, 5]
    told = capsys.readouterr().out
    assert told.count("event=tracker-failed") == 1
    assert 'why="ConnectionError: 503 at 2"' in told
    assert "event=tracker-incomplete tracker=fake failed=2 left_out=0 waiting=0" in told


def test_one_that_hangs_holds_up_nothing_and_its_queue_is_bounded(capsys: pytest.CaptureFixture[str]) -> None:
    gate, beside = threading.Event(), Fake()
    hung = Fake(gate=gate)
    it = Trackers([hung, beside], close_seconds=0.0)
    it.begin("run", 0)
    for step in range(1, QUEUED + 100):
        it.log(step, {"loss": 1.0})
        if step % 100 == 0:  # only the one that hangs may fall behind
            wait_for(beside, step)
    wait_for(beside, QUEUED + 99)
    assert hung.calls == [], "and all those calls came back"
    it.close()
    told = capsys.readouterr().out
    assert told.count("event=tracker-slow tracker=fake") == 1
    assert "event=tracker-incomplete" in told and "left_out=0" not in told.split("waiting")[0]
    gate.set()


def wait_for(fake: Fake, step: int) -> None:
    for _ in range(3000):
        if fake.calls and fake.calls[-1][0] == step:
            return
        threading.Event().wait(0.01)
    raise AssertionError(f"step {step} did not arrive")


# --- names ----------------------------------------------------------------------------------------------
def test_the_run_id_is_the_jobs_in_characters_that_all_take() -> None:
    assert run_id("3f2a7c1e-0000-4000-8000-0123456789ab") == "3f2a7c1e-0000-4000-8000-0123456789ab"
    assert run_id("team/a b:c") == "team-a-b-c" and len(run_id("x" * 200)) == 64


def test_a_checkpoint_of_another_run_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    it = Trackers([])
    it.load_state_dict({"run": "one"})
    it.begin("two", 7)
    assert it.state_dict() == {"run": "two"}
    assert "event=override setting=tracker-run checkpoint=one script=two" in capsys.readouterr().out


def test_a_tracker_whose_package_is_missing_is_refused(monkeypatch: pytest.MonkeyPatch, told: Told) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    for make in (
        lambda: trackers.WandB(project="p"),
        lambda: trackers.MLflow(experiment="e"),
        lambda: trackers.TensorBoard(folder="f"),
    ):
        with pytest.raises(ConfigurationError) as refused:
            make()
        told(refused)

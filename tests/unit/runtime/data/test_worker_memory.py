"""Whether the copies of the set in the loader workers fit into the container: decisions, and what is told."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from spottrain.core.container import ContainerMemory
from spottrain.core.training_settings import Settings, resolve
from spottrain.core.training_spec import Training
from spottrain.data import Batches, Plan, StreamBatches, loader, worker_memory
from spottrain.data.worker_count import TRIAL_STEPS
from spottrain.data.worker_memory import FORKED, WorkerMemoryLimit
from spottrain.distributed.world import World
from spottrain.training import components
from spottrain.training.evaluation import Evaluation

from tests.support.sentences import Told

MIB, GIB = 2**20, 2**30
WORDS = [f"/data/images/{number:09d}.jpeg" for number in range(100_000)]
EACH = 80 * len(WORDS) + FORKED
"""Bytes that one forked worker comes to hold: about 7.6 MiB of words."""


def left(size: float, limit: float = 4 * GIB) -> Callable[[], ContainerMemory]:
    return lambda: ContainerMemory(limit=int(limit), used=int(limit - size))


def advice(capfd: pytest.CaptureFixture[str]) -> list[str]:
    lines = [line for line in capfd.readouterr().out.splitlines() if "event=advice about=data" in line]
    return [shlex.split(line)[-1].removeprefix("text=") for line in lines]


@pytest.mark.parametrize(
    ("size", "ranks", "workers"),
    [(9.5, 1, 6), (6.1, 1, 6), (5.5, 1, 5), (1.5, 1, 1), (0.5, 1, 0), (-3.0, 1, 0), (9.5, 2, 4), (9.5, 8, 1)],
)
def test_as_many_workers_as_have_room_beside_what_is_there_and_the_other_ranks(
    size: float, ranks: int, workers: int
) -> None:
    assert WorkerMemoryLimit(WORDS, ranks=ranks, memory=left(size * EACH)).most(6) == workers


def test_fewer_workers_are_told_with_the_figure_the_cause_and_the_way_out(
    capfd: pytest.CaptureFixture[str], told: Told
) -> None:
    asked = WorkerMemoryLimit(WORDS, memory=left(2.5 * EACH))
    assert [asked.most(6), asked.most(6)] == [2, 2]
    (text,) = advice(capfd)
    told(text)


def test_where_not_even_one_has_room_there_is_none(capfd: pytest.CaptureFixture[str]) -> None:
    assert WorkerMemoryLimit(WORDS, memory=left(0)).most(3) == 0
    assert advice(capfd)[0].startswith("no loader worker instead of 3")


def test_a_given_number_is_kept_and_what_will_happen_is_told_once(
    capfd: pytest.CaptureFixture[str], told: Told
) -> None:
    asked = WorkerMemoryLimit(WORDS, name="eval_dataset", ranks=2, memory=left(2.5 * EACH))
    asked.warn(4)
    asked.warn(4)
    (text,) = advice(capfd)
    told(text)


def test_what_fits_is_not_worth_a_word(capfd: pytest.CaptureFixture[str]) -> None:
    asked = WorkerMemoryLimit(WORDS, memory=left(6.1 * EACH))
    asked.warn(6)
    assert asked.most(6) == 6 and asked.most(0) == 0 and advice(capfd) == []


def test_an_array_of_any_size_has_room(capfd: pytest.CaptureFixture[str]) -> None:
    asked = WorkerMemoryLimit(numpy.zeros((1000, 1000)), memory=left(2 * FORKED))
    assert asked.most(1) == 1 and advice(capfd) == []


def test_workers_that_are_started_again_are_sent_arrays_too(
    capfd: pytest.CaptureFixture[str], told: Told
) -> None:
    held = numpy.zeros(GIB // 8)
    assert WorkerMemoryLimit(held, memory=left(3 * GIB), context="spawn").most(4) == 2
    (text,) = advice(capfd)
    told(text)


def test_without_workers_nothing_is_looked_at() -> None:
    def never() -> ContainerMemory:
        raise AssertionError("asked")

    WorkerMemoryLimit(WORDS, memory=never).warn(0)


def test_where_the_memory_is_not_known_it_is_said_once_and_nothing_is_changed(
    capfd: pytest.CaptureFixture[str],
) -> None:
    asked = WorkerMemoryLimit(WORDS, memory=lambda: None)
    asked.warn(4)
    assert asked.most(6) == 6
    assert capfd.readouterr().out.count("event=loader-memory") == 1


def test_a_set_that_cannot_be_estimated_ends_no_training(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*held: Any, **more: Any) -> Any:
        raise RuntimeError("changed size during iteration")

    monkeypatch.setattr(worker_memory, "copy_of", broken)
    assert WorkerMemoryLimit(WORDS, memory=left(0)).most(6) == 6
    assert "RuntimeError: changed size during iteration" in capfd.readouterr().out


# --- where it is asked ------------------------------------------------------------------------------------
class Slow:
    """A set of Python objects whose samples take a while, by the clock of the test."""

    def __init__(self) -> None:
        self.words, self.now = WORDS, 0.0

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        self.now += 0.35
        return len(self.words[index])

    def clock(self) -> float:
        return self.now


def test_the_number_that_is_found_is_held_against_the_memory(capfd: pytest.CaptureFixture[str]) -> None:
    slow = Slow()
    batches = Batches(
        slow,
        Plan(size=64, global_batch_size=8, micro_batch_size=4),
        num_workers="auto",
        cores=8,
        clock=slow.clock,
        room=WorkerMemoryLimit(slow, memory=left(2.5 * EACH)),
    )
    for step, found in islice(batches, TRIAL_STEPS + 2):
        list(found)
        slow.now += 1.0
        batches.done(step)
    assert batches.num_workers == 2
    out = capfd.readouterr().out
    assert (
        "event=loader-workers workers=2 wanted=4" in out and out.count("2 loader worker(s) instead of 4") == 1
    )


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container in which no copy has room."""
    monkeypatch.setattr(worker_memory, "memory_here", left(MIB))


def first(batches: Any) -> None:
    stream = iter(batches)
    _, found = next(stream)
    list(found)
    stream.close()


@pytest.mark.usefixtures("little")
def test_a_given_number_is_held_against_it_before_the_workers_start(
    capfd: pytest.CaptureFixture[str],
) -> None:
    first(Batches(WORDS, Plan(size=len(WORDS), global_batch_size=2, micro_batch_size=2), num_workers=1))
    assert len(advice(capfd)) == 1


@pytest.mark.filterwarnings("ignore:'set_vital'")
@pytest.mark.usefixtures("little")
def test_so_is_that_of_a_loader_that_was_given(capfd: pytest.CaptureFixture[str]) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    own: Any = StatefulDataLoader(WORDS, batch_size=2, num_workers=1)
    first(StreamBatches(own))
    assert len(advice(capfd)) == 1


class Unsaid:
    """A loader with a state, that has no word for its workers."""

    num_workers = None

    def __iter__(self) -> Any:
        return iter([torch.ones(2)])

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("called")


def test_a_loader_may_say_that_its_workers_are_none() -> None:
    batches = StreamBatches(Unsaid())
    first(batches)
    assert batches.num_workers == 0


@pytest.mark.usefixtures("little")
def test_so_is_that_of_a_loader_for_a_loop_of_one_s_own(capfd: pytest.CaptureFixture[str]) -> None:
    made = loader(WORDS, batch_size=2, num_workers=1, world=World())
    next(stream := iter(made))
    stream.close()
    assert len(advice(capfd)) == 1


def test_workers_that_stay_for_the_next_pass_are_not_counted_twice(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    at_first = left(1.5 * EACH)
    monkeypatch.setattr(worker_memory, "memory_here", lambda: at_first())
    made = loader(WORDS[:8], batch_size=4, num_workers=1, persistent_workers=True, world=World())
    made._room = WorkerMemoryLimit(WORDS)
    for _ in made:
        made.advance()
    at_first = left(MIB)  # with the copy of the worker, which is there
    for _ in made:
        made.advance()
    made._iterator._shutdown_workers()  # type: ignore[union-attr]
    assert advice(capfd) == []


@pytest.mark.usefixtures("little")
def test_so_is_that_of_an_evaluation(capfd: pytest.CaptureFixture[str]) -> None:
    evaluation = Evaluation(
        dataset=WORDS,
        measure=lambda model, batch: {"loss": torch.zeros(())},
        batch_size=50_000,
        device=torch.device("cpu"),
        autocast=lambda: torch.no_grad(),
        workers=1,
        collate=None,
    )
    assert evaluation.run(torch.nn.Linear(1, 1), lambda: False) == {"loss": 0.0}
    assert "the Python objects in eval_dataset" in advice(capfd)[0]


@pytest.mark.parametrize(("found", "has"), [(6, 2), (1, 1), (0, 0)])
def test_an_evaluation_has_as_many_workers_as_were_found_for_the_training_and_as_fit(
    found: int, has: int
) -> None:
    evaluation: Any = SimpleNamespace(workers=0, room=WorkerMemoryLimit(WORDS, memory=left(2.5 * EACH)))
    Evaluation.resize(evaluation, micro_batch_size=None, workers=found)
    assert evaluation.workers == has


def told(settings: Settings, capfd: pytest.CaptureFixture[str]) -> list[str]:
    components.tell_what_cannot_act(
        settings, Batches(WORDS, Plan(size=64, global_batch_size=8, micro_batch_size=8))
    )
    return advice(capfd)


def test_a_prefetch_factor_without_workers_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    settings = resolve(Training(), max_steps=1, seed=0, prefetch_factor=4)
    assert "prefetch_factor has no effect" in told(settings, capfd)[0]
    for workers in (2, "auto"):
        assert told(replace(settings, num_workers=workers), capfd) == []

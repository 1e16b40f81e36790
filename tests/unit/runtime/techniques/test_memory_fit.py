"""Micro-batch and recomputation found by trial in one call, and the record of what ran out of memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from spottrain.distributed.world import World
from spottrain.errors import StoreUnavailable
from spottrain.storage.base import Store
from spottrain.storage.open import open_store
from spottrain.techniques import find_batch_size
from spottrain.techniques.activation_checkpointing import Policy, Recomputed
from spottrain.techniques.memory_fit import OOMHistory

from tests.support.sentences import Told

DATASET = [torch.full((4,), float(number)) for number in range(64)]


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(x)
        return found


def built() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(*(Block() for _ in range(4)))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def recomputed(model: torch.nn.Module) -> int:
    return sum(isinstance(vars(module).get("forward"), Recomputed) for module in model.modules())


def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """As if eight samples took all memory, or sixteen where all blocks are recomputed."""
    if len(batch) > (16 if recomputed(model) == 4 else 8):
        raise torch.OutOfMemoryError("CUDA out of memory (as a test says it)")
    found: torch.Tensor = model(batch).square().mean()
    return found


def fit(model: torch.nn.Module, optimizer: torch.optim.Optimizer, **more: Any) -> Any:
    return find_batch_size(model, optimizer, DATASET, loss, global_batch_size=32, world=World(), **more)


def test_the_largest_micro_batch_that_fits_is_found_and_the_trials_leave_no_trace() -> None:
    model, optimizer = built()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    found = fit(model, optimizer)
    assert (found.micro_batch_size, found.accumulation, found.policy) == (8, 4, Policy())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    assert not optimizer.state and all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("options", "found", "blocks"),
    [
        ({"micro_batch_size": 16, "checkpointing": "auto"}, (16, 2, Policy(every=1)), 4),
        ({"micro_batch_size": 8, "checkpointing": "auto"}, (8, 4, Policy()), 0),
        ({"micro_batch_size": None, "checkpointing": None}, (32, 1, Policy()), 0),
        (
            {"checkpointing": Policy(every=2, classes=("Block",))},
            (8, 4, Policy(every=2, classes=("Block",))),
            2,
        ),
    ],
    ids=["least recomputation", "none needed", "no size and no policy", "given policy"],
)
def test_a_given_size_or_policy_is_kept_and_the_other_found(
    options: dict[str, Any], found: tuple[int, int, Policy], blocks: int
) -> None:
    model, optimizer = built()
    fitted = fit(model, optimizer, **options)
    assert (fitted.micro_batch_size, fitted.accumulation, fitted.policy) == found
    assert recomputed(model) == blocks


def test_if_nothing_fits_the_error_says_so(told: Told) -> None:
    model, optimizer = built()
    told(lambda: fit(model, optimizer, micro_batch_size=32, checkpointing="auto"))


# --- the record ---------------------------------------------------------------------------------------
@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path))


def test_the_smallest_recorded_size_of_a_job_counts(store: Store) -> None:
    job = OOMHistory(store=store, job_uid="local-my train")
    assert job.least() is None
    assert job.note(8, rank=1) and job.note(32) and job.least() == 8
    assert job.note(8, rank=0), "two ranks may run out in the same step"
    assert job.note(4) and OOMHistory(store=store, job_uid="local-my train").least() == 4
    assert OOMHistory(store=store, job_uid="another").least() is None
    (first,) = (key for key in store.list("out-of-memory/") if key.endswith("/000000008.json"))
    found = store.get(first)
    assert found is not None
    assert json.loads(found.body) == {"jobUID": "local-my train", "microBatchSize": 8, "rank": 1}


def test_recorded_policies_and_those_that_recompute_less_are_left_out(store: Store) -> None:
    job = OOMHistory(store=store, job_uid="A")
    assert job.failed_policies() == 0
    assert job.note_policy("every-3", rank=1) and job.failed_policies() == 2
    assert job.note_policy("none") and job.failed_policies() == 2
    assert job.least() is None, "a policy is not a size"
    assert OOMHistory(store=store, job_uid="B").failed_policies() == 0


def test_without_a_store_nothing_is_recorded() -> None:
    job = OOMHistory(store=None, job_uid="A")
    assert job.least() is None and not job.note(8)
    assert job.failed_policies() == 0 and not job.note_policy("none")


def test_a_record_that_cannot_be_written_or_read_back_does_not_count(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = OOMHistory(store=store, job_uid="A")
    monkeypatch.setattr(type(store), "list", lambda self, prefix: [])
    assert not job.note(8)

    def broken(self: Store, key: str, body: object) -> str:
        raise StoreUnavailable("no answer")

    monkeypatch.setattr(type(store), "put_if_absent", broken)
    assert not job.note(4)
    assert 'event=batch-size too_large=4 kept=False why="no answer"' in capsys.readouterr().out

"""Micro-batch and recomputation found by trials that leave nothing behind."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from spottrain.core.training_settings import ActivationCheckpointing
from spottrain.data.plan import Plan
from spottrain.data.source import Batches
from spottrain.distributed.world import World
from spottrain.techniques import find_batch_size, memory_fit
from spottrain.techniques.activation_checkpointing import Recomputed, described
from spottrain.techniques.memory_fit import (
    MemoryFit,
    StepMemory,
    is_out_of_memory,
    sizes_up_to,
    state_bytes,
    weight_bytes,
)
from spottrain.techniques.precision import Precision

from tests.support.sentences import Told

CPU = torch.device("cpu")
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
    assert (found.micro_batch_size, found.accumulation, described(found.policy)) == (8, 4, "none")
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    assert not optimizer.state and all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("options", "found", "blocks"),
    [
        ({"micro_batch_size": 16, "checkpointing": "auto"}, (16, 2, "all"), 4),
        ({"micro_batch_size": 8, "checkpointing": "auto"}, (8, 4, "none"), 0),
        ({"micro_batch_size": None, "checkpointing": None}, (32, 1, "none"), 0),
        ({"checkpointing": 2}, (8, 4, "every-2"), 2),
    ],
    ids=["least recomputation", "none needed", "no size and no policy", "given policy"],
)
def test_a_given_size_or_policy_is_kept_and_the_other_found(
    options: dict[str, Any], found: tuple[int, int, str], blocks: int
) -> None:
    model, optimizer = built()
    fitted = fit(model, optimizer, **options)
    assert (fitted.micro_batch_size, fitted.accumulation, described(fitted.policy)) == found
    assert recomputed(model) == blocks


def test_if_nothing_fits_the_error_says_so(told: Told) -> None:
    model, optimizer = built()
    told(lambda: fit(model, optimizer, micro_batch_size=32, checkpointing="auto"))


# --- which size -----------------------------------------------------------------------------------------
@given(most=st.integers(1, 2000))
def test_sizes_divide_the_largest_and_at_least_double(most: int) -> None:
    sizes = sizes_up_to(most)
    assert sizes[0] == 1 and sizes[-1] == most
    assert all(most % size == 0 for size in sizes)
    assert all(high >= 2 * low for low, high in itertools.pairwise(sizes))


def test_the_sizes_of_a_share() -> None:
    assert sizes_up_to(64) == [1, 2, 4, 8, 16, 32, 64]
    assert sizes_up_to(100) == [1, 2, 5, 10, 25, 50, 100]


# --- a trial --------------------------------------------------------------------------------------------
@dataclass
class Metered:
    """A memory in which a sample takes 10 bytes beside 100 for the rest."""

    limit: int = 1000
    fails_softly: bool = True
    size: int = 0

    def begin(self) -> None: ...

    def peak(self) -> int:
        return 100 + 10 * self.size


class Scene:
    """A training whose passes are noted. `most`: samples above which a pass runs out of memory."""

    def __init__(
        self,
        memory: Metered,
        *,
        share: int = 64,
        most: int = 1 << 30,
        collate: Callable[[list[torch.Tensor]], torch.Tensor] | None = None,
    ) -> None:
        self.memory: Any = memory
        self.most = most
        self.model = torch.nn.Sequential(
            torch.nn.Linear(4, 2), torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(2)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.passes: list[int] = []
        plan = Plan(size=64, global_batch_size=share, micro_batch_size=share)
        self.fit = MemoryFit(
            "auto",
            ActivationCheckpointing(policy="none"),
            model=self.model,
            optimizer=self.optimizer,
            loss_of=self.loss_of,
            source=Batches(DATASET, plan, collate_fn=collate or self.collated),
            precision=Precision(name="fp32"),
            device=CPU,
            world=World(),
        )

    def largest(self) -> int | None:
        return self.fit.largest(sizes_up_to(64), self.memory)

    def used(self, size: int) -> float:
        return self.fit.used(size, self.memory)

    def collated(self, samples: list[torch.Tensor]) -> torch.Tensor:
        self.memory.size = len(samples)
        return torch.randn(len(samples), 4)

    def loss_of(self, model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        self.passes.append(len(batch))
        if len(batch) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        loss: torch.Tensor = model(batch).square().mean()
        return loss


def test_a_trial_leaves_room_and_no_trace() -> None:
    scene = Scene(Metered(limit=1000))
    before = {name: value.clone() for name, value in scene.model.state_dict().items()}
    random = torch.get_rng_state()
    assert scene.largest() == 64
    assert torch.equal(torch.get_rng_state(), random)
    softly = Scene(Metered(limit=800))
    assert softly.largest() == 32, "740 of 800 is above 90 %"
    assert 64 in softly.passes, "tried, since an error is the worst that could come of it"
    after = scene.model.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert not scene.optimizer.state and all(p.grad is None for p in scene.model.parameters())


def test_where_there_are_several_micro_batches_gradients_of_the_first_are_there() -> None:
    scene = Scene(Metered(), share=8)
    scene.used(8)
    scene.used(4)
    assert scene.passes == [8, 4, 4]


def test_where_going_above_ends_the_process_a_size_foreseen_to_is_not_tried() -> None:
    scene = Scene(Metered(limit=300, fails_softly=False))
    assert scene.largest() == 16
    assert set(scene.passes) == {1, 2, 4, 8, 16}, "32 would need 420 of 270"


def test_a_size_that_the_model_does_not_support_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert Scene(Metered(), most=4).largest() == 4
    assert "left_out=1" in capsys.readouterr().out, "batch norm needs two samples"


@pytest.mark.parametrize("error", [RuntimeError("mat1 and mat2 shapes"), KeyError("labels")])
def test_other_errors_than_out_of_memory_propagate(error: Exception) -> None:
    def collate(samples: list[torch.Tensor]) -> torch.Tensor:
        raise error

    with pytest.raises(type(error)) as caught:
        Scene(Metered(), collate=collate).largest()
    assert caught.value is error


def test_the_memory_of_a_failed_trial_is_free_when_it_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[bool] = []
    held: list[weakref.ref[torch.Tensor]] = []

    def collate(samples: list[torch.Tensor]) -> torch.Tensor:
        batch = torch.randn(len(samples), 4)
        held.append(weakref.ref(batch))
        return batch

    scene = Scene(Metered(), most=1, collate=collate)
    monkeypatch.setattr(memory_fit, "release", lambda: alive.append(held[-1]() is not None))
    assert scene.used(2) == float("inf")
    assert alive == [False]


# --- what an error of memory is -------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"), False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("DefaultCPUAllocator: can't allocate memory"), False),
    ],
)
def test_errors_of_memory_are_told_from_others(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_what_torch_raises_on_a_cpu_is_one() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60)
    assert is_out_of_memory(caught.value), caught.value


# --- what is reserved for the optimizer -----------------------------------------------------------------
@pytest.mark.parametrize(
    ("make", "each"),
    [
        (lambda p: torch.optim.AdamW(p), 8),
        (lambda p: torch.optim.SGD(p, lr=0.1), 0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 4),
    ],
)
def test_the_optimizers_state_is_foreseen(
    make: Callable[[Any], torch.optim.Optimizer], each: int, capsys: Any
) -> None:
    weights = torch.nn.Parameter(torch.zeros(100, 10))
    optimizer = make([weights])
    random = torch.get_rng_state()
    assert weight_bytes(optimizer) == 4000
    assert state_bytes(optimizer) == pytest.approx(1000 * each, abs=16), "a step count beside it"
    assert torch.equal(torch.get_rng_state(), random) and not optimizer.state
    assert "as Adam" not in capsys.readouterr().out
    weights.grad = torch.ones_like(weights)
    optimizer.step()
    assert state_bytes(optimizer) == 0 or not optimizer.state


def test_a_state_that_cannot_be_foreseen_counts_as_adams_and_is_told(capsys: Any) -> None:
    class Own(torch.optim.Optimizer):
        def __init__(self, parameters: Any, *, must: int) -> None:
            super().__init__(parameters, {})

    optimizer = Own([torch.nn.Parameter(torch.zeros(10))], must=1)
    assert state_bytes(optimizer) == 80
    assert 'state="as Adam' in capsys.readouterr().out


# --- how much memory there is ---------------------------------------------------------------------------
def written(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_on_a_cpu_it_is_the_containers_or_the_machines(tmp_path: Path) -> None:
    process = written(tmp_path / "own", {"cgroup": "0::/\n"})
    machine = StepMemory(CPU, cgroups=tmp_path / "none", process=process).limit
    assert machine > 1 << 28
    assert StepMemory(CPU, cgroups=written(tmp_path, {"memory.max": "5000"}), process=process).limit == 5000
    assert StepMemory(CPU, ranks=4, cgroups=tmp_path, process=process).limit == 1250, "shared by four"
    assert (
        StepMemory(CPU, cgroups=written(tmp_path, {"memory.max": "9" * 18}), process=process).limit == machine
    )


def test_the_peak_is_the_processs_own_and_begins_again(tmp_path: Path) -> None:
    process = written(tmp_path, {"status": "Name:\tx\nVmHWM:\t    2048 kB\n", "clear_refs": ""})
    memory = StepMemory(CPU, process=process)
    memory.begin()
    assert (process / "clear_refs").read_text() == "5" and memory.peak() == 2048 * 1024


def test_a_peak_that_cannot_begin_again_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    StepMemory(CPU, process=tmp_path / "absent").begin()
    assert 'peak="of all trials so far"' in capsys.readouterr().out

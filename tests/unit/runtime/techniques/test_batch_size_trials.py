"""The largest micro-batch that divides and fits, found by trials that leave nothing behind."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from spottrain.distributed.world import World
from spottrain.techniques.batch_size_trials import (
    MemoryOfAllRanks,
    OutOfMemoryTogether,
    Trial,
    divisors,
    find,
    is_out_of_memory,
    smaller,
    state_bytes,
    weight_bytes,
)
from spottrain.techniques.memory import HostMemory, memory_of

from tests.support.sentences import Told

CPU = torch.device("cpu")


def up_to(most: int, tried: list[int] | None = None) -> Callable[[int], None]:
    def trial(size: int) -> None:
        if tried is not None:
            tried.append(size)
        if size > most:
            raise torch.OutOfMemoryError("CUDA out of memory")

    return trial


# --- which size -----------------------------------------------------------------------------------------
@given(share=st.integers(1, 600), most=st.integers(1, 700))
def test_the_largest_divisor_that_fits_is_found_in_few_trials(share: int, most: int) -> None:
    tried: list[int] = []
    expected = max(size for size in divisors(share) if size <= most)
    with patch("spottrain.techniques.batch_size_trials.release"):  # it takes most of the time
        assert find(up_to(most, tried), share) == expected
    assert len(tried) == len(set(tried)) <= 2 * len(divisors(share)).bit_length()


@pytest.mark.parametrize(
    ("most", "share", "largest", "sizes"),
    [(40, 128, None, [1, 4, 64, 16, 32]), (1000, 64, 20, [1, 4, 16])],
    ids=["grows, then halves the gap", "none above the largest wanted"],
)
def test_the_order_of_trials(most: int, share: int, largest: int | None, sizes: list[int]) -> None:
    tried: list[int] = []
    assert find(up_to(most, tried), share, largest=largest) == sizes[-1]
    assert tried == sizes


def test_if_nothing_fits_the_error_names_what_to_do(told: Told) -> None:
    told(lambda: find(up_to(0), 8))


@pytest.mark.parametrize("error", [RuntimeError("mat1 and mat2 shapes"), KeyError("labels")])
def test_other_errors_than_out_of_memory_propagate(error: Exception) -> None:
    def trial(size: int) -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        find(trial, 8)
    assert caught.value is error


def test_a_size_that_the_model_does_not_support_is_left_out() -> None:
    tried: list[int] = []

    def trial(size: int) -> None:
        tried.append(size)
        if size == 1:
            raise ValueError("Expected more than 1 value per channel when training")
        if size > 4:
            raise torch.OutOfMemoryError

    assert find(trial, 16) == 4 and tried[0] == 1


def test_the_memory_of_a_failed_trial_is_free_when_it_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[weakref.ref[torch.Tensor]] = []
    alive: list[bool] = []
    released = "spottrain.techniques.batch_size_trials.release"
    monkeypatch.setattr(released, lambda: alive.append(held[-1]() is not None))

    def trial(size: int) -> None:
        big = torch.ones(size)
        held.append(weakref.ref(big))
        if size > 2:
            raise MemoryError

    assert find(trial, 4) == 2
    assert alive == [False]


def test_the_next_smaller_size_divides_too_and_below_one_there_is_none(told: Told) -> None:
    assert [smaller(8, 8), smaller(6, 12), smaller(5, 12), smaller(2, 9)] == [4, 4, 4, 1]
    told(lambda: smaller(1, 8))


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


# --- a trial --------------------------------------------------------------------------------------------
@dataclass
class Metered:
    """A memory in which a sample takes 10 bytes beside 100 for the rest; at least `least`."""

    limit: int = 1000
    fails_softly: bool = True
    device: torch.device = CPU
    size: int = 0
    least: int = 0

    def begin(self) -> None: ...

    def peak(self) -> int:
        return max(self.least, 100 + 10 * self.size)


class Scene:
    def __init__(self, memory: Metered, share: int = 64) -> None:
        self.memory = memory
        self.model = torch.nn.Sequential(
            torch.nn.Linear(4, 2), torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(2)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.passes: list[int] = []
        self.trial = Trial(
            self.model,
            self.optimizer,
            loss_of=self.loss_of,
            batch_of=self.batch_of,
            share=share,
            memory=memory,
        )

    def batch_of(self, size: int) -> torch.Tensor:
        self.memory.size = size
        return torch.randn(size + 1, 4)

    def loss_of(self, model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        self.passes.append(len(batch) - 1)
        loss: torch.Tensor = model(batch).square().mean()
        return loss


def test_a_trial_leaves_room_and_no_trace() -> None:
    scene = Scene(Metered(limit=1000))
    before = {name: value.clone() for name, value in scene.model.state_dict().items()}
    random = torch.get_rng_state()
    assert find(scene.trial, 64) == 64
    assert torch.equal(torch.get_rng_state(), random)
    softly = Scene(Metered(limit=800))
    assert find(softly.trial, 64) == 32, "740 of 800 is above 90 %"
    assert 64 in softly.passes, "tried, since an error is the worst that could come of it"
    assert find(Scene(Metered(limit=825)).trial, 64) == 64
    after = scene.model.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert not scene.optimizer.state and all(p.grad is None for p in scene.model.parameters())


def test_where_there_are_several_micro_batches_gradients_of_the_first_are_there() -> None:
    scene = Scene(Metered(), share=8)
    scene.trial(8)
    scene.trial(4)
    assert scene.passes == [8, 4, 4]


def test_where_going_above_ends_the_process_a_size_foreseen_to_is_not_tried(told: Told) -> None:
    scene = Scene(Metered(limit=300, fails_softly=False))
    assert find(scene.trial, 64) == 16
    assert set(scene.passes) == {1, 2, 4, 8, 16}, "64 would need 740 of 270, and 32 would 420"
    told(lambda: scene.trial(64))


def test_a_peak_that_grows_only_from_some_size_on_is_foreseen() -> None:
    scene = Scene(Metered(limit=300, fails_softly=False, least=180))  # the optimizer's step takes most
    assert find(scene.trial, 64) == 16 and max(scene.passes) == 16


def test_a_whole_share_is_judged_by_single_passes_beside_which_there_are_no_gradients() -> None:
    scene = Scene(Metered(limit=1000, fails_softly=False), share=4)
    assert find(scene.trial, 4) == 4
    assert scene.passes == [1, 1, 1, 2, 4], "4 is all there is, so 1 and 2 are tried alone once more"


def test_sizes_that_the_model_cannot_do_are_left_out_on_the_way_up(told: Told) -> None:
    scene = Scene(Metered(limit=300, fails_softly=False))
    scene.batch_of = lambda size: torch.randn(size, 4)  # type: ignore[method-assign]
    scene.trial.batch_of = scene.batch_of
    scene.memory.size = 4
    scene.trial(8)
    told(lambda: scene.trial(1))


@pytest.mark.parametrize("at", [1, 4])
def test_where_ranks_try_together_one_that_runs_out_does_not_try_another_size(at: int, told: Told) -> None:
    memory = Metered(limit=1000)
    scene = Scene(memory)

    def loss_of(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if len(batch) > at:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return scene.loss_of(model, batch)

    together = MemoryOfAllRanks(memory, World())
    assert (together.limit, together.peak()) == (memory.limit, memory.peak())
    trial = Trial(
        scene.model, scene.optimizer, loss_of=loss_of, batch_of=scene.batch_of, share=64, memory=together
    )
    with pytest.raises(OutOfMemoryTogether) as caught:
        find(trial, 64)
    told(caught)
    assert caught.value.size == at and not is_out_of_memory(caught.value)


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
    machine = memory_of(CPU, cgroups=tmp_path / "none", process=process).limit
    assert machine > 1 << 28
    assert memory_of(CPU, cgroups=written(tmp_path, {"memory.max": "5000"}), process=process).limit == 5000
    assert memory_of(CPU, ranks=4, cgroups=tmp_path, process=process).limit == 1250, "shared by four"
    assert (
        memory_of(CPU, cgroups=written(tmp_path, {"memory.max": "9" * 18}), process=process).limit == machine
    )


def test_the_peak_is_the_processs_own_and_begins_again(tmp_path: Path) -> None:
    process = written(tmp_path, {"status": "Name:\tx\nVmHWM:\t    2048 kB\n", "clear_refs": ""})
    memory = HostMemory(1, process)
    memory.begin()
    assert (process / "clear_refs").read_text() == "5" and memory.peak() == 2048 * 1024


def test_a_peak_that_cannot_begin_again_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    HostMemory(1, tmp_path / "absent").begin()
    assert 'peak="of all trials so far"' in capsys.readouterr().out

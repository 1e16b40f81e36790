"""What torch.compile is refused for, a first batch that leaves no trace, and what compiles again."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from spottrain.errors import ConfigurationError
from spottrain.lifecycle.topology import LOOPBACK, reserve_port
from spottrain.techniques.compilation import OwnGradients, compilations, compiled, warm_up
from spottrain.techniques.dry_run import rehearsal
from torch.nn.parallel import DataParallel, DistributedDataParallel

from tests.support.sentences import Told


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def world_of_one() -> Iterator[None]:
    with reserve_port() as reserved:
        where = f"tcp://{LOOPBACK}:{reserved.getsockname()[1]}"
        dist.init_process_group("gloo", init_method=where, rank=0, world_size=1)
        yield
        dist.destroy_process_group()


class Net(torch.nn.Module):
    """Everything that a forward pass changes: random state, a running mean, a buffer assigned again."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.drop = torch.nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        out: torch.Tensor = self.drop(self.norm(self.layer(x)))
        return out


def traces(model: torch.nn.Module) -> list[Any]:
    tensors = [*model.parameters(), *model.buffers(), torch.get_rng_state()]
    kept = [tensor.detach().clone() for tensor in tensors]
    kept += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    return kept


def equal(some: list[Any], others: list[Any]) -> bool:
    return len(some) == len(others) and all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def step(model: torch.nn.Module, size: int = 3) -> None:
    model(torch.randn(size, 4)).square().sum().backward()


# --- refused --------------------------------------------------------------------------------------------
def test_data_parallel_and_an_unknown_mode_are_refused(told: Told) -> None:
    told(lambda: compiled(DataParallel(torch.nn.Linear(2, 2))))
    told(lambda: compiled(torch.nn.Linear(2, 2), "fast"))


# --- a step that leaves no trace ------------------------------------------------------------------------
@pytest.mark.parametrize("has_gradients", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_a_rehearsal_leaves_no_trace(has_gradients: bool, fails: bool) -> None:
    model = Net()
    if has_gradients:
        step(model)
    model.drop.eval()
    before, calls, share = traces(model), model.calls, model.drop.p
    with pytest.raises(MemoryError) if fails else nullcontext(), rehearsal(model):
        model.train()
        step(model)
        assert not equal(traces(model), before)
        model.drop.p += 0.1
        model.layer.requires_grad_(False)
        if fails:
            raise MemoryError
    assert equal(traces(model), before)
    assert model.calls is calls and not model.drop.training and model.norm.training
    assert model.drop.p == share and model.layer.weight.requires_grad


class Teacher(Net):
    """Whose frozen weights follow the trained ones in the forward pass (MoCo, BYOL)."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.teacher = torch.nn.Linear(4, 4).requires_grad_(False)

    @torch.no_grad()
    def follow(self) -> None:
        for mine, other in zip(self.teacher.parameters(), self.layer.parameters(), strict=True):
            if self.how == "in place":
                mine.mul_(0.5).add_(other, alpha=0.5)
            elif self.how == "data in place":
                mine.data.mul_(0.5)
            else:
                mine.data = 0.5 * mine.data + 0.5 * other.data

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.follow()
        out: torch.Tensor = super().forward(x) + self.teacher(x)
        return out


@pytest.mark.parametrize("how", ["in place", "data in place", "assigned"])
def test_frozen_weights_that_a_forward_pass_writes_are_put_back(how: str) -> None:
    model = Teacher(how)
    before, held = traces(model), model.teacher.weight.data_ptr()
    with pytest.raises(MemoryError), rehearsal(model):
        step(model)
        assert not torch.equal(model.teacher.weight, before[4])
        raise MemoryError
    assert equal(traces(model), before) and model.teacher.weight.data_ptr() == held


class Clipped(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.layer.weight.mul_(0.9)
        return super().forward(x)


def test_a_forward_pass_that_writes_trained_weights_cannot_be_rehearsed(told: Told) -> None:
    model = Clipped()
    with pytest.raises(ConfigurationError) as refused, rehearsal(model):
        step(model)
    told(refused)


def test_trained_weights_that_are_only_moved_are_no_fault() -> None:
    model = Net()
    model.layer.bias.data[0] = torch.nan
    with rehearsal(model):
        model.layer.weight.data = model.layer.weight.data.clone()  # as flatten_parameters of an LSTM does
        step(model)


def test_of_a_frozen_base_many_times_its_adapter_no_copy_is_made_and_a_write_is_told(told: Told) -> None:
    base = torch.nn.Linear(100, 100).requires_grad_(False)
    model = torch.nn.Sequential(base, torch.nn.Linear(100, 1))
    with rehearsal(model):
        model(torch.randn(2, 100)).sum().backward()
    with pytest.raises(ConfigurationError) as refused, rehearsal(model), torch.no_grad():
        base.weight.zero_()
    told(refused)


# --- the first batch ------------------------------------------------------------------------------------
def eager(model: torch.nn.Module) -> torch.nn.Module:
    """Traced and guarded like any, without the minutes of a compiler behind it."""
    outer: Any = torch.compile(model, backend="aot_eager")
    return outer  # type: ignore[no-any-return]


def test_the_first_batch_compiles_and_leaves_no_trace() -> None:
    inner = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5))
    model = eager(inner)
    before = traces(inner)
    assert warm_up(lambda: step(model), model) > 0
    assert equal(traces(inner), before)
    assert warm_up(lambda: step(model), model) == 0


def test_within_it_ddp_talks_to_nobody(world_of_one: None, monkeypatch: pytest.MonkeyPatch) -> None:
    ddp = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)))
    told: list[str] = []

    def exchange(bucket: Any) -> torch.futures.Future[torch.Tensor]:
        told.append("gradients")
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    ddp.register_comm_hook(None, lambda state, bucket: exchange(bucket))
    monkeypatch.setattr(ddp, "_sync_buffers", lambda: told.append("buffers"))
    warm_up(lambda: step(ddp), ddp)
    assert told == []
    step(ddp)
    assert told == ["buffers", "gradients"], "and after it as ever"


# --- gradients in the memory of a CUDA graph -------------------------------------------------------------
def test_a_gradient_is_copied_before_the_graph_that_holds_it_runs_again() -> None:
    model, graph = torch.nn.Linear(2, 2, bias=False), torch.zeros(2, 2)
    own, weight = OwnGradients(model), model.weight

    def run(value: float) -> None:
        graph.fill_(value)  # each run of a graph writes its results into the same memory
        if weight.grad is None:
            weight.grad = graph.view(2, 2)
        else:
            weight.grad += graph

    run(1.0)
    own.keep()
    first = weight.grad
    run(2.0)
    own.keep()
    run(3.0)
    assert first is not None and weight.grad is first and first.tolist() == [[6.0, 6.0], [6.0, 6.0]]


def test_no_copy_of_a_gradient_outlives_its_step() -> None:
    model = torch.nn.Linear(2, 2)
    own = OwnGradients(model)
    model(torch.ones(1, 2)).sum().backward()
    own.keep()
    assert model.weight.grad is not None
    copy = weakref.ref(model.weight.grad)
    model.zero_grad(set_to_none=True)
    own.forget()
    assert copy() is None


# --- compiled again -------------------------------------------------------------------------------------
def test_what_compiles_again_is_counted() -> None:
    @torch.compile(backend="eager", dynamic=False)
    def twice(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    before = compilations()
    for size in (1, 1, 2, 3, 3):
        twice(torch.ones(size))
    found = compilations().since(before)
    assert found.count == 3 and found.seconds > 0

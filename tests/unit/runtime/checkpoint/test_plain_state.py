"""Names and numbers of a model's and an optimizer's state do not depend on what is wrapped around them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from spottrain.checkpoint.final_weights import FinalWeights, digest, most_bytes
from spottrain.checkpoint.layout import SHARD_BYTES
from spottrain.checkpoint.plain_state import (
    boxes,
    clean,
    explain_mismatch,
    incompatible,
    load_model,
    load_optimizer,
    model_state,
    optimizer_state,
    plain,
)
from spottrain.checkpoint.weights_files import load_weights
from spottrain.core.container import ContainerMemory
from spottrain.lifecycle.topology import LOOPBACK, reserve_port
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel

from tests.support.sentences import Told
from tests.support.snapshots import pack, same, unpack


@pytest.fixture(scope="module", autouse=True)
def world_of_one() -> Iterator[None]:
    with reserve_port() as reserved:
        where = f"tcp://{LOOPBACK}:{reserved.getsockname()[1]}"
        dist.init_process_group("gloo", init_method=where, rank=0, world_size=1)
        yield
        dist.destroy_process_group()


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x).relu()


class Model(torch.nn.Module):
    """With a buffer and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block(), Block()])
        self.norm = torch.nn.BatchNorm1d(4)
        self.last = torch.nn.Linear(4, 4, bias=False)
        self.blocks[1].inner.weight = self.last.weight  # type: ignore[union-attr]

    def forward(self, x: torch.Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.last(self.norm(x))


def checkpointed(model: torch.nn.Module) -> torch.nn.Module:
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    return model


def sharded(model: torch.nn.Module) -> torch.nn.Module:
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(model, mesh=mesh)
    return model


def same_module(model: torch.nn.Module) -> torch.nn.Module:
    return model


WRAPS: dict[str, Callable[[torch.nn.Module], Any]] = {
    "plain": same_module,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "DDP": lambda model: DistributedDataParallel(model),
    "compiled DDP": lambda model: torch.compile(DistributedDataParallel(model), backend="eager"),
    "DDP of compiled": lambda model: DistributedDataParallel(torch.compile(model, backend="eager")),
    "activation checkpointing": checkpointed,
    "activation checkpointing in DDP": lambda model: DistributedDataParallel(checkpointed(model)),
    "FSDP2": sharded,
    "activation checkpointing in FSDP2": lambda model: sharded(checkpointed(model)),
}


def trained(wrap: str, seed: int, steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model: torch.nn.Module = WRAPS[wrap](Model())
    decayed = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    called = plain(model) if "compile" in wrap else model  # to compile takes seconds and changes no name
    for step in range(steps):
        called(torch.randn(3, 4, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return model, optimizer


def saved(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Through a checkpoint, with every tensor whole."""
    return unpack(pack({"model": model_state(model), "optimizer": optimizer_state(model, optimizer)}))


def names(value: Any, path: str = "") -> set[str]:
    if not isinstance(value, dict):
        return {path}
    return set().union(*(names(item, f"{path}/{key}") for key, item in value.items()))


@pytest.fixture(scope="module")
def bare(world_of_one: None) -> Any:
    return saved(*trained("plain", 1, 2))


@pytest.mark.parametrize("wrap", WRAPS)
def test_what_is_wrapped_around_changes_no_name_and_either_loads_the_other_s(wrap: str, bare: Any) -> None:
    state = saved(*trained(wrap, 1, 2))
    assert names(state) == names(bare)
    assert "model/blocks.0.inner.weight" in {name.lstrip("/") for name in names(state)}

    fresh = trained("plain", 2, 0)
    assert load_model(fresh[0], state["model"]) is None
    assert load_optimizer(*fresh, state["optimizer"]) is None
    assert same(saved(*fresh), state), "saved with, loaded without"

    other = trained(wrap, 3, 0)
    assert load_model(other[0], bare["model"]) is None
    assert load_optimizer(*other, bare["optimizer"]) is None
    assert same(saved(*other), bare), "saved without, loaded with"


def test_an_optimizer_s_state_is_named_by_parameters_and_survives_another_order() -> None:
    model, optimizer = trained("plain", 1, 2)
    state = saved(model, optimizer)["optimizer"]
    assert set(state["state"]) == {name for name, _ in model.named_parameters()}
    assert "last.weight" not in state["state"] or "blocks.1.inner.weight" not in state["state"], "tied"
    torch.manual_seed(9)
    other = Model()
    turned = [p for p in reversed(list(other.parameters())) if p.dim() > 1]
    rest = [p for p in reversed(list(other.parameters())) if p.dim() <= 1]
    groups: list[dict[str, Any]] = [{"params": turned}, {"params": rest}]
    another = torch.optim.AdamW(groups)
    assert load_optimizer(other, another, state) is None
    for name, parameter in other.named_parameters():
        assert torch.equal(another.state[parameter]["exp_avg"], state["state"][name]["exp_avg"])
    assert another.param_groups[1]["weight_decay"] == 0.0 and another.param_groups[0]["lr"] == 0.01


def test_a_parameter_that_is_not_the_model_s_is_named_by_its_place() -> None:
    model, heat = torch.nn.Linear(2, 2), torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([*model.parameters(), heat], lr=0.1, momentum=0.9)
    (model(torch.ones(1, 2)).sum() * heat).sum().backward()
    optimizer.step()
    state = optimizer_state(model, optimizer)
    assert list(state["state"]) == ["weight", "bias", "#2"]
    assert load_optimizer(model, optimizer, unpack(pack(state))) is None


def test_data_parallel_is_refused_with_what_to_use(told: Told) -> None:
    told(lambda: plain(DataParallel(torch.nn.Linear(1, 1))))


def test_names_are_cleaned_of_every_wrapper() -> None:
    assert clean("_orig_mod.a._checkpoint_wrapped_module.b._fsdp_wrapped_module.c") == "a.b.c"


# --- what does not fit ----------------------------------------------------------------------------------
def state(**shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(shape) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("before", "now", "says"),
    [
        (state(w=(2,)), state(w=(2,)), None),
        (state(w=(2,)), state(w=(2,), v=(1,)), "the checkpoint has no v, which the model has"),
        (state(w=(2,), v=(1,)), state(w=(2,)), "the model has no v, which the checkpoint has"),
        (state(w=(2, 3)), state(w=(3, 2)), "w has shape (2, 3) in the checkpoint and (3, 2) in the model"),
        (state(w=(2,)), {"w": {"extra": 1}}, "w has shape (2,) in the checkpoint and none in the model"),
    ],
)
def test_what_does_not_fit_is_a_sentence(before: Any, now: Any, says: str | None) -> None:
    assert explain_mismatch(before, now) == says


def test_a_model_that_does_not_fit_is_not_touched() -> None:
    model = torch.nn.Linear(2, 2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert load_model(model, {"weight": torch.zeros(2, 2), "bias": torch.zeros(3)}) == (
        "bias has shape (3,) in the checkpoint and (2,) in the model"
    )
    assert same(dict(model.state_dict()), before)
    error = incompatible("s3://b/p", "bias is gone")
    assert str(error) == (
        "the checkpoint at s3://b/p does not match this training: bias is gone. "
        "Use the script that wrote it, or another checkpoint URI"
    )
    assert error.reason == "CheckpointIncompatible"


def test_an_optimizer_with_other_groups_is_a_sentence() -> None:
    model = torch.nn.Linear(2, 2)
    one = torch.optim.AdamW(model.parameters())
    groups: list[dict[str, Any]] = [{"params": [model.weight]}, {"params": [model.bias]}]
    two = torch.optim.AdamW(groups)
    bare = torch.optim.AdamW([model.weight])
    state = optimizer_state(model, one)
    assert load_optimizer(model, two, state) == (
        "its optimizer has 1 parameter group(s), and the one here has 2"
    )
    assert load_optimizer(model, bare, state) == (
        "its optimizer's parameter group 0 differs from the one here in bias"
    )


def test_a_sharded_model_has_a_part_of_each_tensor_and_a_plain_one_none() -> None:
    shape, box = boxes(sharded(Block()))["inner.weight"]
    assert shape == box.shape == (4, 4), "the only rank's part is all of it"
    assert boxes(Block()) == {}


def left(state: dict[str, Any], **more: Any) -> tuple[bytes, str]:
    """The one file, and the digest."""
    final = FinalWeights(state)
    files = [bytes(body) for _, body in final.files(first=True, **({"keep": True} | more))]
    return (files[0] if files else b""), final.digest


# --- final weights --------------------------------------------------------------------------------------
@pytest.mark.parametrize("wrap", ["plain", "DDP", "FSDP2"])
def test_the_final_file_is_one_that_the_safetensors_library_reads_with_tied_weights_by_each_name(
    wrap: str, bare: Any
) -> None:
    file, its_digest = left(model_state(trained(wrap, 1, 2)[0]))
    found, whole = safetensors.torch.load(file), bare["model"]
    assert found.keys() == whole.keys() >= {"last.weight", "blocks.1.inner.weight"}
    assert all(same(found[name], tensor) for name, tensor in whole.items())
    assert its_digest == digest(whole) == digest(found)
    assert Model().load_state_dict(found)


def test_tensors_of_every_width_without_shape_and_without_numbers_are_in_the_final_file() -> None:
    state: dict[str, Any] = {
        "byte": torch.arange(3, dtype=torch.uint8),
        "empty": torch.empty(0, 3),
        "half": torch.ones(5, dtype=torch.bfloat16),
        "scalar": torch.tensor(5),
        "switch": torch.tensor(True),
        "turned": torch.arange(6.0).reshape(2, 3).T,
        "empty too": torch.empty(0, dtype=torch.float64),
        "words": "of no tensor",
    }
    file, its_digest = left(state)
    found = safetensors.torch.load(file)
    tensors = {name: each for name, each in state.items() if isinstance(each, torch.Tensor)}
    assert found.keys() == tensors.keys()
    assert all(same(found[name], tensor) for name, tensor in tensors.items())
    assert its_digest == digest(tensors)


def test_weights_of_a_type_that_safetensors_has_not_are_named(told: Told) -> None:
    told(lambda: FinalWeights({"filter": torch.ones(2, dtype=torch.complex128)}))


def test_who_keeps_no_final_file_has_none_and_the_same_digest() -> None:
    file, its_digest = left(state(w=(2, 3)), keep=False)
    assert file == b"" and its_digest == digest(state(w=(2, 3)))


def test_a_file_takes_half_of_what_the_container_has_left() -> None:
    assert most_bytes(None) == most_bytes(ContainerMemory(limit=2**40, used=0)) == SHARD_BYTES
    assert most_bytes(ContainerMemory(limit=2**30, used=2**29)) == 2**28


def test_what_is_beside_the_model_is_read_by_the_name_of_its_module(tmp_path: Path) -> None:
    weights = {"extra.weight": torch.ones(2), "extra.loss.weight": torch.zeros(3), "loose.4": torch.ones(1)}
    file = tmp_path / "model.safetensors"
    final = FinalWeights(weights, beside=["extra.loss.weight", "loose.4"])
    for _, body in final.files(first=True, keep=True):
        file.write_bytes(body)
    assert load_weights(file).keys() == {"extra.weight"}, "a part of the model that is called so"
    assert load_weights(file, "extra.loss").keys() == {"weight"}
    assert load_weights(tmp_path, "loose").keys() == {"4"}

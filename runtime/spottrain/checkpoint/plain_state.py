"""State of model and optimizer under the names of the plain model. Called by `run` and `trainer`.

Whatever is wrapped around a model (DDP, torch.compile, activation checkpointing, FSDP2) changes neither its
names nor what is stored: save with each, load without. An optimizer's state is named by its parameters, not
by their numbers, so it survives another order of parameter groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from spottrain.checkpoint.manifest import StoredTensor
from spottrain.contract import Reason
from spottrain.distributed.dtensor import Box, box_of, is_sharded, like
from spottrain.errors import CheckpointError, ConfigurationError

INNER: Final = "_spottrain_model"
"""Where the model lies in `trained.Together`."""
WRAPPERS: Final = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", f"{INNER}.")
"""Parts of a name that torch.compile, the checkpoint wrapper and FSDP1 (torch 2.15), and we, put into it."""
MODEL: Final = "model"
OPTIMIZER: Final = "optimizer"
EMA: Final = "ema"


def plain(model: torch.nn.Module) -> torch.nn.Module:
    """What is inside of DDP and torch.compile."""
    if isinstance(model, DataParallel):
        raise ConfigurationError(
            "the model is a torch.nn.DataParallel, which torch.compile and resuming do not work with; use "
            "DistributedDataParallel: spottrain run --nproc auto starts a process for each GPU"
        )
    if isinstance(model, DistributedDataParallel):
        return plain(model.module)
    inner = getattr(model, "_orig_mod", None)
    return plain(inner) if isinstance(inner, torch.nn.Module) else model


def clean(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def model_state(model: torch.nn.Module) -> dict[str, Any]:
    # The parameters themselves, so that tied ones are one object under all of their names.
    return {clean(name): value for name, value in plain(model).state_dict(keep_vars=True).items()}


def buffers(model: torch.nn.Module, under: str = MODEL) -> frozenset[str]:
    """Paths of its buffers in a state that keeps the model `under` that name.

    They are rank 0's: DDP averages gradients alone, and gives all ranks its buffers before a forward pass.
    """
    return frozenset(f"{under}.{clean(name)}" for name, _ in plain(model).named_buffers())


def load_model(model: torch.nn.Module, saved: Mapping[str, Any]) -> str | None:
    """None, or a sentence that says why it does not fit; then nothing was changed."""
    inner = plain(model)
    here = inner.state_dict()
    mismatch = explain_mismatch(saved, {clean(name): value for name, value in here.items()})
    if mismatch is None:
        inner.load_state_dict({name: _like(here[name], saved[clean(name)]) for name in here})
    return mismatch


def explain_mismatch(saved: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
    """Why saved weights do not fit this model, as a sentence; None where they do."""
    for name in here:
        if name not in saved:
            return f"the checkpoint has no {name}, which the model has"
        if not _fits(saved[name], here[name]):
            before, now = _shape(saved[name]), _shape(here[name])
            return f"{name} has shape {before} in the checkpoint and {now} in the model"
    extra = next((name for name in saved if name not in here), None)
    return None if extra is None else f"the model has no {extra}, which the checkpoint has"


def _fits(saved: Any, here: Any) -> bool:
    """`saved` is the part that this rank wanted, or, where the whole has another shape, all of it."""
    if not isinstance(saved, torch.Tensor) or not isinstance(here, torch.Tensor):
        return isinstance(saved, torch.Tensor) == isinstance(here, torch.Tensor)
    return tuple(saved.shape) == box_of(here).shape


def _shape(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, torch.Tensor) else "none"


# --- optimizer --------------------------------------------------------------------------------------
def optimizer_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """As `Optimizer.state_dict`, with names of parameters where that has numbers."""
    names = _names(model, optimizer)
    raw = optimizer.state_dict()
    return {
        "state": {names[number]: values for number, values in raw["state"].items()},
        "param_groups": [
            group | {"params": [names[n] for n in group["params"]]} for group in raw["param_groups"]
        ],
    }


def load_optimizer(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]
) -> str | None:
    """None, or a sentence that says why it does not fit; then nothing was changed."""
    names = _names(model, optimizer)
    numbers = {name: number for number, name in names.items()}
    before = [sorted(group["params"]) for group in saved["param_groups"]]
    groups = optimizer.state_dict()["param_groups"]
    now = [sorted(names[n] for n in group["params"]) for group in groups]
    if before != now:
        return _explain_groups(before, now)
    parameters = {names[n]: p for n, p in enumerate(_parameters(optimizer))}
    state = {
        numbers[name]: {key: _like(parameters[name], value) for key, value in values.items()}
        for name, values in saved["state"].items()
    }
    merged = [
        {**theirs, "params": mine["params"]}
        for mine, theirs in zip(groups, saved["param_groups"], strict=True)
    ]
    optimizer.load_state_dict({"state": state, "param_groups": merged})
    return None


def _explain_groups(before: list[list[str]], now: list[list[str]]) -> str:
    if len(before) != len(now):
        return f"its optimizer has {len(before)} parameter group(s), and the one here has {len(now)}"
    changed = next(i for i, (a, b) in enumerate(zip(before, now, strict=True)) if a != b)
    missing = sorted(set(before[changed]) ^ set(now[changed])) or before[changed]
    return f"its optimizer's parameter group {changed} differs from the one here in {missing[0]}"


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _names(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[int, str]:
    """Name of each of the optimizer's parameters by its number in `Optimizer.state_dict`.

    One that is not the model's (a learnt temperature of the loss, say) is named by its place.
    """
    of = {
        id(parameter): clean(name) for name, parameter in plain(model).named_parameters(remove_duplicate=True)
    }
    return {n: of.get(id(p), f"#{n}") for n, p in enumerate(_parameters(optimizer))}


# --- parts of a tensor ------------------------------------------------------------------------------
def _like(here: Any, saved: Any) -> Any:
    """`saved`, a part of a tensor, as a DTensor where `here` is one and it is its part."""
    if not is_sharded(here) or not isinstance(saved, torch.Tensor) or is_sharded(saved):
        return saved
    return like(here, saved) if saved.dim() and box_of(here).shape == tuple(saved.shape) else saved


def wanted(model: torch.nn.Module) -> Callable[[StoredTensor], Box | None]:
    """Which part of each stored tensor this rank needs: that of the parameter that it belongs to."""
    boxes = {
        clean(name): (tuple(value.shape), box_of(value))
        for name, value in plain(model).state_dict().items()
        if is_sharded(value)
    }

    def want(stored: StoredTensor) -> Box | None:
        name = stored.name.removeprefix(f"{MODEL}.").removeprefix(f"{EMA}.average.")
        if stored.name.startswith(f"{OPTIMIZER}.state."):
            name = stored.name.removeprefix(f"{OPTIMIZER}.state.").rpartition(".")[0]
        shape, box = boxes.get(name, (None, None))
        return box if shape == stored.shape else None

    return want


def incompatible(uri: str | None, why: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint at {uri} is not of this training: {why}. "
        "Use the script it was made with, or another checkpoint URI",
        reason=Reason.CHECKPOINT_INCOMPATIBLE,
    )

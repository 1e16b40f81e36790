"""State of model and optimizer under the parameter names of the plain model.

Wrappers (DDP, torch.compile, activation checkpointing, FSDP2) change neither names nor contents: a state
saved with them loads without them. Optimizer state is keyed by parameter name, not by number, so parameters
may change their order within a group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from spottrain.checkpoint.manifest import MODEL
from spottrain.contract import Reason
from spottrain.core import device as devices
from spottrain.core import log, patches
from spottrain.distributed.dtensor import Box, box_of, is_sharded, like
from spottrain.errors import CheckpointError, ConfigurationError

INNER: Final = "_spottrain_model"
"""Attribute of `outside_parameters.ModelWithExtras` that holds the model."""
WRAPPERS: Final = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", f"{INNER}.")
"""Name parts inserted by torch.compile, the checkpoint wrapper, FSDP1 (torch 2.15) and ModelWithExtras."""


def plain(model: torch.nn.Module) -> torch.nn.Module:
    """Returns the model inside DDP and torch.compile. Raises ConfigurationError for a DataParallel."""
    if isinstance(model, DataParallel):
        raise ConfigurationError(
            "the model is a torch.nn.DataParallel, which supports neither torch.compile nor "
            "resuming; use DistributedDataParallel: spottrain run --nproc auto starts one process "
            "per GPU"
        )
    if isinstance(model, DistributedDataParallel):
        return plain(model.module)
    inner = getattr(model, "_orig_mod", None)
    return plain(inner) if isinstance(inner, torch.nn.Module) else model


def wrappers(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yields what DDP and torch.compile have wrapped around the plain model, from the outside."""
    inner = model.module if isinstance(model, DistributedDataParallel) else getattr(model, "_orig_mod", None)
    if isinstance(inner, torch.nn.Module):
        yield model
        yield from wrappers(inner)


def is_compiled(model: torch.nn.Module) -> bool:
    """Whether torch.compile has wrapped it, maybe inside of DDP."""
    return any(hasattr(each, "_orig_mod") for each in wrappers(model))


def replica(model: torch.nn.Module) -> DistributedDataParallel | None:
    """Returns the DDP around the plain model, if there is one."""
    return next((each for each in wrappers(model) if isinstance(each, DistributedDataParallel)), None)


def clean(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def model_state(model: torch.nn.Module) -> dict[str, Any]:
    # keep_vars: the parameters themselves, so that tied ones are one object under all of their names.
    return {clean(name): value for name, value in plain(model).state_dict(keep_vars=True).items()}


def buffers(model: torch.nn.Module, under: str = MODEL) -> frozenset[str]:
    """Returns the paths of the model's buffers in a state that has the model under the name `under`.

    Rank 0's buffers count: DDP averages only gradients, and broadcasts rank 0's buffers before each forward.
    """
    return frozenset(f"{under}.{clean(name)}" for name, _ in plain(model).named_buffers())


def load_model(model: torch.nn.Module, saved: Mapping[str, Any]) -> str | None:
    """Loads weights. Returns None, or a sentence why they do not fit; then nothing was changed."""
    inner = plain(model)
    here = inner.state_dict()
    mismatch = explain_mismatch(saved, {clean(name): value for name, value in here.items()})
    if mismatch is None:
        _separate_buffers(inner, saved)
        with contiguous_buffers(inner):
            inner.load_state_dict({name: _like(here[name], saved[clean(name)]) for name in here})
        _join_buffers(inner, saved)
    return mismatch


@contextmanager
def contiguous_buffers(model: torch.nn.Module) -> Iterator[None]:
    """Context to load buffers of which several elements share memory, such as one made by `expand`."""
    found = [
        (module._buffers, name, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and devices.overlaps(buffer)
    ]
    for buffers, name, buffer in found:
        buffers[name] = buffer.clone(memory_format=torch.contiguous_format)
    yield
    for buffers, name, buffer in found:
        loaded = buffers[name]
        if loaded is not None and loaded.shape == buffer.shape:
            _write_overlapping(buffer, loaded)
            if torch.equal(buffer, loaded):  # else it was no such view any more when it was saved
                buffers[name] = buffer


def _saved_buffers(
    model: torch.nn.Module, saved: Mapping[str, Any]
) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
    for path, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            tensor = saved.get(clean(f"{path}.{name}".lstrip(".")))
            if isinstance(buffer, torch.Tensor) and isinstance(tensor, torch.Tensor):
                yield module._buffers, name, tensor


def _separate_buffers(model: torch.nn.Module, saved: Mapping[str, Any]) -> None:
    """Makes two of a buffer that is one tensor here under two names, and two tensors in the checkpoint."""
    first: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for buffers, name, tensor in _saved_buffers(model, saved):
        if first.setdefault(id(buffers[name]), (buffers[name], tensor))[1] is not tensor:
            buffers[name] = buffers[name].clone()


def _join_buffers(model: torch.nn.Module, saved: Mapping[str, Any]) -> None:
    """Makes one of two buffers that are one tensor in the checkpoint."""
    first: dict[int, torch.Tensor] = {}
    for buffers, name, tensor in _saved_buffers(model, saved):
        buffers[name] = first.setdefault(id(tensor), buffers[name])


def _write_overlapping(tensor: torch.Tensor, values: torch.Tensor) -> None:
    reach = devices.span(tensor)
    memory = tensor.as_strided((reach,), (1,))
    places = torch.arange(reach, device=tensor.device).as_strided(tensor.shape, tensor.stride())
    memory.put_(places.reshape(-1), values.reshape(-1))


def explain_mismatch(saved: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
    """Returns why saved weights do not fit this model, as a sentence; None if they fit."""
    for name in here:
        if name not in saved:
            return f"the checkpoint has no {name}, which the model has"
        if not _fits(saved[name], here[name]):
            before, now = _shape(saved[name]), _shape(here[name])
            return f"{name} has shape {before} in the checkpoint and {now} in the model"
    extra = next((name for name in saved if name not in here), None)
    return None if extra is None else f"the model has no {extra}, which the checkpoint has"


def _fits(saved: Any, here: Any) -> bool:
    """`saved` is this rank's part, or the whole tensor if its full shape differs from the model's."""
    if not isinstance(saved, torch.Tensor) or not isinstance(here, torch.Tensor):
        return isinstance(saved, torch.Tensor) == isinstance(here, torch.Tensor)
    return tuple(saved.shape) == box_of(here).shape


def _shape(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, torch.Tensor) else "none"


# --- optimizer --------------------------------------------------------------------------------------
def group_names(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Returns the names of the parameters of each parameter group."""
    names = iter(_names(model, optimizer).values())
    return [[next(names) for _ in group["params"]] for group in optimizer.param_groups]


def optimizer_state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, made: Sequence[Sequence[str]] | None = None
) -> dict[str, Any]:
    """Returns `Optimizer.state_dict` with parameter names in place of parameter numbers.

    `made`: the `group_names` of the optimizer as the script made it, if the training may have changed them.
    """
    names = _names(model, optimizer)
    trained = {id(each) for each in parameters_of(optimizer)}
    left = {each: state for each, state in optimizer.state.items() if id(each) not in trained}
    for each in left:  # of a group that was removed: torch's state_dict() fails
        del optimizer.state[each]
    raw = optimizer.state_dict()
    optimizer.state.update(left)
    groups = [group | {"params": [names[n] for n in group["params"]]} for group in raw["param_groups"]]
    state = {names[number]: values for number, values in raw["state"].items()}
    if left:
        of_model = {id(each): clean(name) for name, each in plain(model).named_parameters()}
        state |= {of_model[id(each)]: values for each, values in left.items() if id(each) in of_model}
    changed = {} if made in (None, [group["params"] for group in groups]) else {"made": made}
    return {"state": state, "param_groups": groups, "kind": type(optimizer).__name__, **changed}


def load_optimizer(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]
) -> str | None:
    """Loads optimizer state. Returns None, or a sentence why it does not fit; then nothing was changed.

    Parameter groups that training has changed since the script made the optimizer are rebuilt.
    """
    was, now = saved.get("kind"), type(optimizer).__name__
    if was not in (None, now):
        return f"its optimizer is {was}, and here it is {now}"
    here = group_names(model, optimizer)
    made = saved.get("made", [group["params"] for group in saved["param_groups"]])
    if list(map(sorted, made)) != list(map(sorted, here)):
        return _explain_groups(list(map(sorted, made)), list(map(sorted, here)))
    parameters = {clean(name): each for name, each in plain(model).named_parameters()}
    parameters |= dict(zip(_names(model, optimizer).values(), parameters_of(optimizer), strict=True))
    if "made" in saved:
        absent = [
            name for group in saved["param_groups"] for name in group["params"] if name not in parameters
        ]
        if absent:
            return f"its optimizer trains {absent[0]}, which the model here does not have"
        _rebuild_groups(optimizer, saved["param_groups"], parameters)
    names = _names(model, optimizer)
    numbers = {name: number for number, name in names.items()}
    whole = {
        name: {key: _like(parameters[name], value) for key, value in values.items()}
        for name, values in saved["state"].items()
        if name in parameters
    }
    state = {numbers[name]: values for name, values in whole.items() if name in numbers}
    groups = optimizer.state_dict()["param_groups"]
    merged = [
        {**theirs, "params": mine["params"]}
        for mine, theirs in zip(groups, saved["param_groups"], strict=True)
    ]
    optimizer.load_state_dict({"state": state, "param_groups": merged})
    for name in (each for each in whole if each not in numbers):  # of a group that training has removed
        optimizer.state[parameters[name]] = devices.to_device(whole[name], parameters[name].device)
    return None


def _rebuild_groups(
    optimizer: torch.optim.Optimizer,
    saved: Sequence[Mapping[str, Any]],
    parameters: Mapping[str, torch.nn.Parameter],
) -> None:
    """Makes the groups that training has made. Code that runs again and adds one of them finds it there."""
    known = {id(each) for each in parameters_of(optimizer)}
    optimizer.param_groups[:] = [
        {**group, "params": [parameters[name] for name in group["params"]]} for group in saved
    ]
    sets = [{id(each) for each in group["params"]} for group in optimizer.param_groups]
    fresh = [each for each in sets if not each & known]
    add = optimizer.add_param_group

    def add_param_group(group: dict[str, Any]) -> None:
        given = group["params"]
        group["params"] = [given] if isinstance(given, torch.Tensor) else list(given)
        found = {id(each) for each in group["params"]}
        if found not in fresh:
            return add(group)
        fresh.remove(found)
        log.event("override", setting="param_groups", checkpoint="there", script="added again")

    patches.replace(optimizer, "add_param_group", add_param_group)


def _explain_groups(before: list[list[str]], now: list[list[str]]) -> str:
    if len(before) != len(now):
        return f"its optimizer has {len(before)} parameter group(s), and the one here has {len(now)}"
    changed = next(i for i, (a, b) in enumerate(zip(before, now, strict=True)) if a != b)
    missing = sorted(set(before[changed]) ^ set(now[changed])) or before[changed]
    return f"its optimizer's parameter group {changed} differs from the one here in {missing[0]}"


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _names(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[int, str]:
    """Returns the names of the optimizer's parameters by their numbers in `Optimizer.state_dict`.

    A parameter that is not the model's (such as a learnt temperature of the loss) is named `#<number>`.
    """
    of = {id(parameter): clean(name) for name, parameter in plain(model).named_parameters()}
    return {n: of.get(id(p), f"#{n}") for n, p in enumerate(parameters_of(optimizer))}


# --- parts of a tensor ------------------------------------------------------------------------------
def _like(here: Any, saved: Any) -> Any:
    """Returns `saved` as a DTensor if `here` is one and `saved` is its local part; otherwise unchanged."""
    if not is_sharded(here) or not isinstance(saved, torch.Tensor) or is_sharded(saved):
        return saved
    return like(here, saved) if saved.dim() and box_of(here).shape == tuple(saved.shape) else saved


def boxes(model: torch.nn.Module) -> dict[str, tuple[tuple[int, ...], Box]]:
    """Returns the shape of each sharded tensor of the model, and this rank's part of it."""
    return {
        clean(name): (tuple(value.shape), box_of(value))
        for name, value in plain(model).state_dict().items()
        if is_sharded(value)
    }


def incompatible(uri: str | None, why: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint at {uri} does not match this training: {why}. Use the script that wrote it, "
        "or another checkpoint URI",
        reason=Reason.CHECKPOINT_INCOMPATIBLE,
    )

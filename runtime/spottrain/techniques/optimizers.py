"""Makes optimizers by name, so that a manifest can choose one: adamw, sgd, adafactor.

    optimizer = optimizers.make("adamw", model.parameters(), learning_rate=3e-4, weight_decay=0.1)
    optimizer = optimizers.rebuilt(optimizer, "sgd", learning_rate=0.1, momentum=0.9)

Facts of torch 2.15: Without `fused=`, AdamW and SGD use foreach kernels on a GPU and a loop over parameters
on a CPU. Fused kernels, one launch for many tensors, are opt-in. torch reports an unsupported device or dtype
only at the first step, so `make` tries a step on a tensor of one element for each device and dtype. Adafactor
has no fused kernel. Fused and unfused kernels differ in the last bits. So the choice is in the parameter
groups, and a checkpoint's choice holds after a resume. `zero_grad` sets gradients to None by default (since
2.0): that frees memory, and optimizers skip such parameters, unlike those with a gradient of zero.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

import torch

from spottrain.core import log
from spottrain.distributed.dtensor import local
from spottrain.errors import ConfigurationError

MANIFEST_KEY: Final = "said"
"""Key in a parameter group: the settings that the manifest gave, with their values."""


KINDS: Final[Mapping[str, type[torch.optim.Optimizer]]] = {
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "adafactor": torch.optim.Adafactor,
}
UNFUSED: Final = ("foreach", "differentiable")
"""Options that torch refuses together with fused kernels."""
KEPT: Final = ("params", "param_names", "maximize")
"""What a parameter group keeps in an optimizer of another kind, beside no weight decay."""

Parameters = Iterable[torch.Tensor] | Iterable[dict[str, Any]]


def make(
    name: str,
    parameters: Parameters,
    *,
    learning_rate: float,
    fused: bool | None = None,
    **hyper: Any,
) -> torch.optim.Optimizer:
    """Makes an optimizer by name.

    Args:
        name: "adamw", "sgd" or "adafactor".
        parameters: tensors, or torch's parameter groups (dicts with "params").
        learning_rate: learning rate. For adafactor it is the upper limit of a step relative to the size of
            the weights; torch's default is 0.01.
        fused: True: required; None: if torch supports it; False: no, for the same bits as unfused runs.
        hyper: further arguments of torch's class, such as weight_decay, betas or momentum. None: torch's
            default.

    Raises:
        ConfigurationError: the name is not known, the optimizer lacks a hyperparameter, or torch refuses it.
    """
    kind, given = _kind(name), {key: value for key, value in hyper.items() if value is not None}
    if odd := sorted(set(given) - (known := _arguments(kind))):
        raise ConfigurationError(f"{name} has no {odd[0]}: it takes {', '.join(sorted(known))}")
    try:
        made = kind(parameters, lr=learning_rate, **given)  # type: ignore[call-arg]
        if not _takes_fused(made, name, fused):
            return made
        groups = [group | {"fused": True} for group in made.param_groups]
        return kind(groups, lr=learning_rate, **given, fused=True)  # type: ignore[call-arg]
    except (ValueError, TypeError) as error:
        raise ConfigurationError(f"the optimizer {name} cannot be made: {error}") from error


def rebuilt(optimizer: torch.optim.Optimizer, name: str, **hyper: Any) -> torch.optim.Optimizer:
    """Makes the manifest's optimizer over the parameter groups of the script's optimizer, in their order.

    If the kind stays the same, options of the script that are not given again stay; else only `maximize`.
    Each group keeps the ratio of its rate to the script's rate. If the kind stays the same, it also keeps
    each setting that differs from the script's default; else only a weight decay of 0 (biases and norms) and
    `maximize`. Fused kernels are chosen as in `make`, but not if the script's optimizer has fused=False,
    foreach or differentiable. Make torch schedules after this call: they reference their optimizer.

    Args:
        optimizer: the script's optimizer, before its first step.
        name: "adamw", "sgd" or "adafactor".
        hyper: as of `make`. learning_rate is required if the kind changes: a rate of AdamW does not suit SGD.

    Raises:
        ConfigurationError: as of `make`; or the script's optimizer has made a step or has a torch schedule.
    """
    kind = _kind(name)
    same, script, defaults = type(optimizer) is kind, type(optimizer).__name__, optimizer.defaults
    if optimizer.state:
        raise ConfigurationError(
            f"the script's {script} has already stepped, and {name} would not have its state: replace it "
            "before its first step"
        )
    if any("initial_lr" in group for group in optimizer.param_groups):
        raise ConfigurationError(
            f"a torch LRScheduler refers to the script's {script} and would not act on {name}: use "
            "schedule='cosine', 'constant' or a function of the step, or leave the optimizer out of the "
            "manifest"
        )
    rate = hyper.pop("learning_rate", None)
    if rate is None:
        if not same:
            raise ConfigurationError(
                f"the manifest replaces the script's {script} by {name}, which needs another learning rate: "
                "set optimizer.learningRate too"
            )
        rate = defaults["lr"]
    groups = []
    for group in optimizer.param_groups:
        own = {key: value for key, value in group.items() if key not in defaults or value != defaults[key]}
        for key in list(own):
            if key == "fused" or not (same or key in KEPT or (key, own[key]) == ("weight_decay", 0)):
                del own[key]
        ratio = float(group["lr"]) / float(defaults["lr"]) if defaults.get("lr") else 1.0
        groups.append(own | {"params": group["params"], "lr": rate * ratio})
    taken = _arguments(kind) - {"fused"} if same else {"maximize"}
    words = {key: value for key, value in defaults.items() if key in taken} | hyper
    if same and defaults.get("fused") is False:
        words["fused"] = False
    made = make(name, groups, learning_rate=rate, **words)
    log.event("override", setting="optimizer", manifest=name, script=script, lr=f"{rate:.6g}")
    return made


def override_checkpoint(optimizer: torch.optim.Optimizer, names: Collection[str]) -> None:
    """Makes settings of the manifest override those of a checkpoint, if the manifest has changed since.

    The manifest's values are stored in the parameter groups. If they are the same as at the save, nothing is
    overridden, because a schedule or the script may have changed a setting since. With a torch LRScheduler,
    which has its own state, "lr" stays the checkpoint's. Overrides are logged when a state is loaded.

    optimizer: its current group settings are the manifest's. names: settings, by torch's names.
    """
    if not names:
        return
    wanted = [{name: group[name] for name in names} for group in optimizer.param_groups]
    for group, mine in zip(optimizer.param_groups, wanted, strict=True):
        group[MANIFEST_KEY] = group.get(MANIFEST_KEY, {}) | mine

    def put_back(restored: torch.optim.Optimizer) -> None:
        for number, (group, mine) in enumerate(zip(restored.param_groups, wanted, strict=False)):
            before = group.get(MANIFEST_KEY, {})
            group[MANIFEST_KEY] = before | mine
            for name, value in mine.items():
                if before.get(name) != value:
                    _override(group, name, value, number)

    optimizer.register_load_state_dict_post_hook(put_back)


def _override(group: dict[str, Any], name: str, value: Any, number: int) -> None:
    scheduled = name == "lr" and "initial_lr" in group
    was = group["initial_lr" if scheduled else name]
    if not scheduled:
        group[name] = value
    if was != value:
        words = {"holds": "checkpoint" if scheduled else "now", "checkpoint": repr(was), "now": repr(value)}
        log.event("override", setting=f"optimizer.{name}", group=number, **words)


def _kind(name: str) -> type[torch.optim.Optimizer]:
    if name not in KINDS:
        raise ConfigurationError(f"the optimizer {name!r} is not known: use {', '.join(sorted(KINDS))}")
    return KINDS[name]


def _arguments(kind: type[torch.optim.Optimizer]) -> set[str]:
    return set(inspect.signature(kind).parameters) - {"params", "lr"}


def _takes_fused(optimizer: torch.optim.Optimizer, name: str, wanted: bool | None) -> bool:
    """Whether it can have fused kernels, and logs why not. Raises ConfigurationError if they are `wanted`."""
    kind, groups = type(optimizer), optimizer.param_groups
    unfit = next((key for key in UNFUSED for each in (optimizer.defaults, *groups) if each.get(key)), None)
    why: str | None
    if "fused" not in _arguments(kind):
        why = f"torch has no fused {name}"
    elif wanted is False:
        why = "fused=False is set"
    elif unfit:
        why = f"{unfit} is set, and torch refuses both"
    else:
        places = dict.fromkeys((local(p).device, p.dtype) for group in groups for p in group["params"])
        why = next(filter(None, (_refusal(kind, *each) for each in places)), None)
    if why is not None and wanted:
        raise ConfigurationError(f"fused=True is not possible for {name}: {why}")
    log.event("optimizer", name=name, fused=why is None, why=why)
    return why is None


def _refusal(kind: type[torch.optim.Optimizer], device: torch.device, dtype: torch.dtype) -> str | None:
    """Tries a fused step on a tensor of one element. Returns why it fails, or None."""
    try:
        probe = torch.nn.Parameter(torch.zeros(1, device=device, dtype=dtype))
        probe.grad = torch.zeros_like(probe)
        kind([probe], lr=1e-3, fused=True).step()  # type: ignore[call-arg]
    except (RuntimeError, NotImplementedError) as error:
        return f"{str(error).splitlines()[0][:120]} ({device.type}, {dtype})"
    return None

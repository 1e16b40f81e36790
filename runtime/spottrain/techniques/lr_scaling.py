"""Scales the learning rate for another batch size, and computes the length of the warm-up.

    lr = lr_scaling.scaled(3e-4, global_batch_size=2048, base_batch_size=256, rule="sqrt")
    steps = lr_scaling.warmup_steps(epochs=5, total_steps=total, steps_per_epoch=per_epoch)

Linear: Goyal et al. 2017 (arXiv:1706.02677), for SGD with momentum: k times the batch size needs k times
the rate, after a warm-up of 5 epochs. Square root: Krizhevsky 2014 (arXiv:1404.5997) shows that it keeps the
variance of a step constant, but uses the linear rule. Malladi et al. 2022 (arXiv:2205.10287) derive it for
Adam and RMSprop, with changes of their other hyperparameters, which are not made here. Both are rules of
thumb: use them to start a short sweep.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from spottrain.core import log
from spottrain.errors import ConfigurationError

if TYPE_CHECKING:
    import torch

RULES: Final = ("none", "linear", "sqrt")
TESTED: Final = {
    "linear": (8192, "Goyal et al. 2017, figure 1: ResNet-50 on ImageNet; above it accuracy was lost"),
    "sqrt": (
        32768,
        "You et al. 2020 (arXiv:1904.00962), table 1: BERT with LAMB; Adam at such sizes matched it only "
        "with a rate tuned again (Nado et al. 2021, arXiv:2102.06356)",
    ),
}
"""Global batch size, in samples, up to which each rule was tested, and the source."""


def scaled(
    learning_rate: float, *, global_batch_size: int, base_batch_size: int, rule: str = "none"
) -> float:
    """Scales a learning rate to another batch size, and logs it.

    Args:
        learning_rate: rate that was tuned for `base_batch_size`.
        global_batch_size: samples of one optimizer step over all ranks.
        base_batch_size: the same for which `learning_rate` was tuned.
        rule: "none", "linear" or "sqrt".

    Raises:
        ConfigurationError: an argument is not valid.
    """
    found = scaled_rate(
        learning_rate, global_batch_size=global_batch_size, base_batch_size=base_batch_size, rule=rule
    )
    if rule == "none":
        return found
    ratio = global_batch_size / base_batch_size
    log.event(
        "learning-rate", rule=rule, base=f"{learning_rate:.6g}", scaled=f"{found:.6g}", ratio=f"{ratio:.6g}"
    )
    return found


def scaled_rate(learning_rate: float, *, global_batch_size: int, base_batch_size: int, rule: str) -> float:
    """Returns the same as `scaled`, without a log line."""
    if rule not in RULES:
        raise ConfigurationError(f"the learning-rate rule {rule!r} is not known: use {', '.join(RULES)}")
    if not (math.isfinite(learning_rate) and learning_rate > 0):
        raise ConfigurationError(f"the learning rate {learning_rate} must be a finite number above 0")
    for name, size in (("global batch size", global_batch_size), ("base batch size", base_batch_size)):
        if size < 1:
            raise ConfigurationError(f"the {name} {size} must be at least 1")
    ratio = global_batch_size / base_batch_size
    return learning_rate * {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[rule]


def forget_scheduler(optimizer: torch.optim.Optimizer) -> None:
    """Undoes the changes that an unused torch LRScheduler made to the learning rates."""
    for group in optimizer.param_groups:
        base = group.pop("initial_lr", None)
        if base is not None and base != group["lr"]:
            log.event("learning-rate", base=base, was=group["lr"], why="without the script's LRScheduler")
            group["lr"] = base


def warmup_steps(
    *,
    steps: int | None = None,
    epochs: float | None = None,
    fraction: float | None = None,
    total_steps: int,
    steps_per_epoch: int | None = None,
) -> int:
    """Converts the length of the warm-up to optimizer steps. Give at most one of the first three.

    Args:
        steps: length in optimizer steps.
        epochs: length in epochs.
        fraction: share of the run, 0 to 1.
        total_steps: optimizer steps of the run.
        steps_per_epoch: optimizer steps per epoch; needed for `epochs`.

    Returns:
        Optimizer steps, rounded up; 0 if no length is given.

    Raises:
        ConfigurationError: the arguments are not valid, or the warm-up does not end before the run.
    """
    given = {"steps": steps, "epochs": epochs, "fraction": fraction}
    named = {name: value for name, value in given.items() if value is not None}
    if len(named) > 1:
        words = " and ".join(f"{name}={value}" for name, value in named.items())
        raise ConfigurationError(f"the warm-up is set more than once ({words}): keep one")
    for name, value in named.items():
        if not (math.isfinite(value) and value >= 0):
            raise ConfigurationError(f"the warm-up's {name}={value} must be a finite number, at least 0")
    if epochs and steps_per_epoch is None:
        raise ConfigurationError(
            f"the warm-up is given as epochs={epochs}, but the length of an epoch is not known for "
            "this data: give it in steps, or set steps_per_epoch"
        )
    whole = (epochs or 0) * (steps_per_epoch or 0) or (fraction or 0) * total_steps
    found = steps or math.ceil(round(whole, 6))  # of binary fractions: 0.07 of 100 is 7, not 8
    if found and found >= total_steps:
        what = " ".join(f"{name}={value}" for name, value in named.items())
        raise ConfigurationError(
            f"the warm-up ({what}) is {found} steps, but the run has only {total_steps}: shorten it, "
            "or give it as a fraction of the run"
        )
    return found

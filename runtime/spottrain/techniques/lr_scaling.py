"""The learning rate for another batch size, and how long it warms up. Called before the first step.

    lr = rates.scaled(3e-4, batch_size=2048, base_batch_size=256, rule="sqrt")
    steps = rates.warmup_steps(epochs=5, total_steps=total, steps_per_epoch=per_epoch)

Linear: Goyal et al. 2017 (arXiv:1706.02677), for SGD with momentum: k times the batch, k times the rate,
after a warm-up of 5 epochs. Square root: Krizhevsky 2014 (arXiv:1404.5997) names it as what keeps the
variance of a step the same, and himself takes the linear rule; Malladi et al. 2022 (arXiv:2205.10287) derive
it for Adam and RMSprop, together with a change of their other hyperparameters, which is not made here. Both
are rules of thumb: they find the neighbourhood of a good rate, and a short sweep finds the rate.
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
        "with a rate tuned anew (Nado et al. 2021, arXiv:2102.06356)",
    ),
}
"""Samples of a global batch up to which a rule was seen to hold, and where."""


def scaled(learning_rate: float, *, batch_size: int, base_batch_size: int, rule: str = "none") -> float:
    """The rate for `batch_size` where `learning_rate` was found for `base_batch_size`.

    Both sizes are samples of one optimizer step, of all ranks together. A batch beyond what the rule was
    tested with is told (`event=advice`), and scaled all the same. Raises ConfigurationError.
    """
    if rule not in RULES:
        raise ConfigurationError(f"the rule {rule!r} for the learning rate is not known: use {_or(RULES)}")
    if not (math.isfinite(learning_rate) and learning_rate > 0):
        raise ConfigurationError(f"the learning rate {learning_rate} must be a finite number above 0")
    for name, size in (("batch size", batch_size), ("base batch size", base_batch_size)):
        if size < 1:
            raise ConfigurationError(f"the {name} {size} must be at least 1")
    if rule == "none":
        return learning_rate
    ratio = batch_size / base_batch_size
    found = learning_rate * (ratio if rule == "linear" else math.sqrt(ratio))
    log.event(
        "learning-rate", rule=rule, base=f"{learning_rate:.6g}", scaled=f"{found:.6g}", ratio=f"{ratio:.6g}"
    )
    _advise(rule, batch_size)
    return found


def _advise(rule: str, batch_size: int) -> None:
    limit, source = TESTED[rule]
    if batch_size > limit:
        why = f"a global batch of {batch_size} is beyond {limit}, up to which {rule} was tested ({source})"
        log.event(
            "advice", about="learning-rate", why=why, fix="sweep the rate at this batch size, or lower it"
        )


def advise_on_rule(rule: str, optimizer: str, *, warms_up: bool) -> None:
    """Says where a scaled rate is not used as its source did. optimizer: the name of its class."""
    if rule == "linear" and "adam" in optimizer.lower():
        log.event(
            "advice",
            about="learning-rate",
            why=f"the linear rule was found for SGD, and this is {optimizer}",
            fix="use the rule sqrt",
        )
    if rule != "none" and not warms_up:
        log.event(
            "advice",
            about="learning-rate",
            why="the rate is scaled and there is no warm-up, without which large batches diverge early",
            fix="warm up, as for 5 epochs (Goyal et al. 2017)",
        )


def forget_scheduler(optimizer: torch.optim.Optimizer) -> None:
    """Puts back the rates from before a torch LRScheduler that is not used, which has changed them."""
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
    """The warm-up in optimizer steps, of whichever one is given; 0 where none is. A part of a step is a
    whole.

    fraction: of the run, from 0 to 1. steps_per_epoch: needed for `epochs`.
    Raises ConfigurationError, also where the warm-up would not end before the run does.
    """
    given = {"steps": steps, "epochs": epochs, "fraction": fraction}
    named = {name: value for name, value in given.items() if value is not None}
    if len(named) > 1:
        words = " and ".join(f"{name}={value}" for name, value in named.items())
        raise ConfigurationError(f"the warm-up is given as {words}: give one of them")
    for name, value in named.items():
        if not (math.isfinite(value) and value >= 0):
            raise ConfigurationError(f"the warm-up's {name}={value} must be a finite number, at least 0")
    found = steps or _of_epochs(epochs, steps_per_epoch) or _whole((fraction or 0) * total_steps)
    if found and found >= total_steps:
        what = " ".join(f"{name}={value}" for name, value in named.items())
        raise ConfigurationError(
            f"the warm-up ({what}) is {found} steps, and the run has {total_steps}: the full rate would "
            "never be reached; shorten it, or give it as a fraction of the run"
        )
    return found


def _of_epochs(epochs: float | None, steps_per_epoch: int | None) -> int:
    if not epochs:
        return 0
    if steps_per_epoch is None:
        raise ConfigurationError(
            f"the warm-up is given as epochs={epochs}, and how long an epoch is cannot be known of this "
            "data: give it in steps, or give steps_per_epoch"
        )
    return _whole(epochs * steps_per_epoch)


def _whole(steps: float) -> int:
    """Rounded up, but for what binary fractions add: 0.07 of 100 are 7, not 8."""
    return math.ceil(round(steps, 6))


def _or(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"

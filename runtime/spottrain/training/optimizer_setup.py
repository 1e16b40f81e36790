"""Makes the optimizer and the learning rate schedule from arguments and settings."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from spottrain.checkpoint import outside_parameters
from spottrain.core import log
from spottrain.core.training_settings import WARM_UPS, Settings, log_value
from spottrain.core.training_spec import OPTIMIZERS, problem
from spottrain.errors import ConfigurationError
from spottrain.techniques import lr_scaling, optimizers, schedules


def optimizer(
    given: torch.optim.Optimizer | str,
    model: torch.nn.Module,
    settings: Settings,
    learning_rate: float | None,
) -> torch.optim.Optimizer:
    """Returns the script's optimizer, or the named one, with the rate scaled for the batch size."""
    named, fused = settings.optimizer, False if settings.deterministic else None
    _require_rate(given, learning_rate)
    if not isinstance(given, str) and not isinstance(settings.schedule, LRScheduler):
        lr_scaling.forget_scheduler(given)
    if isinstance(given, str):
        same = named is None or named.name == given  # another optimizer needs another rate
        own = learning_rate if same else None
        rate = (named and named.learningRate) or own
        if rate is None:
            raise ConfigurationError(
                f"the optimizer {named.name if named else given} needs a learning rate: "
                "Trainer(learning_rate=...), or spec.training.optimizer.learningRate"
            )
        if named is not None:
            log.event("override", setting="optimizer", manifest=log_value(named), script=f"{given} lr={own}")
        made = optimizers.make(
            named.name if named else given,
            outside_parameters.groups(model),
            learning_rate=rate,
            fused=fused,
            **_overrides(settings),
        )
    elif named is not None:
        hyper = _overrides(settings)
        if named.learningRate is not None:
            hyper["learning_rate"] = named.learningRate
        made = optimizers.rebuilt(given, named.name, fused=fused, **hyper)
    else:
        made = given
    optimizers.override_checkpoint(made, _overrides(settings))
    _scale(made, settings)
    return made


def _overrides(settings: Settings) -> dict[str, Any]:
    """The manifest's hyperparameters except the rate, by torch's names."""
    named = settings.optimizer
    words = {"weight_decay": named.weightDecay, "momentum": named.momentum} if named is not None else {}
    return {name: value for name, value in words.items() if value is not None}


def _require_rate(given: torch.optim.Optimizer | str, rate: Any) -> None:
    """Raises ConfigurationError."""
    if not isinstance(given, str):
        if rate is not None:
            raise ConfigurationError(
                f"Trainer(learning_rate={rate!r}) is for an optimizer given by its name, and this is "
                f"a {type(given).__name__}, which has its own: give it lr=, or leave learning_rate out"
            )
        return
    if given not in OPTIMIZERS:
        raise ConfigurationError(
            f"Trainer(optimizer={given!r}): give it a torch Optimizer, or a name: {', '.join(OPTIMIZERS)}"
        )
    if rate is not None and (words := problem("optimizer.learningRate", rate)):
        raise ConfigurationError(f"Trainer(learning_rate={rate!r}): must be {words}")


def _scale(made: torch.optim.Optimizer, settings: Settings) -> None:
    wanted = settings.learning_rate_scaling
    if wanted is None or wanted.rule == "none":
        return
    if isinstance(settings.schedule, LRScheduler):
        raise ConfigurationError(
            "learning_rate_scaling sets the rates, and so does a torch LRScheduler: scale the rate that you "
            "give the optimizer, or use schedule='cosine', 'constant' or a function of the step"
        )
    for group in (each for each in made.param_groups if each["lr"]):  # 0: a frozen group
        group["lr"] = lr_scaling.scaled(
            float(group["lr"]),
            global_batch_size=settings.global_batch_size,
            base_batch_size=wanted.baseBatchSize,
            rule=wanted.rule,
        )
    lr_scaling.advise_on_rule(
        wanted.rule, type(made).__name__, warms_up=any(getattr(settings, name) for name in WARM_UPS)
    )


def schedule(
    made: torch.optim.Optimizer, settings: Settings, total_steps: int, steps_per_epoch: int | None
) -> schedules.Schedule:
    kind: Any = settings.schedule
    outside_parameters.require_of(kind, [made], "Trainer(schedule=...)")
    warmup = warmup_steps(settings, total_steps, steps_per_epoch)
    if isinstance(kind, str):
        kind = schedules.shape(kind, warmup_steps=warmup, total_steps=total_steps)
    return schedules.Schedule(made, kind, override_checkpoint=overrides_checkpoint(settings))


def warmup_steps(settings: Settings, total_steps: int, steps_per_epoch: int | None) -> int:
    """Converts the warm-up to steps from the unit in which it is set. Raises ConfigurationError."""
    return lr_scaling.warmup_steps(
        steps=settings.warmup_steps,
        epochs=settings.warmup_epochs,
        fraction=settings.warmup_fraction,
        total_steps=total_steps,
        steps_per_epoch=steps_per_epoch,
    )


def overrides_checkpoint(settings: Settings) -> bool:
    """Whether this attempt sets the rate: by the manifest or the batch size, not by the checkpoint."""
    said = settings.optimizer is not None and settings.optimizer.learningRate is not None
    scaled = settings.learning_rate_scaling is not None and settings.learning_rate_scaling.rule != "none"
    return said or scaled

"""Makes optimizer, schedule, early stopping and trackers from arguments and settings, and checks both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from spottrain.checkpoint import outside_parameters, plain_state
from spottrain.core import log
from spottrain.core.training_settings import (
    OPTIMIZERS,
    WARM_UPS,
    MLflowSpec,
    Optimizer,
    Settings,
    TensorBoardSpec,
    WandBSpec,
    log_value,
    problem,
    require_whole,
)
from spottrain.data.source import Batches, Source
from spottrain.errors import ConfigurationError
from spottrain.lifecycle.session import Session
from spottrain.techniques import lr_scaling, optimizers, schedules
from spottrain.techniques import trackers as trackers_of
from spottrain.techniques.early_stopping import EarlyStopping
from spottrain.techniques.trackers import Tracker


# --- optimizer and schedule -------------------------------------------------------------------------------
def optimizer(
    given: torch.optim.Optimizer | str,
    model: torch.nn.Module,
    settings: Settings,
    learning_rate: float | None,
) -> torch.optim.Optimizer:
    """Returns the script's optimizer, or the named one, with the rate scaled for the batch size."""
    named, hyper = settings.optimizer, _overrides(settings)
    fused = False if settings.deterministic else None
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
            **hyper,
        )
    elif named is not None:
        chosen = {} if named.learningRate is None else {"learning_rate": named.learningRate}
        made = optimizers.rebuilt(given, named.name, fused=fused, **hyper, **chosen)
    else:
        made = given
    optimizers.override_checkpoint(made, hyper)
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
    if rate is not None and (words := problem("learningRate", rate, Optimizer)):
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


# --- early stopping and trackers --------------------------------------------------------------------------
def early_stopping(settings: Settings, *, evaluates: bool, more: bool) -> EarlyStopping | None:
    """`more`: whether the evaluation returns further metrics, whose names are known only then."""
    wanted = settings.early_stopping
    if wanted is None:
        return None
    found = EarlyStopping(
        metric=wanted.metric,
        mode=wanted.mode,
        patience=wanted.patience,
        min_delta=wanted.minDelta,
        target=wanted.target,
        min_steps=wanted.minSteps,
        stop_on_nan=wanted.stopOnNaN,
    )
    found.require(evaluates=evaluates, metrics=None if more else ("loss",))
    return found


def trackers(given: Sequence[Tracker] | None, settings: Settings, session: Session) -> list[Tracker]:
    """Returns the trackers of script and manifest; the manifest's replace the script's of the same name.

    Ranks other than 0 get none. Raises ConfigurationError.
    """
    own = trackers_of.listed(given, "Trainer(trackers=...)")
    wanted = settings.trackers
    asked = {} if wanted is None else {each.name: getattr(wanted, each.name) for each in fields(wanted)}
    asked = {name: words for name, words in asked.items() if words is not None}
    kept = [each for each in own if each.name not in asked]
    for each in own:
        if each.name in asked:
            log.event(
                "override",
                setting=f"trackers.{each.name}",
                manifest=log_value(asked[each.name]),
                script="own",
            )
    if not session.world.first:  # the package of a tracker may need a lock or an account
        return []
    return kept + [_tracker(words, settings) for words in asked.values()]


def _tracker(wanted: TensorBoardSpec | WandBSpec | MLflowSpec, settings: Settings) -> Tracker:
    config = {name: log_value(value) for name, value in settings.given().items()}
    match wanted:
        case TensorBoardSpec():
            return trackers_of.TensorBoard(folder=wanted.folder)
        case WandBSpec():
            return trackers_of.WandB(**asdict(wanted), config=config)
        case MLflowSpec():
            return trackers_of.MLflow(
                experiment=wanted.experiment, tracking_uri=wanted.trackingURI, config=config
            )


# --- checks of Trainer's arguments; all but the first raise ConfigurationError ------------------------------
def tell_what_cannot_act(settings: Settings, source: Source) -> None:
    """Warns of settings that have no effect with this train_dataset or schedule."""
    loading = ("num_workers", "prefetch_factor", "pin_memory", "drop_last")
    given = [name for name in loading if getattr(settings, name) not in (0, None, False)]
    if given and not isinstance(source, Batches):
        text = f"{', '.join(given)} have no effect: train_dataset is a loader, so set them there"
        log.event("advice", about="data", text=text)
    if settings.prefetch_factor and not settings.num_workers and isinstance(source, Batches):
        text = "prefetch_factor has no effect without loader workers: set num_workers too, or leave it out"
        log.event("advice", about="data", text=text)
    warm_ups = [name for name in WARM_UPS if getattr(settings, name)]
    if warm_ups and not isinstance(settings.schedule, str):
        names = ", ".join(warm_ups)
        text = f"{names} have no effect on a schedule of the script's own: use 'cosine' or 'constant'"
        log.event("advice", about="learning-rate", text=text)


def require_kinds(model: object, optimizer: object) -> None:
    for name, value, kind in (
        ("model", model, torch.nn.Module),
        ("optimizer", optimizer, torch.optim.Optimizer),
    ):
        if not isinstance(value, kind) and not (name == "optimizer" and isinstance(value, str)):
            raise ConfigurationError(
                f"Trainer({name}=...) is a {type(value).__name__}: give it a torch {kind.__name__}"
            )


def require_compiled_once(model: torch.nn.Module, settings: Settings) -> None:
    if settings.compile and plain_state.is_compiled(model):
        raise ConfigurationError(
            "compile is set, and Trainer(model=...) is compiled already: give it the plain model, or leave "
            "out compile=True (spec.training.compile)"
        )


def require_own_parameters(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    own = {id(parameter) for parameter in model.parameters()}
    given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not any(id(parameter) in own for parameter in given):
        raise ConfigurationError(
            "Trainer(optimizer=...) has none of the model's parameters, so it would train nothing: make it "
            "from model.parameters() of this very model, after spottrain.shard(model) where that is called"
        )


def require_positive(**arguments: int | None) -> None:
    for name, value in arguments.items():
        if value is None:
            continue
        require_whole(name, value)
        if value < 1:
            raise ConfigurationError(f"Trainer({name}={value}): must be at least 1")

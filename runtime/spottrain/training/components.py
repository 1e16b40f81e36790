"""Makes early stopping and trackers from the settings, checks arguments, and warns of ignored settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

import torch

from spottrain.core import log
from spottrain.core.training_settings import WARM_UPS, Settings, log_value, require_whole
from spottrain.core.training_spec import MLflowSpec, TensorBoardSpec, WandBSpec
from spottrain.data import Batches, Source
from spottrain.errors import ConfigurationError
from spottrain.lifecycle.session import Session
from spottrain.techniques import trackers as trackers_of
from spottrain.techniques.early_stopping import EarlyStopping
from spottrain.techniques.ema import EMA
from spottrain.techniques.trackers import Tracker
from spottrain.training.evaluation import Evaluation


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


def pinned(settings: Settings, device: torch.device) -> bool:
    return device.type == "cuda" if settings.pin_memory is None else settings.pin_memory


def use_findings(evaluation: Evaluation, *, micro_batch_size: int | None, workers: int | None) -> None:
    """Sets the evaluation's sizes to those found by trial; None: unchanged."""
    if micro_batch_size is not None:
        evaluation.batch_size = micro_batch_size
    if workers is not None:
        evaluation.workers = workers if evaluation.room is None else evaluation.room.most(workers)


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


def restore_average(ema: EMA, saved: Mapping[str, Any] | None) -> None:
    """Restores an average; without a saved one it starts from the restored weights. Raises ValueError."""
    if saved is None:
        log.event("ema", source="the restored weights", why="the checkpoint has no average")
        ema.begin()
        return
    ema.load_state_dict(saved)


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


def run_id(session: Session) -> str:
    """Returns the id for experiment trackers: one for all attempts of a job."""
    return trackers_of.run_id(session.run.job_uid)


# --- checks of Trainer's arguments; each raises ConfigurationError ---------------------------------------
def require_kinds(model: object, optimizer: object) -> None:
    for name, value, kind in (
        ("model", model, torch.nn.Module),
        ("optimizer", optimizer, torch.optim.Optimizer),
    ):
        if not isinstance(value, kind) and not (name == "optimizer" and isinstance(value, str)):
            raise ConfigurationError(
                f"Trainer({name}=...) is a {type(value).__name__}: give it a torch {kind.__name__}"
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

"""What a `Trainer` is made of, by its settings. Called by `trainer` alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler

from spottrain import log
from spottrain import schedule as schedules
from spottrain.data import Batches, Dataset, Source
from spottrain.data.source import size_of
from spottrain.device import to_device
from spottrain.diagnosis.split import Split
from spottrain.errors import ConfigurationError, TrainingFailed
from spottrain.evaluation import Evaluation
from spottrain.fitting import Fitting
from spottrain.levers import accumulation, compiling, compression, optimizers, rates
from spottrain.levers.compression import Compression
from spottrain.levers.ema import EMA
from spottrain.levers.precision import Precision
from spottrain.levers.stopping import EarlyStopping
from spottrain.levers.trackers import run_id as usable
from spottrain.meter import Meter
from spottrain.process.session import Session
from spottrain.ranks.parallel import Replica
from spottrain.ranks.world import World
from spottrain.settings import WARM_UPS, Settings
from spottrain.training import AUTO, OPTIMIZERS
from spottrain.watch import Watch

if TYPE_CHECKING:
    from spottrain.trainer import Trainer


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What `fit` returns."""

    step: int
    loss: float
    """Of the last optimizer step."""
    best: float | None
    """Lowest evaluation loss; None without an eval_set."""
    digest: str
    """SHA-256 of the final weights (`weights.digest`)."""
    output_uri: str
    """Where they are; empty without a checkpoint URI."""
    ended_early: str = ""
    """Why, where early stopping ended it."""


def optimizer(
    given: torch.optim.Optimizer | str,
    model: torch.nn.Module,
    settings: Settings,
    learning_rate: float | None,
) -> torch.optim.Optimizer:
    """The script's, or the one that is named, with the rate of this batch size."""
    named, fused = settings.optimizer, False if settings.deterministic else None
    if isinstance(given, str):
        if given not in OPTIMIZERS:
            raise ConfigurationError(
                f"Trainer(optimizer={given!r}): give it a torch Optimizer, or a name: {', '.join(OPTIMIZERS)}"
            )
        same = named is None or named.name == given  # else its rate means nothing
        own = learning_rate if same else None
        rate = (named and named.learningRate) or own
        if rate is None:
            raise ConfigurationError(
                f"the optimizer {named.name if named else given} needs a learning rate: "
                "Trainer(learning_rate=...), or spec.training.optimizer.learningRate"
            )
        made = optimizers.make(
            named.name if named else given,
            model.parameters(),
            learning_rate=rate,
            weight_decay=named.weightDecay if named else None,
            momentum=named.momentum if named else None,
            fused=fused,
        )
    elif named is not None:
        words = {
            "learning_rate": named.learningRate,
            "weight_decay": named.weightDecay,
            "momentum": named.momentum,
        }
        hyper = {name: value for name, value in words.items() if value is not None}
        made = optimizers.rebuilt(given, named.name, fused=fused, **hyper)
    else:
        made = given
    _scale(made, settings)
    return made


def _scale(made: torch.optim.Optimizer, settings: Settings) -> None:
    wanted = settings.learning_rate_scaling
    if wanted is None or wanted.rule == "none":
        return
    if isinstance(settings.schedule, LRScheduler):
        raise ConfigurationError(
            "learning_rate_scaling sets the rates, and so does a torch LRScheduler: scale the rate that you "
            "give the optimizer, or use schedule='cosine', 'constant' or a function of the step"
        )
    for group in (each for each in made.param_groups if each["lr"]):  # 0 is one that is not trained
        group["lr"] = rates.scaled(
            float(group["lr"]),
            batch_size=settings.batch_size,
            base_batch_size=wanted.baseBatchSize,
            rule=wanted.rule,
        )


def schedule(
    made: torch.optim.Optimizer, settings: Settings, total_steps: int, steps_per_epoch: int | None
) -> schedules.Schedule:
    kind: Any = settings.schedule
    warmup = rates.warmup_steps(
        steps=settings.warmup_steps,
        epochs=settings.warmup_epochs,
        fraction=settings.warmup_fraction,
        total_steps=total_steps,
        steps_per_epoch=steps_per_epoch,
    )
    if isinstance(kind, str):
        kind = schedules.shape(kind, warmup_steps=warmup, total_steps=total_steps)
    return schedules.Schedule(made, kind)


def tell_what_cannot_act(settings: Settings, source: Source) -> None:
    """Settings that this train_set or this schedule takes no notice of: else they would seem to hold."""
    loading = ("workers", "prefetch_factor", "pin_memory", "drop_last")
    given = [name for name in loading if getattr(settings, name) not in (0, None, False)]
    if given and not isinstance(source, Batches):
        text = f"{', '.join(given)} cannot act: train_set is a loader, which has settings of its own"
        log.event("advice", about="data", text=text)
    warm_ups = [name for name in WARM_UPS if getattr(settings, name)]
    if warm_ups and not isinstance(settings.schedule, str):
        text = f"{', '.join(warm_ups)} cannot act: the schedule is the script's own; use cosine or constant"
        log.event("advice", about="learning-rate", text=text)


def pinned(settings: Settings, device: torch.device) -> bool:
    return device.type == "cuda" if settings.pin_memory is None else settings.pin_memory


def fitting(trainer: Trainer) -> Fitting:
    return Fitting(
        trainer.settings,
        model=trainer.model,
        optimizer=trainer.optimizer,
        loss_of=trainer.loss,
        source=trainer.batches,
        precision=trainer.precision,
        device=trainer.device,
        world=trainer.session.world,
    )


def meter(trainer: Trainer) -> Meter:
    return Meter(
        trainer.session.board,
        born=trainer.session.born,
        total_steps=trainer.total_steps,
        log_every=trainer.log_every,
        world=trainer.session.world,
        told=trainer.trackers.log,
    )


def evaluation(trainer: Trainer, eval_set: Dataset, collate: Any) -> Evaluation:
    if not size_of(eval_set, "eval_set"):
        raise ConfigurationError("Trainer(eval_set=...) is empty: give it samples, or leave it out")
    settings, session, loss, metrics = trainer.settings, trainer.session, trainer.loss, trainer.metrics
    micro, workers = settings.micro_batch_size, settings.workers

    def measure(model: torch.nn.Module, batch: Any) -> Mapping[str, Any]:
        return {"loss": loss(model, batch), **(metrics(model, batch) if metrics else {})}

    return Evaluation(
        dataset=eval_set,
        measure=measure,
        batch_size=micro if isinstance(micro, int) else settings.batch_size // session.world.size,
        device=trainer.device,
        autocast=lambda: trainer.precision.autocast(trainer.device),
        workers=workers if isinstance(workers, int) else 0,
        collate=collate,
        weight=trainer.loss_weight,
        world=session.world,
        until=lambda: session.interruption.deadline,  # infinite while nobody has asked for an end
        alive=session.board.pulse.beat,
    )


def keep_up(trainer: Trainer) -> None:
    """Has the evaluation use what was found by trial since it was made."""
    found = trainer.judge.evaluation
    if found is not None and trainer.fitting.size is not None:
        found.batch_size = trainer.fitting.size
    if found is not None and trainer.settings.workers == AUTO:
        found.workers = trainer.batches.workers


def early_stopping(settings: Settings, *, evaluates: bool, more: bool) -> EarlyStopping | None:
    """more: whether the evaluation gives figures beside the loss, whose names come with it."""
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


def exchange(replica: Replica, settings: Settings, precision: Precision, split: Split) -> Compression:
    """How ranks exchange gradients, timed."""
    around: Callable[..., Any] = split.timed
    kind = settings.gradient_compression
    if kind == "none" and isinstance(replica.outer, DistributedDataParallel):
        replica.outer.register_comm_hook(None, around())
    return compression.attach(replica.outer, kind, precision=precision.name, around=around)


def restore_average(ema: EMA, saved: Mapping[str, Any] | None) -> None:
    """One that is new in this attempt begins with the weights that were restored. Raises ValueError."""
    if saved is None:
        log.event("ema", source="the restored weights", why="the checkpoint has no average")
        ema.begin()
        return
    ema.load_state_dict(saved)


def weighted(
    found: list[tuple[Any, float]], count: Callable[[Any], float], world: World
) -> Iterator[tuple[Any, float]]:
    """Micro-batches of a step, each with its share by what it counts; a filler stays without any.

    The mean over nothing is no number, and stays none when it is multiplied by 0: in the place of a batch
    that counts 0 stands one that counts, with no weight. Raises TrainingFailed where this rank has none.
    """
    counts = [float(count(batch)) if share else 0.0 for batch, share in found]
    shares = accumulation.shares_by_count(counts, world)
    spare = next((batch for (batch, _), number in zip(found, counts, strict=True) if number), None)
    if spare is None:
        raise TrainingFailed(
            "no micro-batch of this step has anything that counts (loss_weight is 0 for each): leave such "
            "samples out of the set, or raise the batch size"
        )
    batches = [batch if number else spare for (batch, _), number in zip(found, counts, strict=True)]
    return zip(batches, shares, strict=True)


def compile_first(trainer: Trainer, compiled: torch.nn.Module) -> None:
    """Before the first collective, so that no rank waits in one while another compiles."""
    if not trainer.session.world.distributed or not isinstance(trainer.batches, Batches):
        return
    batch = to_device(trainer.fitting.sample(trainer.batches.plan.micro_batch_size), trainer.device)

    def step() -> None:
        with trainer.precision.autocast(trainer.device):
            loss = trainer.loss(compiled, batch)
        loss.backward()  # type: ignore[no-untyped-call]

    compiling.warm_up(step, compiled)


def watch(trainer: Trainer) -> Watch:
    return Watch(
        trainer.settings,
        trainer.session,
        model=trainer.model,
        loss_of=trainer.loss,
        source=trainer.batches,
        fitting=trainer.fitting,
        precision=trainer.precision,
        device=trainer.device,
        start=trainer.step,
        total_steps=trainer.total_steps,
    )


def run_id(session: Session) -> str:
    """Of experiment trackers: one for all attempts of a job."""
    return usable(session.run.job_uid)

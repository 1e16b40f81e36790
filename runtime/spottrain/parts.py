"""What a `Trainer` is made of, by its settings. Called by `trainer` alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from spottrain import log
from spottrain.checkpoint import trained
from spottrain.data import Batches, Dataset, Source
from spottrain.data.room import Room
from spottrain.data.source import size_of
from spottrain.device import to_device
from spottrain.diagnosis.split import Split
from spottrain.errors import ConfigurationError, RunError
from spottrain.evaluation import Evaluation
from spottrain.fitting import Fitting
from spottrain.levers import accumulation, compiling, compression
from spottrain.levers import trackers as trackers_of
from spottrain.levers.compression import Compression
from spottrain.levers.ema import EMA
from spottrain.levers.rehearsing import rehearsal
from spottrain.levers.stopping import EarlyStopping
from spottrain.levers.trackers import Tracker
from spottrain.meter import Meter
from spottrain.process.session import Session
from spottrain.ranks import parallel
from spottrain.ranks.parallel import Replica
from spottrain.settings import WARM_UPS, Settings, told
from spottrain.shortages import Shortages
from spottrain.training import AUTO, MLflow, TensorBoard, WandB
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


def tell_what_cannot_act(settings: Settings, source: Source) -> None:
    """Settings that this train_set or this schedule takes no notice of: else they would seem to hold."""
    loading = ("workers", "prefetch_factor", "pin_memory", "drop_last")
    given = [name for name in loading if getattr(settings, name) not in (0, None, False)]
    if given and not isinstance(source, Batches):
        text = f"{', '.join(given)} cannot act: train_set is a loader, which has settings of its own"
        log.event("advice", about="data", text=text)
    if settings.prefetch_factor and not settings.workers and isinstance(source, Batches):
        text = "prefetch_factor cannot act: it is how far loader workers are ahead, and there are none"
        log.event("advice", about="data", text=text)
    warm_ups = [name for name in WARM_UPS if getattr(settings, name)]
    if warm_ups and not isinstance(settings.schedule, str):
        text = f"{', '.join(warm_ups)} cannot act: the schedule is the script's own; use cosine or constant"
        log.event("advice", about="learning-rate", text=text)


def pinned(settings: Settings, device: torch.device) -> bool:
    return device.type == "cuda" if settings.pin_memory is None else settings.pin_memory


def loss_of(trainer: Trainer) -> Callable[[torch.nn.Module, Any], torch.Tensor]:
    """The loss of the model as the script has it, where more than that is trained."""
    return lambda model, batch: trainer.loss(trained.inner(model), batch)


def fitting(trainer: Trainer) -> Fitting:
    return Fitting(
        trainer.settings,
        model=trainer.model,
        optimizer=trainer.optimizer,
        loss_of=loss_of(trainer),
        source=trainer.batches,
        precision=trainer.precision,
        device=trainer.device,
        world=trainer.session.world,
        shortages=Shortages(store=trainer.session.store, job_uid=trainer.session.run.job_uid),
    )


def cannot_go_on(trainer: Trainer, error: BaseException) -> RunError | None:
    """What an error means that ends this rank alone, and all the others for want of it; None: just itself."""
    if trainer.step < trainer.total_steps and (short := trainer.fitting.out_of_memory(error, trainer.step)):
        return short
    return parallel.peer_lost(error, trainer.session.world, trainer.session.peer_gone)


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
    settings, session, loss, metrics = trainer.settings, trainer.session, loss_of(trainer), trainer.metrics
    micro, workers = settings.micro_batch_size, settings.workers

    def measure(model: torch.nn.Module, batch: Any) -> Mapping[str, Any]:
        return {"loss": loss(model, batch), **(metrics(trained.inner(model), batch) if metrics else {})}

    return Evaluation(
        dataset=eval_set,
        measure=measure,
        batch_size=micro if isinstance(micro, int) else settings.batch_size // session.world.size,
        device=trainer.device,
        autocast=lambda: trainer.precision.autocast(trainer.device),
        workers=workers if isinstance(workers, int) else 0,
        collate=collate,
        weight=trainer.loss_weight,
        room=Room(eval_set, collate, name="eval_set", ranks=session.world.local_size),
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
        wanted = trainer.batches.workers
        found.workers = wanted if found.room is None else found.room.most(wanted)


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


def exchange(trainer: Trainer, replica: Replica, split: Split) -> Compression:
    """How ranks exchange gradients, timed."""
    around: Callable[..., Any] = split.timed
    kind = trainer.settings.gradient_compression
    if kind == "none" and isinstance(replica.outer, DistributedDataParallel):
        replica.outer.register_comm_hook(None, around())
    return compression.attach(
        replica.outer,
        kind,
        start_step=compression.start(trainer.total_steps, trainer.schedule.warmup_steps),
        precision=trainer.precision.name,
        around=around,
    )


def restore_average(ema: EMA, saved: Mapping[str, Any] | None) -> None:
    """One that is new in this attempt begins with the weights that were restored. Raises ValueError."""
    if saved is None:
        log.event("ema", source="the restored weights", why="the checkpoint has no average")
        ema.begin()
        return
    ema.load_state_dict(saved)


Weighing = Callable[[list[tuple[Any, float]]], list[tuple[Any, float]]]


def weighing(trainer: Trainer) -> Weighing | None:
    """Of the micro-batches of a step by what they count; None: by samples, as they come."""
    count, batches = trainer.loss_weight, trainer.batches
    if count is None:
        return None

    def spare() -> Any:
        """The first micro-batch of the set that counts: the same in each attempt."""
        assert isinstance(batches, Batches)
        size = batches.plan.micro_batch_size
        for start in range(0, len(batches.dataset), size):
            batch = trainer.fitting.sample(size, start=start)
            if count(batch):
                return batch
            trainer.session.board.pulse.beat()  # it may be far
        return None

    made = spare if isinstance(batches, Batches) else None
    return accumulation.Reweighed(count, trainer.session.world, spare=made)


def compile_first(trainer: Trainer, compiled: torch.nn.Module, batch: Any) -> None:
    """Before the first collective, so that no rank waits in one while another compiles."""
    batch = to_device(batch, trainer.device)

    def step() -> None:
        with trainer.precision.autocast(trainer.device):
            loss = trainer.loss(compiled, batch)
        loss.backward()  # type: ignore[no-untyped-call]

    with rehearsal(trainer.model):  # it knows of what is trained beside the model, too
        compiling.warm_up(step, compiled)


def watch(trainer: Trainer) -> Watch:
    return Watch(
        trainer.settings,
        trainer.session,
        model=trainer.model,
        loss_of=loss_of(trainer),
        source=trainer.batches,
        fitting=trainer.fitting,
        precision=trainer.precision,
        device=trainer.device,
        start=trainer.step,
        total_steps=trainer.total_steps,
    )


def trackers(given: Sequence[Tracker] | None, settings: Settings, session: Session) -> list[Tracker]:
    """The script's, and those of the manifest, which stand in place of its own of the same name; none on
    other ranks than 0. Raises ConfigurationError."""
    own = trackers_of.listed(given, "Trainer(trackers=...)")
    wanted = settings.trackers
    asked = {} if wanted is None else {each.name: getattr(wanted, each.name) for each in fields(wanted)}
    asked = {name: words for name, words in asked.items() if words is not None}
    kept = [each for each in own if each.name not in asked]
    for each in own:
        if each.name in asked:
            log.event(
                "override", setting=f"trackers.{each.name}", manifest=told(asked[each.name]), script="own"
            )
    if not session.world.first:  # the others make none: its package may ask for a lock, or for an account
        return []
    return kept + [_tracker(words, settings) for words in asked.values()]


def _tracker(wanted: TensorBoard | WandB | MLflow, settings: Settings) -> Tracker:
    config = {name: told(value) for name, value in settings.given().items()}
    match wanted:
        case TensorBoard():
            return trackers_of.TensorBoard(folder=wanted.folder)
        case WandB():
            return trackers_of.WandB(**asdict(wanted), config=config)
        case MLflow():
            return trackers_of.MLflow(
                experiment=wanted.experiment, tracking_uri=wanted.trackingURI, config=config
            )


def run_id(session: Session) -> str:
    """Of experiment trackers: one for all attempts of a job."""
    return trackers_of.run_id(session.run.job_uid)

"""`LightningCallback`: makes Lightning's Trainer survive interruptions:

    spot = LightningCallback()
    trainer = L.Trainer(..., callbacks=[spot])
    trainer.fit(model, ckpt_path=spot.resume())

A checkpoint holds what `trainer.save_checkpoint` writes, and the random state of each rank, which Lightning
omits. It is taken right after a step, before a validation due there and before the epoch's end. After a
restart Lightning skips both; the callback makes it run them (`_before_validation`). Lightning's handling of
SIGTERM is switched off: its handler runs collectives, and exits without a save.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any, Final

import torch

try:
    import lightning.pytorch as pl
except ImportError:
    import pytorch_lightning as pl  # type: ignore[no-redef]

from spottrain.checkpoint import outside_parameters, plain_state
from spottrain.core import device as devices
from spottrain.core import log
from spottrain.core.preemption import SIGNALS
from spottrain.diagnostics.background import BackgroundMonitor
from spottrain.distributed import process_group
from spottrain.errors import ConfigurationError
from spottrain.integrations.folder_checkpoints import FolderCoordinator, packed, unpacked
from spottrain.lifecycle.coordinator import TrainingState
from spottrain.lifecycle.session import current
from spottrain.training import job_settings
from spottrain.training.loop import cursor_of
from spottrain.training.metrics_log import MetricsLog

FILE: Final = "lightning.ckpt"


class LightningCallback(pl.Callback):
    """Saves, stops and resumes Lightning's Trainer. Create one per process and Trainer.

    Args:
        folder: on a disk with room for one checkpoint; the same for all ranks of a machine.
        log_every: optimizer steps between two log lines.
    """

    def __init__(self, *, folder: str | Path = ".", log_every: int = 10) -> None:
        self.session = current()
        self.coordinator: FolderCoordinator | None = None
        self._folder, self._log_every = Path(folder), log_every
        self._handlers = {number: signal.getsignal(number) for number in SIGNALS}
        self._trainer: pl.Trainer | None = None
        self._random: Any = None
        """Restored when the first batch begins: until then Lightning draws random numbers."""
        self._unvalidated: Any = None
        """Random state before a validation, restored after it, so that validations do not affect training."""
        self._finished = False
        self._resumed = False
        """Whether the run resumed from our checkpoint and its first epoch is not over."""
        self._metrics: dict[str, torch.Tensor] = {}
        """Metrics of a validation before the checkpoint, for schedulers that step at the epoch's end."""
        self._monitor: BackgroundMonitor | None = None

    # --- public ---------------------------------------------------------------------------------------
    def resume(self) -> str | None:
        """Claims the checkpoint URI and downloads the last checkpoint.

        Returns:
            The file for `trainer.fit(ckpt_path=...)`; None at the first start.

        Raises:
            RunError: it is called twice, or the checkpoint cannot be claimed or read.
        """
        if self.coordinator is not None:
            raise ConfigurationError("spot.resume() was called a second time: a run trains once")
        session, world = self.session, self.session.world
        if world.distributed:
            process_group.join(world, devices.choose(process_group.default_device(world)))
        session.board.update(step=0)
        self.coordinator = FolderCoordinator(
            session,
            TrainingState(shared=self._shared, own=self._own, load=self._load),
            place=self._folder,
            write=self._write,
        )
        try:
            self.coordinator.begin()
        except BaseException:
            self.coordinator.ends.give_up()
            raise
        restored = self.coordinator.restored
        return None if restored is None else str(restored / FILE)

    # --- hooks of pl.Callback -------------------------------------------------------------------------
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        if self.coordinator is None:
            raise ConfigurationError(
                "LightningCallback was not asked where to go on: call "
                "trainer.fit(model, ckpt_path=spot.resume())"
            )
        if trainer.world_size != self.session.world.size:
            raise ConfigurationError(
                f"Lightning trains with {trainer.world_size} process(es), and spottrain knows of "
                f"{self.session.world.size}: start them by spottrain run --nproc N or torchrun, and give "
                "L.Trainer(devices=N) the same number"
            )
        self._trainer = trainer
        self._take_max_steps(trainer)

    def on_sanity_check_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._take_signals(trainer)

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if self.coordinator is not None and self.coordinator.restored is not None:
            self._resumed = True
            _before_validation(checkpoint["loops"]["fit_loop"])

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._take_signals(trainer)
        if self._resumed:
            trainer._logger_connector._callback_metrics.update(self._metrics)
            if _go_on(trainer):
                self._restore_random()
        coordinator, session, step = self._begun(), self.session, trainer.global_step
        outside_parameters.require_owned(
            [each for each in trainer.optimizers if isinstance(each, torch.optim.Optimizer)],
            [each for each in (pl_module, trainer.strategy.model) if isinstance(each, torch.nn.Module)],
            "Make its module an attribute of the LightningModule",
        )
        if coordinator.restored is None:  # it may resume from a checkpoint of Lightning's own
            session.board.update(step=step, start_step=step)
        elif step != coordinator.step:
            raise ConfigurationError(
                f"the training begins at step {step}, and the newest checkpoint is of step "
                f"{coordinator.step}: "
                "call trainer.fit(model, ckpt_path=spot.resume())"
            )
        coordinator.total_steps = trainer.max_steps if trainer.max_steps > 0 else None
        total = _expected_steps(trainer)
        session.board.update(total_steps=total or 0, state="Training")
        self._metrics_log = MetricsLog(
            session.board,
            born=session.born,
            total_steps=total,
            log_every=self._log_every,
            world=session.world,
        )
        job_settings.advise(session, ("max_steps",))
        if total is None or step < total:
            device = trainer.strategy.root_device
            self._monitor = BackgroundMonitor(session, start=step, total_steps=total, device=device)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._restore_random()

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        self.session.preemption.let_end(None)  # from here on there is work to lose

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self._unvalidated = devices.random_state()
        coordinator, step = self._begun(), trainer.global_step
        if step == coordinator.step:
            return  # a micro-batch
        for loader in _counting(trainer):
            loader.advance(1)
        self._metrics_log.note(step, lambda: _loss(outputs), rate=_rate(trainer), epoch=trainer.current_epoch)
        if self._monitor is not None:
            self._monitor.step()
        if coordinator.boundary(step):
            try:
                coordinator.ends.interrupted()
            finally:
                self._close()

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self.session.board.heartbeat.beat()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._resumed:
            self._resumed = False
            trainer.fit_loop.epoch_loop.on_iteration_done()  # not called if no batch was left
            if _has_monitored(trainer):  # otherwise ReduceLROnPlateau skips this epoch
                trainer.fit_loop._restarting = False

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._unvalidated is not None:  # random numbers drawn by it do not count
            devices.set_random_state(self._unvalidated)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.session.board.update(ended_early=_early(trainer))
        self._finish(pl_module)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._finish(pl_module)  # without a step left there is no on_train_end

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        if self.coordinator is None or self._finished or self.session.message is not None:
            return
        session = self.session
        if (lost := process_group.peer_lost(exception, session.world, session.peer_gone)) is not None:
            self.coordinator.end_without(lost)
        self.session.broken_by_stop(exception)
        self.coordinator.ends.give_up()
        self._close()

    # --- private --------------------------------------------------------------------------------------
    def _restore_random(self) -> None:
        """Restores the random state before the first action after the checkpoint's step."""
        if self._random is not None:
            devices.set_random_state(self._random)
            self._unvalidated, self._random = self._random, None

    def _begun(self) -> FolderCoordinator:
        assert self.coordinator is not None, "setup() looks"
        return self.coordinator

    def _take_signals(self, trainer: pl.Trainer) -> None:
        """Restores our signal handlers, which Lightning replaces just before the run."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        trainer._signal_connector.received_sigterm = False

    def _finish(self, module: torch.nn.Module) -> None:
        if self._finished:
            return
        self._finished = True
        try:
            self._begun().finish(lambda: plain_state.model_state(module))
        finally:
            self._close()

    def _close(self) -> None:
        if self._monitor is not None:
            self._monitor.close()

    def _take_max_steps(self, trainer: pl.Trainer) -> None:
        """Applies the manifest's maxSteps as the only end of the run, before the scheduler is made."""
        wanted = self.session.run.training.maxSteps
        if wanted is None or (wanted, -1) == (trainer.max_steps, trainer.max_epochs):
            return
        script = f"{trainer.max_steps} steps, {trainer.max_epochs} epochs"
        log.event("override", setting="max_steps", manifest=wanted, script=script)
        trainer.fit_loop.epoch_loop.max_steps = wanted
        trainer.fit_loop.max_epochs = -1

    def _write(self, folder: Path) -> None:
        assert self._trainer is not None
        self._trainer.save_checkpoint(folder / FILE)

    def _shared(self) -> dict[str, Any]:
        assert self._trainer is not None
        logged = self._trainer.callback_metrics
        metrics = {name: float(value) for name, value in logged.items() if value.numel() == 1}
        return {"trained": self._begun().trained, "metrics": metrics}

    def _own(self) -> dict[str, Any]:
        return {"random": packed(devices.random_state())}

    def _load(self, shared: Any, own: Any, new_rank: bool) -> None:
        self._begun().trained = shared["trained"]
        self._metrics = {name: torch.tensor(each) for name, each in shared.get("metrics", {}).items()}
        if new_rank:
            log.event("new-rank", why="the checkpoint has no random state of this rank; it gets a fresh one")
        else:
            self._random = unpacked(own["random"])


def _before_validation(loops: dict[str, Any]) -> None:
    """Makes Lightning resume between a step and the validation, or epoch end, that may be due after it.

    It changes `loops`, the state of the fit loop: the last batch is then complete, and a validation has begun
    with no batch done. Lightning does not run a validation that is not due.
    """
    for batches in loops["epoch_loop.batch_progress"].values():
        if isinstance(batches, dict):
            batches["completed"] = batches["processed"]
    validated = loops["epoch_loop.val_loop.batch_progress"]
    total = validated["total"]
    total["ready"] = total["started"] = total["processed"] + 1
    total["completed"] = total["processed"]
    validated["current"] = dict.fromkeys(validated["current"], 0)


def _go_on(trainer: pl.Trainer) -> bool:
    """Completes `_before_validation` when training begins.

    Returns whether a validation or epoch end comes before the next batch.
    """
    epoch_loop, fetcher = trainer.fit_loop.epoch_loop, trainer.fit_loop._data_fetcher
    due = fetcher is not None and epoch_loop._should_check_val_fx(fetcher)
    over = epoch_loop._num_ready_batches_reached()
    if not due:
        epoch_loop._batches_that_stepped += 1  # step count of loggers; otherwise the validation adds it
        epoch_loop.val_loop._has_run = over
    if over:
        for loader in _counting(trainer):  # this epoch has no batch left
            if (cursor := cursor_of(loader)) is not None:
                cursor.begin_epoch()
    return due or over


def _has_monitored(trainer: pl.Trainer) -> bool:
    """Whether there is a metric for each ReduceLROnPlateau scheduler."""
    wanted = {each.monitor for each in trainer.lr_scheduler_configs if each.reduce_on_plateau}
    return wanted <= set(trainer.callback_metrics)


def _counting(trainer: pl.Trainer) -> list[Any]:
    """Returns loaders of `spottrain.data`, and its samplers in other loaders."""
    combined = trainer.fit_loop._combined_loader
    found = []
    for loader in combined.flattened if combined is not None else ():
        for each in (loader, getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)):
            if hasattr(each, "advance"):
                found.append(each)
                break
    return found


def _early(trainer: pl.Trainer) -> str:
    """Returns why Lightning's EarlyStopping ended training; "" if it did not."""
    if not trainer.should_stop:
        return ""
    said = (getattr(each, "stopping_reason_message", None) for each in trainer.early_stopping_callbacks)
    return next((why for why in said if why), "")


def _expected_steps(trainer: pl.Trainer) -> int | None:
    steps = trainer.estimated_stepping_batches
    return int(steps) if 0 < steps < float("inf") else None


def _loss(outputs: Any) -> float | None:
    """Returns the loss of the step's last micro-batch."""
    value = outputs.get("loss") if isinstance(outputs, dict) else outputs
    return float(value) if isinstance(value, torch.Tensor) and value.numel() == 1 else None


def _rate(trainer: pl.Trainer) -> float | None:
    return float(trainer.optimizers[0].param_groups[0]["lr"]) if trainer.optimizers else None

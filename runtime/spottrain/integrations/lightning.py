"""`LightningCallback`: makes Lightning's Trainer survive interruptions:

    spot = LightningCallback()
    trainer = L.Trainer(..., callbacks=[spot])
    trainer.fit(model, ckpt_path=spot.resume())

A checkpoint holds what `trainer.save_checkpoint` writes, and the random state of each rank, which Lightning
omits. It is taken right after a step, before a validation due there and before the epoch's end. After a
restart Lightning skips both; the callback makes it run them (`_before_validation`). Lightning's handling of
SIGTERM is switched off: its handler runs collectives, and exits without a save.

`run_attached` does the same for a script that knows nothing of it.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from inspect import BoundArguments
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils.data import DataLoader

if TYPE_CHECKING or "lightning.pytorch" in sys.modules or "pytorch_lightning" not in sys.modules:
    try:
        import lightning.pytorch as pl
    except ImportError:
        import pytorch_lightning as pl  # type: ignore[no-redef]
else:
    import pytorch_lightning as pl  # the one that the script uses

from spottrain.checkpoint import final_weights, outside_parameters, plain_state
from spottrain.checkpoint.training_state import OURS, LibraryFolders, TrainingState
from spottrain.core import device as devices
from spottrain.core import log, patches
from spottrain.core.uri import is_path
from spottrain.data.sampler import BatchSampler
from spottrain.errors import ConfigurationError
from spottrain.integrations.folder_checkpoints import OFF, CallbackEngine, link_tree
from spottrain.integrations.generators import (
    generators,
    is_sized,
    random_state,
    set_generators,
    set_random_state,
)
from spottrain.lifecycle.life import Phase
from spottrain.training.position import cursor_of

FILE: Final = "lightning.ckpt"
BEST: Final = "best"
"""Folder of a checkpoint with the best checkpoints of the script's ModelCheckpoint callbacks."""
CALL: Final = "trainer.fit(model, ckpt_path=spot.resume())"

WARNING: Final = "You're resuming from a checkpoint that ended before the epoch ended"
PERSISTENT: Final = (
    "persistent_workers=True: the random state of the loader's workers goes on from epoch to epoch, and is "
    "not saved. After an interruption random numbers that are drawn in them differ; the order of the samples "
    "does not. Leave it out for a training that is exact"
)


class LoaderPosition:
    """The position in the only train loader of `trainer`, unless the loader has a state of its own.

    Lightning would begin the data of an interrupted epoch again. The batches of an epoch follow from the
    random state when the loader's iterator is made, and from that when the first batch is fetched. Both are
    part of a checkpoint. A resume makes the iterator from them, reads the batches that were used, and sets
    the random state of the last step before the next batch is fetched. Of a loader without a length Lightning
    fetches one batch ahead of the step: that one has a random state of its own. Random state is the global
    one, and that of the generators of the loader and its samplers.

    `before_batch` is called before the first batch after a resume is fetched.
    """

    def __init__(self, trainer: Any, before_batch: Callable[[], None]) -> None:
        self._trainer, self._before_batch = trainer, before_batch
        self._made: Any = None
        self._first: Any = None
        """Random states when this epoch's iterator was made, and when its first batch was fetched."""
        self._before: dict[int, Any] = {}
        """Random states before the last two batches were fetched, by their numbers."""
        self._loader: Any = None
        """The loader that is followed."""
        self._renewed = self._advised = False
        """Whether this epoch goes on with the workers of the one before; whether `PERSISTENT` was logged."""
        self._saved: dict[str, Any] | None = None
        self._generators: Mapping[str, Any] = {}
        """States of the generators in the checkpoint."""

    def state(self) -> dict[str, Any] | None:
        """Returns the position for a checkpoint; None if it is not known. No batches: the end of an epoch."""
        if self._loader is None:
            return None
        epoch_loop = self._trainer.fit_loop.epoch_loop
        position: dict[str, Any] = {"generators": generators(self._loader)}
        if self._first is None or epoch_loop._num_ready_batches_reached():
            return position
        used = epoch_loop.batch_progress.current.ready
        within = {"made": self._made, "first": self._first, "batches": used, "renewed": self._renewed}
        return position | within | {"ahead": self._before.get(used)}

    def load(self, saved: dict[str, Any] | None) -> None:
        """Makes the next iterator begin at this position."""
        self._generators = (saved or {}).get("generators", {})
        self._saved = saved if saved is not None and "batches" in saved else None

    def restore_generators(self) -> None:
        """Sets the generators to their state in the checkpoint."""
        if self._loader is not None:
            set_generators(self._loader, {"generators": self._generators})

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Within the block, the train loader's iterators are followed."""
        usual = DataLoader.__iter__

        def iterate(loader: Any) -> Any:
            return self._iterate(loader, usual) if self._follows(loader) else usual(loader)

        undo = patches.replace(DataLoader, "__iter__", iterate)
        try:
            yield
        finally:
            undo()

    def _follows(self, loader: Any) -> bool:
        combined = self._trainer.fit_loop._combined_loader
        loaders = [] if combined is None else combined.flattened
        alone = len(loaders) == 1 and loaders[0] is loader
        return alone and self._trainer.training and not hasattr(loader, "state_dict")

    def _iterate(self, loader: Any, usual: Callable[[Any], Iterator[Any]]) -> Iterator[Any]:
        saved, self._saved = self._saved, None
        self._loader = loader
        if loader.persistent_workers and not self._advised:
            self._advised = True
            log.event("advice", about="attach", text=PERSISTENT)
        if saved is not None:
            return self._resume(saved, lambda: usual(loader), ahead=not is_sized(loader))
        self._renewed = loader.persistent_workers and loader._iterator is not None
        self._made, self._first = random_state(loader), None
        return self._begin(usual(loader))

    def _begin(self, batches: Iterator[Any]) -> Iterator[Any]:
        self._first = random_state(self._loader)
        yield from self._fetch(batches, 0)

    def _fetch(self, batches: Iterator[Any], first: int) -> Iterator[Any]:
        """Yields the batches, of which the next one has the number `first`."""
        for number in itertools.count(first):
            last = self._before.get(number - 1)
            self._before = {number - 1: last, number: random_state(self._loader)}
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch

    def _resume(
        self, saved: dict[str, Any], make: Callable[[], Iterator[Any]], *, ahead: bool
    ) -> Iterator[Any]:
        """Makes the iterator when its first batch is fetched: by then the sampler knows its epoch.

        `ahead`: Lightning fetches a batch while it trains on the one before, because the end is not known.
        """
        warnings.filterwarnings("ignore", message=WARNING)
        loader, now = self._loader, random_state(self._loader)
        self._made, self._first = saved["made"], saved["first"]
        self._renewed = saved.get("renewed", False)
        if self._renewed:
            make()  # starts the workers, for which torch draws a number
        set_random_state(loader, self._made)
        batches = make()
        set_random_state(loader, self._first)
        for _ in range(saved["batches"]):
            next(batches, None)
        used, before_ahead = saved["batches"], saved.get("ahead") if ahead else None
        if before_ahead is not None:
            set_random_state(loader, before_ahead, in_workers=loader.num_workers > 0)
            yield from itertools.islice(self._fetch(batches, used), 1)
            used += 1
        else:
            set_random_state(loader, now)
        if before_ahead is not None or not ahead:
            self._before_batch()
        yield from self._fetch(batches, used)


class LightningCallback(pl.Callback):
    """Saves, stops and resumes Lightning's Trainer. Create one per process and Trainer.

    Args:
        folder: on a disk with room for one checkpoint; the same for all ranks of a machine.
        log_every: optimizer steps between two log lines.
        attached: set by `run_attached`: the job is done when the script ends, not with its training.
    """

    def __init__(self, *, folder: str | Path = ".", log_every: int = 10, attached: bool = False) -> None:
        self._engine = CallbackEngine(CALL, attached=attached)
        self.session = self._engine.session
        self._folder, self._log_every = Path(folder), log_every
        self._trainer: pl.Trainer | None = None
        self._position: LoaderPosition | None = None
        """Set by `run_attached`: a script that knows of us uses a loader with a state."""
        self._random_due = False
        """Whether `_random` is to be restored, when the first batch begins: until then Lightning draws."""
        self._random: Any = None
        """Random state in the checkpoint; None if it has none for this rank."""
        self._unvalidated: Any = None
        """Random state before a validation, restored after it, so that validations do not affect training."""
        self._between_steps = False
        """Whether the last batch has ended a step, and none has begun since."""
        self._resumed = False
        """Whether the run resumed from our checkpoint and its first epoch is not over."""
        self._over: str | None = None
        """Why training was over before its last step, or "" if the reason is unknown."""
        self._best: list[str] = []
        """Paths of the best checkpoints of the script that the last checkpoint holds."""
        self._finishing = False
        """Whether the training is over, and its last checkpoint is due."""
        self._copied: dict[int, tuple[str, int]] = {}
        """Path and time of the copies of these, by number."""
        self._metrics: dict[str, torch.Tensor] = {}
        """Metrics of a validation before the checkpoint, for schedulers that step at the epoch's end."""

    # --- public ---------------------------------------------------------------------------------------
    def resume(self) -> str | None:
        """Claims the checkpoint URI and downloads the last checkpoint.

        Returns:
            The file for `trainer.fit(ckpt_path=...)`; None at the first start.

        Raises:
            RunError: it is called twice, or the checkpoint cannot be claimed or read.
        """
        folders = LibraryFolders(self._folder, self._write)
        state = TrainingState(shared=self._shared, own=self._own, load=self._load, folders=folders)
        restored = self._engine.resume(state)
        return None if restored is None else str(restored / FILE)

    # --- hooks of pl.Callback -------------------------------------------------------------------------
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._engine.require_resume(type(self).__name__)
        self._require_processes(trainer)
        self._trainer = trainer
        patches.replace(trainer._signal_connector, "register_signal_handlers", lambda: None)
        self._take_max_steps(trainer)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        own = trainer.ckpt_path is not None
        self._engine.initialize_first(pl_module, own_checkpoint=own)

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if self._engine.restored:
            self._resumed = True
            _before_validation(checkpoint["loops"]["fit_loop"])
            if self._engine.attached:
                self._place_best(trainer, checkpoint["callbacks"])

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._over is not None:
            trainer.should_stop = True  # before the first batch
        elif self._resumed:
            trainer._logger_connector._callback_metrics.update(self._metrics)
            if _go_on(trainer):
                self._restore_random()
        outside_parameters.require_owned(
            [each for each in trainer.optimizers if isinstance(each, torch.optim.Optimizer)],
            [each for each in (pl_module, trainer.strategy.model) if isinstance(each, torch.nn.Module)],
            "Make its module an attribute of the LightningModule",
        )
        final_weights.require_storable(plain_state.model_state(pl_module))
        limit, expected = trainer.max_steps, trainer.estimated_stepping_batches
        self._engine.start_at(
            trainer.global_step,
            last=limit if limit > 0 else None,
            total_steps=int(expected) if 0 < expected < float("inf") else None,
            device=trainer.strategy.root_device,
            log_every=self._log_every,
        )

    def on_train_batch_start(self, *_: Any, **__: Any) -> None:
        self._between_steps = False
        self._restore_random()

    def on_before_optimizer_step(self, *_: Any, **__: Any) -> None:
        if not self._engine.ended:
            self.session.enter(Phase.STEP)  # from here on there is work to lose

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._unvalidated = devices.random_state()
        step = trainer.global_step
        self._between_steps = step != self._engine.step
        if not self._between_steps:
            return  # a micro-batch
        for cursor in _cursors(trainer):
            cursor.advance()
        rate = float(trainer.optimizers[0].param_groups[0]["lr"]) if trainer.optimizers else None
        self._engine.count(step, loss=lambda: _loss(outputs), rate=rate, epoch=trainer.current_epoch)
        if self._engine.boundary(step):
            self._engine.stop()

    def on_validation_batch_end(self, *_: Any, **__: Any) -> None:
        """Saves the step before a validation that a stop comes in, and ends. The next attempt validates."""
        self.session.board.heartbeat.beat()
        alone = not self.session.world.distributed
        if alone and self.session.preemption.stopping and self._between_steps and not self._engine.ended:
            devices.set_random_state(self._unvalidated)
            self._engine.stop()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._resumed:
            self._resumed = False
            trainer.fit_loop.epoch_loop.on_iteration_done()  # not called if no batch was left
            wanted = {each.monitor for each in trainer.lr_scheduler_configs if each.reduce_on_plateau}
            if wanted <= set(trainer.callback_metrics):  # otherwise ReduceLROnPlateau skips this epoch
                trainer.fit_loop._restarting = False

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._unvalidated is not None:  # random numbers drawn by it do not count
            devices.set_random_state(self._unvalidated)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.should_stop and self._over is None:
            self._over = _early(trainer)
        self._finish(pl_module)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._finish(pl_module)  # without a step left there is no on_train_end

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self._engine.fail_in_script(exception)

    # --- private --------------------------------------------------------------------------------------
    def _require_processes(self, trainer: pl.Trainer) -> None:
        """Raises ConfigurationError unless the processes that train are those that spottrain knows of."""
        size, off = self.session.world.size, f", or {OFF}" if self._engine.attached else ""
        if trainer.world_size != size:
            raise ConfigurationError(
                f"Lightning trains with {trainer.world_size} process(es), and spottrain knows of {size}: "
                "start them by spottrain run --nproc N or torchrun, and give L.Trainer(devices=N) the same "
                f"number{off}"
            )

    def _restore_random(self) -> None:
        """Restores the random state before the first action after the checkpoint's step."""
        if self._random_due:
            self._random_due = False
            self._engine.restore_random(self._random, self._engine.step)
            if self._position is not None:
                self._position.restore_generators()
            self._unvalidated = devices.random_state()

    def _finish(self, module: torch.nn.Module) -> None:
        if not self._engine.ended:
            self._finishing = True
            self._engine.finish_with(module, self._over or "")
            for number in self._copied:
                shutil.rmtree(self._copy(number), ignore_errors=True)

    def _take_max_steps(self, trainer: pl.Trainer) -> None:
        """Applies the manifest's maxSteps as the only end of the run, before the scheduler is made."""
        wanted = self.session.run.training.get("max_steps")
        if wanted is None or (wanted, -1) == (trainer.max_steps, trainer.max_epochs):
            return
        script = f"{trainer.max_steps} steps, {trainer.max_epochs} epochs"
        log.event("override", setting="max_steps", manifest=wanted, script=script)
        trainer.fit_loop.epoch_loop.max_steps = wanted
        trainer.fit_loop.max_epochs = -1

    def _write(self, folder: Path) -> None:
        assert self._trainer is not None
        self._trainer.save_checkpoint(folder / FILE)
        if self._engine.attached and self.session.world.first_here:
            self._add_best(folder / BEST)

    def _copy(self, number: int) -> Path:
        return self._folder.resolve() / f"{OURS}best-{number}"

    def _add_best(self, folder: Path) -> None:
        """Adds what `ckpt_path="best"` means after the training, for a new pod does not have the file.

        Without a monitor the best checkpoint is the last one: then only the last one of the training counts.
        It is copied once, for Lightning may write it in place during the upload.
        """
        assert self._trainer is not None
        found: list[str] = []
        for each in self._trainer.checkpoint_callbacks:
            if self._finishing or getattr(each, "monitor", None):
                found.append(getattr(each, "best_model_path", ""))
            if self._finishing:
                found.append(getattr(each, "last_model_path", ""))
        self._best = [path for path in dict.fromkeys(found) if path and Path(path).exists()]
        for number, best in enumerate(map(Path, self._best)):
            copy, made = self._copy(number), (str(best), best.stat().st_mtime_ns)
            if self._copied.get(number) != made:
                shutil.rmtree(copy, ignore_errors=True)
                copy.mkdir(parents=True)
                (shutil.copytree if best.is_dir() else shutil.copy2)(best, copy / best.name)
                self._copied[number] = made
            link_tree(copy, folder / str(number))

    def _place_best(self, trainer: pl.Trainer, states: dict[str, Any]) -> None:
        """Moves the best checkpoints to where the script's ModelCheckpoint callbacks now look for them.

        With a logger that is a new folder in each attempt. `states`: of the callbacks, in the checkpoint; a
        ModelCheckpoint forgets its scores if the folder in its state is another one.
        """
        moved: dict[str, str] = {}
        for each in trainer.checkpoint_callbacks:
            state, folder = states.get(each.state_key, {}), getattr(each, "dirpath", None)
            if folder and state.get("dirpath"):
                moved |= _move_folder(state, str(folder))
        restored = self._engine.restored
        assert restored is not None
        if self.session.world.first_here:
            for number, path in enumerate(self._best):
                found = restored / BEST / str(number) / Path(path).name
                best = Path(moved.get(path, path))
                if found.exists() and not best.exists():
                    with contextlib.suppress(OSError):  # a folder that this machine does not have
                        best.parent.mkdir(parents=True, exist_ok=True)
                        shutil.move(found, best)
        self._engine.barrier()  # all ranks look for it

    def _shared(self) -> dict[str, Any]:
        assert self._trainer is not None
        logged = self._trainer.callback_metrics
        metrics = {name: float(value) for name, value in logged.items() if value.numel() == 1}
        return {"metrics": metrics, "over": self._over, "best": self._best}

    def _own(self) -> dict[str, Any]:
        position = self._position.state() if self._position is not None else None
        return {"random": devices.random_state(), "data": position}

    def _load(self, shared: Any, own: Any, new_rank: bool) -> None:
        if self._position is not None and not new_rank:
            self._position.load(own.get("data"))
        self._over, self._best = shared.get("over"), list(shared.get("best", ()))
        self._metrics = {name: torch.tensor(each) for name, each in shared.get("metrics", {}).items()}
        self._random_due, self._random = True, None if new_rank else own["random"]


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


def _move_folder(state: dict[str, Any], folder: str) -> dict[str, str]:
    """Changes the folder in the state of a ModelCheckpoint. Returns the new paths by the old ones."""
    old = str(state["dirpath"])
    names = ("best_model_path", "kth_best_model_path", "last_model_path")
    paths = [str(state.get(name, "")) for name in names] + list(state.get("best_k_models", ()))
    moved = {path: folder + path.removeprefix(old) for path in paths if path.startswith(f"{old}/")}
    state["dirpath"] = folder
    for name in names:
        if name in state:
            state[name] = moved.get(state[name], state[name])
    if "best_k_models" in state:
        state["best_k_models"] = {moved.get(k, k): score for k, score in state["best_k_models"].items()}
    return moved


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
        for cursor in _cursors(trainer):  # this epoch has no batch left
            cursor.begin_epoch()
    return due or over


def _cursors(trainer: pl.Trainer) -> list[BatchSampler]:
    """Returns the positions of the loaders and samplers of `spottrain.data`."""
    combined = trainer.fit_loop._combined_loader
    found = map(cursor_of, combined.flattened if combined is not None else ())
    return [cursor for cursor in found if cursor is not None]


def _early(trainer: pl.Trainer) -> str:
    """Returns why Lightning's EarlyStopping ended training; "" if it did not."""
    if not trainer.should_stop:
        return ""
    said = (getattr(each, "stopping_reason_message", None) for each in trainer.early_stopping_callbacks)
    return next((why for why in said if why), "")


def _loss(outputs: Any) -> float | None:
    """Returns the loss of the step's last micro-batch."""
    value = outputs.get("loss") if isinstance(outputs, dict) else outputs
    return float(value) if isinstance(value, torch.Tensor) and value.numel() == 1 else None


def run_attached(call: BoundArguments, fit: Callable[..., Any]) -> Any:
    """Calls `Trainer.fit`, saved and resumed by a callback that is made for this call."""
    trainer: Any = call.arguments["self"]
    if not isinstance(call.arguments["self"], pl.Trainer):
        raise ConfigurationError(
            "the script uses both lightning.pytorch and pytorch_lightning, which do not share their classes; "
            f"import one of them, or {OFF}"
        )
    root = trainer.default_root_dir
    spot = LightningCallback(
        folder=root if is_path(root) else ".", log_every=trainer.log_every_n_steps or 10, attached=True
    )
    spot._position = LoaderPosition(trainer, spot._restore_random)
    # Behind all other callbacks but those that save, as Lightning orders them.
    saving = [i for i, each in enumerate(trainer.callbacks) if isinstance(each, pl.callbacks.Checkpoint)]
    trainer.callbacks.insert(saving[0] if saving else len(trainer.callbacks), spot)

    def resume() -> str | None:
        _refuse_own_launch(trainer)
        spot._require_processes(trainer)
        restored = spot.resume()
        if restored is not None and "weights_only" in call.signature.parameters:
            call.arguments["weights_only"] = False  # it is of this job, and may hold hyperparameters
        return restored

    try:
        with spot._position.followed():
            return spot._engine.attached_to(call, fit, "ckpt_path", resume)
    finally:
        trainer.callbacks = [each for each in trainer.callbacks if each is not spot]


def _refuse_own_launch(trainer: Any) -> None:
    if method := getattr(trainer.strategy.launcher, "_start_method", ""):
        raise ConfigurationError(
            "Lightning's strategies ddp_spawn, ddp_fork and ddp_notebook start their processes by "
            f"themselves (here by {method}): give L.Trainer strategy='ddp', and start the processes by "
            f"spottrain run --nproc N, or {OFF}"
        )

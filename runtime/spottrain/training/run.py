"""`Run`: makes a custom training loop survive interruptions, in three to five lines.

run = spottrain.Run(model=model, optimizer=optimizer, scheduler=scheduler, data=loader, max_steps=1000)
for batch in run.batches(loader):
    ...                              # forward, backward, optimizer.step(), scheduler.step()
    run.step_completed(loss=loss)
run.finish()

A checkpoint of an epoch's last step does not cover what the loop does between two epochs (see `epochs`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import repeat
from types import TracebackType
from typing import Any, Self

import torch

from spottrain.checkpoint.final_files import write_description
from spottrain.checkpoint.training_state import TrainingState
from spottrain.core import log, patches
from spottrain.core.time_split import timed
from spottrain.distributed.dtensor import is_sharded
from spottrain.errors import ConfigurationError, RunError, TrainingFailed
from spottrain.lifecycle.life import Phase
from spottrain.lifecycle.session import Session, current
from spottrain.techniques.early_stopping import EarlyStopping
from spottrain.techniques.trackers import Trackers
from spottrain.training import job_settings
from spottrain.training.drawn_batch import onto_devices, with_devices
from spottrain.training.engine import Engine
from spottrain.training.epochs import LoopEpochs
from spottrain.training.finished_step import FinishedSteps
from spottrain.training.given_state import GivenState, final_weights
from spottrain.training.metrics_log import require_finite
from spottrain.training.position import DrawnBy, LoopPosition, StepBoundary, cursor_of
from spottrain.training.script_functions import number_of_loss
from spottrain.training.state_tree import StateTree


class Run:
    """Saves and restores a custom training loop.

    The constructor claims the checkpoint URI and restores what it is given; `global_step` then says how many
    steps are done. Create it last, after DDP, FSDP2 or torch.compile has wrapped the model. The random state
    of Python, NumPy, torch and the current GPU is saved for each rank.

    A None in a dict, and `scaler=None`, mean "not used": the checkpoint's state of that name is dropped. A
    scaler or a technique (EMA, EarlyStopping, Trackers) without state in the checkpoint starts fresh. Both
    are logged.

    Args:
        model: a module, wrapped or not, or a dict of several.
        optimizer: a torch optimizer, or a dict of several. It may also train parameters outside the model:
            those of modules in `extra`, and single ones, which are saved without buffers of their module.
            They are stored with the final weights too (`spottrain.load_weights(path, "extra.loss")`).
        scheduler: an object with state_dict() and load_state_dict(), or a dict of several.
        scaler: the same for a GradScaler.
        data: the source of the batches, if it keeps its position: `spottrain.data.loader`, a DataLoader over
            a sampler of `spottrain.data`, torchdata's StatefulDataLoader, or any object with a state.
        extra: further state, by name. Its values must be equal on all ranks, except random generators.
            Objects with state_dict() and load_state_dict(). If one also has own_state_dict(), that part is
            saved per rank; both parts are passed to load_state_dict(state, own), where own is None on a new
            rank.
            Modules, such as an average of the weights: stored like the model.
            An `EMA` of the whole model: it becomes the final weights.
            A `spottrain.EarlyStopping`: its reason is reported if training ends early.
            `Trackers`: closed at the end.
            Plain values: numbers, strings, tensors, dicts and lists of them, and random generators of torch,
            Python and NumPy. They are restored in place, except numbers and strings, which the script
            reads and writes as `run.extra[name]`.
        max_steps: optimizer steps of the whole training; None: until `finish`. spec.training.maxSteps wins.
            spec.training.profile takes effect too. The loop must apply all other settings itself, with
            `spottrain.job_settings`; those that it does not name are logged.
        log_every: steps between two log lines, at least 1.
        session: the process's own session by default.

    Raises:
        RunError: an argument cannot be saved, the checkpoint does not match, or the store fails.
    """

    _give_scheduler = (
        "Run(scheduler=scheduler), or scheduler={} where the script sets the rates by run.global_step"
    )

    def __init__(
        self,
        *,
        model: torch.nn.Module | Mapping[str, torch.nn.Module],
        optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer],
        scheduler: Any = None,
        scaler: Any = None,
        data: Any = None,
        extra: Mapping[str, Any] | None = None,
        max_steps: int | None = None,
        log_every: int = 10,
        session: Session | None = None,
    ) -> None:
        self.session = session = session or current()
        self._engine = Engine(session)
        if log_every < 1 or (max_steps is not None and max_steps < 1):
            raise ConfigurationError(f"Run(max_steps={max_steps}, log_every={log_every}): at least 1 each")
        wanted = session.run.training.get("max_steps")
        if wanted is not None and wanted != max_steps:
            log.event("override", setting="max_steps", manifest=wanted, script=max_steps)
        self.max_steps = wanted or max_steps
        self._loss: Any = None
        self._given = given = GivenState(
            model, optimizer, scheduler, scaler, extra, give_scheduler=self._give_scheduler
        )
        self.extra = given.values
        """The given values, by name. Numbers and strings are read and written here."""
        self._position = self._position_in(data)
        self._epochs = LoopEpochs(self._position)
        self._before_step: StepBoundary | None = None
        """State to undo the partial step that `poll` has seen, or all that comes after `max_steps`."""
        for each in given.objects.values():
            if isinstance(each, EarlyStopping):
                job_settings.use_first_rank(each, session.world)
            if isinstance(each, Trackers):
                self._engine.close_at_end(each)
        self._state = StateTree(
            type(self).__name__,
            given.model,
            given.optimizers,
            given.modules,
            given.objects,
            left_out=given.left_out,
            dataset=getattr(data, "dataset", None),
            replicas=session.world.distributed and given.replicated,
            regroups=True,
            over=lambda: self._engine.ended or self.ended_by_itself,
            incompatible=self._engine.incompatible,
        )
        given.require_scheduler()
        self._engine.join()
        self._module = torch.nn.ModuleList([given.model, *given.modules.values()])
        self._finished = FinishedSteps(self._state)
        self._begin(log_every)

    def _begin(self, log_every: int) -> None:
        """Claims and restores."""
        session = self.session
        session.loop = self
        if session.world.distributed and session.script:
            self._finish_before_group_ends()
        for each in self._given.optimizers.values():
            each.register_step_pre_hook(self._begin_step)
        job_settings.advise(session)
        state = TrainingState(
            shared=self._shared,
            own=self._own,
            load=self._load,
            unmoved=self._finished.unmoved,
            want=self._state.want(),
            by_rank0=self._state.by_rank0,
            describe=lambda folder: write_description(self._given.model, None, folder),
        )
        restored = self._engine.begin(state, total_steps=self.max_steps)
        if not restored and self._engine.initialize(self._given.model):
            for average in self._state.averages.values():
                average.begin()  # it holds the weights from before
        first = next(self._module.parameters(), None)
        self._engine.start(
            step=self._position.step,
            total_steps=self.max_steps,
            device=torch.device("cpu") if first is None else first.device,
            log_every=log_every,
        )
        if self.done:  # the previous attempt did all steps, but ended before it stored the weights
            self.finish()
            session.end(session.done)

    # --- public ---------------------------------------------------------------------------------------
    @property
    def global_step(self) -> int:
        """Optimizer steps done, in all attempts."""
        self._position.reads += 1
        return self._position.step

    @property
    def done(self) -> bool:
        """Whether `max_steps` are done; False without `max_steps`."""
        return self.max_steps is not None and self._position.step >= self.max_steps

    @property
    def epoch(self) -> int:
        """The epoch to start or continue, from 0; within `epochs` and `batches` the current one.

        It changes when the next epoch begins, not after an epoch's last step; also in a new attempt.

        Raises:
            ConfigurationError: nothing counts epochs.
        """
        position = self._position
        position.reads += 1
        if self._epochs.counted:
            return position.epoch
        if position.cursor is not None:
            position.counts_epochs |= position.cursor.begun is None
            return position.cursor.position.epoch
        if position.drawn_by is DrawnBy.BATCHES:
            return position.passes
        raise ConfigurationError(
            "run.epoch is not known: Run(data=...) was not given spottrain.data.loader(...), which "
            "counts epochs; iterate `for epoch in run.epochs(n)`, which counts them whatever the data are"
        )

    @property
    def epoch_step(self) -> int:
        """Optimizer steps done in the current epoch, in all attempts.

        Raises:
            ConfigurationError: the loop does not iterate over `epochs`.
        """
        if not self._epochs.counted:
            raise ConfigurationError(
                "run.epoch_step is of an epoch that run.epochs(...) gives: iterate `for epoch in "
                "run.epochs(n)`"
            )
        self._epochs.read_position()
        self._position.skips = True
        return self._epochs.steps_done

    def epochs(self, count: int, *, steps: int | None = None) -> Iterator[int]:
        """Yields the epochs that are left of `count`: `for epoch in run.epochs(10)`.

        The first epoch after a resume may be partly done: its loop over the batches then gets the rest of
        them, or none. The code after that loop (validation, a per-epoch scheduler step) runs in any case.
        The code between two epochs runs a second time only if the first step after it was not saved.

        Without `data=` the loop skips what is done itself, by `epoch_step`. A resumed epoch begins with the
        random state that it began with before, so that the loop draws the same order again; with the first
        read of `epoch_step` the random state of the last step is restored.

        Args:
            count: epochs of the whole training, at least 1.
            steps: optimizer steps per epoch, if an epoch is not one pass over the data. Then iterate over
                `run.batches(loader)`, which ends with the epoch.

        Yields:
            The number of each epoch, from 0.

        Raises:
            ConfigurationError: an interruption would lose the position in an epoch, it is called twice, or
                `max_steps` are more than the steps of all epochs.
        """
        epochs = self._epochs
        if epochs.counted:
            raise ConfigurationError(
                "run.epochs(...) was called a second time: a Run counts a single loop over epochs"
            )
        if count < 1 or (steps is not None and steps < 1):
            raise ConfigurationError(f"run.epochs({count}, steps={steps}): at least 1 each")
        self._position.reads += 1
        epochs.count, epochs.steps = count, steps
        epochs.require_enough(self.max_steps)
        while not (epochs.done or self.done):
            epochs.begin()
            yield self._position.epoch
            if not self.done:
                epochs.end()
                self._before_step = None
        epochs.end_all()

    @property
    def should_stop(self) -> bool:
        """Whether this rank was told to stop; for long work between steps.

        Each read is also a heartbeat. `step_completed` stops by itself and needs no check.
        """
        self.session.board.heartbeat.beat()
        return self.session.preemption.stopping

    def step_completed(self, loss: torch.Tensor | float | None = None, *, samples: int | None = None) -> bool:
        """Counts an optimizer step, and saves if due. Call it after each optimizer (and scheduler) step.

        On a stop request all ranks save at the same step, release HEAD and leave through SystemExit.
        A loop that goes on after `max_steps` is finished before its next optimizer step, as it was after the
        last one, and exits with code 0.

        Args:
            loss: loss of this step, one element, for log and progress. It is read from its device only when
                a log line or a save is due.
            samples: samples of this step over all ranks, if `data` does not know them.

        Returns:
            Whether to go on.

        Raises:
            ConfigurationError: an interruption would lose the position.
            TrainingFailed: the loss is NaN or infinite.
        """
        self._require_open()
        self._begin_step()  # from here on there is work to lose
        try:
            self._epochs.require_position(self.max_steps)
            self._count(loss, samples)
            stop = self._engine.boundary(self._position.step)
        except RunError as error:  # without `with` HEAD is released only here
            self._engine.failed(error)
            raise
        if stop:
            self._engine.stop()
        self._end_step()
        return not self.done

    def _begin_step(self, *_: Any) -> None:
        """Keeps other threads from saving. Waits for one that does, which then ends the process.

        Also called before each optimizer step. A loop that goes on after `max_steps` is finished here, as it
        was after the last step, and leaves through SystemExit.
        """
        if self._engine.ended:
            return
        self.session.enter(Phase.STEP)
        self._finished.forget()
        if self.done:
            if self._before_step is not None:
                self._before_step.restore()  # what the loop has begun since has changed running means
            self.finish()
            self.session.end(self.session.done)

    def _end_step(self) -> None:
        """Lets another thread save this step, should a stop come while the loop does something else."""
        if self.done:
            self._before_step = StepBoundary(self._module.modules(), self._position)
        phase, one_rank = Phase.BOUNDARY, not self.session.world.distributed
        if one_rank and self._position.is_cheap and self._engine.manager is not None:
            self._finished.keep(self._position)
            phase = Phase.BETWEEN
        self.session.enter(phase)

    def _count(self, loss: torch.Tensor | float | None, samples: int | None) -> None:
        self._state.live.note()
        position = self._position
        epoch = position.epoch if self._epochs.counted else position.epoch_of_data
        position.step += 1
        self.session.enter(Phase.BOUNDARY)
        position.advance()
        self._before_step = None
        self._loss = loss.detach() if isinstance(loss, torch.Tensor) else loss
        self._engine.count(
            position.step,
            loss=self._read_loss,
            rate=self._rate(),
            samples=position.samples if samples is None else samples,
            epoch=epoch,
        )

    def poll(self) -> None:
        """Stops within a step if requested. Call it before each micro-batch of a step that has several.

        It leaves through SystemExit; the partial step is dropped and repeated by the next attempt. With
        several ranks it does nothing: they stop together, between steps.
        """
        self._require_open()
        if self.session.world.distributed:
            return
        if self.should_stop:
            self.session.enter(Phase.STEP)
            if self._before_step is not None:
                self._before_step.restore()
            self._engine.stop()
        before = self._before_step
        if before is None or (not self.done and before.in_data != self._position.in_data):
            self._before_step = StepBoundary(self._module.modules(), self._position)

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yields batches, pass after pass, until `max_steps` are done.

        Within `epochs` it makes one pass, or yields as many batches as `epochs(steps=...)` needs.

        Args:
            loader: iterated once for each pass.

        Yields:
            The batches of `loader`.

        Raises:
            ConfigurationError: there is neither `max_steps` nor `epochs`, or the loader is empty.
        """
        epochs, position = self._epochs, self._position
        if position.drawn_by is DrawnBy.SCRIPT:
            position.drawn_by = DrawnBy.BATCHES
        if self.max_steps is None and not epochs.counted:
            raise ConfigurationError(
                "Run.batches needs an end: give Run(max_steps=...), or iterate in `for epoch in "
                "run.epochs(n)`"
            )
        if epochs.counted:
            epochs.begin_batches()
        if self.done or epochs.full:
            return
        for batch in self._passes_over(loader, once=epochs.counted and epochs.steps is None):
            position.taken += 1
            yield batch
            if self.done or epochs.full:
                return
        epochs.passed = True

    def _passes_over(self, loader: Iterable[Any], *, once: bool = False) -> Iterator[Any]:
        """Yields the batches of pass after pass, or of one. Raises ConfigurationError if there are none."""
        cursor = cursor_of(loader)
        empty = 0
        while empty < 2:  # the first may be the empty rest of an interrupted pass
            empty += 1
            for batch in timed(lambda: self._position.begin_pass(loader), self.session.board.clock):
                empty = 0
                yield batch
            self._position.passes += 1
            if cursor is not None and cursor.ahead:
                cursor.ended = cursor.begun
            if once:
                return
        raise ConfigurationError(
            f"the {type(loader).__name__} gave no batch in a whole pass: give it data, and see that "
            "drop_last leaves some"
        )

    def ahead(self, source: Iterable[Any] | Callable[[], Any]) -> Iterator[Any]:
        """Returns an endless iterator for a loop that draws its next batch before `step_completed`.

        A batch that was drawn and not used comes first in the next attempt. Create it once, after the Run.

            batches = run.ahead(lambda: get_batch("train"))
            batch = next(batches)
            while not run.done:
                loss = model(batch)
                batch = next(batches)    # while the GPU works
                loss.backward()
                optimizer.step()
                run.step_completed(loss=loss)

        Args:
            source: a function that makes a batch, or an iterable of batches, iterated pass after pass. A
                loader of `spottrain.data` resumes from its position; for others the batch itself is saved.

        Raises:
            ConfigurationError: it is called twice, or in a loop over `epochs`; or the source is empty.
        """
        if self._position.drawn_by is DrawnBy.AHEAD:
            raise ConfigurationError("run.ahead(...) was called a second time: the Run keeps one batch")
        if self._epochs.counted:
            raise ConfigurationError(
                "run.ahead(...) draws batches across the ends of epochs, so it cannot be used within "
                "run.epochs(...): create it before the loop, and count steps instead of epochs"
            )
        self._position.drawn_by, cursor = DrawnBy.AHEAD, cursor_of(source)
        if cursor is not None:
            cursor.ahead, self._position.drawn = True, []
        return self._draw(source, keep=cursor is None)

    def _draw(self, source: Iterable[Any] | Callable[[], Any], *, keep: bool) -> Iterator[Any]:
        yield from onto_devices(self._position.drawn)  # by the last attempt, which has not used it
        if isinstance(source, Iterator):  # a single pass
            batches: Iterable[Any] = source
        elif isinstance(source, Iterable):
            batches = self._passes_over(source)
        else:
            batches = (source() for _ in repeat(None))
        for batch in timed(lambda: self._position.known(batches), self.session.board.clock):
            if keep:
                self._position.drawn = [with_devices(batch)]
            yield batch

    def finish(self, *, ended_early: str | None = None) -> str:
        """Saves the last checkpoint and the final weights, and completes the job. Call it last.

        Under `spottrain run` it may be left out where the loop has done all its epochs or `max_steps`: then
        the end of the script finishes it.

        Args:
            ended_early: why training ends before `max_steps` or the last of its epochs, such as
                `EarlyStopping.reason`. The job then completes with the reason EarlyStopped. None: the Run
                looks for the reason itself. "": none.

        Returns:
            URI of the final weights; "" without a checkpoint URI.

        Raises:
            TrainingFailed: the training is shorter than it was asked for, and nothing says that it shall be.
                Its last step is saved.
            RunError: the run has ended before, the loss is NaN or infinite, or the store fails.
        """
        self._require_open()
        self._read_loss()
        why = self._early() if ended_early is None else ended_early
        if not why:
            self._require_whole_training()
        return self._engine.finish(self._final, self._state.trained_beside().keys(), ended_early=why)[0]

    def finish_ended(self) -> None:
        """Finishes a loop that has done all its epochs or steps.

        Raises RunError. Sharded weights need torch's process group, which the script may have destroyed by a
        function that it had imported before the Run was made.
        """
        group_left = self.session.world.distributed and not torch.distributed.is_initialized()
        if group_left and any(map(is_sharded, self._final().values())):
            raise ConfigurationError(
                "the weights are sharded, and the script has destroyed torch's process group, so they cannot "
                "be stored: call run.finish() before destroy_process_group()"
            )
        self.finish()

    def _finish_before_group_ends(self) -> None:
        """Has `destroy_process_group` finish an ended loop first: the group gathers sharded weights."""
        destroy = torch.distributed.destroy_process_group

        @functools.wraps(destroy)
        def finish_and_destroy(*args: Any, **options: Any) -> None:
            if self.ended_by_itself and not self._engine.ended and self.session.message is None:
                self.finish()
            destroy(*args, **options)

        patches.replace(torch.distributed, "destroy_process_group", finish_and_destroy)

    @property
    def ended_by_itself(self) -> bool:
        """Whether the loop has done all its steps or epochs."""
        return self.done or self._epochs.done

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._engine.ended:
            return
        if error is not None:
            self._engine.failed(error)
        elif not (self.ended_by_itself and self.session.script):  # `spottrain run` finishes such a loop
            log.event("not-finished", step=self._position.step, why="run.finish() was not called")
            self._engine.give_up()

    # --- private --------------------------------------------------------------------------------------
    def _require_whole_training(self) -> None:
        """Saves and raises TrainingFailed if fewer steps were trained than asked for."""
        epochs = self._epochs
        if self.done or (self.max_steps is None and (epochs.done or not epochs.counted)):
            return
        of = f"step {self._position.step} of max_steps={self.max_steps}"
        if self.max_steps is None:
            of = f"step {self._position.step}, in epoch {self._position.epoch} of run.epochs(...)"
        self._engine.give_up(save=True)
        kept = "The step is saved, and the next start goes on from it"
        if self.session.board.facts.lost_steps:
            kept = "The step is not saved"
        raise TrainingFailed(
            f"the loop has ended at {of}, so the training is shorter than it was asked for. {kept}: to train "
            "all iterate over run.batches(loader), or until run.done, without break; where it ends early on "
            "purpose say why by run.finish(ended_early=...)"
        )

    def _read_loss(self) -> float | None:
        """Raises TrainingFailed if the loss is NaN or infinite: such a state is not saved."""
        if self._loss is None:
            return None
        value = number_of_loss(self._loss)
        require_finite(value, self._position.step)
        return value

    def _require_open(self) -> None:
        if self._engine.ended and self.session.message is not None:
            self.session.end(self.session.done)  # a loop that goes on although it was told to leave
        if self._engine.ended:
            raise ConfigurationError("the Run has ended: nothing can be counted or saved after finish()")

    def _rate(self) -> float | None:
        """The learning rate of the first optimizer."""
        groups = next(iter(self._given.optimizers.values())).param_groups
        return float(groups[0]["lr"]) if groups and "lr" in groups[0] else None

    # --- what is saved --------------------------------------------------------------------------------
    def _position_in(self, data: Any) -> LoopPosition:
        return LoopPosition(data, self.session.world, self._given.objects.values())

    def _final(self) -> Mapping[str, Any]:
        weights = final_weights(self._given.model, self._state.averages, tell=self.session.world.first)
        return weights | self._state.trained_beside()

    def _early(self) -> str:
        """Reason of an EarlyStopping, else "". It is ignored once `max_steps` are done."""
        given = (each.reason for each in self._given.objects.values() if isinstance(each, EarlyStopping))
        return "" if self.done else next((reason for reason in given if reason), "")

    def _shared(self) -> dict[str, Any]:
        self._given.require_scheduler()
        saved = self._finished.saved
        tree = self._state.shared(saved)
        self._read_loss()
        place = self._position.shared() if saved is None else saved.place
        return tree | {"progress": self._engine.record() | place}

    def _own(self) -> dict[str, Any]:
        saved = self._finished.saved
        place = self._position.own() if saved is None else saved.own_place
        return place | self._state.own(saved)

    def _load(self, tree: Any, own: Any, new_rank: bool) -> None:
        """Restores a checkpoint. Raises CheckpointError if it does not match the arguments."""
        tree = self._state.load(tree, own, new_rank)
        self._load_progress(tree["progress"], own, new_rank)

    def _load_progress(self, saved: Mapping[str, Any], own: Mapping[str, Any], new_rank: bool) -> None:
        """Raises CheckpointError if the position in the data does not fit."""
        mismatch = self._position.load(saved, own, new_rank)
        if mismatch is not None:
            raise self._engine.incompatible(mismatch)
        self._engine.load_record(saved)
        self._engine.restore_random(None if new_rank else own["random"], self._position.step)

"""`Loop`: counts, saves and stops a custom training loop, whatever its checkpoints contain.

    begin: claim, restore -> [ step_completed after each step ] -> finish, or SystemExit on a stop request

A checkpoint of an epoch's last step does not cover what the loop does between two epochs (see `epochs`).
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self

import torch

from spottrain.checkpoint.kinds import CheckpointKind
from spottrain.core import device as devices
from spottrain.core import log, patches
from spottrain.core.time_split import timed
from spottrain.distributed.dtensor import is_sharded
from spottrain.errors import ConfigurationError, RunError, TrainingFailed
from spottrain.lifecycle.life import Phase
from spottrain.lifecycle.session import Session
from spottrain.training import job_settings
from spottrain.training.drawn_batch import onto_devices, require_same_type, with_devices
from spottrain.training.engine import Engine
from spottrain.training.epochs import LoopEpochs
from spottrain.training.finished_step import FinishedStep, FinishedSteps
from spottrain.training.metrics_log import require_finite
from spottrain.training.position import LoopPosition, cursor_of


class _Partial(devices.Boundary):
    """State to undo a partial step. `at`: position in the data; `drawn`: batches of `Loop.ahead`."""

    def __init__(self, modules: Iterable[torch.nn.Module], at: Any, drawn: list[Any]) -> None:
        super().__init__(modules)
        self.at, self.drawn = at, drawn


class Loop:
    """Counts the steps of a custom loop, saves it, and stops it.

    In a `with` statement an exception releases HEAD, and the loss of another rank is reported as such.
    """

    def __init__(self, *, data: Any, max_steps: int | None, log_every: int, session: Session) -> None:
        self.session = session
        self._engine = Engine(session)
        if log_every < 1 or (max_steps is not None and max_steps < 1):
            raise ConfigurationError(f"Run(max_steps={max_steps}, log_every={log_every}): at least 1 each")
        wanted = session.run.training.get("max_steps")
        if wanted is not None and wanted != max_steps:
            log.event("override", setting="max_steps", manifest=wanted, script=max_steps)
        self.max_steps = wanted or max_steps
        self._at_max_steps: devices.Boundary | None = None
        """State after the last step, for a loop that goes on."""
        self._step = 0
        self._data = LoopPosition(data, session.world)
        self._log_every = log_every
        self._loss: Any = None
        self._passes = 0
        self._epochs = LoopEpochs(self._data)
        self._in_batches = self._asked = False
        """Whether the loop has read its position; if not, it starts at 0 in each attempt."""
        self._counts_epochs = False
        """Whether the loop has read its epoch before its first pass, as `range(run.epoch, n)` does."""
        self._first_pass_after_resume = False
        """Whether it was restored and no pass has begun since."""
        self._draws_ahead = False
        self._drawn: list[Any] = []
        """The batch that `ahead` has drawn last, unless the position in the data is enough to draw it."""
        self._partial: _Partial | None = None
        self._finished: FinishedSteps | None = None
        """Set where another thread can save: with one rank, and a position that costs little to note."""
        self._saved_step: FinishedStep | None = None
        """The step that another thread saves."""

    # --- public ---------------------------------------------------------------------------------------
    @property
    def global_step(self) -> int:
        """Optimizer steps done, in all attempts."""
        self._asked = True
        return self._step

    @property
    def done(self) -> bool:
        """Whether `max_steps` are done; False without `max_steps`."""
        return self.max_steps is not None and self._step >= self.max_steps

    @property
    def epoch(self) -> int:
        """The epoch to start or continue, from 0; within `epochs` and `batches` the current one.

        It changes when the next epoch begins, not after an epoch's last step; also in a new attempt.

        Raises:
            ConfigurationError: nothing counts epochs.
        """
        self._asked = True
        if self._epochs.counted:
            return self._epochs.number
        known = self._data.epoch
        if known is not None:
            cursor = self._data.cursor
            self._counts_epochs |= cursor is not None and cursor.begun is None
            return known
        if self._in_batches:
            return self._passes
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
        self._epochs.skipped = True
        return self._step - self._epochs.began

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
        self._asked = epochs.counted = True
        epochs.steps = steps
        if self.max_steps is not None:
            epochs.require_enough(count, self._step, self.max_steps)
        while epochs.number < count and not self.done:
            epochs.begin(self._step)
            yield epochs.number
            self._end_epoch()
        epochs.end_all()

    def _end_epoch(self) -> None:
        """Moves on to the next epoch."""
        if not self.done:
            self._epochs.end(self._step)
        self._partial = None

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
        if self.done:
            self._end_at_max_steps()
        try:
            self._require_position()
            self._count(loss, samples)
            stop = self._engine.boundary(self._step)
        except RunError as error:  # without `with` HEAD is released only here
            self._engine.failed(error)
            raise
        if stop:
            self._engine.stop()
        if self.done:
            self._at_max_steps = devices.Boundary(self._module.modules())
        self._end_step()
        return not self.done

    def _end_at_max_steps(self) -> None:
        """Finishes a loop that goes on after `max_steps`, and leaves through SystemExit."""
        if self._at_max_steps is not None:
            self._at_max_steps.restore()  # what the loop has begun since has changed running means
        self.finish()
        self.session.end(self.session.done)

    def _end_step(self) -> None:
        """Lets another thread save this step, should a stop come while the loop does something else."""
        phase = Phase.BOUNDARY
        if self._finished is not None and self._engine.manager is not None:
            self._finished.keep(self._place, self._drawn)
            phase = Phase.BETWEEN
        self.session.enter(phase)

    def _begin_step(self) -> None:
        """Keeps other threads from saving. Waits for one that does, which then ends the process."""
        self.session.enter(Phase.STEP)
        if self._finished is not None:
            self._finished.forget()

    def _require_position(self) -> None:
        """Raises ConfigurationError for a loop whose position is not what is counted here.

        After an interruption it would train other samples, or another number of steps. Raised at its first
        step, or in its second pass.
        """
        if self._epochs.counted:
            self._epochs.require_position(self._step)
        elif self.max_steps is None and self._counts_epochs:
            raise ConfigurationError(
                "the loop counts its epochs by itself, as range(run.epoch, n) does, so how many passes it "
                "makes in each is not known: iterate `for epoch in run.epochs(n)`"
            )
        elif self.max_steps is None and not self._asked and (not self._data.given or self._data.epoch):
            raise ConfigurationError(
                "the loop does not read its position from the Run, so after an interruption it would "
                "start at step 0 again: iterate `for epoch in run.epochs(n)`, or until run.global_step "
                "is what you want, or give Run(max_steps=...)"
            )
        if self._data.of_loader and not (self._in_batches or self._draws_ahead):
            raise ConfigurationError(
                "the loop does not iterate over run.batches(...), so the Run does not know the passes over "
                "the loader that is given as data=, and a resume would draw other random numbers: write `for "
                "batch in run.batches(loader)`"
            )

    def _count(self, loss: torch.Tensor | float | None, samples: int | None) -> None:
        epoch = self._epochs.number if self._epochs.counted else self._data.epoch
        self._step += 1
        self.session.enter(Phase.BOUNDARY)
        self._data.advance(self._saved_besides())
        self._partial = None
        self._loss = loss.detach() if isinstance(loss, torch.Tensor) else loss
        self._engine.count(
            self._step,
            loss=self._read_loss,
            rate=self._rate(),
            samples=self._data.samples if samples is None else samples,
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
            if self._partial is not None:
                self._partial.restore()
                self._drawn = self._partial.drawn
            self._engine.stop()
        cursor = self._data.cursor
        at = None if cursor is None else cursor.position  # it moves on when an epoch begins
        if self._partial is None or self._partial.at != at:
            self._partial = _Partial(self._module.modules(), at, self._drawn)

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
        self._in_batches = True
        if self.max_steps is None and not self._epochs.counted:
            raise ConfigurationError(
                "Run.batches needs an end: give Run(max_steps=...), or iterate in `for epoch in "
                "run.epochs(n)`"
            )
        epochs = self._epochs
        if epochs.counted:
            epochs.read_position()
            epochs.require_one_pass()
        if self.done or epochs.full(self._step):
            return
        for batch in self._passes_over(loader, once=epochs.counted and epochs.steps is None):
            self._data.taken += 1
            yield batch
            if self.done or epochs.full(self._step):
                return
        epochs.passes += 1

    def _passes_over(self, loader: Iterable[Any], *, once: bool = False) -> Iterator[Any]:
        """Yields the batches of pass after pass, or of one. Raises ConfigurationError if there are none."""
        cursor = cursor_of(loader) if self._draws_ahead else None
        empty = 0
        while empty < 2:  # the first may be the empty rest of an interrupted pass
            empty += 1
            for batch in timed(lambda: self._known(self._pass(loader)), self.session.board.clock):
                empty = 0
                yield batch
            self._passes += 1
            if cursor is not None:
                cursor.ended = cursor.begun
            if once:
                return
        raise ConfigurationError(
            f"the {type(loader).__name__} gave no batch in a whole pass: give it data, and see that "
            "drop_last leaves some"
        )

    def _pass(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Begins a pass. The first one after a resume leaves the random state unchanged.

        What a loader draws for its workers and order was drawn when the interrupted pass began.

        Raises ConfigurationError if nothing of the position in the loader is saved.
        """
        if not (self._data.given or isinstance(loader, Iterator) or self._epochs.skipped):
            raise ConfigurationError(
                f"the loop iterates over a {type(loader).__name__}, of which nothing is saved, so each "
                "attempt would begin it again: write `data = spottrain.data.loader(dataset, ...)`, for "
                "batches of another kind `data = spottrain.data.Skipping(batches)`; then "
                "`spottrain.Run(data=data)` and run.batches(data) or run.ahead(data). Batches that are drawn "
                "at random each come from a generator or another iterator"
            )
        if not self._first_pass_after_resume or self._data.cursor is not None:
            return iter(loader)
        self._first_pass_after_resume, before = False, devices.random_state()
        stream = iter(loader)
        devices.set_random_state(before)
        return stream

    def _known(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yields the batches. Raises ConfigurationError if they do not follow from what is saved.

        The second one tells: without `data` it must be drawn from the random state, or from the position.
        """
        stream, others = iter(batches), self._saved_besides()
        if not (self._data.given or others is None or others or self._epochs.skipped):
            first = list(itertools.islice(stream, 1))
            yield from first
            before, asked, self._asked = devices.random_state(), self._asked, False
            second = list(itertools.islice(stream, 1))
            constant = all(map(operator.is_, first, second))
            if not (constant or self._asked or not devices.same(before, devices.random_state())):
                raise ConfigurationError(
                    "the batches are not drawn from the random numbers of Python, NumPy or torch, and "
                    "nothing else of their position is saved, so each attempt would begin with the first "
                    "one: give spottrain.Run(data=...) what they come from (spottrain.data.loader, or "
                    "spottrain.data.Skipping around a list or another loader), or a generator that they are "
                    "drawn with as extra={'generator': generator}"
                )
            self._asked |= asked
            yield from second
            del first, second
        yield from stream

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
        if self._draws_ahead:
            raise ConfigurationError("run.ahead(...) was called a second time: the Run keeps one batch")
        if self._epochs.counted:
            raise ConfigurationError(
                "run.ahead(...) draws batches across the ends of epochs, so it cannot be used within "
                "run.epochs(...): create it before the loop, and count steps instead of epochs"
            )
        self._draws_ahead, cursor = True, cursor_of(source)
        if cursor is not None:
            cursor.ahead, self._drawn = True, []
        return self._draw(source, keep=cursor is None)

    def _draw(self, source: Iterable[Any] | Callable[[], Any], *, keep: bool) -> Iterator[Any]:
        yield from list(self._drawn)  # by the last attempt, which has not used it
        if isinstance(source, Iterator):  # a single pass
            batches: Iterable[Any] = source
        elif isinstance(source, Iterable):
            batches = self._passes_over(source)
        else:
            batches = (source() for _ in itertools.repeat(None))
        for batch in timed(lambda: self._known(batches), self.session.board.clock):
            if keep:
                require_same_type(batch)
                self._drawn = [batch]
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
        return self._engine.finish(self._final, self._names_beside(), ended_early=why)[0]

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
            log.event("not-finished", step=self._step, why="run.finish() was not called")
            self._engine.give_up()

    # --- for subclasses -------------------------------------------------------------------------------
    def _final(self) -> Mapping[str, Any]:
        """The final weights, by name."""
        raise NotImplementedError

    def _names_beside(self) -> Collection[str]:
        """Names of those final weights that are not the model's own."""
        return ()

    def _early(self) -> str:
        """Why training ends before its last step, if known; else ""."""
        return ""

    def _unmoved(self) -> bool:
        """Whether the last finished step can be saved, which is then what is saved.

        The script may have drawn random numbers since.
        """
        unchanged = self._finished is not None and self._finished.unchanged
        self._saved_step = self._finished.last if self._finished is not None and unchanged else None
        return unchanged

    def _note_move(self, *_: Any) -> None:
        """Called before each optimizer step."""
        if not self._engine.ended:
            self._begin_step()
            if self.done:
                self._end_at_max_steps()

    def _saved_besides(self) -> Collection[Any] | None:
        """Objects that are saved beside `data`; None: any loader is taken."""
        return ()

    def _begin(
        self, kind: CheckpointKind, module: torch.nn.Module, optimizers: list[torch.optim.Optimizer]
    ) -> None:
        """Claims and restores. `module`: contains all modules with buffers, the model first."""
        self._module, self._torch_optimizers = module, optimizers
        self.session.loop = self
        if self.session.world.distributed and self.session.script:
            self._finish_before_group_ends()
        for each in optimizers:
            each.register_step_pre_hook(self._note_move)
        job_settings.advise(self.session)
        if not self._engine.begin(kind, total_steps=self.max_steps):
            self._initialize()
        first = next(module.parameters(), None)
        self._engine.start(
            step=self._step,
            total_steps=self.max_steps,
            device=torch.device("cpu") if first is None else first.device,
            log_every=self._log_every,
        )
        if self.done:  # the previous attempt did all steps, but ended before it stored the weights
            self.finish()
            self.session.end(self.session.done)

    def _initialize(self) -> None:
        """Loads the weights of `checkpoint.initFrom`, if any, at the first start."""
        raise NotImplementedError

    def _rate(self) -> float | None:
        """The learning rate of the first optimizer."""
        groups = self._torch_optimizers[0].param_groups if self._torch_optimizers else []
        return float(groups[0]["lr"]) if groups and "lr" in groups[0] else None

    def _place(self) -> dict[str, Any]:
        """Returns the position, as far as it is the same on all ranks."""
        return {
            "step": self._step,
            "passes": self._passes,
            "epoch": self._epochs.number,
            "epoch_began": self._epochs.began,
            "data": self._data.state() if self._data.shared else None,
        }

    def _progress(self) -> dict[str, Any]:
        self._read_loss()
        saved = self._saved_step
        return self._engine.record() | (self._place() if saved is None else saved.progress)

    def _own(self) -> dict[str, Any]:
        data, saved = None if self._data.shared else self._data.state(), self._saved_step
        random, drawn = (
            (devices.random_state(), self._drawn) if saved is None else (saved.random, saved.drawn)
        )
        epoch_random = self._epochs.random
        return {"random": random, "data": data, "ahead": with_devices(drawn), "epoch_random": epoch_random}

    def _load_progress(self, saved: Mapping[str, Any], own: Mapping[str, Any], new_rank: bool) -> None:
        """Raises CheckpointError if the position in the data does not fit."""
        mismatch = self._data.load(saved["data"] if self._data.shared else own["data"])
        if mismatch is not None:
            raise self._engine.incompatible(mismatch)
        self._step, self._passes = saved["step"], saved.get("passes", 0)
        self._epochs.number = saved.get("epoch", 0)
        self._epochs.began = saved.get("epoch_began", self._step)
        self._first_pass_after_resume = self._step > 0
        self._drawn = [] if new_rank else onto_devices(own.get("ahead", []))
        self._epochs.random = None if new_rank else own.get("epoch_random")
        self._engine.load_record(saved)
        self._engine.restore_random(None if new_rank else own["random"], self._step)

    # --- private --------------------------------------------------------------------------------------
    def _require_whole_training(self) -> None:
        """Saves and raises TrainingFailed if fewer steps were trained than asked for."""
        epochs = self._epochs
        if self.done or (self.max_steps is None and (epochs.done or not epochs.counted)):
            return
        of = f"step {self._step} of max_steps={self.max_steps}"
        if self.max_steps is None:
            of = f"step {self._step}, in epoch {epochs.number} of run.epochs(...)"
        self._engine.save_unfinished()
        self._engine.close()
        raise TrainingFailed(
            f"the loop has ended at {of}, so the training is shorter than it was asked for. The step is "
            "saved, and the next start goes on from it: to train all iterate over run.batches(loader), or "
            "until run.done, without break; where it ends early on purpose say why by "
            "run.finish(ended_early=...)"
        )

    def _read_loss(self) -> float | None:
        """Raises TrainingFailed if the loss is NaN or infinite: such a state is not saved."""
        if self._loss is None:
            return None
        if isinstance(self._loss, torch.Tensor) and self._loss.numel() != 1:
            raise ConfigurationError(
                f"run.step_completed(loss=...) has shape {tuple(self._loss.shape)}; give one number, "
                "such as its mean"
            )
        try:
            value = float(self._loss)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(
                f"run.step_completed(loss=...) is a {type(self._loss).__name__}; give one number, or None"
            ) from error
        require_finite(value, self._step)
        return value

    def _require_open(self) -> None:
        if self._engine.ended and self.session.message is not None:
            self.session.end(self.session.done)  # a loop that goes on although it was told to leave
        if self._engine.ended:
            raise ConfigurationError("the Run has ended: nothing can be counted or saved after finish()")

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
import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self

import torch

from spottrain.checkpoint import outside_parameters, plain_state
from spottrain.checkpoint.kinds import StateCheckpoints, TrainingState
from spottrain.core import device as devices
from spottrain.core import log, patches
from spottrain.core.time_split import timed
from spottrain.distributed.dtensor import is_sharded
from spottrain.errors import ConfigurationError, RunError, TrainingFailed
from spottrain.lifecycle.life import Phase
from spottrain.lifecycle.session import Session, current
from spottrain.techniques.early_stopping import EarlyStopping
from spottrain.techniques.trackers import Trackers
from spottrain.training import job_settings
from spottrain.training.drawn_batch import onto_devices, require_same_type, with_devices
from spottrain.training.engine import Engine
from spottrain.training.epochs import LoopEpochs
from spottrain.training.extra_state import adapted, final_weights
from spottrain.training.finished_step import FinishedStep, FinishedSteps
from spottrain.training.metrics_log import require_finite
from spottrain.training.position import LoopPosition, cursor_of, has_state
from spottrain.training.state_tree import MAIN, SCALER, StateTree, is_scaler


class _Partial(devices.Boundary):
    """State to undo a partial step. `at`: position in the data; `drawn`: batches of `Run.ahead`."""

    def __init__(self, modules: Iterable[torch.nn.Module], at: Any, drawn: list[Any]) -> None:
        super().__init__(modules)
        self.at, self.drawn = at, drawn


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
        self._at_max_steps: devices.Boundary | None = None
        """State after the last step, for a loop that goes on."""
        self._step = 0
        self._data = LoopPosition(data, session.world)
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
        self._model = _models(model)
        self._optimizers = _optimizers(optimizer)
        self._modules: dict[str, torch.nn.Module] = {}
        self._objects: dict[str, Any] = {}
        self._left_out: set[str] = set()
        self.extra = dict(extra) if isinstance(extra, Mapping) else {}
        """The given values, by name. Numbers and strings are read and written here."""
        for kind, given in (("scheduler", scheduler), (SCALER, scaler), ("extra", extra)):
            self._add(kind, given)
        given = model.values() if isinstance(model, Mapping | torch.nn.ModuleDict) else [model]
        self._state = StateTree(
            type(self).__name__,
            self._model,
            self._optimizers,
            self._modules,
            self._objects,
            left_out=self._left_out,
            dataset=getattr(data, "dataset", None),
            replicas=session.world.distributed and any(map(plain_state.replica, given)),
            regroups=True,
            over=lambda: self._engine.ended or self.ended_by_itself,
            incompatible=self._engine.incompatible,
        )
        self._require_whole(scheduler)
        self._engine.join()
        modules = [self._model, *self._modules.values()]
        self._module = torch.nn.ModuleList(modules)
        if not session.world.distributed and self._data.shared:
            self._finished = FinishedSteps(
                modules=modules,
                optimizers=self._optimizers,
                objects={name: each for name, each in self._objects.items() if not is_scaler(name)},
                loose=lambda: self._state.loose.values(),
            )
        self._begin(log_every)

    def _begin(self, log_every: int) -> None:
        """Claims and restores."""
        session = self.session
        session.loop = self
        if session.world.distributed and session.script:
            self._finish_before_group_ends()
        for each in self._optimizers.values():
            each.register_step_pre_hook(self._note_move)
        job_settings.advise(session)
        state = TrainingState(
            shared=self._shared,
            own=self._own,
            load=self._load,
            unmoved=self._unmoved,
            want=self._state.want(),
            by_rank0=self._state.by_rank0,
        )
        restored = self._engine.begin(StateCheckpoints(state, self._model), total_steps=self.max_steps)
        if not restored and self._engine.initialize(self._model):
            for average in self._state.averages.values():
                average.begin()  # it holds the weights from before
        first = next(self._module.parameters(), None)
        self._engine.start(
            step=self._step,
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
        self._state.live.note()
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
        return self._engine.finish(self._final, self._trained_beside().keys(), ended_early=why)[0]

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

    def _rate(self) -> float | None:
        """The learning rate of the first optimizer."""
        groups = next(iter(self._optimizers.values())).param_groups
        return float(groups[0]["lr"]) if groups and "lr" in groups[0] else None

    # --- what is saved --------------------------------------------------------------------------------
    def _require_whole(self, scheduler: Any) -> None:
        """Raises ConfigurationError unless all that is trained is saved."""
        for each in scheduler.values() if isinstance(scheduler, Mapping) else [scheduler]:
            outside_parameters.require_of(each, self._optimizers.values(), "Run(scheduler=...)")
        self._may_schedule = scheduler is not None or any(
            hasattr(each, "optimizer") for each in self._objects.values()
        )
        self._require_scheduler()

    def _require_scheduler(self) -> None:
        """Raises ConfigurationError if the script has made a torch scheduler that is not saved."""
        groups = [group for each in self._optimizers.values() for group in each.param_groups]
        if not self._may_schedule and any("initial_lr" in group for group in groups):
            raise ConfigurationError(
                "a torch scheduler was made for the optimizer, and the Run is not given it, so after an "
                f"interruption its rates would start again from the beginning: {self._give_scheduler}"
            )

    def _add(self, kind: str, given: Any) -> None:
        if isinstance(given, Mapping):
            named = {f"{kind}.{name}": each for name, each in given.items()}
        elif given is None and kind != SCALER:
            return
        elif kind == "extra":
            raise ConfigurationError(
                f"Run(extra=...) is a {type(given).__name__}: give it a dict of names, such as "
                "extra={'ema': ema}"
            )
        else:
            named = {kind: given}
        for name, each in named.items():
            if each is None:  # not used now, e.g. the scaler of fp16, or an average
                self._left_out.add(name)
            else:
                self._keep(kind, name, each)

    def _keep(self, kind: str, name: str, each: Any) -> None:
        if isinstance(each, EarlyStopping):
            job_settings.use_first_rank(each, self.session.world)
        if isinstance(each, Trackers):
            self._engine.close_at_end(each)
        if isinstance(each, torch.nn.Module):
            self._modules[name] = plain_state.plain(each)
        elif has_state(each):
            self._objects[name] = each
        elif kind == "extra" and (plain := adapted(self.extra, name.removeprefix("extra."))) is not None:
            self._objects[name] = plain
        else:
            raise ConfigurationError(
                f"Run: {name} is a {type(each).__name__} without state_dict() and load_state_dict(), "
                "so it cannot be saved; give it both, or leave it out"
                + ("; or give what is in it: numbers, tensors, dicts of them" if kind == "extra" else "")
            )

    def _saved_besides(self) -> Collection[Any] | None:
        """Objects that are saved beside `data`; None: any loader is taken."""
        return self._objects.values()

    def _final(self) -> Mapping[str, Any]:
        weights = final_weights(self._model, self._state.averages, tell=self.session.world.first)
        return weights | self._trained_beside()

    def _trained_beside(self) -> dict[str, Any]:
        """Trained tensors outside the model; not those that follow its weights, such as an average."""
        given = {id(p) for each in self._optimizers.values() for g in each.param_groups for p in g["params"]}
        found: dict[str, Any] = {
            f"{outside_parameters.LOOSE}.{name}": each for name, each in self._state.loose.items()
        }
        for name, module in self._modules.items():
            if given.intersection(map(id, module.parameters())):
                found |= {f"{name}.{n}": each for n, each in plain_state.model_state(module).items()}
        return found

    def _early(self) -> str:
        """Reason of an EarlyStopping, else "". It is ignored once `max_steps` are done."""
        given = (each.reason for each in self._objects.values() if isinstance(each, EarlyStopping))
        return "" if self.done else next((reason for reason in given if reason), "")

    def _place(self) -> dict[str, Any]:
        """Returns the position, as far as it is the same on all ranks."""
        return {
            "step": self._step,
            "passes": self._passes,
            "epoch": self._epochs.number,
            "epoch_began": self._epochs.began,
            "data": self._data.state() if self._data.shared else None,
        }

    def _shared(self) -> dict[str, Any]:
        self._require_scheduler()
        saved = self._saved_step
        tree = self._state.shared(saved)
        self._read_loss()
        place = self._place() if saved is None else saved.progress
        return tree | {"progress": self._engine.record() | place}

    def _own(self) -> dict[str, Any]:
        data, saved = None if self._data.shared else self._data.state(), self._saved_step
        random, drawn = (
            (devices.random_state(), self._drawn) if saved is None else (saved.random, saved.drawn)
        )
        position = {"random": random, "data": data, "ahead": with_devices(drawn)}
        return position | {"epoch_random": self._epochs.random} | self._state.own(saved)

    def _load(self, tree: Any, own: Any, new_rank: bool) -> None:
        """Restores a checkpoint. Raises CheckpointError if it does not match the arguments."""
        tree = self._state.load(tree, own, new_rank)
        self._load_progress(tree["progress"], own, new_rank)

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


def _models(given: Any) -> torch.nn.Module:
    """Returns one module; parameters of several are named `<key>.<parameter>`."""
    if isinstance(given, torch.nn.Module) and not isinstance(given, torch.nn.ModuleDict):
        return plain_state.plain(given)
    if not isinstance(given, Mapping | torch.nn.ModuleDict) or not given:
        raise ConfigurationError(
            f"Run(model=...) is {given!r:.80}; give a torch module, or a dict of modules"
        )
    try:
        return torch.nn.ModuleDict({name: plain_state.plain(each) for name, each in given.items()})
    except (KeyError, TypeError) as error:
        raise ConfigurationError(
            f"Run(model=...): {error}; give a dict of names and torch modules"
        ) from error


def _optimizers(given: Any) -> dict[str, torch.optim.Optimizer]:
    named = dict(given) if isinstance(given, Mapping) else {MAIN: given}
    for name, each in named.items():
        each = getattr(each, "optimizer", each)  # unwraps Accelerate's optimizer
        if not isinstance(each, torch.optim.Optimizer):
            raise ConfigurationError(
                f"Run(optimizer=...): {name} is a {type(each).__name__}; give a torch optimizer, or a dict "
                "of several"
            )
        named[name] = each
    if not named:
        raise ConfigurationError("Run(optimizer={}) is empty; give a torch optimizer, or a dict of them")
    return named

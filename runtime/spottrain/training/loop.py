"""What every loop that is not ours has in common, whatever its checkpoints are made of. Base of `run.Run`
and of `integrations.accelerate.AccelerateRun`.

    begin: claim, restore -> [ step_completed after each step ] -> finish, or SystemExit when told to stop

A checkpoint of an epoch's last step is of before what the loop does between two epochs (`epochs`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Final, NoReturn, Self

import torch

from spottrain.checkpoint import plain_state
from spottrain.contract import Outcome
from spottrain.core import device as devices
from spottrain.core import log
from spottrain.data.sampler import Cursor
from spottrain.diagnostics.background import Beside
from spottrain.distributed import process_group
from spottrain.distributed.world import World
from spottrain.errors import CheckpointError, ConfigurationError, PeerLost, RunError
from spottrain.lifecycle.coordinator import Keeper
from spottrain.lifecycle.session import Session
from spottrain.lifecycle.worker_signals import protect
from spottrain.training import job_settings
from spottrain.training.metrics_log import Meter, require_finite

COUNTING: Final = ("advance", "state_dict", "load_state_dict")
STATEFUL: Final = COUNTING[1:]
_TENSOR: Final = "tensor of a batch"


class LoopPosition:
    """The position in the data: of what `advance` is told to, or of a loader with a state of its own."""

    def __init__(self, given: Any, world: World) -> None:
        self._world = world
        self._object = _with_state(given)
        self._counts = hasattr(self._object, "advance")
        self.given = given is not None
        self.shared = given is None or self._counts or bool(getattr(self._object, "elastic", False))
        """Whether its state is the same on all ranks."""

    def advance(self) -> None:
        if self._counts:
            self._object.advance(1)

    @property
    def epoch(self) -> int | None:
        """None where only the loop knows."""
        position = getattr(self._object, "position", None) if self._counts else None
        return getattr(position, "epoch", None)

    @property
    def cursor(self) -> Cursor | None:
        """Of what `advance` is told to, if it is of `spottrain.data`."""
        return cursor_of(self._object)

    @property
    def samples(self) -> int:
        """Of a step, all ranks together; 0: not known."""
        return 0 if self.cursor is None else self.cursor.plan.batch_size

    def state(self) -> dict[str, Any] | None:
        if self._object is None:
            return None
        return {"ranks": self._world.size, "state": self._object.state_dict()}

    def load(self, saved: Mapping[str, Any] | None) -> str | None:
        """None, or a sentence that says why it does not fit. Raises CheckpointError."""
        if (saved is None) != (self._object is None):
            was, now = ("none", "some") if saved is None else ("some", "none")
            return f"it was made with {was} for data=, and now there is {now}"
        if saved is None:
            return None
        if not self.shared and saved["ranks"] != self._world.size:
            return (
                f"{type(self._object).__name__} has a position for each rank, of which there were "
                f"{saved['ranks']} and are {self._world.size}; go on with as many, or use "
                "spottrain.data.loader"
            )
        self._object.load_state_dict(saved["state"])
        return None


def _with_state(given: Any) -> Any:
    """What keeps the position: the object itself, or the sampler inside of a DataLoader."""
    for found in (given, getattr(given, "batch_sampler", None), getattr(given, "sampler", None)):
        if all(hasattr(found, name) for name in COUNTING):
            protect(given)
            return found
    if given is None or all(hasattr(given, name) for name in STATEFUL):
        protect(given)
        return given
    raise ConfigurationError(
        f"Run(data=...) is a {type(given).__name__} without state_dict() and load_state_dict(), so it "
        "cannot go on where it was; use spottrain.data.loader(dataset, batch_size=...) in its place, a "
        "DataLoader over a spottrain.data.BatchSampler, or torchdata's StatefulDataLoader"
    )


def cursor_of(data: Any) -> Cursor | None:
    """The position of a loader or sampler of `spottrain.data`, or of a DataLoader over one."""
    for each in (data, *(getattr(data, name, None) for name in ("requests", "batch_sampler", "sampler"))):
        if isinstance(each, Cursor):
            return each
    return None


class Ahead:
    """What `Loop.ahead` gives: an iterator that keeps the last batch it has given, which is not used yet."""

    def __init__(
        self,
        source: Iterable[Any] | Callable[[], Any],
        saved: list[Any],
        begin: Callable[[Iterable[Any]], Iterator[Any]],
    ) -> None:
        self._begin = begin
        self._cursor = cursor_of(source)
        if self._cursor is not None:
            self._cursor.ahead = True
        self._first = deque(_onto_devices(saved))
        self.drawn: list[Any] = list(self._first)
        self._draw = self._passes(source) if isinstance(source, Iterable) else _calls(source)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        batch = self._first.popleft() if self._first else next(self._draw)
        self.drawn = [batch]
        return batch

    @property
    def kept(self) -> list[Any]:
        """For the checkpoint: nothing where the position says it all."""
        return [] if self._cursor is not None else _with_devices(self.drawn)

    def _passes(self, source: Iterable[Any]) -> Iterator[Any]:
        if isinstance(source, Iterator):  # it has one
            yield from source
            return
        empty = 0
        while empty < 2:  # one may be what is left of an epoch that had ended
            empty += 1
            for batch in self._begin(source):
                empty = 0
                yield batch
            if self._cursor is not None:
                self._cursor.ended = self._cursor.begun
        raise ConfigurationError(
            f"run.ahead(...): the {type(source).__name__} gave no batch in a whole pass: give it data, and "
            "see that drop_last leaves some"
        )


def _calls(make: Callable[[], Any]) -> Iterator[Any]:
    while True:
        yield make()


class _Partial(devices.Boundary):
    """What a step that is dropped has changed. `at`: the position; `drawn`: of `Loop.ahead`."""

    def __init__(self, buffers: list[torch.Tensor], at: Any, drawn: list[Any] | None) -> None:
        super().__init__(buffers)
        self.at, self.drawn = at, drawn or []


def _with_devices(value: Any) -> Any:
    """A batch as a checkpoint holds it: each tensor with the kind of its device."""
    return _mapped(value, lambda tensor: {_TENSOR: tensor.detach(), "device": tensor.device.type})


def _onto_devices(value: Any) -> Any:
    """The batch again, each tensor on this rank's device of its kind. Raises ConfigurationError."""
    if isinstance(value, Mapping) and _TENSOR in value:
        return value[_TENSOR].to(value["device"])
    if isinstance(value, Mapping):
        return {key: _onto_devices(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_onto_devices(item) for item in value)
    return value


def _mapped(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _mapped(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        made = [_mapped(item, change) for item in value]
        return made if isinstance(value, list) else tuple(made)
    return value


class Loop:
    """In a `with` statement an exception gives HEAD up, and the loss of another rank is told as such."""

    keeper: Keeper
    _beside: Beside | None = None
    """From the restore on, where there is something left to do."""

    def __init__(self, *, data: Any, max_steps: int | None, log_every: int, session: Session) -> None:
        self.session = session
        if session.completed:
            raise ConfigurationError("a second Run in one run: a run trains once; make it two scripts")
        if log_every < 1 or (max_steps is not None and max_steps < 1):
            raise ConfigurationError(f"Run(max_steps={max_steps}, log_every={log_every}): at least 1 each")
        wanted = session.run.training.maxSteps
        if wanted is not None and wanted != max_steps:
            log.event("override", setting="max_steps", manifest=wanted, script=max_steps)
        self.max_steps = wanted or max_steps
        self._endless = max_steps is None or (wanted is not None and wanted < max_steps)
        self._output: str | None = None
        """Where the final weights are, of a loop without an end of its own that `max_steps` has ended."""
        self._step = 0
        self._data = LoopPosition(data, session.world)
        self._log_every = log_every
        self._loss: Any = None
        self._passes = 0
        self._moved = False
        self._epoch, self._epoch_began = 0, 0
        """Of `epochs`: the epoch, and the step at which it began."""
        self._epoch_steps: int | None = None
        """Steps of each epoch, where the loop says so."""
        self._in_epochs = self._in_batches = False
        self._asked = self._asked_step_of_epoch = False
        """Whether the loop has asked how far it is; one that has not begins anew in each attempt."""
        self._goes_on = False
        """Whether it was restored, and no pass has begun since."""
        self._ahead: Ahead | None = None
        self._saved_ahead: list[Any] = []
        self._partial: _Partial | None = None
        self._ended = False

    # --- of the person's loop -------------------------------------------------------------------------
    @property
    def global_step(self) -> int:
        """Optimizer steps done, of all attempts."""
        self._asked = True
        return self._step

    @property
    def done(self) -> bool:
        """Whether `max_steps` are done."""
        return self.max_steps is not None and self._step >= self.max_steps

    @property
    def epoch(self) -> int:
        """The epoch to begin or go on with; in `epochs` and `batches` the present one. After an epoch's last
        step it stays that epoch's until the next one begins, in a new attempt too.

        Raises ConfigurationError where nothing counts epochs.
        """
        self._asked = True
        if self._in_epochs:
            return self._epoch
        known = self._data.epoch
        if known is not None:
            self._count_whole_passes()
            return known
        if self._in_batches:
            return self._passes
        raise ConfigurationError(
            "run.epoch is not known: Run(data=...) was not given spottrain.data.loader(...), which "
            "counts epochs; iterate `for epoch in run.epochs(n)`, which counts them whatever the data are"
        )

    @property
    def epoch_step(self) -> int:
        """Optimizer steps done in the present epoch, in all attempts. Raises ConfigurationError."""
        if not self._in_epochs:
            raise ConfigurationError(
                "run.epoch_step is of an epoch that run.epochs(...) gives: iterate `for epoch in "
                "run.epochs(n)`"
            )
        self._asked_step_of_epoch = True
        return self._step - self._epoch_began

    def epochs(self, count: int, *, steps: int | None = None) -> Iterator[int]:
        """The epochs that are left of `count`: `for epoch in run.epochs(10)`.

        The first one may be partly done, or done but for what the loop does after its steps (validation, the
        step of a scheduler by epochs): the loop over its batches then has only the rest of them, or none, and
        what follows is done in any case. What was done between two epochs is done again only where the first
        step after it was not saved.
        steps: optimizer steps of an epoch, where it is not a pass over the data; then iterate over
        `run.batches(loader)`, which ends with the epoch.
        Raises ConfigurationError where the position in an epoch would be lost by an interruption.
        """
        if self._in_epochs:
            raise ConfigurationError("run.epochs(...) was called a second time: the Run counts one loop")
        if count < 1 or (steps is not None and steps < 1):
            raise ConfigurationError(f"run.epochs({count}, steps={steps}): at least 1 each")
        self._asked = self._in_epochs = True
        self._epoch_steps = steps
        if steps is None and self._data.epoch is not None:
            self._epoch = self._data.epoch  # a checkpoint of a loop over range(run.epoch, n) has no other
        while self._epoch < count and not self.done:
            yield self._epoch
            self._end_epoch()

    def _end_epoch(self) -> None:
        """The loop has done all that belongs to an epoch."""
        cursor = self._data.cursor
        if cursor is not None and self._epoch_steps is None and not self.done:
            if not cursor.over:
                raise ConfigurationError(
                    f"the loop over epoch {self._epoch} was left after {cursor.position.sample} of its "
                    f"{cursor.plan.samples_per_epoch} samples: an attempt that goes on at that step would do "
                    "the rest of them. Iterate `for epoch in run.epochs(n, steps=...)` and `for batch in "
                    "run.batches(loader)`, which ends each epoch after so many steps, without break"
                )
            cursor.begin_epoch()
        self._epoch, self._epoch_began = self._epoch + 1, self._step
        self._partial = None

    @property
    def _epoch_over(self) -> bool:
        return self._epoch_steps is not None and self._step - self._epoch_began >= self._epoch_steps

    def _count_whole_passes(self) -> None:
        """A loop over range(run.epoch, n) counts by passes; one that looks at it on its way does not."""
        cursor = self._data.cursor
        if cursor is not None and cursor.begun is None and self.max_steps is None:
            cursor.counted = True

    @property
    def should_stop(self) -> bool:
        """Whether this rank was told to stop. `step_completed` leaves by itself; for long work between
        steps, of which it is a sign of life (`heartbeat`)."""
        self.session.board.pulse.beat()
        return self.session.interruption.stopping

    def step_completed(self, loss: torch.Tensor | float | None = None, *, samples: int | None = None) -> bool:
        """After each optimizer step (and the scheduler's): counts it, and saves when that is due.

        Told to stop it saves, gives HEAD up and leaves through SystemExit; all ranks at the same step.
        Where the loop has no end of its own, or a later one, and the manifest has one, the step that reaches
        it is the last: it finishes, and a loop that goes on all the same is left with 0.
        loss: of this step, for log and progress; not read from its device before a line is due.
        samples: of this step, all ranks together, where `data` does not know. Answers whether to go on.
        """
        self._require_open()
        self.session.interruption.let_end(None)  # from here on there is work to lose
        if self.done:
            self._close()  # a profile is still being stored
            raise ConfigurationError(
                f"max_steps={self.max_steps} are done, and the loop goes on: leave it when step_completed() "
                "returns False, or iterate over run.batches(loader)"
            )
        try:
            self._require_position()
            self._count(loss, samples)
            stop = self.keeper.boundary(self._step)
        except RunError as error:  # ours, and it ends the run: nobody else may be there to give HEAD up
            self._give_up(error)
            raise
        if stop:
            self._interrupted()
        if self.done and self._endless:
            self._output = self.finish()  # now: a loop that does not look at the answer trains on
        return not self.done

    def _require_position(self) -> None:
        """Raises ConfigurationError for a loop that begins anew in each attempt, and so would train more
        steps after an interruption than without one: at its first step, or in its second epoch."""
        if self._in_epochs:
            by_itself = self._data.given or self._epoch_steps is not None
            if not by_itself and not self._asked_step_of_epoch:
                raise ConfigurationError(
                    "Run has no data=, and the loop does not ask where in the epoch it is, so an attempt "
                    "that goes on in an epoch's middle would begin it anew: leave out what is done, by "
                    "run.epoch_step optimizer steps (such as accelerator.skip_first_batches(loader, "
                    "run.epoch_step * accumulation)), or give Run(data=spottrain.data.loader(...))"
                )
            return
        begins_anew = not self._data.given or bool(self._data.epoch)
        if begins_anew and self.max_steps is None and not self._asked:
            raise ConfigurationError(
                "the loop does not ask the Run how far the training is, so after an interruption it would "
                "begin to count at 0 again: iterate `for epoch in run.epochs(n)`, or until run.global_step "
                "is what you want, or give Run(max_steps=...)"
            )

    def _count(self, loss: torch.Tensor | float | None, samples: int | None) -> None:
        epoch = self._epoch if self._in_epochs else self._data.epoch
        self._step += 1
        self._moved = False
        self._data.advance()
        self._partial = None
        self._loss = loss.detach() if isinstance(loss, torch.Tensor) else loss
        self._meter.note(
            self._step,
            self._read_loss,
            rate=self._rate(),
            samples=self._data.samples if samples is None else samples,
            epoch=epoch,
        )
        if self._beside is not None:
            self._beside.step()

    def poll(self) -> None:
        """Before each micro-batch of a step that has several: leaves inside of the step, which is dropped.

        With several ranks it does nothing: they stop together, between steps.
        """
        self._require_open()
        if self.session.world.distributed:
            return
        if self.should_stop:
            self.session.interruption.let_end(None)
            if self._partial is not None:
                self._partial.restore()
                if self._ahead is not None:
                    self._ahead.drawn = self._partial.drawn
            self._interrupted()
        cursor = self._data.cursor
        at = None if cursor is None else cursor.position  # it moves on when an epoch begins
        if self._partial is None or self._partial.at != at:
            buffers = devices.saved_buffers(self._module())
            self._partial = _Partial(buffers, at, None if self._ahead is None else self._ahead.drawn.copy())

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Batches, pass after pass, until `max_steps` are done; in a loop over `epochs` one pass, or as many
        as the steps of an epoch need."""
        self._in_batches, whole = True, self._in_epochs and self._epoch_steps is None
        if self.max_steps is None and not self._in_epochs:
            raise ConfigurationError(
                "Run.batches needs an end: give Run(max_steps=...), or iterate in `for epoch in "
                "run.epochs(n)`"
            )
        empty, self._endless = 0, False  # the loop is ended here, and finishes by itself
        while not self.done and not self._epoch_over:
            empty += 1
            for batch in self._pass(loader):
                empty = 0
                yield batch
                if self.done or self._epoch_over:
                    return
            self._passes += 1
            if whole:
                return
            if empty > 1:  # one may be what was left of the pass in which the last attempt was interrupted
                raise ConfigurationError(
                    f"the {type(loader).__name__} gave no batch in a whole pass: give it data, and see that "
                    "drop_last leaves some"
                )

    def _pass(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The first one of an attempt that goes on draws nothing: what a loader draws from the random state
        for its workers and its order was drawn when the pass was begun that it goes on in."""
        if not self._goes_on or self._data.cursor is not None:
            return iter(loader)
        self._goes_on, before = False, devices.random_state()
        stream = iter(loader)
        devices.set_random_state(before)
        return stream

    def ahead(self, source: Iterable[Any] | Callable[[], Any]) -> Iterator[Any]:
        """For a loop that draws its next batch before it calls `step_completed`: what was drawn and not used
        comes first in the next attempt. It has no end of its own.

            batches = run.ahead(lambda: get_batch("train"))
            batch = next(batches)
            while not run.done:
                loss = model(batch)
                batch = next(batches)    # while the GPU works
                loss.backward()
                optimizer.step()
                run.step_completed(loss=loss)

        source: a function that makes a batch, or what gives batches, pass after pass: a loader of
        `spottrain.data`, which goes on by its position, or another one, of which the batch itself is saved.
        Call it after the Run is made, once. Raises ConfigurationError.
        """
        if self._ahead is not None:
            raise ConfigurationError("run.ahead(...) was called a second time: the Run keeps one batch")
        if self._in_epochs:
            raise ConfigurationError(
                "run.ahead(...) draws over the ends of epochs, and the loop is one over run.epochs(...): "
                "call it before that, and count by steps"
            )
        self._ahead = Ahead(source, self._saved_ahead, self._pass)
        return self._ahead

    def finish(self, *, ended_early: str | None = None) -> str:
        """After the last step: last checkpoint, final weights, and the job is done. Answers their URI.

        ended_early: why it ends before `max_steps`, as `EarlyStopping.reason` says it: the job is done then
        too, for the reason EarlyStopped. None: by what the Run knows itself; "": it is just done.
        """
        if self._output is not None:
            return self._output
        self._require_open()
        self._read_loss()
        self._ended = True
        why = self._early() if ended_early is None else ended_early
        self.session.board.update(ended_early=why)
        if ended_early is None and not why and self.max_steps is not None and not self.done:
            self._tell_short(self.max_steps)
        try:
            return self.keeper.finish(self._final, self._names_beside())[0]
        finally:
            self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._ended:
            return
        if error is None:
            log.event("not-finished", step=self._step, why="run.finish() was not called")
        self._give_up(error)

    # --- for the kinds of it --------------------------------------------------------------------------
    def _module(self) -> torch.nn.Module:
        """All that has buffers, the model first."""
        raise NotImplementedError

    def _final(self) -> Mapping[str, Any]:
        """The weights to leave, by name."""
        raise NotImplementedError

    def _names_beside(self) -> Collection[str]:
        """Names, in the weights to leave, of what is not the model's own."""
        return ()

    def _rate(self) -> float | None:
        """The learning rate."""
        raise NotImplementedError

    def _early(self) -> str:
        """Why it ends before its last step, where that is known; else ""."""
        return ""

    def _optimizers_of_torch(self) -> Iterable[torch.optim.Optimizer]:
        raise NotImplementedError

    def _intact(self) -> bool:
        """Whether no optimizer has stepped since the last `step_completed`: that step is not counted yet."""
        return not self._moved

    def _note_move(self, *_: Any) -> None:
        self._moved = True

    def _begin(self, keeper: Keeper) -> None:
        session = self.session
        self.keeper = keeper
        for each in self._optimizers_of_torch():
            each.register_step_pre_hook(self._note_move)
        session.board.update(total_steps=self.max_steps or 0, step=0)
        job_settings.advise(session, ("max_steps",))
        try:
            keeper.begin()
            if not self.done:
                self._beside = self._make_beside()
        except BaseException as error:
            self._give_up(error)
            raise
        self._meter = Meter(
            session.board,
            born=session.born,
            total_steps=self.max_steps,
            log_every=self._log_every,
            world=session.world,
        )
        session.board.update(state="Training")
        if self.done:
            self._done_already()

    def _progress(self) -> dict[str, Any]:
        self._read_loss()
        return {
            "step": self._step,
            "passes": self._passes,
            "epoch": self._epoch,
            "epoch_began": self._epoch_began,
            "trained": self.keeper.trained,
            "data": self._data.state() if self._data.shared else None,
        }

    def _own(self) -> dict[str, Any]:
        data = None if self._data.shared else self._data.state()
        drawn = [] if self._ahead is None else self._ahead.kept
        return {"random": devices.random_state(), "data": data, "ahead": drawn}

    def _load_progress(self, saved: Mapping[str, Any], own: Mapping[str, Any], new_rank: bool) -> None:
        """Raises CheckpointError."""
        mismatch = self._data.load(saved["data"] if self._data.shared else own["data"])
        if mismatch is not None:
            raise self._incompatible(mismatch)
        self._step, self._passes = saved["step"], saved["passes"]
        self._epoch, self._epoch_began = saved.get("epoch", 0), saved.get("epoch_began", self._step)
        self._goes_on = self._step > 0
        self._saved_ahead = [] if new_rank else own.get("ahead", [])
        self.keeper.trained = saved["trained"]
        devices.set_random_state(own["random"])
        if new_rank:
            log.event("new-rank", why="the checkpoint has no random state of this rank; it gets a fresh one")
            devices.seed_rank(self.session.world.rank + self._step)

    def _incompatible(self, why: str) -> CheckpointError:
        return plain_state.incompatible(self.session.run.checkpoint_uri, why)

    # --- inside ---------------------------------------------------------------------------------------
    def _tell_short(self, max_steps: int) -> None:
        """A loop may end early on purpose; one with an end of its own ends so where the manifest has more."""
        text = (
            f"the loop has ended at step {self._step} of max_steps={max_steps}, and the job is done: to "
            "train them all iterate over run.batches(loader), or until run.done; where it ends early on "
            "purpose say so by run.finish(ended_early=...)"
        )
        if self.session.world.first:
            log.event("advice", about="max-steps", text=text)

    def _make_beside(self) -> Beside:
        """Raises ConfigurationError where the window of a profile ends after the run."""
        first = next(self._module().parameters(), None)
        device = None if first is None else first.device
        return Beside(self.session, start=self._step, total_steps=self.max_steps, device=device)

    def _interrupted(self) -> NoReturn:
        self._ended = True
        try:
            self.keeper.ends.interrupted()
        finally:  # a notice is short: what was trained is safe by now
            self._close()

    def _close(self) -> None:
        """At every end, maybe twice."""
        if self._beside is not None:
            self._beside.close()

    def _read_loss(self) -> float | None:
        """Raises TrainingFailed where it is no number: such a state is not saved."""
        if self._loss is None:
            return None
        if isinstance(self._loss, torch.Tensor) and self._loss.numel() != 1:
            raise ConfigurationError(
                f"run.step_completed(loss=...) has shape {tuple(self._loss.shape)}; give one number, "
                "such as its mean"
            )
        value = float(self._loss)
        require_finite(value, self._step)
        return value

    def _require_open(self) -> None:
        if self._output is not None:  # the manifest's maxSteps are done and stored, and the loop goes on
            self.session.end(Outcome.DONE, self.session.summary(), reason=self.session.reason_done)
        if self._ended:
            raise ConfigurationError("the Run has ended: nothing can be counted or saved after finish()")

    def _done_already(self) -> NoReturn:
        """The attempt before has done all steps, and was ended before it could leave the weights."""
        self.finish()
        self.session.end(Outcome.DONE, self.session.summary(), reason=self.session.reason_done)

    def _peer_lost(self, error: BaseException) -> PeerLost | None:
        return process_group.peer_lost(error, self.session.world, self.session.peer_gone)

    def _give_up(self, error: BaseException | None) -> None:
        self._ended = True
        if error is not None and (lost := self._peer_lost(error)) is not None:
            self.keeper.end_without(lost)
        if error is not None:
            self.session.broken_by_stop(error)
        self.keeper.ends.give_up()
        self._close()

"""What every loop that is not ours has in common, whatever its checkpoints are made of. Base of `guard.Guard`
and of `integrations.accelerate.Guard`.

    begin: claim, restore -> [ advance after each optimizer step ] -> finish, or SystemExit when told to stop
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Final, NoReturn, Self

import torch

from spottrain import device as devices
from spottrain import log, ownloop
from spottrain.beside import Beside
from spottrain.checkpoint import modelstate
from spottrain.contract import Outcome
from spottrain.data.fetch import protect
from spottrain.errors import CheckpointError, ConfigurationError, PeerLost, RunError
from spottrain.keeper import Keeper
from spottrain.meter import Meter, require_finite
from spottrain.process.session import Session
from spottrain.ranks import parallel
from spottrain.ranks.world import World

COUNTING: Final = ("advance", "state_dict", "load_state_dict")
STATEFUL: Final = COUNTING[1:]


class Data:
    """The position in the data: of what `advance` is told to, or of a loader with a state of its own."""

    def __init__(self, given: Any, world: World) -> None:
        self._world = world
        self._object = _with_state(given)
        self._counts = hasattr(self._object, "advance")
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
    def samples(self) -> int:
        """Of a step, all ranks together; 0: not known."""
        plan = getattr(getattr(self._object, "requests", self._object), "plan", None)
        return int(getattr(plan, "batch_size", 0))

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
        f"Guard(data=...) is a {type(given).__name__} without state_dict() and load_state_dict(), so it "
        "cannot go on where it was; use spottrain.data.loader(dataset, batch_size=...) in its place, a "
        "DataLoader over a spottrain.data.BatchSampler, or torchdata's StatefulDataLoader"
    )


class Loop:
    """`step`: optimizer steps done, of all attempts.

    In a `with` statement an exception gives HEAD up, and the loss of another rank is told as such.
    """

    keeper: Keeper
    _beside: Beside | None = None
    """From the restore on, where there is something left to do."""

    def __init__(self, *, data: Any, max_steps: int | None, log_every: int, session: Session) -> None:
        self.session = session
        if session.completed:
            raise ConfigurationError("a second Guard in one run: a run trains once; make it two scripts")
        if log_every < 1 or (max_steps is not None and max_steps < 1):
            raise ConfigurationError(f"Guard(max_steps={max_steps}, log_every={log_every}): at least 1 each")
        wanted = session.run.training.maxSteps
        if wanted is not None and wanted != max_steps:
            log.event("override", setting="max_steps", manifest=wanted, script=max_steps)
        self.max_steps = wanted or max_steps
        self._endless = max_steps is None or (wanted is not None and wanted < max_steps)
        self._output: str | None = None
        """Where the final weights are, of a loop without an end of its own that `max_steps` has ended."""
        self.step = 0
        self._data = Data(data, session.world)
        self._log_every = log_every
        self._loss: Any = None
        self._passes = 0
        self._moved = False
        self._partial: devices.Boundary | None = None
        self._ended = False

    # --- of the person's loop -------------------------------------------------------------------------
    @property
    def done(self) -> bool:
        """Whether `max_steps` are done."""
        return self.max_steps is not None and self.step >= self.max_steps

    @property
    def epoch(self) -> int:
        """The epoch to begin or go on with: `for epoch in range(guard.epoch, epochs)`."""
        known = self._data.epoch
        return self._passes if known is None else known

    @property
    def should_stop(self) -> bool:
        """Whether this rank was told to stop. `advance` leaves by itself; for long work between steps, of
        which it is a sign of life (`pulse`)."""
        self.session.board.pulse.beat()
        return self.session.interruption.stopping

    def advance(self, loss: torch.Tensor | float | None = None, *, samples: int | None = None) -> bool:
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
                f"max_steps={self.max_steps} are done, and the loop goes on: leave it when advance() answers "
                "False, or iterate over guard.batches(loader)"
            )
        try:
            self._count(loss, samples)
            stop = self.keeper.boundary(self.step)
        except RunError as error:  # ours, and it ends the run: nobody else may be there to give HEAD up
            self._give_up(error)
            raise
        if stop:
            self._interrupted()
        if self.done and self._endless:
            self._output = self.finish()  # now: a loop that does not look at the answer trains on
        return not self.done

    def _count(self, loss: torch.Tensor | float | None, samples: int | None) -> None:
        epoch = self._data.epoch
        self.step += 1
        self._moved = False
        self._data.advance()
        self._partial = None
        self._loss = loss.detach() if isinstance(loss, torch.Tensor) else loss
        self._meter.note(
            self.step,
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
            self._interrupted()
        if self._partial is None:
            self._partial = devices.Boundary(devices.saved_buffers(self._module()))

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Batches, pass after pass, until `max_steps` are done."""
        if self.max_steps is None:
            raise ConfigurationError("Guard.batches needs Guard(max_steps=...): without it there is no end")
        empty, self._endless = 0, False  # the loop is ended here, and finishes by itself
        while not self.done:
            empty += 1
            for batch in loader:
                empty = 0
                yield batch
                if self.done:
                    return
            self._passes += 1
            if empty > 1:  # one may be what was left of the pass in which the last attempt was interrupted
                raise ConfigurationError(
                    f"the {type(loader).__name__} gave no batch in a whole pass: give it data, and see that "
                    "drop_last leaves some"
                )

    def finish(self, *, ended_early: str | None = None) -> str:
        """After the last step: last checkpoint, final weights, and the job is done. Answers their URI.

        ended_early: why it ends before `max_steps`, as `EarlyStopping.reason` says it: the job is done then
        too, for the reason EarlyStopped. None: by what the Guard knows itself; "": it is just done.
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
            log.event("not-finished", step=self.step, why="guard.finish() was not called")
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
        """Whether no optimizer has stepped since the last `advance`: such a step is not counted yet."""
        return not self._moved

    def _note_move(self, *_: Any) -> None:
        self._moved = True

    def _begin(self, keeper: Keeper) -> None:
        session = self.session
        self.keeper = keeper
        for each in self._optimizers_of_torch():
            each.register_step_pre_hook(self._note_move)
        session.board.update(total_steps=self.max_steps or 0, step=0)
        ownloop.advise(session, ("max_steps",))
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
            "step": self.step,
            "passes": self._passes,
            "trained": self.keeper.trained,
            "data": self._data.state() if self._data.shared else None,
        }

    def _own(self) -> dict[str, Any]:
        data = None if self._data.shared else self._data.state()
        return {"random": devices.random_state(), "data": data}

    def _load_progress(self, saved: Mapping[str, Any], own: Mapping[str, Any], new_rank: bool) -> None:
        """Raises CheckpointError."""
        mismatch = self._data.load(saved["data"] if self._data.shared else own["data"])
        if mismatch is not None:
            raise self._incompatible(mismatch)
        self.step, self._passes = saved["step"], saved["passes"]
        self.keeper.trained = saved["trained"]
        devices.set_random_state(own["random"])
        if new_rank:
            log.event("new-rank", why="the checkpoint has no random state of this rank; it gets a fresh one")
            devices.seed_rank(self.session.world.rank + self.step)

    def _incompatible(self, why: str) -> CheckpointError:
        return modelstate.incompatible(self.session.run.checkpoint_uri, why)

    # --- inside ---------------------------------------------------------------------------------------
    def _tell_short(self, max_steps: int) -> None:
        """A loop may end early on purpose; one with an end of its own ends so where the manifest has more."""
        text = (
            f"the loop has ended at step {self.step} of max_steps={max_steps}, and the job is done: to train "
            "them all iterate over guard.batches(loader), or until guard.done; where it ends early on "
            "purpose say so by guard.finish(ended_early=...)"
        )
        if self.session.world.first:
            log.event("advice", about="max-steps", text=text)

    def _make_beside(self) -> Beside:
        """Raises ConfigurationError where the window of a profile ends after the run."""
        first = next(self._module().parameters(), None)
        device = None if first is None else first.device
        return Beside(self.session, start=self.step, total_steps=self.max_steps, device=device)

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
                f"guard.advance(loss=...) has shape {tuple(self._loss.shape)}; give one number, such as its "
                "mean"
            )
        value = float(self._loss)
        require_finite(value, self.step)
        return value

    def _require_open(self) -> None:
        if self._output is not None:  # the manifest's maxSteps are done and stored, and the loop goes on
            self.session.end(Outcome.DONE, self.session.summary(), reason=self.session.reason_done)
        if self._ended:
            raise ConfigurationError("the Guard has ended: nothing can be counted or saved after finish()")

    def _done_already(self) -> NoReturn:
        """The attempt before has done all steps, and was ended before it could leave the weights."""
        self.finish()
        self.session.end(Outcome.DONE, self.session.summary(), reason=self.session.reason_done)

    def _peer_lost(self, error: BaseException) -> PeerLost | None:
        return parallel.peer_lost(error, self.session.world, self.session.peer_gone)

    def _give_up(self, error: BaseException | None) -> None:
        self._ended = True
        if error is not None and (lost := self._peer_lost(error)) is not None:
            self.keeper.end_without(lost)
        if error is not None:
            self.session.broken_by_stop(error)
        self.keeper.ends.give_up()
        self._close()

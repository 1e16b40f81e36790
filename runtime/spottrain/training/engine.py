"""`Engine`: what every training needs around its steps, whatever its loop.

    begin -> start -> [ count, boundary after each optimizer step ] -> finish, or stop

`Trainer`, custom loops (`loop.Loop`) and the callbacks for other libraries' trainers are thin on top of it.
They own the steps and say what a checkpoint consists of; the engine owns the rest of the run: claim and
restore, log lines and progress, diagnostics, saves, the stop, the final weights, and the end after an error.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any, Final, NoReturn

import torch

from spottrain.checkpoint import plain_state
from spottrain.checkpoint.kinds import CheckpointKind
from spottrain.core import device as devices
from spottrain.core import log
from spottrain.core.series import Point
from spottrain.core.time_split import WAITING
from spottrain.core.training_spec import Profile
from spottrain.diagnostics.monitor import Monitor, Phases
from spottrain.distributed import process_group
from spottrain.errors import CheckpointError, ConfigurationError, PeerLost, TrainingFailed
from spottrain.lifecycle.coordinator import Coordinator
from spottrain.lifecycle.series_writer import SeriesWriter
from spottrain.lifecycle.session import RunEnded, Session
from spottrain.techniques.trackers import Trackers


class Engine:
    """Runs one training of this process. All ranks call the same methods at the same steps."""

    coordinator: Coordinator
    """Set by `begin`."""
    metrics: MetricsLog
    """Set by `start`."""

    def __init__(self, session: Session) -> None:
        devices.require_torch()
        self.session = session
        self.ended = False
        """Whether the training was finished, stopped or given up: nothing more can be counted or saved."""
        self.monitor: Monitor | None = None
        self._trackers: list[Trackers] = []
        self._failed = False

    # --- begin --------------------------------------------------------------------------------------
    def join(self) -> None:
        """Creates torch's process group on this rank's own GPU, unless there is only one rank."""
        self._require_first()
        world = self.session.world
        if world.distributed:
            with self.session.board.clock.part(WAITING):
                process_group.join(world, devices.choose(process_group.default_device(world)))

    def close_at_end(self, trackers: Trackers) -> None:
        """Closes the trackers with the training, or with the process if it ends earlier."""
        self._trackers.append(trackers)
        self.session.at_end.append(lambda outcome, left: trackers.close(outcome, within=left))

    def begin(self, kind: CheckpointKind, *, total_steps: int | None) -> bool:
        """Claims the checkpoint URI and restores the last checkpoint. Returns whether there was one.

        Raises RunError. If the job is done already, it leaves through SystemExit.
        """
        self._require_first()
        self.ended = self._failed = False  # `Trainer.fit` may have failed before
        self.session.board.update(total_steps=total_steps or 0, step=0)
        self.coordinator = Coordinator(self.session, kind, total_steps=total_steps)
        with self.failures():
            return self.coordinator.begin()

    def initialize(self, model: torch.nn.Module) -> bool:
        """Loads the weights of `checkpoint.initFrom`. Returns whether there are any. Raises RunError.

        All ranks call it where nothing was restored.
        """
        with self.failures():
            return self.coordinator.initialize(model)

    def _require_first(self) -> None:
        if self.session.completed or self.session.complete is not None:
            raise ConfigurationError("a second training in one run: a run trains once; make it two scripts")

    def incompatible(self, why: str) -> CheckpointError:
        return plain_state.incompatible(self.session.run.checkpoint_uri, why)

    def restore_random(self, saved: dict[str, Any] | None, step: int) -> None:
        """Restores this rank's random state. None: fewer ranks wrote the checkpoint, so it is a fresh one."""
        if saved is not None:
            return devices.set_random_state(saved)
        log.event("new-rank", why="the checkpoint has no random state of this rank; it gets a fresh one")
        devices.seed_rank(self.session.world.rank + step)

    def start(
        self,
        *,
        step: int,
        total_steps: int | None,
        device: torch.device,
        log_every: int,
        state: str = "Training",
        profile: Profile | None = None,
        phases: Phases | None = None,
        on_line: Callable[[int, dict[str, float | None]], None] = lambda step, values: None,
    ) -> None:
        """Starts log and diagnostics of this attempt, `step` steps into the training.

        `state`: until the first step is done. `profile`: the script's own window to profile, which the
        manifest's replaces. `phases`: see `Monitor`.
        `on_line` gets the figures of each log line. Raises ConfigurationError if the window does not fit.
        """
        if phases is not None or total_steps is None or step < total_steps:
            with self.failures():
                self.monitor = Monitor(
                    self.session,
                    start=step,
                    total_steps=total_steps,
                    device=device,
                    profile=self.session.run.training.profile or profile,
                    phases=phases,
                )
        self.metrics = MetricsLog(
            self.session,
            total_steps=total_steps,
            log_every=log_every,
            on_line=on_line,
            series=self.coordinator.series,
        )
        self.session.board.update(total_steps=total_steps or 0, state=state)

    # --- steps --------------------------------------------------------------------------------------
    def count(
        self,
        step: int,
        *,
        loss: Callable[[], float | None] | None = None,
        rate: float | None = None,
        samples: int = 0,
        epoch: int | None = None,
    ) -> None:
        """Counts an optimizer step. `step`: steps done, including this one.

        `loss` is called only if a log line is due. None: the loop logs by itself, by `metrics.line`.
        `samples`: of this step over all ranks; 0: unknown.
        """
        self.metrics.note(step, loss, rate=rate, samples=samples, epoch=epoch)
        if self.monitor is not None:
            self.monitor.step_done()

    def boundary(self, step: int, *, save: Callable[[], object] | None = None) -> bool:
        """Saves if a save is due after `step` steps. Returns whether all ranks stop here: then call `stop`.

        `save` replaces the coordinator's, for loops that save later themselves.
        """
        orders = self.coordinator.boundary(step)
        if orders.save:
            (save or self.coordinator.save)()
        return orders.stop

    # --- end ----------------------------------------------------------------------------------------
    def stop(self) -> NoReturn:
        """Saves the newest step within the notice, releases HEAD, and leaves through SystemExit."""
        self.ended = True
        with closing(self), self.failures():  # closed last: notice is short, and the checkpoint comes first
            self.coordinator.save_and_end()

    def finish(
        self,
        weights: Callable[[], Mapping[str, Any]],
        beside: Collection[str] = (),
        *,
        ended_early: str = "",
        with_script: bool = False,
    ) -> tuple[str, str]:
        """Writes the last checkpoint and the final weights, which completes the job.

        `ended_early`: why training ends before its last step; "" if it does not. `with_script`: the job is
        done only when the script ends. For the other arguments and the result see `Coordinator.finish`.
        Raises RunError.
        """
        self.ended = True
        self.session.board.update(ended_early=ended_early)
        finish = self.coordinator.finish_with_script if with_script else self.coordinator.finish
        with closing(self), self.failures():
            return finish(weights, beside)

    def give_up(self) -> None:
        """Ends without a result: waits for an upload in progress, then releases HEAD."""
        self.session.preemption.let_end(None)  # another thread may be saving
        self.ended = True
        self.coordinator.give_up()
        self.close()

    @contextmanager
    def failures(self) -> Iterator[None]:
        """Calls `failed` for an exception of the block. `RunEnded` passes through: it is no failure."""
        try:
            yield
        except RunEnded:
            raise
        except BaseException as error:
            self.failed(error)
            raise

    def failed(self, error: BaseException) -> None:
        """Reports `error` as what it means, and releases HEAD, so that the next attempt need not wait.

        If another rank is lost, it ends the process: no step can be computed.
        """
        if self._failed or isinstance(error, RunEnded):
            return
        self._failed = True
        session = self.session
        lost = error if isinstance(error, PeerLost) else None
        lost = lost or process_group.peer_lost(error, session.world, session.peer_gone)
        if lost is not None:
            self.coordinator.end_without(lost)
        try:
            session.broken_by_stop(error)
        finally:
            self.give_up()

    def close(self) -> None:
        """Ends the diagnostics and closes the trackers; may run twice."""
        if self.monitor is not None:
            self.monitor.close()
            self.monitor = None
        for trackers in self._trackers:
            trackers.close(self.session.outcome)


LINE_SECONDS: Final = 5.0
"""Least time between two logged lines of steps, unless the script asks for a line of every step."""


class MetricsLog:
    """Logs a line every `log_every` steps, and updates the progress board at every step.

    The loss stays on its device until it is logged: reading it makes the host wait for the device.
    """

    def __init__(
        self,
        session: Session,
        *,
        total_steps: int | None,
        log_every: int,
        on_line: Callable[[int, dict[str, float | None]], None],
        series: SeriesWriter | None = None,
    ) -> None:
        self._session, self._on_line, self._series = session, on_line, series
        self._total, self._every = total_steps, log_every
        self._logged = float("-inf")
        self._restored = time.time()
        self.began = False
        """Whether this attempt has done a step."""
        self.restart()

    def restart(self) -> None:
        """Excludes the time since the last line, which was not spent on steps."""
        self._since, self._samples, self._steps = time.perf_counter(), 0, 0

    def note(
        self,
        step: int,
        loss: Callable[[], float | None] | None,
        *,
        rate: float | None,
        samples: int,
        epoch: int | None,
    ) -> None:
        """Counts a step; see `Engine.count`."""
        board = self._session.board
        self._samples += samples
        self._steps += 1
        due = not self.began or step % self._every == 0 or step == self._total
        if loss is not None and due:
            self.line(step, loss(), rate=rate, epoch=epoch)
        if not self.began:
            self.began, now = True, time.time()
            seconds, startup = now - self._restored, now - self._session.born
            board.update(first_step_seconds=seconds, startup_seconds=startup)
            log.event("first-step", step=step, seconds=seconds, startup=startup)
        board.stepped(step)

    def line(self, step: int, loss: float | None, *, rate: float | None, epoch: int | None) -> None:
        """Logs the steps since the last line. Raises TrainingFailed if the loss is NaN or infinite."""
        if loss is not None:
            require_finite(loss, step)
        seconds = max(time.perf_counter() - self._since, 1e-9)
        speed = self._samples / seconds if self._samples else None
        self._on_line(step, {"loss": loss, "lr": rate, "samples_per_second": speed})
        self._session.board.update(
            loss=loss, samples_per_second=speed, steps_per_second=self._steps / seconds
        )
        if self._session.world.first and self._wanted(step):
            log.step(step, self._total, loss=loss, lr=rate, samples_per_second=speed, epoch=epoch)
        if self._series is not None:
            self._series.add(self._point(step, loss, rate, seconds))
        self.restart()

    def _point(self, step: int, loss: float | None, rate: float | None, seconds: float) -> Point:
        facts = self._session.board.facts
        return Point(
            step=step,
            time=time.time(),
            loss=loss,
            steps=self._steps,
            seconds=seconds,
            samples=self._samples,
            learningRate=rate,
            mfu=facts.mfu,
            gpuUtilisation=facts.utilisation,
            gpuMemory=facts.gpu_memory,
        )

    def _wanted(self, step: int) -> bool:
        """Whether to log the line: short steps would fill the log. A script that wants every step gets it."""
        now = time.monotonic()
        soon = now - self._logged < LINE_SECONDS
        if soon and self._every > 1 and step != self._total:
            return False
        self._logged = now
        return True


def require_finite(loss: float, step: int) -> None:
    """Raises TrainingFailed if the loss is NaN or infinite: the state after it is not worth saving."""
    if not math.isfinite(loss):
        raise TrainingFailed(
            f"the loss is {loss} at step {step}; nothing was saved since. Lower the learning rate, clip the "
            "gradients (clipGradNorm), use bf16 instead of fp16, or look at the samples of this step; the "
            "checkpoints before it are whole"
        )

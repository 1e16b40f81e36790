"""`Engine`: one training of this process, whatever its loop and whatever its checkpoints contain.

    begin -> start -> [ count, boundary after each optimizer step ] -> finish, or stop

`Trainer`, custom loops (`run.Run`) and the callbacks for other libraries' trainers are thin on top of it.
They own the steps and say what a checkpoint consists of (`TrainingState`). The engine claims HEAD and
restores, saves, agrees with the other ranks on saves and stops, stores the final weights, and releases HEAD.
`lifecycle.life` says what ends a training in which phase. All ranks call the same methods at the same steps.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any, Final, NoReturn

import torch

from spottrain.checkpoint import plain_state
from spottrain.checkpoint.final_weights import FinalWeights, most_bytes
from spottrain.checkpoint.head.owner import Claim
from spottrain.checkpoint.initial_weights import InitialWeights
from spottrain.checkpoint.manager import CheckpointManager
from spottrain.checkpoint.saver import Save
from spottrain.checkpoint.training_state import LibraryFolders, TrainingState
from spottrain.checkpoint.upload import Transfer
from spottrain.contract import Env
from spottrain.core import device as devices
from spottrain.core import log
from spottrain.core.container import memory
from spottrain.core.time_split import CHECKPOINT_STALL, OTHER, RESTORE, WAITING
from spottrain.core.training_settings import Profile
from spottrain.diagnostics.monitor import Monitor, Phases
from spottrain.distributed import process_group
from spottrain.errors import CheckpointError, ConfigurationError, PeerLost, RunError, StoreError
from spottrain.lifecycle import endings
from spottrain.lifecycle.endings import Ending
from spottrain.lifecycle.life import Phase
from spottrain.lifecycle.notice_budget import BudgetReport, NoticeBudget
from spottrain.lifecycle.peers import Peers
from spottrain.lifecycle.save_interval import SavePolicy
from spottrain.lifecycle.series_writer import SeriesWriter
from spottrain.lifecycle.session import RunEnded, Session
from spottrain.lifecycle.worker_signals import protect_all
from spottrain.storage.base import Cancelled
from spottrain.techniques.trackers import Trackers
from spottrain.training.metrics_log import MetricsLog

UPLOAD_SECONDS: Final = 60.0
"""Seconds for an upload in progress to finish when the script fails."""
MEASURED_AFTER: Final = 3
"""Steps of this attempt after which a step no longer includes compilation."""


class _Moved(Exception):
    """The training thread has changed the state while another thread copied it."""


class Engine:
    """Runs one training of this process."""

    state: TrainingState
    """Set by `begin`, with what follows."""
    metrics: MetricsLog
    """Set by `start`."""

    def __init__(self, session: Session) -> None:
        devices.require_torch()
        self.session = session
        self.clock = session.board.clock
        self.manager: CheckpointManager | None = None
        """None without a checkpoint URI."""
        self.total_steps: int | None = None
        self.monitor: Monitor | None = None
        self._trackers: list[Trackers] = []
        self._failed = False
        self._series: SeriesWriter | None = None
        """On rank 0, once HEAD is claimed."""
        self._still: Callable[[], bool] | None = None
        """Returns whether what was copied is the last step's; set while the training thread goes on."""
        self._result = ("", "")
        """URI and digest of the stored result."""

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.session.board.facts.step

    @property
    def begun(self) -> bool:
        return hasattr(self, "state")

    @property
    def ended(self) -> bool:
        """Whether the training was finished, stopped or given up: nothing more can be counted or saved."""
        if not self.begun or self.session.engine is not self:
            return self.begun
        return self.session.phase.begun and not self.session.phase.trains

    # --- begin --------------------------------------------------------------------------------------
    def join(self) -> None:
        """Creates torch's process group on this rank's own GPU, unless there is only one rank."""
        self._require_first()
        world = self.session.world
        if world.distributed:
            with self.clock.part(WAITING):
                process_group.join(world, devices.choose(process_group.default_device(world)))

    def close_at_end(self, trackers: Trackers) -> None:
        """Closes the trackers with the training, or with the process if it ends earlier."""
        self._trackers.append(trackers)
        self.session.at_end.append(lambda outcome, left: trackers.close(outcome, within=left))

    def begin(self, state: TrainingState, *, total_steps: int | None) -> bool:
        """Claims the checkpoint URI and restores the last checkpoint. Returns whether there was one.

        Until the first step is done, a stop may end the process at any point but in the claim: no work can be
        lost. Raises RunError. If the job is done already, it leaves through SystemExit.
        """
        self._require_first()
        session = self.session
        session.enter(Phase.STARTING)  # `Trainer.fit` may have failed before
        self._failed, self._steps_here, self._evaluated = False, 0, 0
        self._initialized: Mapping[str, Any] | None = None  # by `checkpoint.initFrom`, also after a resume
        session.board.update(total_steps=total_steps or 0, step=0)
        self.state, self.total_steps = state, total_steps
        self._policy = SavePolicy(
            session.run.interval,
            session.attempt,
            lambda: session.preemption.advised,
        )
        self._budget = BudgetReport(session.board)
        session.board.trains = True
        self.clock.begin()
        with self.clock.part(WAITING):  # for the other ranks
            self._peers = Peers(session, self._policy.advice, self._end_without)
        if session.store is not None:
            self.manager = CheckpointManager(
                session,
                session.store,
                transfer=lambda: Transfer(self.session.run.where),
                control=self._peers.control,
                by_rank0=state.by_rank0,
            )
        session.engine = self
        protect_all()
        with self.failures():
            if state.folders is not None:
                state.folders.begin(session.world)
            claim = self._claim()
            session.enter(Phase.READY)
            restored = claim is not None and self._restore(claim)
            session.outage.patient = False  # from here on, training continues during an outage
            session.board.update(start_step=self.step)
            self._policy.begin(self.step)
            if self._peers.agreement.begin(self.step, total_steps).stop:
                self._note_stop()
                self.stop()
            return restored

    def initialize(self, model: torch.nn.Module) -> bool:
        """Loads the weights of `checkpoint.initFrom`. Returns whether there are any. Raises RunError.

        All ranks call it where nothing was restored, before the first step.
        """
        session = self.session
        if session.run.init_from is None:
            return False
        with self.failures():
            session.board.update(state="Restoring")
            weights = InitialWeights(
                session.run.init_from,
                world=session.world,
                control=self._peers.control,
                folder=session.run.folder,
                open_store=session.open_other,
            )
            with self.clock.part(RESTORE):
                self._initialized = weights.load(model)
        return True

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
        `on_line` gets the figures of each log line. Raises ConfigurationError if a profile has no store.
        """
        if phases is not None or total_steps is None or step < total_steps:
            with self.failures():
                self.monitor = Monitor(
                    self.session,
                    start=step,
                    total_steps=total_steps,
                    device=device,
                    profile=self.session.run.training.get("profile") or profile,
                    phases=phases,
                )
        self.metrics = MetricsLog(
            self.session, total_steps=total_steps, log_every=log_every, on_line=on_line, series=self._series
        )
        self.session.board.update(total_steps=total_steps or 0, state=state)

    def _require_first(self) -> None:
        if self.session.phase in (Phase.STORED, Phase.DONE):
            raise ConfigurationError("a second training in one run: a run trains once; make it two scripts")

    def _claim(self) -> Claim | None:
        if self.manager is None:
            log.event("no-checkpoints", why="no checkpoint URI: an interruption loses the run")
            return None
        with self.clock.part(WAITING):
            if self.state.folders is not None:
                self.manager.barrier()  # pods may share the disk, and a slow one still empties it
            claim = self.manager.claim()
        session = self.session
        if claim.done:
            self._end_done_before(self.manager)
        if session.world.first:
            self._series = SeriesWriter(session, self.manager.store, claim.term)
            session.at_end.append(self._series.close)
        return claim

    def _end_done_before(self, manager: CheckpointManager) -> NoReturn:
        """Ends a job that is done already: the script must not continue with untrained weights."""
        uri = manager.final_uri
        trained, total = manager.trained()
        self.session.board.update(
            state="Done", step=trained, durable_step=trained, total_steps=total or trained, output_uri=uri
        )
        in_job = Env.JOB_UID in self.session.env
        wanted = self.total_steps or 0
        self.session.end(endings.done_before(uri, trained, total=total, wanted=wanted, in_job=in_job))

    def _restore(self, claim: Claim) -> bool:
        assert self.manager is not None
        board = self.session.board
        board.update(state="Restoring")
        with self.clock.part(RESTORE):
            place = None if self.state.folders is None else self.state.folders.restored_to
            found = self.manager.restore(claim, self.state.want, folder=place)
            if found is not None:
                self.state.load(found.shared, found.own, found.new_rank)
        if found is not None:
            entry = found.entry
            board.update(durable_step=entry.step, durable_time=entry.time, key=entry.key, step=entry.step)
        self.session.cache_ready()
        return found is not None

    # --- what a checkpoint keeps of the attempts so far -----------------------------------------------
    def record(self) -> dict[str, Any]:
        found = self._policy.record(self.clock.trained, at_stop=self.session.preemption.stopping)
        return found if self._initialized is None else found | {"initialized": dict(self._initialized)}

    def load_record(self, saved: Mapping[str, Any]) -> None:
        self._policy.load_record(saved)
        self._initialized = saved.get("initialized")

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
        self.session.board.stepped(step)
        if self.monitor is not None:
            self.monitor.step_done()

    def boundary(self, step: int, *, save: Callable[[], object] | None = None) -> bool:
        """Saves if a save is due after `step` steps. Returns whether all ranks stop here: then call `stop`.

        `save` replaces the engine's own, for loops that save later themselves.
        """
        self._steps_here += 1
        if self._steps_here == 1 and self.state.folders is None and not self.busy:
            assert self.manager is not None
            with self.clock.part(CHECKPOINT_STALL):
                self.manager.saver.prepare(self.state.shared(), self.state.own())
        if self._steps_here == MEASURED_AFTER:
            threading.Thread(target=self._after_first_steps, name="spottrain-measure", daemon=True).start()
        if self.total_steps is not None and step >= self.total_steps:
            return False  # `finish` makes the last save
        agreement, manager = self._peers.agreement, self.manager
        due = manager is not None and agreement.decides(step) and self._save_due(step, manager)
        following = self._policy.next_step(step if due else None)
        decision = agreement.at_boundary(step, save=due, next_save=following)
        if decision.save:
            (save or self.save)()
        return decision.stop and self._note_stop()

    def stops_evaluation(self) -> bool:
        """Whether all ranks stop here, within an evaluation. All ranks ask as often."""
        self._evaluated += 1
        return self._peers.agreement.stops_evaluation(self._evaluated) and self._note_stop()

    def _note_stop(self) -> bool:
        agreement = self._peers.agreement
        self.session.preemption.stop_by(agreement.stop_deadline, agreement.stop_reason)
        return True

    @property
    def busy(self) -> bool:
        """Whether no save can begin now: one is in progress, or no checkpoints are configured."""
        return self.manager is None or self.manager.busy_with is not None

    def _save_due(self, step: int, manager: CheckpointManager) -> bool:
        return self._policy.due(
            step,
            lambda: self.session.board.facts,
            self.clock.trained,
            self.clock.stepped,
            uploading=manager.busy_with,
            failed=manager.last_save_failed,
        )

    def save(self, *, best: bool = False) -> Save:
        """Copies the state and uploads it while training continues. All ranks call it at the same step."""
        assert self.manager is not None
        self._policy.started(self.step, self.clock.stepped)
        began = time.perf_counter()
        with self.clock.part(CHECKPOINT_STALL):
            self.manager.wait_for_upload()  # on other ranks than 0 a save may be in progress
            save = self._take(best=best, beside=True)
            self.manager.start(save, self._after_commit)
        stall = time.perf_counter() - began
        if self.session.world.first:
            log.event("saving", step=self.step, stall=stall, best=best or None)
        self.session.board.update(stall_seconds=stall)
        self.session.board.heartbeat.beat()
        return save

    @property
    def copying(self) -> bool:
        """Whether a save still copies what the next optimizer step changes."""
        return self.manager is not None and self.manager.saver.copying

    def before_step(self) -> None:
        """Waits for that copy. Loops with `state.stepped` call it before each optimizer step."""
        if self.manager is None or not self.copying:
            return
        began = time.perf_counter()
        with self.clock.part(CHECKPOINT_STALL):
            self.manager.saver.before_step()
        stall = (self.session.board.facts.stall_seconds or 0.0) + time.perf_counter() - began
        self.session.board.update(stall_seconds=stall)

    def _take(self, *, best: bool = False, beside: bool = False) -> Save:
        """Copies everything that the next step depends on. `beside`: `state.stepped` may be copied later."""
        assert self.manager is not None
        state, saver = self.state, self.manager.saver
        try:
            if state.folders is not None:
                save = self._take_folder(state.folders, best=best)
            else:
                stepped = state.stepped() if beside else ()
                save = saver.snapshot(state.shared(), state.own(), self.step, best=best, stepped=stepped)
        except RunError:
            raise
        except Exception as error:  # such as of a dict that the script changes at this moment
            if self._still is None:
                raise
            raise _Moved from error
        if self._still is not None and not self._still():
            raise _Moved
        save.productive = self.clock.done
        return save

    def _take_folder(self, folders: LibraryFolders, *, best: bool) -> Save:
        assert self.manager is not None
        if self.manager.busy_with is None:
            folders.forget_saves(self.session.world)
        began = time.perf_counter()
        folder = folders.save(self.step)
        self.manager.barrier()  # the files of all ranks must be complete before the upload
        saver = self.manager.saver
        saver.copy_seconds = time.perf_counter() - began
        return saver.folder(folder, self.state.shared(), self.state.own(), self.step, best=best)

    # --- measures -----------------------------------------------------------------------------------
    def _after_commit(self) -> None:
        self._report_budget()
        if self._series is not None:
            self._series.save()

    def _after_first_steps(self) -> None:
        """Measures, beside the training, how long a save at a notice takes, and saves the compile cache."""
        if self.manager is not None:
            try:
                self.manager.measure_bandwidth()
                self._report_budget()
            except (RunError, Cancelled) as error:
                log.event("bandwidth-not-measured", error=str(error))
        if self.session.compile_cache is not None:
            self.session.compile_cache.save_if_changed()

    def _report_budget(self) -> None:
        assert self.manager is not None
        saver = self.manager.saver
        if saver.bandwidth is not None:
            self._budget.report(
                NoticeBudget(
                    bytes=saver.bytes,
                    bandwidth=saver.bandwidth,
                    step_seconds=self.clock.step_seconds,
                    copy_seconds=saver.copy_seconds,
                    grace=self.session.preemption.grace,
                )
            )

    def _end_without(self, lost: PeerLost) -> NoReturn:
        """Ends the process when a peer is lost: no step can be computed."""
        if self.manager is not None:
            self.manager.release()
        self.session.end(lost, at_once=True)

    # --- end with a result ----------------------------------------------------------------------------
    def finish(
        self,
        weights: Callable[[], Mapping[str, Any]],
        beside: Collection[str] = (),
        *,
        ended_early: str = "",
        with_script: bool = False,
    ) -> tuple[str, str]:
        """Writes the last checkpoint and the final weights, and completes the job. A successor can repeat it.

        Args:
            weights: returns the tensors by name; all ranks call it.
            beside: names of tensors that are not the model's own.
            ended_early: why training ends before its last step; "" if it does not.
            with_script: the job is done only when the script ends on all ranks without an error. Until then
                this attempt keeps HEAD. If it ends in another way, the next attempt resumes at the last step
                and runs the rest of the script. A stop leaves the rest a part of the notice.

        Returns:
            URI and digest of the weights.

        Raises:
            RunError: the store fails, or a rank is lost.
        """
        session = self.session
        session.enter(Phase.STORING)
        session.board.update(ended_early=ended_early)
        with closing(self), self.failures():
            self._result = self._store_result(weights, beside)
            if not with_script:
                self._release_as_done()
                return self._result
            session.outage.patient = False
            if (manager := self.manager) is not None:
                session.at_end.append(lambda outcome, left: manager.release())
            session.board.update(state="Done")  # no step is expected any more
            self.clock.completed()
            log.event("trained", step=self.step, digest=self._result[1])
            session.enter(Phase.STORED)
            return self._result

    def complete(self) -> None:
        """Completes a job whose script has ended after its result was stored. Raises RunError."""
        self._allow_outage()
        session, manager = self.session, self.manager
        if manager is not None:
            if session.world.first and session.attachment and (files := session.attachment.saved_files()):
                began = time.time()
                sent = manager.final.add_saved(files)  # a stop cuts it short, like the rest of the script
                seconds = time.time() - began
                log.event(
                    "model-stored", files=len(files), bytes=sent, output=manager.final_uri, seconds=seconds
                )
            manager.barrier()  # the script has to end on all ranks
        self.session.enter(Phase.STORING)
        self._release_as_done()

    def _store_result(
        self, weights: Callable[[], Mapping[str, Any]], beside: Collection[str]
    ) -> tuple[str, str]:
        self.clock.enter(OTHER)
        self._allow_outage()
        manager = self.manager
        if manager is not None:
            self.session.board.update(state="Saving")
            with self.clock.part(CHECKPOINT_STALL):
                manager.wait_for_upload()
                if self.session.board.facts.durable_step != self.step:
                    manager.save_now(self._take)
            manager.saver.forget()
        final = FinalWeights(weights(), beside=beside, most=most_bytes(memory()))
        digest = self._write_final_weights(final)
        if manager is None:
            return "", digest
        if self.session.compile_cache is not None:
            self.session.compile_cache.save_if_changed()
        return manager.final_uri, digest

    def _allow_outage(self) -> None:
        """Allows store outages as long as the unsaved steps took to train, and `store_wait` at least."""
        session, facts = self.session, self.session.board.facts
        if self.manager is not None:
            since = facts.durable_time or session.born
            unsaved = time.time() - since if facts.lost_steps else 0.0
            session.store_wait = max(session.run.store_wait, unsaved)
            session.outage.patient = True

    def _write_final_weights(self, final: FinalWeights) -> str:
        """Writes the final weights on rank 0, one file at a time. Returns their digest on all ranks."""
        first = self.session.world.first
        if self.manager is not None and first:
            self.manager.write_final(final, self.step, self.state.described())
        else:
            for _ in final.files(first=first, keep=False):
                pass  # the other ranks take part in gathering each tensor
        if first:
            self._peers.control.broadcast("final", final.digest)
            return final.digest
        return str(self._peers.control.receive("final"))

    def _release_as_done(self) -> None:
        """Releases HEAD as done: from here on nothing can be lost, by a lost peer or a signal."""
        session, (uri, digest) = self.session, self._result
        if self.manager is not None:
            self.manager.release(done=True)
            session.outage.patient = False
        self.clock.completed()
        with session.preemption.turn:  # a stop does not cut off what follows
            session.enter(Phase.DONE)
            session.board.update(state="Done", output_uri=uri)
            session.note(session.done)
            self._disconnect()
            log.event("done", step=self.step, digest=digest, output=uri or None)

    # --- end without a result -------------------------------------------------------------------------
    def stop(self) -> NoReturn:
        """Saves the newest step within the notice, releases HEAD, and leaves through SystemExit."""
        self.session.enter(Phase.ENDED)
        with closing(self):  # last: notice is short, and the checkpoint comes first
            ending = self.save_and_release(save=True)
            assert ending is not None, "the state does not change meanwhile"
            self.session.end(ending)

    def give_up(self, *, save: bool = False) -> None:
        """Ends without a result: saves the last step with `save`, and releases HEAD."""
        if self.session.phase not in (Phase.STORED, Phase.DONE):
            self.session.enter(Phase.ENDED)
        self.save_and_release(save=save)
        self.close()

    @contextmanager
    def failures(self) -> Iterator[None]:
        """Calls `failed` for an exception of the block."""
        try:
            yield
        except BaseException as error:
            self.failed(error)
            raise

    def failed(self, error: BaseException) -> None:
        """Reports `error` as what it means, and releases HEAD, so that the next attempt need not wait.

        If another rank is lost, it ends the process: no step can be computed. `RunEnded` is no failure.
        """
        if self._failed or isinstance(error, RunEnded):
            return
        self._failed = True
        if (lost := self.session.lost_peer(error)) is not None:
            self._end_without(lost)
        try:
            self.session.script_raised(error)
        finally:
            self.give_up()

    def close(self) -> None:
        """Ends the diagnostics and closes the trackers; may run twice."""
        if self.monitor is not None:
            self.monitor.close()
            self.monitor = None
        for trackers in self._trackers:
            trackers.close(self.session.outcome)

    def peer_gone(self, seconds: float) -> bool:
        """Whether another rank is known to be lost; waits up to the given number of seconds to learn it."""
        return self._peers.gone(seconds)

    def save_and_release(self, *, save: bool, outside: bool = False) -> Ending | None:
        """Saves the last step with `save`, and releases HEAD: within the notice, if there is one.

        Returns how a stop ends the run then. `outside`: in another thread than the one that trains. That one
        may change the state of a custom loop meanwhile: then it returns None, and that one saves it.
        """
        board, preemption = self.session.board, self.session.preemption
        why = endings.GIVEN_UP if self.ended else endings.IN_STEP
        error: Exception | None = None
        unmoved = self.state.unmoved if save and not self.ended else None
        if unmoved is not None and not unmoved() and outside:
            return None
        self._still = unmoved if outside else None
        try:
            if save:
                self._save_last()
        except _Moved:
            self._still = None
            board.update(state="Training")
            return None
        except StoreError as failure:
            board.save_failed(str(failure))
            if not preemption.stopping:  # else each try is in the log
                log.unhindered("save-failed", step=self.step, error=str(failure))
            why = str(failure)
        except Exception as failure:  # such as of a state_dict() of the script
            if (lost := self.session.lost_peer(failure)) is not None:
                self._end_without(lost)
            what = endings.what_failed(failure, self.session.script or sys.argv[0])
            log.unhindered("save-failed", step=self.step, error=what)
            why, error = f"{endings.NO_COPY} ({what})", failure
        saved_at = time.time()
        self._release_after_upload()
        if save and error is None and preemption.stopping:  # else the other ranks must see it as a loss
            self._disconnect()
        if isinstance(error, RunError):
            return Ending.of(error, board.facts)
        seconds = saved_at - (preemption.signalled_at or saved_at) if save else None
        return endings.interrupted(board.facts, why if self.manager else endings.NO_URI, seconds)

    def _save_last(self) -> None:
        """Saves the last step unless it is saved. Raises RunError, or an error of the script's state."""
        board, manager = self.session.board, self.manager
        if manager is None or not board.facts.lost_steps:
            return
        board.update(state="Saving")
        with self.clock.part(CHECKPOINT_STALL):
            if self.session.preemption.stopping:
                return manager.save_before_end(self._take, self.step)
            manager.wait_for_upload()
            if board.facts.lost_steps:
                manager.save_now(self._take)

    def _release_after_upload(self) -> None:
        """Waits a limited time for an upload in progress, then releases HEAD."""
        self.clock.enter(OTHER)
        if self.manager is not None:
            with self.clock.part(CHECKPOINT_STALL):
                self.manager.wait_for_upload(min(UPLOAD_SECONDS, self.session.preemption.seconds_left()))
            self.manager.release()

    def _disconnect(self) -> None:
        """Disconnects from the other ranks. Rank 0 waits for them until the notice period is nearly over."""
        if self.manager is not None:
            self.manager.saver.close()
        self._peers.close()
        if self.state.folders is not None:
            self.state.folders.close(self.session.world)

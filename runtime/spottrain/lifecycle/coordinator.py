"""Coordinates one rank's training: claim HEAD, restore, save, agree on a stop with the other ranks, end.

    begin -> [ boundary after each optimizer step, save ] -> finish, or save_and_end

`checkpoint.kinds` says what a checkpoint consists of, so any training loop can use this module. All ranks
call the same methods at the same steps.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, Final, NoReturn

import torch

from spottrain.checkpoint.final_weights import FinalWeights, most_bytes
from spottrain.checkpoint.head.owner import Claim
from spottrain.checkpoint.initial_weights import InitialWeights
from spottrain.checkpoint.kinds import CheckpointKind
from spottrain.checkpoint.manager import CheckpointManager
from spottrain.checkpoint.saver import Save
from spottrain.checkpoint.upload import InProcessTransfer, ProcessTransfer, Transfer
from spottrain.contract import Env, Outcome, Reason
from spottrain.core import log
from spottrain.core.container import memory
from spottrain.core.series import Attempt
from spottrain.core.time_split import CHECKPOINT_STALL, OTHER, RESTORE, WAITING
from spottrain.distributed.control_channel import ControlChannel, broadcast_facts, connect, receive_facts
from spottrain.distributed.stop_agreement import GO_ON, Orders, StopAgreement, alone, led
from spottrain.errors import PeerLost, RunError, StoreError
from spottrain.lifecycle import endings
from spottrain.lifecycle.endings import Ending
from spottrain.lifecycle.notice_budget import NoticeBudget, StepTimes
from spottrain.lifecycle.save_interval import (
    Losses,
    RebalanceAdvice,
    SaveInterval,
    auto_seconds,
)
from spottrain.lifecycle.series_writer import SeriesWriter
from spottrain.lifecycle.session import Session
from spottrain.lifecycle.worker_signals import protect_all
from spottrain.storage.base import Cancelled

LOOK_SECONDS: Final = 0.1
"""Seconds between two checks for a stop or an advice to save that must be passed on to rank 0."""
LAST_SECONDS: Final = 5.0
"""Seconds for the training thread to notice the loss of a peer before another thread ends the process."""
ADVISED: Final = "advised"
"""Control message: the ranks of other pods report an advice to save to rank 0."""
SETTLE_SECONDS: Final = 60.0
"""Seconds for an upload in progress to finish when the script fails."""
REST_SHARE: Final = 0.5
"""Share of a notice that the script gets for what it does after its training."""
LONG_STEPS: Final = 2.0
"""A loop that is this many steps' time away from its last step is taken to do something else."""
MEASURED_AFTER: Final = 3
"""Steps of this attempt after which a step no longer includes compilation."""


class _Moved(Exception):
    """The training thread has changed the state while another thread copied it."""


class Coordinator:
    """Saves, restores and stops one rank's training. `step`: optimizer steps done, counted by the loop."""

    def __init__(self, session: Session, kind: CheckpointKind, *, total_steps: int | None = None) -> None:
        self.session = session
        self.kind, self.state = kind, kind.state
        self.total_steps = total_steps
        self.checkpoints: CheckpointManager | None = None
        self.control: ControlChannel | None = None
        self.agreement: StopAgreement = alone(lambda: session.preemption.stopping)
        self.series: SeriesWriter | None = None
        """On rank 0, once HEAD is claimed."""
        self.trained = 0.0
        """Seconds of training of all attempts so far."""
        self._trained_before = 0.0
        """Those of the attempts before this one."""
        self.losses = max(session.attempt - 1, 0)
        """Attempts so far that lost steps; without a checkpoint all of them did."""
        self.initialized: Mapping[str, Any] | None = None
        """What `checkpoint.initFrom` has set the first weights to, also after a resume."""
        self._interval = SaveInterval(session.run.interval, self._auto_seconds)
        self._advice = RebalanceAdvice(lambda: session.preemption.advised)
        self._steps_here = 0
        self._steps = StepTimes()
        """Of this attempt, without its first step."""
        self._stepped: float | None = None
        self._skipped_for: int | None = None
        self._still: Callable[[], bool] | None = None
        """Returns whether what was copied is the last step's; set while the training thread goes on."""
        self._budget: NoticeBudget | None = None
        """The budget that was logged last."""
        self._warning = session.board.facts.warning
        """Warning of the session, such as a launcher that kills early."""
        self.clock = session.board.clock
        session.board.trains = True
        self.clock.begin()
        with self.clock.part(WAITING):  # for the other ranks
            self._connect()
        if session.store is not None:
            self.checkpoints = CheckpointManager(
                session, session.store, transfer=self._transfer, control=self.control
            )
            self.checkpoints.saver.of_first = self.state.of_first
            self.checkpoints.on_durable = self._after_commit
        session.unfinished = self._save_unfinished
        session.broken = self._end_broken_script
        protect_all()

    @property
    def step(self) -> int:
        return self.session.board.facts.step

    # --- start --------------------------------------------------------------------------------------
    def begin(self) -> bool:
        """Claims HEAD and restores. Returns True if there was a checkpoint to restore. Raises RunError.

        Before the first step is done, a stop may end the process at any point: no work can be lost.
        """
        self.kind.start(self.session.world)
        claim = self._claim()
        self.session.preemption.let_end(self._end_before_first_step)
        restored = claim is not None and self._restore(claim)
        self._started()
        return restored

    def _claim(self) -> Claim | None:
        if self.checkpoints is None:
            log.event("no-checkpoints", why="no checkpoint URI: an interruption loses the run")
            return None
        with self.clock.part(WAITING):
            claim = self.checkpoints.claim()
        if claim.done:
            self._end_done_before(self.checkpoints)
        if self.session.world.first:
            self.series = SeriesWriter(self.checkpoints.store, claim.term, partial(self._attempt, claim.term))
            self.session.at_end.append(self.series.close)
        return claim

    def _restore(self, claim: Claim) -> bool:
        assert self.checkpoints is not None
        board = self.session.board
        board.update(state="Restoring")
        with self.clock.part(RESTORE):
            found = self.kind.restore(self.checkpoints, claim)
            if found is not None:
                self.state.load(found.shared, found.own, found.new_rank)
        if found is not None:
            entry = found.entry
            board.update(durable_step=entry.step, durable_time=entry.time, key=entry.key, step=entry.step)
        self.session.cache_ready()
        return found is not None

    def initialize(self, model: torch.nn.Module) -> bool:
        """Loads the weights of `checkpoint.initFrom`. Returns whether there are any. Raises RunError.

        All ranks call it where `begin` has found no checkpoint, before the first step.
        """
        session = self.session
        if session.run.init_from is None:
            return False
        session.board.update(state="Restoring")
        weights = InitialWeights(
            session.run.init_from,
            world=session.world,
            control=self.control,
            folder=session.run.folder,
            open_store=session.open_other,
        )
        with self.clock.part(RESTORE):
            self.initialized = weights.load(model)
        return True

    def _started(self) -> None:
        """Marks the begin of training on this rank; may end the process if the ranks agree on a stop."""
        self.session.outage.patient = False  # from here on, training continues during an outage
        self.session.board.update(start_step=self.step)
        self._interval.started(self.step)
        self._advice.begin()
        if self.agreement.begin(self.step, self.total_steps).stop:
            self._end_before_first_step()

    def _connect(self) -> None:
        world = self.session.world
        if not world.distributed:
            return
        host = os.environ.get("MASTER_ADDR", "127.0.0.1")
        bind = self.session.run.bind_address
        self.control = connect(world, host=host, bind=bind, on_lost=self._peer_lost)
        self.session.peer_gone = self.control.await_loss
        self.agreement = led(self.control)
        if world.first:
            self.control.handle(ADVISED, lambda rank, body: self._advice.tell(float(body)))
        threading.Thread(target=self._forward_requests, name="spottrain-stop", daemon=True).start()

    def _transfer(self) -> Transfer:
        assert self.session.store is not None
        return (
            ProcessTransfer(self.session.run.where)
            if hasattr(os, "memfd_create")
            else InProcessTransfer(self.session.store)
        )

    # --- between steps ------------------------------------------------------------------------------
    def boundary(self, step: int) -> Orders:
        """Returns what all ranks do after `step` steps: save, stop, or go on."""
        self._time_step()
        if self.checkpoints is not None and self._steps_here == 1 and not self.busy:
            with self.clock.part(CHECKPOINT_STALL):
                self.kind.prepare(self.checkpoints)
        if self._steps_here == MEASURED_AFTER:
            threading.Thread(target=self._after_first_steps, name="spottrain-measure", daemon=True).start()
        if self.total_steps is not None and step >= self.total_steps:
            return GO_ON  # `finish` makes the last save
        orders = self.agreement.at_boundary(
            step, save_due=self._save_due, horizon=lambda: self._interval.next_step
        )
        if orders.stop:
            self.session.preemption.stop_by(self.agreement.stop_deadline, self.agreement.stop_reason)
        return orders

    def record(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps of the attempts so far."""
        last = self.session.preemption.stopping
        found = {"trained": self.trained, "losses": self.losses, "saved_at_stop": last}
        return found if self.initialized is None else found | {"initialized": dict(self.initialized)}

    def load_record(self, saved: Mapping[str, Any]) -> None:
        """Restores it. The attempt that saved it lost steps, unless it saved at its stop."""
        self.trained = self._trained_before = saved["trained"]
        self.initialized = saved.get("initialized")
        self.losses = saved.get("losses", 0) + (0 if saved.get("saved_at_stop") else 1)

    @property
    def busy(self) -> bool:
        """Whether no save can begin now: one is in progress, or no checkpoints are configured."""
        return self.checkpoints is None or self.checkpoints.busy_with is not None

    def _time_step(self) -> None:
        now = time.perf_counter()
        if self._stepped is not None:
            seconds = now - self._stepped
            self.trained += seconds
            self._steps.add(seconds)
        self._stepped = now
        self._steps_here += 1

    @property
    def next_step_is_near(self) -> bool:
        """Whether the loop is likely to come to the end of a step soon; after a stop request."""
        away = time.perf_counter() - (self._stepped or 0.0)
        return away < LONG_STEPS * self._steps.typical and self.session.preemption.share_spent() < REST_SHARE

    def _save_due(self) -> bool:
        """Decides on rank 0 whether to save now."""
        checkpoints, advised = self.checkpoints, self._advice.take()
        if checkpoints is not None and advised is not None and self._accepts_advice(advised):
            return True
        if checkpoints is None or not self._interval.due(self.step, failed=checkpoints.last_save_failed):
            return False
        if (uploading := checkpoints.busy_with) is None:
            return True
        if uploading != self._skipped_for:  # logged once for each upload, not at every step
            log.event("save-skipped", step=self.step, uploading=uploading)
        self._skipped_for = uploading
        return False

    def _accepts_advice(self, advised: float) -> bool:
        """Whether an advice to save justifies a save now."""
        facts, why = self.session.board.facts, None
        age = time.time() - (facts.durable_time or 0.0)
        if self.busy:
            why = "a save is under way"
        elif self._interval.fresh(steps=facts.lost_steps, seconds=age):
            why = f"there is little to lose: {facts.lost_steps} step(s) since what is durable"
        log.event("save-advised", step=facts.step, advised=log.rfc3339(advised), skipped=why)
        return why is None

    def save(self, *, best: bool = False, since: float | None = None) -> Save:
        """Copies the state and uploads it while training continues. All ranks call it at the same step.

        `since`: the `perf_counter` value at which training paused for the save; default: now.
        """
        assert self.checkpoints is not None
        self._interval.started(self.step)
        began = time.perf_counter() if since is None else since
        with self.clock.part(CHECKPOINT_STALL):
            self.checkpoints.settle()  # on other ranks than 0 a save may be in progress
            save = self.take(best=best, beside=True)
            self.checkpoints.start(save)
        stall = time.perf_counter() - began
        if self.session.world.first:
            log.event("saving", step=self.step, stall=stall, best=best or None)
        self.session.board.update(stall_seconds=stall)
        self.session.board.heartbeat.beat()
        self._stepped = time.perf_counter()
        return save

    @property
    def copying(self) -> bool:
        """Whether a save still copies what the next optimizer step changes."""
        return self.checkpoints is not None and self.checkpoints.saver.copying

    def before_step(self) -> None:
        """Waits for that copy. Loops with `state.stepped` call it before each optimizer step."""
        if self.checkpoints is None or not self.copying:
            return
        began = time.perf_counter()
        with self.clock.part(CHECKPOINT_STALL):
            self.checkpoints.saver.before_step()
        stall = (self.session.board.facts.stall_seconds or 0.0) + time.perf_counter() - began
        self.session.board.update(stall_seconds=stall)

    def take(self, *, best: bool = False, beside: bool = False) -> Save:
        """Copies everything that the next step depends on. `beside`: see `CheckpointKind.take`."""
        assert self.checkpoints is not None
        try:
            save = self.kind.take(self.checkpoints, self.step, best=best, beside=beside)
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

    def _auto_seconds(self) -> float:
        return auto_seconds(
            stall=self.session.board.facts.stall_seconds,
            upload=self.session.board.facts.save_seconds,
            losses=Losses(
                trained=self.trained,
                here=self.trained - self._trained_before,
                attempts=max(self.session.attempt - 1, 0),
                lost=self.losses,
            ),
        )

    # --- measures -----------------------------------------------------------------------------------
    def _after_commit(self) -> None:
        self._report_budget()
        if self.series is not None:
            self.series.save()

    def _attempt(self, term: int, outcome: Outcome | None) -> Attempt:
        """Returns what the series of steps says of this attempt."""
        session, facts = self.session, self.session.board.facts
        return Attempt(
            term=term,
            job=session.run.job,
            jobUID=session.run.job_uid,
            number=session.attempt,
            bornTime=session.born,
            writtenTime=time.time(),
            startStep=facts.start_step or 0,
            totalSteps=facts.total_steps,
            step=facts.step,
            durableStep=facts.durable_step,
            outcome=outcome or "",
            diagnosis=facts.diagnosis,
            timeSplit=session.board.time_split,
        )

    def _after_first_steps(self) -> None:
        """Measures, beside the training, how long a save at a notice takes, and saves the compile cache."""
        if self.checkpoints is not None:
            try:
                self.checkpoints.measure_bandwidth()
                self._report_budget()
            except (RunError, Cancelled) as error:
                log.event("bandwidth-not-measured", error=str(error))
        if self.session.compile_cache is not None:
            self.session.compile_cache.save_if_changed()

    def _report_budget(self) -> None:
        assert self.checkpoints is not None
        saver, grace = self.checkpoints.saver, self.session.preemption.grace
        if saver.bandwidth is None:
            return
        budget = NoticeBudget(
            bytes=saver.bytes,
            bandwidth=saver.bandwidth,
            step_seconds=self._steps.typical,
            copy_seconds=saver.copy_seconds,
            grace=grace,
        )
        board = self.session.board
        warning = " ".join(filter(None, (self._warning, budget.warning)))
        board.update(emergency_seconds=budget.seconds, grace_seconds=grace, warning=warning)
        if self._budget is not None and bool(self._budget.warning) == bool(budget.warning):
            return  # logged already; the numbers vary a little with each save
        self._budget = budget
        log.event(
            "emergency-budget",
            seconds=budget.seconds,
            grace=grace,
            share=budget.share,
            bytes=budget.bytes,
            bandwidth=int(budget.bandwidth),
            step_seconds=budget.step_seconds,
            warning=budget.warning or None,
        )

    # --- other ranks --------------------------------------------------------------------------------
    def _forward_requests(self) -> None:
        """Reports a stop of this rank to rank 0, and again if the deadline becomes earlier.

        The first rank of each other pod also reports an advice to save.
        """
        told, preemption, world = float("inf"), self.session.preemption, self.session.world
        while True:
            if preemption.stopping and preemption.deadline < told:
                told = preemption.deadline
                self.agreement.request_stop(told, preemption.source)
            if world.first_here and not world.first and (advised := self._advice.take()) is not None:
                assert self.control is not None
                with contextlib.suppress(PeerLost):  # the training thread notices it
                    self.control.send_to_leader(ADVISED, str(advised).encode())
            time.sleep(LOOK_SECONDS)

    def _peer_lost(self, error: PeerLost) -> None:
        """Ends the process soon: the training thread may be stuck in a collective forever."""
        log.unhindered("peer-lost", error=str(error))

        def end() -> None:
            time.sleep(LAST_SECONDS)
            self.end_without(error)

        threading.Thread(target=end, name="spottrain-peer-lost", daemon=True).start()

    def end_without(self, lost: PeerLost) -> NoReturn:
        """Ends the process when a peer is lost: no step can be computed."""
        if self.checkpoints is not None:
            self.checkpoints.release()
        self.session.end_now(self.session.ending_of(lost))

    # --- end ----------------------------------------------------------------------------------------
    def finish(
        self, weights: Callable[[], Mapping[str, Any]], beside: Collection[str] = ()
    ) -> tuple[str, str]:
        """Writes the last checkpoint and the final weights, then releases HEAD. A successor can repeat each.

        `weights` returns the tensors by name; all ranks call it. `beside`: names of tensors that are not the
        model's own. Returns the URI and the digest of the weights.
        """
        result = self._store_result(weights, beside)
        self._complete(*result)
        return result

    def finish_with_script(
        self, weights: Callable[[], Mapping[str, Any]], beside: Collection[str] = ()
    ) -> tuple[str, str]:
        """Stores what `finish` stores. The job is done when the script ends on all ranks without an error.

        Until then this attempt keeps HEAD. If it ends in another way, the next attempt resumes at the last
        step and runs the rest of the script. A stop leaves the rest a part of the notice.
        """
        uri, digest = self._store_result(weights, beside)
        session = self.session
        session.outage.patient = False
        session.complete = lambda: self._complete_with_script(uri, digest)
        session.broken = self._conclude_rest
        session.at_end.append(lambda outcome, left: self._release())
        session.board.update(state="Done")  # no step is expected any more
        self.clock.completed()
        log.event("trained", step=self.step, digest=digest)
        session.preemption.let_end(
            lambda: session.end_now(session.interrupted_after_training()), after=REST_SHARE
        )
        return uri, digest

    def _complete_with_script(self, uri: str, digest: str) -> None:
        self._wait_for_store()
        if self.checkpoints is not None:
            self._store_saved(self.checkpoints)
            self.checkpoints.meet()  # the script has to end on all ranks
        self.session.preemption.let_end(None)
        self._complete(uri, digest)

    def _store_saved(self, checkpoints: CheckpointManager) -> None:
        """Stores the models that the script has saved. A stop cuts it short, like the rest of the script."""
        if self.session.world.first and (files := self.session.saved_files()):
            began = time.time()
            sent = checkpoints.final.add_saved(files)
            uri = checkpoints.final_uri
            log.event("model-stored", files=len(files), bytes=sent, output=uri, seconds=time.time() - began)

    def _conclude_rest(self, then: str) -> None:
        self.session.conclude(self.session.interrupted_after_training().then(then))

    def _release(self) -> None:
        if self.checkpoints is not None:
            self.checkpoints.release()

    def _store_result(
        self, weights: Callable[[], Mapping[str, Any]], beside: Collection[str]
    ) -> tuple[str, str]:
        self.session.preemption.let_end(None)
        self.clock.enter(OTHER)
        uri = ""
        self._wait_for_store()
        if self.checkpoints is not None:
            self.session.board.update(state="Saving")
            with self.clock.part(CHECKPOINT_STALL):
                self.checkpoints.settle()
                if self.session.board.facts.durable_step != self.step:
                    self._save_last(self.checkpoints)
            self.checkpoints.saver.forget()
        final = FinalWeights(weights(), beside=beside, most=most_bytes(memory()))
        digest = self._write_final_weights(final)
        if self.checkpoints is not None:
            uri = self.checkpoints.final_uri
            if self.session.compile_cache is not None:
                self.session.compile_cache.save_if_changed()
        return uri, digest

    def _complete(self, uri: str, digest: str) -> None:
        """Releases HEAD as done: from here on nothing can be lost."""
        if self.checkpoints is not None:
            self.checkpoints.release(done=True)
            self.session.outage.patient = False
        self.clock.completed()
        self.session.completed = True  # HEAD is released as done: a lost peer or a signal does not change it
        self.session.board.update(state="Done", output_uri=uri)
        self.session.note_done()
        self.close()
        log.event("done", step=self.step, digest=digest, output=uri or None)
        self.session.preemption.let_end(lambda: self.session.end_now(self.session.done))

    def _wait_for_store(self) -> None:
        """Allows store outages as long as the unsaved steps took to train, and `store_wait` at least."""
        session, facts = self.session, self.session.board.facts
        if self.checkpoints is not None:
            since = facts.durable_time or session.born
            unsaved = time.time() - since if facts.lost_steps else 0.0
            session.store_wait = max(session.run.store_wait, unsaved)
            session.outage.patient = True

    def _write_final_weights(self, final: FinalWeights) -> str:
        """Writes the final weights on rank 0, one file at a time. Returns their digest on all ranks."""
        first = self.session.world.first
        if self.checkpoints is not None and first:
            self.checkpoints.write_final(final, self.step, self.kind.final_files())
        else:
            for _ in final.files(first=first, keep=False):
                pass  # the other ranks take part in gathering each tensor
        if first:
            broadcast_facts(self.control, "final", {"digest": final.digest})
            return final.digest
        return str(receive_facts(self.control, "final")["digest"])

    def _save_last(self, checkpoints: CheckpointManager) -> None:
        if self.kind.last_exists(checkpoints, self.step):
            checkpoints.save_now(self.take)
        else:
            log.event("no-last-checkpoint", step=self.step, why="the library did not write one")

    def close(self) -> None:
        """Disconnects from the other ranks. Rank 0 waits for them until the notice period is nearly over."""
        if self.checkpoints is not None:
            self.checkpoints.saver.close()
        if self.control is not None:
            self.control.close(min(10.0, max(self.session.preemption.seconds_left(), 0.1)))
        self.kind.close(self.session.world)

    # --- early end: by the training thread ----------------------------------------------------------
    def _end_done_before(self, checkpoints: CheckpointManager) -> NoReturn:
        """Ends a job that is done already: the script must not continue with untrained weights."""
        uri = checkpoints.final_uri
        trained, total = checkpoints.trained()
        self.session.board.update(
            state="Done", step=trained, durable_step=trained, total_steps=total or trained, output_uri=uri
        )
        in_job = Env.JOB_UID in self.session.env
        wanted = self.total_steps or 0
        self.session.end(endings.done_before(uri, trained, total=total, wanted=wanted, in_job=in_job))

    def save_and_end(self) -> NoReturn:
        """Saves the newest step within the notice period, releases HEAD, and leaves through SystemExit."""
        self.session.end(self._save_and_release())

    def give_up(self) -> None:
        """Waits a limited time for an upload in progress, then releases HEAD."""
        self.clock.enter(OTHER)
        if self.checkpoints is not None:
            with self.clock.part(CHECKPOINT_STALL):
                self.checkpoints.settle(min(SETTLE_SECONDS, self.session.preemption.seconds_left()))
            self.checkpoints.release()

    def _save_unfinished(self) -> None:
        """Saves for the next attempt when the script has ended without calling `finish`."""
        if self.checkpoints is None:
            return
        try:
            with self.clock.part(CHECKPOINT_STALL):
                self.checkpoints.settle()
                if self.session.board.facts.lost_steps:
                    self._save_last(self.checkpoints)
        except Exception as error:  # the end of the script is reported in any case
            log.event("save-failed", step=self.step, error=str(error))
        self.give_up()

    def _end_broken_script(self, then: str) -> None:
        """Writes the message of a script that a stop broke. With several ranks it cannot save any more."""
        whole = not self.session.world.distributed and self.state.intact()
        try:
            ending = self._save_and_release() if whole else None
        except RunError as error:
            self.give_up()
            ending = Ending.of(error)
        except Exception as error:  # of a state_dict() of the script, or a full disk
            log.unhindered("save-failed", step=self.step, error=str(error))
            ending = None
        if ending is None:
            self.give_up()
            why = "which could not be saved" if whole else "within the step after it, which cannot be undone"
            ending = endings.interrupted(self.session.board.facts, why)
        self.session.conclude(ending.then(then))

    # --- early end: by another thread, while the training thread cannot poll --------------------------
    def _end_before_first_step(self) -> NoReturn:
        """Ends the process before the first step is done, when no work can be lost."""
        if self.checkpoints is not None:
            self.checkpoints.release()
        text = f"Interrupted at step {self.step}, before a step was done; nothing was lost."
        self.session.end_now(Ending(Outcome.INTERRUPTED, text))

    def save_and_end_now(self, still: Callable[[], bool] | None = None) -> None:
        """Saves and ends the process while the training thread is between two steps.

        `still`: whether the state is that of the last step; None: the training thread does nothing. If it is
        not after the copy, this returns, and the training thread saves at the end of its step.
        """
        self._still = still
        try:
            ending = self._save_and_release()
        except _Moved:
            self._still = None
            return self.session.board.update(state="Training")
        except Exception as error:
            self.give_up()
            if isinstance(error, RunError):
                self.session.fail_now(error)
            ending = Ending(Outcome.FAILED, f"{type(error).__name__}: {error}", Reason.SCRIPT_FAILED)
        self.session.end_now(ending)

    def _save_and_release(self) -> Ending:
        """Saves the newest step and releases HEAD. Raises RunError, or an error of the script's state."""
        board, step = self.session.board, self.step
        board.update(state="Saving")
        lost = "there is no checkpoint URI" if self.checkpoints is None else ""
        if self.checkpoints is not None and board.facts.lost_steps:
            try:
                with self.clock.part(CHECKPOINT_STALL):
                    self.checkpoints.save_before_end(self.take, step)
            except StoreError as error:
                board.save_failed(str(error))
                lost = str(error)
        durable_seconds = time.time() - (self.session.preemption.signalled_at or time.time())
        self.give_up()
        self.close()
        if board.facts.lost_steps:
            text = f"Interrupted at step {step}; {board.facts.lost_steps} step(s) are lost: {lost}."
            return Ending(Outcome.INTERRUPTED_LOST, text)
        text = f"Interrupted at step {step}, which is saved; the same command resumes from there."
        return Ending(Outcome.INTERRUPTED, text, durable_seconds=durable_seconds)

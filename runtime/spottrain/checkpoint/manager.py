"""Checkpoint manager: the checkpoints of one claim. On rank 0, `head.owner.HeadOwner` changes HEAD.

    claim -> choice.restore -> [ start, in a thread, one at a time ] -> save_before_end, or save_now and
    write_final -> release

Every rank calls the same methods at the same steps. One save, on rank 0:

    saver.snapshot -> start -> _write:  saver.upload (all ranks) -> _commit: manifest, owner.commit (HEAD)
                                        -> _note_durable -> saver.say_result

The change of HEAD, one conditional request, is the commit. The other ranks note it when they hear the result.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch

from spottrain.checkpoint.context import RunContext
from spottrain.checkpoint.final_files import FinalFiles
from spottrain.checkpoint.final_weights import FinalWeights
from spottrain.checkpoint.head.owner import Claim, ClaimPolicy, Entry, HeadOwner, Identity
from spottrain.checkpoint.head.state import BEST
from spottrain.checkpoint.saver import Abandoned, Report, Save, Saver, manifest
from spottrain.checkpoint.selection import CheckpointSelection
from spottrain.checkpoint.upload import Transfer
from spottrain.checkpoint.upload_process import UploadItem
from spottrain.contract import CHECKPOINTS_PREFIX, CHUNK_BYTES, FINAL_PREFIX, MANIFEST_NAME
from spottrain.core import log
from spottrain.distributed.control_channel import ControlChannel, broadcast_facts, receive_facts
from spottrain.errors import (
    CheckpointError,
    PeerLost,
    RunError,
    StoreError,
    StoreUnavailable,
    Superseded,
    TrainingFailed,
)
from spottrain.storage.base import AlreadyExists, Store
from spottrain.storage.requests import tried

WATCH_SECONDS: Final = 30.0
"""Interval at which HEAD is re-read: a superseded process notices within this time."""
RETRY_SECONDS: Final = 0.5
CLAIM_SLACK: Final = 60.0
"""Seconds on top of `store_wait`, so that `storage.outage` gives up first, with its own error message."""
CHECKS: Final = 60
"""Attempts to read HEAD before the final weights are written, RETRY_SECONDS apart."""
SPARE: Final = 1.5
"""Safety factor on the expected duration of a save."""
PROBE_BYTES: Final = 8 * CHUNK_BYTES
"""Size of the object that measures the bandwidth at the start: one part for each connection."""


def seconds_for_running(left: float, *, running: float, one_save: float | None) -> float:
    """Returns how many of the `left` seconds the current upload gets before a newer save replaces it.

    `running`: seconds since the upload began; `one_save`: expected seconds of a save, None if not measured.
    If both saves fit, the upload may finish. If only the newer save fits, with the SPARE factor, the upload
    is abandoned at once. Otherwise the upload gets all of the time, because it has the least left to do.
    If no save was measured yet, the upload gets half.
    """
    if one_save is None:
        return left / 2
    if max(one_save - running, 0.0) + one_save <= left:
        return left - one_save
    return 0.0 if SPARE * one_save <= left else left


class CheckpointManager:
    """Claims HEAD, saves, and releases HEAD, on each rank of one attempt.

    `control` connects the ranks; None for a single rank. `transfer` starts an uploader.
    """

    def __init__(
        self,
        context: RunContext,
        store: Store,
        *,
        transfer: Callable[[], Transfer],
        control: ControlChannel | None = None,
        watch_seconds: float = WATCH_SECONDS,
    ) -> None:
        run = context.run
        self.context = context
        self.store = store
        self.final = FinalFiles(store, self._retry_in_outage)
        self._control = control
        self._watch_seconds = watch_seconds
        self._owner = HeadOwner(
            store,
            Identity(job_uid=run.job_uid, job=run.job, attempt=context.attempt),
            ClaimPolicy(on_existing=run.on_existing, known_durable_step=run.known_durable_step),
        )
        self.saver = Saver(context.world, control, transfer, pin=torch.cuda.is_available())
        self._released = not context.world.first  # the other ranks have nothing to release
        self.choice = CheckpointSelection(context, store, control)
        if context.world.first:
            self.choice.on_settled = lambda: threading.Thread(target=self._sweep, daemon=True).start()
        self.on_durable: Callable[[], None] = lambda: None
        """Called after each commit, on the thread that made it."""
        self._save: Save | None = None
        self._commit_turn = threading.Lock()

    # --- start --------------------------------------------------------------------------------------
    def claim(self) -> Claim:
        """Waits for the predecessor to release HEAD, then claims it. Raises RunError."""
        self.context.board.update(state="Gated")
        if not self.context.world.first:
            # May take long; a stop ends this process meanwhile.
            return Claim.from_facts(receive_facts(self._control, "claim"))
        run, preemption = self.context.run, self.context.preemption
        self._owner.wait_at_gate(run.gate_until, lambda: preemption.stopping)
        preemption.let_end(None)  # a signal must not end the process between the claim and its response
        claim = self._owner.claim(lambda: preemption.stopping, patience=self.context.store_wait + CLAIM_SLACK)
        if claim is None:
            with contextlib.suppress(StoreUnavailable):  # an unresponsive store must not delay the end
                self._owner.release(patience=self._patience())
            self.context.end_idle()
        self._released = claim.done  # if the job is done, nothing was claimed
        if not claim.done:
            newest = claim.resume[0] if claim.resume else None
            log.event("claimed", term=claim.term, step=newest and newest.step, key=newest and newest.key)
            threading.Thread(target=self._watch, name="spottrain-watch", daemon=True).start()
        broadcast_facts(self._control, "claim", asdict(claim))
        return claim

    def trained(self) -> tuple[int, int]:
        """Returns (steps trained, planned total steps or 0 if unknown) of a finished run.

        All ranks must call it. Raises StoreError.
        """
        if self.context.world.first:
            found = self.store.get(FINAL_PREFIX + MANIFEST_NAME)
            facts = json.loads(found.body) if found is not None else {}
            broadcast_facts(self._control, "trained", facts)
        else:
            facts = receive_facts(self._control, "trained")
        return int(facts.get("step", 0)), int(facts.get("total_steps", 0))

    def meet(self) -> None:
        """Waits until all ranks have come here, such as for files of all ranks to be complete.

        Raises PeerLost.
        """
        if self._control is None:
            return
        self._control.send_to_leader("meet", b"")
        if not self.context.world.first:
            self._control.receive("meet")
            return
        self._control.collect("meet", math.inf)
        if self._control.lost is not None:
            raise self._control.lost
        self._control.broadcast("meet", b"")

    # --- periodic saves -----------------------------------------------------------------------------
    @property
    def busy_with(self) -> int | None:
        """Step of the save in progress, or None."""
        save = self._save
        return None if save is None or save.finished.is_set() else save.step

    @property
    def last_save_failed(self) -> bool:
        return self._save is not None and self._save.failed

    def start(self, save: Save) -> None:
        """Uploads and commits the save in the background."""
        self._save = save
        threading.Thread(
            target=self._save_in_background, args=[save], name="spottrain-upload", daemon=True
        ).start()

    def _save_in_background(self, save: Save) -> None:
        try:
            self._write(save, lambda: math.inf)
        except Abandoned:
            log.unhindered("save-abandoned", step=save.step)
        except (Superseded, CheckpointError, TrainingFailed) as error:  # no later save can succeed
            self.context.fail_now(error)
        except PeerLost as error:  # the training thread detects it too and handles it
            save.failed = True
            log.unhindered("save-failed", step=save.step, error=str(error))
        except Exception as error:  # training continues after any other error
            save.failed = True
            self.context.board.save_failed(str(error))
            log.unhindered("save-failed", step=save.step, error=str(error), next="it will be tried again")
        finally:
            save.finished.set()
        self._prune(save)

    def _write(self, save: Save, left: Callable[[], float], *, again: bool = False) -> None:
        """Uploads the shards of all ranks; rank 0 then commits, and the others wait for its result.

        `again`: whether the caller retries after a failure.
        """
        if not self.context.world.first:
            self._write_with_leader(save, left)
            return
        try:
            save.key = save.key or self._owner.new_key(save.step)
            self._commit(save, self.saver.upload(save, left))
            self.saver.say_result(save, committed=True)
        except Exception as error:
            if not again:
                self.saver.say_over(save)
            self.saver.say_result(save, committed=False, why=f"{type(error).__name__}: {error}")
            raise

    def _write_with_leader(self, save: Save, left: Callable[[], float]) -> None:
        try:
            self.saver.upload(save, left)
        except Abandoned:
            if save.abandoned:
                raise  # abandoned by this rank; otherwise rank 0 ended the save and sends the reason
        result = self.saver.hear_result(save, left)
        if not result.get("committed"):
            why = str(result.get("why", "no answer"))
            if why.startswith(Abandoned.__name__):
                raise Abandoned
            lost = why.startswith(Superseded.__name__)  # the whole gang is superseded, which is not a failure
            raise (Superseded if lost else StoreUnavailable)(f"rank 0 did not commit step {save.step}: {why}")
        self._note_durable(save)

    def _commit(self, save: Save, reports: list[Report]) -> None:
        whole = manifest(save, reports)
        body = whole.to_bytes()
        entry = Entry(
            key=save.key,
            step=save.step,
            time=save.started,
            bytes=whole.size + len(body),
            keptAs=BEST if save.best else "",
        )
        with self._commit_turn:  # an abandoned save must not commit after the one that replaced it
            if save.abandoned:
                raise Abandoned
            with contextlib.suppress(AlreadyExists):  # the key is unique: an earlier try wrote it
                self.store.put_if_absent(save.key + MANIFEST_NAME, body)
            save.dropped = self._owner.commit(
                entry,
                self.context.run.keep,
                damaged=frozenset(self.choice.damaged),
                patience=self._patience(),
            )
        self._note_durable(save, bytes=entry.bytes)

    def _note_durable(self, save: Save, **facts: Any) -> None:
        save.committed = True
        seconds, board = time.time() - save.started, self.context.board
        board.clock.durable(save.productive)
        board.update(
            durable_step=save.step,
            durable_time=save.started,
            key=save.key,
            saves=board.facts.saves + 1,
            save_seconds=seconds,
        )
        if self.context.world.first:
            log.unhindered("committed", step=save.step, seconds=seconds, **facts, key=save.key)
        self.on_durable()

    def _prune(self, save: Save) -> None:
        """Deletes the checkpoints that the commit dropped from HEAD.

        Does nothing during a preemption notice. A later claim sweeps objects that remain.
        """
        if self.context.preemption.stopping:
            return
        try:
            self._owner.prune(save.dropped)
        except StoreError as error:
            log.unhindered("prune-failed", error=str(error))

    def measure_bandwidth(self) -> None:
        """Uploads a part of the staging buffer as a probe object, then deletes it. Raises StoreError."""
        if (folder := self._probe_folder()) is None:
            return  # a save measures the bandwidth as well
        key = f"{folder}r{self.context.world.rank:05d}-probe"
        size = min(PROBE_BYTES, self.saver.bytes)
        self.saver.send([UploadItem(key=key, bytes=size)], lambda: self.context.preemption.stopping)
        self.store.delete([key])

    def _probe_folder(self) -> str | None:
        """Returns the probe's folder, chosen by rank 0 for all ranks; None if no probe is needed.

        The key is of this term, so that a later claim sweeps it if this process is killed here.
        """
        if not self.context.world.first:
            return receive_facts(self._control, "probe").get("key")
        known = self.busy_with is not None or self.saver.bandwidth is not None
        key = None if known or not self.saver.bytes else self._owner.new_key(0)
        broadcast_facts(self._control, "probe", {"key": key} if key else {})
        return key

    # --- end ----------------------------------------------------------------------------------------
    def settle(self, seconds: float | None = None) -> None:
        """Waits for the save in progress and abandons it after `seconds`; None waits without a limit."""
        save = self._save
        if save is None or save.finished.is_set():
            return
        if not save.finished.wait(None if seconds == math.inf else seconds):
            save.abandoned = True
            log.unhindered("abandoning", step=save.step)
            save.finished.wait(RETRY_SECONDS)

    def save_now(self, take: Callable[[], Save]) -> None:
        """Saves and returns once committed. Raises StoreError, Superseded or CheckpointError.

        While `Outage.patient` is set, all ranks retry if the store does not respond.
        """
        save, outage = take(), self.context.outage
        outage.through(
            f"the save of step {save.step}",
            lambda: self._write(save, lambda: math.inf, again=outage.patient),
            brief=False,
            between=lambda: self.saver.again(save),
        )
        self._prune(save)

    def save_before_end(self, take: Callable[[], Save], step: int) -> None:
        """Saves `step` within the preemption notice. Raises StoreUnavailable when time runs out.

        `take` copies the state into the staging buffer. It is called while no other save is in progress.
        """
        left = self.context.preemption.seconds_left
        board = self.context.board
        if self.busy_with == step:
            self.settle(left())
        elif self._save is not None and self.busy_with is not None:
            running = time.time() - self._save.started
            may = seconds_for_running(left(), running=running, one_save=self.expected_seconds)
            self.settle(may if self.context.world.first else left())  # rank 0 decides for all ranks
        if board.facts.durable_step == step:
            return
        save, logged = take(), ""
        while board.facts.durable_step != step:
            try:
                self._write(save, left, again=True)
            except Exception as error:
                if isinstance(error, RunError) and not isinstance(error, StoreUnavailable):
                    raise
                if str(error) != logged:  # else a full disk would fill the log, too
                    logged = str(error)
                    log.unhindered("save-failed", step=step, error=logged, seconds_left=left())
                if left() < 2 * RETRY_SECONDS:
                    raise StoreUnavailable(f"step {step} could not be saved in time: {error}") from error
                time.sleep(RETRY_SECONDS)
                self.saver.again(save)

    @property
    def expected_seconds(self) -> float | None:
        """Expected seconds of one save, from the last save or the measured bandwidth; None if unknown."""
        last, bandwidth = self.context.board.facts.save_seconds, self.saver.bandwidth
        if last is not None or bandwidth is None:
            return last
        return self.saver.copy_seconds + self.saver.bytes / bandwidth + RETRY_SECONDS

    def write_final(self, weights: FinalWeights, step: int, beside: Iterable[tuple[str, Path]] = ()) -> None:
        """On rank 0: writes the weights to `final/`.

        `beside`: name and place of further files, such as the model's configuration.
        """
        # `check` makes a single request. It is retried here, because a failure would end the training.
        self._retry_in_outage(
            lambda: tried(self._owner.check, CHECKS, lambda failures: time.sleep(RETRY_SECONDS))
        )
        facts = self.context.board.facts
        known = {"step": step, "total_steps": facts.total_steps, "checkpoint": facts.key}
        self.final.write(weights, beside, known)

    def _retry_in_outage(self, act: Callable[[], None]) -> None:
        """Retries one file at a time, because all ranks must gather the next one together."""
        self.context.outage.through("the final weights", act, brief=False)

    @property
    def final_uri(self) -> str:
        return f"{self.store.uri.rstrip('/')}/{FINAL_PREFIX}"

    def release(self, *, done: bool = False) -> None:
        """Releases HEAD, so that the successor need not wait. Must be the last call.

        Errors are raised only with `done`; otherwise they are logged.
        """
        if self._released:
            return
        self._released = True
        try:
            waits = done and self.context.outage.patient
            patience = self.context.store_wait + CLAIM_SLACK if waits else self._patience()
            self._owner.release(done, patience=patience)
            log.unhindered("released", done=done or None)
            if done:  # otherwise the next claim sweeps
                self._quietly(self._owner.sweep_leftovers)
        except RunError as error:
            if done:
                self._released = False  # a later call may still release it
                raise
            log.unhindered("release-failed", error=str(error))

    def _patience(self) -> float | None:
        """Seconds to retry requests for HEAD: the rest of a notice, or None for HeadOwner's default."""
        preemption = self.context.preemption
        return max(preemption.seconds_left() - RETRY_SECONDS, 0.0) if preemption.stopping else None

    def _watch(self) -> None:
        """Re-reads HEAD periodically; ends the process when a newer attempt owns HEAD."""
        while not self._released:
            time.sleep(self._watch_seconds)
            if not self._released:  # after the release a successor may own HEAD
                self._quietly(self._owner.check)

    def _sweep(self) -> None:
        """Deletes what earlier attempts left. Not before HEAD has proved to be the one of what is there."""
        self._quietly(self._owner.sweep_orphans)
        self._quietly(lambda: self.store.sweep_uploads(CHECKPOINTS_PREFIX, self._owner.outlived))

    def _quietly(self, act: Callable[[], object]) -> None:
        try:
            act()
        except Superseded as error:
            self.context.fail_now(error)
        except RunError as error:
            log.event("head-check-failed", error=str(error))

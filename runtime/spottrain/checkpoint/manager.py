"""Checkpoint manager: the checkpoints of one claim. On rank 0, `head.owner.HeadOwner` changes HEAD.

    claim -> restore -> [ saver.snapshot, start: one save at a time ] -> save_before_end, or save_now and
    write_final -> release

Every rank calls the same methods at the same steps. One save, from `start` on in a thread:

    rank 0 (_lead):      key ->  saver.upload, _collect -> _commit: manifest, owner.commit (HEAD) -> result
    others (_follow):    -> key  saver.upload -> report                                           -> result

Ranks report to rank 0 over a TCP connection, not by a collective, because a lost rank must not hang the
others. Rank 0 commits, by one conditional request for HEAD, and sends the others the result.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, NoReturn, Protocol

import torch

from spottrain.checkpoint.final_files import FinalFiles
from spottrain.checkpoint.final_weights import FinalWeights
from spottrain.checkpoint.head.owner import Claim, ClaimPolicy, Entry, HeadOwner, Identity, fresh_nonce
from spottrain.checkpoint.head.state import BEST
from spottrain.checkpoint.manifest import FOLDER, STATE, Damaged
from spottrain.checkpoint.reader import Want, fetch_folder, read_manifest, read_trees
from spottrain.checkpoint.saver import Abandoned, Report, Save, Saver, manifest
from spottrain.checkpoint.upload import Transfer, UploadItem
from spottrain.contract import (
    CHECKPOINTS_PREFIX,
    CHUNK_BYTES,
    FINAL_PREFIX,
    MANIFEST_NAME,
    Reason,
    checkpoint_key,
)
from spottrain.core import log
from spottrain.core.log_format import counted
from spottrain.core.preemption import Preemption
from spottrain.core.progress import ProgressBoard
from spottrain.core.run_config import RunConfig
from spottrain.distributed.control_channel import ControlChannel
from spottrain.distributed.world import World
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
from spottrain.storage.outage import Outage
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
WAIT_SECONDS: Final = 1.0
"""Longest single wait for another rank, before the remaining time is checked again."""
REPORT_SECONDS: Final = 3600.0
"""Longest wait for the other ranks' uploads; it is the only limit while no stop is requested."""
PROBE_BYTES: Final = 8 * CHUNK_BYTES
"""Size of the object that measures the bandwidth at the start: one part for each connection."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """The contents of a checkpoint for this rank."""

    entry: Entry
    shared: Any
    own: Any
    new_rank: bool
    """Whether fewer ranks wrote the checkpoint, so that `own` is rank 0's."""


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


def _raise_error_of(report: Report) -> None:
    if "error" not in report:
        return
    if report["error"] == Abandoned.__name__:
        raise Abandoned
    if report["error"] == TrainingFailed.__name__:
        raise TrainingFailed(report["message"])
    raise StoreUnavailable(f"rank {report['rank']} could not save: {report['error']}: {report['message']}")


class RunContext(Protocol):
    """The part of a run that is needed here."""

    world: World
    run: RunConfig
    attempt: int
    board: ProgressBoard
    preemption: Preemption
    outage: Outage
    """Tracks whether the store responds, and whether requests are retried."""
    store_wait: float
    """Seconds to wait for a store that does not respond."""

    def begin_claim(self) -> None:
        """Notes that HEAD may be claimed from now on: no signal may end the process before the response."""

    def end_idle(self) -> NoReturn:
        """Ends a run that has nothing to save."""

    def end(self, error: RunError, /, *, at_once: bool) -> NoReturn:
        """Ends the run by `error`; with `at_once` the process, from any thread."""


class CheckpointManager:
    """Claims HEAD, saves, and releases HEAD, on each rank of one attempt.

    `control` connects the ranks; None for a single rank. `transfer` starts an uploader. `by_rank0`: see
    `Saver`.
    """

    def __init__(
        self,
        context: RunContext,
        store: Store,
        *,
        transfer: Callable[[], Transfer],
        control: ControlChannel | None = None,
        by_rank0: Collection[str] = (),
        watch_seconds: float = WATCH_SECONDS,
    ) -> None:
        run = context.run
        self.context = context
        self.store = store
        self.final = FinalFiles(store, context.outage)
        self._control = control or ControlChannel(context.world)
        self._watch_seconds = watch_seconds
        self._owner = HeadOwner(
            store,
            Identity(job_uid=run.job_uid, job=run.job, attempt=context.attempt),
            ClaimPolicy(on_existing=run.on_existing, known_durable_step=run.known_durable_step),
        )
        self.saver = Saver(context.world, transfer, by_rank0=by_rank0, pin=torch.cuda.is_available())
        self._released = not context.world.first  # the other ranks have nothing to release
        self._damaged: set[str] = set()
        """Keys of the checkpoints that could not be read."""
        self._save: Save | None = None
        self._term = 0
        self._commit_turn = threading.Lock()

    # --- start --------------------------------------------------------------------------------------
    def claim(self) -> Claim:
        """Waits for the predecessor to release HEAD, then claims it. Raises RunError."""
        self.context.board.update(state="Gated")
        if not self.context.world.first:
            # May take long; a stop ends this process meanwhile.
            theirs = Claim.from_facts(self._control.receive("claim"))
            self._term = theirs.term
            return theirs
        run, preemption = self.context.run, self.context.preemption
        self._owner.wait_at_gate(run.gate_until, lambda: preemption.stopping)
        self.context.begin_claim()
        claim = self._owner.claim(lambda: preemption.stopping, patience=self.context.store_wait + CLAIM_SLACK)
        if claim is None:
            with contextlib.suppress(StoreUnavailable):  # an unresponsive store must not delay the end
                self._owner.release(patience=self._patience())
            self.context.end_idle()
        self._term = claim.term
        self._released = claim.done  # if the job is done, nothing was claimed
        if not claim.done:
            newest = claim.resume[0] if claim.resume else None
            log.event("claimed", term=claim.term, step=newest and newest.step, key=newest and newest.key)
            threading.Thread(target=self._watch, name="spottrain-watch", daemon=True).start()
        self._control.broadcast("claim", asdict(claim))
        return claim

    def restore(
        self, claim: Claim, want: Want | None = None, *, folder: Callable[[int], Path] | None = None
    ) -> Restored | None:
        """Reads the newest intact checkpoint, the same one on all ranks; None if there is none yet.

        `want` selects the part of each tensor. `folder(step)` is where each pod gets a library's files, all
        or nothing; without it the checkpoint is one of tensors. Damaged checkpoints are logged and skipped.
        Raises CheckpointError if all are damaged: then nothing is overwritten, because a person may be able
        to repair them.
        """
        found: Restored | None = None
        reasons: list[str] = []
        for entry in claim.resume:
            began, why = time.time(), ""
            try:
                found = self._read(entry, want, folder)
            except Damaged as error:
                why = str(error)
            why = next(filter(None, self._control.all_gather("restored", why)), "")
            if not why:
                log.event("restored", step=entry.step, key=entry.key, seconds=time.time() - began)
                break
            log.event("damaged", step=entry.step, key=entry.key, error=why)
            found = None
            reasons.append(f"step {entry.step}: {why}")
            self._damaged.add(entry.key)
        if found is None and reasons:
            raise CheckpointError(
                f"none of the {counted(len(reasons), 'checkpoint')} at {self.store.uri} can be read "
                f"({'; '.join(reasons)}). Nothing was overwritten: restore the objects from a backup or "
                "from older versions, or use another URI",
                reason=Reason.CHECKPOINT_DAMAGED,
            )
        if self.context.world.first:  # only now HEAD has proved to be the one of what is there
            threading.Thread(target=self._sweep, daemon=True).start()
        return found

    def _read(self, entry: Entry, want: Want | None, folder: Callable[[int], Path] | None) -> Restored:
        """Raises Damaged."""
        world = self.context.world
        there, kind = read_manifest(self.store, entry.key), STATE if folder is None else FOLDER
        if there.kind != kind:
            raise CheckpointError(
                f"the checkpoint at {self.store.uri} is of kind {there.kind}, but this script "
                f"resumes from kind {kind}: another interface of spottrain, or AccelerateRun of "
                "spottrain 0.3, wrote it. Use the script and image that wrote it, or another checkpoint URI",
                reason=Reason.CHECKPOINT_INCOMPATIBLE,
            )
        if folder is not None and world.first_here:
            fetch_folder(self.store, entry.key, there, folder(entry.step), world.rank)
        shared, own = read_trees(self.store, entry.key, there, rank=world.rank, want=want)
        return Restored(entry=entry, shared=shared, own=own, new_rank=world.rank >= there.world)

    def trained(self) -> tuple[int, int]:
        """Returns (steps trained, planned total steps or 0 if unknown) of a finished run.

        Raises StoreError.
        """
        found = self.store.get(FINAL_PREFIX + MANIFEST_NAME)
        facts = json.loads(found.body) if found is not None else {}
        return int(facts.get("step", 0)), int(facts.get("total_steps", 0))

    def barrier(self) -> None:
        """Waits until all ranks have come here, such as for files of all ranks to be complete.

        Raises PeerLost.
        """
        self._control.all_gather("barrier", True)

    # --- periodic saves -----------------------------------------------------------------------------
    @property
    def busy_with(self) -> int | None:
        """Step of the save in progress, or None."""
        save = self._save
        return None if save is None or save.finished.is_set() else save.step

    @property
    def last_save_failed(self) -> bool:
        return self._save is not None and self._save.failed

    def start(self, save: Save, then: Callable[[], None] = lambda: None) -> None:
        """Uploads and commits the save in the background, `then` calls `then`."""
        self._save = save
        threading.Thread(
            target=self._save_in_background, args=[save, then], name="spottrain-upload", daemon=True
        ).start()

    def _save_in_background(self, save: Save, then: Callable[[], None]) -> None:
        try:
            self._write(save, lambda: math.inf)
            then()
        except Abandoned:
            log.unhindered("save-abandoned", step=save.step)
        except (Superseded, CheckpointError, TrainingFailed) as error:  # no later save can succeed
            self.context.end(error, at_once=True)
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
        """Uploads the parts of all ranks; rank 0 then commits, and the others wait for its result.

        `left` returns the remaining seconds. `again`: whether the caller retries after a failure.
        """
        if self.context.world.first:
            self._lead(save, left, again=again)
        else:
            self._follow(save, left)

    def _lead(self, save: Save, left: Callable[[], float], *, again: bool) -> None:
        about, control = f"save/{save.number}", self._control
        try:
            save.key = save.key or self._owner.new_key(save.step)
            # First: the others wait for it, also where this rank's part then fails.
            control.broadcast(f"{about}/key", {"key": save.key, "files": [each.path for each in save.files]})
            control.send_to_leader(about, self.saver.upload(save, lambda: save.abandoned))
            self._commit(save, self._collect(save, left))
            control.broadcast(f"{about}/result", {"committed": True})
        except Exception as error:
            if not again:  # the others stop uploading
                control.broadcast(f"{about}/over", {})
            why = f"{type(error).__name__}: {error}"
            control.broadcast(f"{about}/result", {"committed": False, "why": why})
            raise

    def _follow(self, save: Save, left: Callable[[], float]) -> None:
        """Reports to rank 0 in any case, so that it does not wait for a rank that has failed."""
        about, control = f"save/{save.number}", self._control
        try:
            self._take_key(save, self._heard(f"{about}/key", left))
            over = f"{about}/over"
            report = self.saver.upload(save, lambda: save.abandoned or control.has_message(over))
        except Exception as error:
            rank = self.context.world.rank
            report = {"error": type(error).__name__, "message": str(error), "rank": rank}
            control.send_to_leader(about, report)
            if save.abandoned or not isinstance(error, Abandoned):
                raise  # otherwise rank 0 has ended the save and sends the reason
        else:
            control.send_to_leader(about, report)
        result = self._heard(f"{about}/result", left)
        if not result.get("committed"):
            why = str(result.get("why", "no answer"))
            if why.startswith(Abandoned.__name__):
                raise Abandoned
            lost = why.startswith(Superseded.__name__)  # the whole gang is superseded, which is not a failure
            raise (Superseded if lost else StoreUnavailable)(f"rank 0 did not commit step {save.step}: {why}")
        self._note_durable(save)

    def _take_key(self, save: Save, heard: dict[str, Any]) -> None:
        """Sets the key that rank 0 chose, and drops the files that rank 0 uploads."""
        if not heard:
            raise Abandoned
        save.key = heard["key"]
        if save.kind == FOLDER:
            theirs = set(heard["files"])
            save.files = [file for file in save.files if file.path not in theirs]
            names = {file.shard for file in save.files}
            save.items = [item for item in save.items if item.key in names]

    def _collect(self, save: Save, left: Callable[[], float]) -> list[Report]:
        control = self._control
        answers = control.collect(f"save/{save.number}", min(left(), REPORT_SECONDS), lambda: save.abandoned)
        if save.abandoned:
            raise Abandoned
        if control.lost is not None:
            raise control.lost
        reports = [answer for answer in answers if answer is not None]
        for report in reports:
            _raise_error_of(report)
        if len(reports) < self.context.world.size:
            raise StoreUnavailable("not all ranks had uploaded their shards in time")
        return reports

    def _heard(self, name: str, left: Callable[[], float]) -> dict[str, Any]:
        """On the other ranks: returns rank 0's message; empty if the time runs out."""
        answer = None
        while answer is None and left() > 0:
            answer = self._control.receive(name, min(WAIT_SECONDS, left()))
        return answer or {}

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
                damaged=frozenset(self._damaged),
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
        size = min(PROBE_BYTES, self.saver.staged)
        if not size or self.busy_with is not None or self.saver.bandwidth is not None:
            return  # a save measures the bandwidth as well
        # Of this term, so that a later claim sweeps it if this process is killed here.
        folder = checkpoint_key(self._term, 0, fresh_nonce())
        key = f"{folder}r{self.context.world.rank:05d}-probe"
        self.saver.send([UploadItem(key=key, bytes=size)], lambda: self.context.preemption.stopping)
        self.store.delete([key])

    # --- end ----------------------------------------------------------------------------------------
    def wait_for_upload(self, seconds: float | None = None) -> None:
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
            self.wait_for_upload(left())
        elif self._save is not None and self.busy_with is not None:
            running = time.time() - self._save.started
            may = seconds_for_running(left(), running=running, one_save=self.expected_seconds)
            self.wait_for_upload(may if self.context.world.first else left())  # rank 0 decides for all ranks
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
        self.context.outage.through(
            "HEAD",
            lambda: tried(self._owner.check, CHECKS, lambda failures: time.sleep(RETRY_SECONDS)),
            brief=False,
        )
        facts = self.context.board.facts
        known = {"step": step, "total_steps": facts.total_steps, "checkpoint": facts.key}
        self.final.write(weights, beside, known)

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
        """Deletes what earlier attempts left."""
        self._quietly(self._owner.sweep_orphans)
        self._quietly(lambda: self.store.sweep_uploads(CHECKPOINTS_PREFIX, self._owner.outlived))

    def _quietly(self, act: Callable[[], object]) -> None:
        try:
            act()
        except Superseded as error:
            self.context.end(error, at_once=True)
        except RunError as error:
            log.event("head-check-failed", error=str(error))

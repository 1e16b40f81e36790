"""Makes training state durable and finds it again. Called by `trainer`; HEAD belongs to `owner.HeadOwner`.

    claim -> restore -> save (in a thread, one at a time) ... -> save_before_end or finish -> release

A save is shards, then the manifest, then one conditional change of HEAD, which is the commit.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, Final

from spottrain import log
from spottrain.contract import FINAL_PREFIX, MANIFEST_NAME, Reason
from spottrain.errors import CheckpointError, RunError, StoreError, StoreUnavailable, Superseded
from spottrain.owner import Claim, ClaimPolicy, Entry, HeadOwner, Identity
from spottrain.session import Session
from spottrain.state import Damaged, Encoded, Manifest, Shard, open_shard
from spottrain.store import AlreadyExists, Store

UPLOADS: Final = 4
"""Shards in flight at once; each is held in memory once more while it is."""
WATCH_SECONDS: Final = 30.0
"""A superseded process learns of it within this time (design.md section 3, rule 8)."""
RETRY_SECONDS: Final = 0.5
SPARE: Final = 1.5
"""A save is counted on to be done within so many times the duration of the last one."""
MODEL_NAME: Final = "model.safetensors"


class _Abandoned(Exception):
    """A newer save takes this one's place."""


@dataclass(slots=True, eq=False)
class Upload:
    step: int
    tree: Any
    started: float = field(default_factory=time.time)
    finished: threading.Event = field(default_factory=threading.Event)
    abandoned: bool = False
    failed: bool = False
    key: str = ""
    shards: dict[str, Shard] = field(default_factory=dict)
    """Those that are in the store: a second try has only the rest to do."""


def seconds_for_running(left: float, *, running: float, one_save: float | None) -> float:
    """Seconds of the `left` ones that an upload gets which has been `running` when a stop is asked for.

    A newer save is wanted after it. Where there is time for both it may finish. Where there is time for the
    newer one alone, and some to spare, it makes room at once, because then nothing is lost. Else it is kept:
    it has the least to do. While no save was measured it gets half: it is the sure thing, and the newer one
    needs the rest.
    """
    if one_save is None:
        return left / 2
    if max(one_save - running, 0.0) + one_save <= left:
        return left - one_save
    return 0.0 if SPARE * one_save <= left else left


class Checkpointer:
    """The checkpoints of one claim."""

    def __init__(self, session: Session, store: Store, *, watch_seconds: float = WATCH_SECONDS) -> None:
        run = session.run
        self.session = session
        self.store = store
        self._watch_seconds = watch_seconds
        self._owner = HeadOwner(
            store,
            Identity(job_uid=run.job_uid, job=run.job, attempt=session.attempt),
            ClaimPolicy(on_existing=run.on_existing, known_durable_step=run.known_durable_step),
        )
        self._released = False
        self._damaged: set[str] = set()
        self._upload: Upload | None = None
        self._commit_turn = threading.Lock()

    # --- start --------------------------------------------------------------------------------------
    def claim(self) -> Claim:
        """Waits at the gate, then becomes the owner of HEAD. Raises RunError."""
        run, interruption = self.session.run, self.session.interruption
        self.session.board.update(state="Gated")
        self._owner.wait_at_gate(run.gate_until, lambda: interruption.stopping)
        interruption.let_end(None)  # nobody may end the process between a claim and its answer
        claim = self._owner.claim(lambda: interruption.stopping)
        if claim is None:
            self._owner.release()
            self.session.end_idle()
        newest = claim.resume[0] if claim.resume else None
        log.event("claimed", term=claim.term, step=newest and newest.step, key=newest and newest.key)
        self._released = claim.done  # then nothing was claimed
        if not claim.done:
            threading.Thread(target=self._watch, name="spottrain-watch", daemon=True).start()
        return claim

    def restore(self, claim: Claim) -> tuple[Entry, Any] | None:
        """The newest checkpoint that is whole, and its tree; None where there is none yet.

        A damaged one is named and passed over. Raises CheckpointError where all are damaged: nothing is
        overwritten, because a person may mend what we cannot.
        """
        reasons = []
        for entry in claim.resume:
            began = time.time()
            try:
                tree = self._read(entry)
            except Damaged as error:
                log.event("damaged", step=entry.step, key=entry.key, error=str(error))
                reasons.append(f"step {entry.step}: {error}")
                self._damaged.add(entry.key)
                continue
            log.event("restored", step=entry.step, key=entry.key, seconds=time.time() - began)
            return entry, tree
        if reasons:
            raise CheckpointError(
                f"none of the {len(reasons)} checkpoint(s) at {self.store.uri} can be read "
                f"({'; '.join(reasons)}). Nothing was overwritten: restore the objects from a backup or "
                "from older versions, or use another URI",
                reason=Reason.CHECKPOINT_DAMAGED,
            )
        return None

    def _read(self, entry: Entry) -> Any:
        found = self.store.get(entry.key + MANIFEST_NAME)
        if found is None:
            raise Damaged("the manifest is missing")
        manifest = Manifest.from_bytes(found.body)

        def fetch(shard: Shard) -> Any:
            answer = self.store.get(entry.key + shard.name)
            return open_shard(shard, answer.body if answer else None)

        with ThreadPoolExecutor(UPLOADS) as pool:
            shards = dict(
                zip([s.name for s in manifest.shards], pool.map(fetch, manifest.shards), strict=True)
            )
        try:
            return manifest.decode(shards)
        except (KeyError, IndexError, RuntimeError) as error:
            raise Damaged(f"shards and manifest do not fit together ({error})") from error

    # --- periodic saves -----------------------------------------------------------------------------
    @property
    def busy_with(self) -> int | None:
        """Step of the upload under way; one that is abandoned may read what it likes, for nothing."""
        upload = self._upload
        return None if upload is None or upload.abandoned or upload.finished.is_set() else upload.step

    @property
    def last_save_failed(self) -> bool:
        return self._upload is not None and self._upload.failed

    def save(self, tree: Any, step: int) -> None:
        """Starts to upload `tree`, which nobody may change until `busy_with` is None again."""
        self._upload = Upload(step, tree)
        threading.Thread(
            target=self._upload_in_background, args=[self._upload], name="spottrain-upload", daemon=True
        ).start()

    def _upload_in_background(self, upload: Upload) -> None:
        try:
            self._write(upload)
        except _Abandoned:
            log.event("save-abandoned", step=upload.step)
        except (Superseded, CheckpointError) as error:  # no later save can succeed
            self.session.fail_now(error)
        except Exception as error:  # whatever else it was, training goes on
            upload.failed = True
            self.session.board.save_failed(str(error))
            log.event("save-failed", step=upload.step, error=str(error), next="it will be tried again")
        finally:
            upload.finished.set()

    def _write(self, upload: Upload) -> None:
        """Shards, manifest, commit, prune."""
        upload.key = key = upload.key or self._owner.new_key(upload.step)
        encoded = Encoded(upload.tree, step=upload.step)
        shards = self._put_shards(upload, encoded)
        manifest = encoded.manifest(shards)
        self._put_once(key + MANIFEST_NAME, manifest)
        size = len(manifest) + sum(shard.bytes for shard in shards)
        entry = Entry(key=key, step=upload.step, time=time.time(), bytes=size)
        self._commit(upload, entry)

    def _put_shards(self, upload: Upload, encoded: Encoded) -> list[Shard]:
        """All of them, or the first error; after one, no further shard is begun."""

        def put(name: str, make: Callable[[], bytes]) -> Shard:
            if upload.abandoned:
                raise _Abandoned
            if name not in upload.shards:
                body = make()
                self._put_once(upload.key + name, body)
                digest = hashlib.sha256(body).hexdigest()
                upload.shards[name] = Shard(name=name, bytes=len(body), sha256=digest)
            return upload.shards[name]

        with ThreadPoolExecutor(UPLOADS) as pool:
            futures = [pool.submit(put, name, make) for name, make in encoded.shards()]
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            errors = [error for error in (each.exception() for each in done) if error is not None]
            if errors:
                pool.shutdown(wait=False, cancel_futures=True)
                raise errors[0]
        return [each.result() for each in futures]

    def _put_once(self, key: str, body: bytes) -> None:
        # The key is ours alone: if it exists, an earlier try of this PUT arrived though its answer did not.
        with contextlib.suppress(AlreadyExists):
            self.store.put_if_absent(key, body)

    def _commit(self, upload: Upload, entry: Entry) -> None:
        with self._commit_turn:  # so that an abandoned upload cannot come after the one that took its place
            if upload.abandoned:
                raise _Abandoned
            dropped = self._owner.commit(
                entry, self.session.run.keep, damaged=frozenset(self._damaged), patience=self._patience()
            )
        now = time.time()
        board = self.session.board
        board.update(
            durable_step=entry.step,
            durable_time=now,
            key=entry.key,
            saves=board.facts.saves + 1,
            save_seconds=now - upload.started,
        )
        log.event(
            "committed", step=entry.step, seconds=now - upload.started, bytes=entry.bytes, key=entry.key
        )
        self._prune(dropped)

    def _prune(self, dropped: tuple[str, ...]) -> None:
        """Deletes what the commit dropped from HEAD. What is left is an orphan, swept by a later claim."""
        try:
            self._owner.prune(dropped)
        except StoreError as error:
            log.event("prune-failed", error=str(error))

    # --- end ----------------------------------------------------------------------------------------
    def settle(self, seconds: float | None = None) -> None:
        """Waits for the upload under way, and gives it up after so many seconds, if any are named."""
        if self._upload is None or self._upload.abandoned or self._upload.finished.wait(seconds):
            return
        self._upload.abandoned = True
        log.event("abandoning", step=self._upload.step)

    def save_now(self, tree: Any, step: int) -> None:
        """Like `save`, but returns when it is committed. Raises StoreError, Superseded or CheckpointError."""
        self._write(Upload(step, tree))

    def save_before_end(self, take: Callable[[], Any], step: int) -> None:
        """Makes the newest step durable within the notice. Raises the last StoreError when time runs out.

        `take` copies the state, once, when no upload is in its way any more.
        """
        left = self.session.interruption.seconds_left
        if self.busy_with == step:
            self.settle(left())
        elif self._upload is not None and self.busy_with is not None:
            facts = self.session.board.facts
            running = time.time() - self._upload.started
            self.settle(seconds_for_running(left(), running=running, one_save=facts.save_seconds))
        if self.session.board.facts.durable_step == step:
            return
        upload = Upload(step, take())
        while self.session.board.facts.durable_step != step:
            try:
                self._write(upload)
            except StoreUnavailable as error:
                log.event("save-failed", step=step, error=str(error), seconds_left=left())
                if left() < 2 * RETRY_SECONDS:
                    raise
                time.sleep(RETRY_SECONDS)

    def write_final(self, weights: bytes, digest: str, step: int) -> str:
        """Leaves the weights at `final/`; returns their URI. A predecessor that died here is written over."""
        self._owner.check()
        self.store.put(FINAL_PREFIX + MODEL_NAME, weights)
        facts = {
            "format": 1,
            "step": step,
            "digest": digest,
            "bytes": len(weights),
            "sha256": hashlib.sha256(weights).hexdigest(),
            "checkpoint": self.session.board.facts.key,
        }
        self.store.put(FINAL_PREFIX + MANIFEST_NAME, json.dumps(facts, indent=1).encode())
        return self.final_uri

    @property
    def final_uri(self) -> str:
        return f"{self.store.uri.rstrip('/')}/{FINAL_PREFIX}"

    def release(self, *, done: bool = False) -> None:
        """Gives HEAD up so that the successor need not wait; the last act. Only `done` has to succeed."""
        if self._released:
            return
        self._released = True
        try:
            self._owner.release(done, patience=self._patience())
            log.event("released", done=done or None)
        except RunError as error:
            if done:
                raise
            log.event("release-failed", error=str(error))

    def _patience(self) -> float | None:
        """Seconds to go on asking for HEAD: what is left of a notice, else the owner's own."""
        interruption = self.session.interruption
        return max(interruption.seconds_left() - RETRY_SECONDS, 0.0) if interruption.stopping else None

    def _watch(self) -> None:
        """Sweeps once, then re-reads HEAD again and again; ends the process when a newer attempt owns it."""
        self._quietly(self._owner.sweep_orphans)
        while not self._released:
            time.sleep(self._watch_seconds)
            self._quietly(self._owner.check)

    def _quietly(self, act: Any) -> None:
        try:
            act()
        except Superseded as error:
            self.session.fail_now(error)
        except RunError as error:
            log.event("watch-failed", error=str(error))

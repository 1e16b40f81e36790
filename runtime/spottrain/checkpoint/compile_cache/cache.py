"""The compiler's cache folders, kept beside the checkpoints: a restarted pod does not compile again.

`session` points torch at the folders before torch is imported. The first process of each node makes a
`CompileCache`, restores in a thread while torch is imported and the checkpoint comes down, and saves in a
thread after the first step and after later saves. Nothing here ends a run: what cannot be restored is
compiled, what cannot be saved is compiled by the next attempt.

    compile-cache/{key}.json               which archive counts, its checksum, what it was compiled for
    compile-cache/{key}-{sha256}.tar.gz    the files; named by content, so that no two writers tear a pair

**An archive is code.** Whoever can write the prefix can run code in the pod (docs/security.md), so it is
read only from the job's own URI, never from the one that a job starts from.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from spottrain.checkpoint.compile_cache.folders import (
    Folders,
    Listing,
    compiling,
    folders_of,
    listing,
    pack,
    unpack,
)
from spottrain.checkpoint.compile_cache.key import FORMAT, CompileTarget, canonical
from spottrain.contract import COMPILE_CACHE_PREFIX, CompileCacheMode
from spottrain.core import log
from spottrain.core.run_config import RunConfig
from spottrain.storage.base import Store

KEYS_KEPT: Final = 8
"""Kinds of machine whose caches stay. A fleet has a few; an image that changes daily makes many."""
TRIES: Final = 3
"""Failed saves after which no more are tried."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoredCache:
    files: int
    bytes: int
    """Of the archive."""
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheEntry:
    """`{key}.json`."""

    format: int
    facts: Mapping[str, Any]
    archive: str
    """Its name below COMPILE_CACHE_PREFIX."""
    sha256: str
    bytes: int
    files: int
    contents: str
    """SHA-256 of the files' names and sizes, by which a node sees that another has saved the same."""
    job: str
    attempt: int
    savedAt: str

    @classmethod
    def from_json(cls, text: str) -> CacheEntry:
        """Raises ValueError."""
        try:
            entry = cls(**json.loads(text))
        except TypeError as error:
            raise ValueError(f"its entry has not the fields of format {FORMAT}: {error}") from error
        if not all(isinstance(word, str) for word in (entry.archive, entry.sha256, entry.savedAt)):
            raise ValueError(f"its entry has not the types of format {FORMAT}")
        return entry


class CompileCache:
    """The compile cache of one node. Its methods may be called from any thread, and never raise."""

    def __init__(
        self,
        *,
        store: Store,
        places: Folders,
        facts: CompileTarget,
        job: str = "",
        attempt: int = 1,
        drop: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.key = facts.key()
        self._store = store
        self._places = places
        self._facts = facts
        self._job = job
        self._attempt = attempt
        self._drop = drop
        self._clock = clock
        self._stored: Listing = {}
        """What is known to be stored."""
        self._unusable = False
        """Whether what is stored could not be restored, and is to be replaced by whatever is compiled now."""
        self._failures = 0
        self._one_at_a_time = threading.Lock()

    @classmethod
    def of(
        cls, store: Store | None, run: RunConfig, environ: Mapping[str, str], attempt: int
    ) -> CompileCache | None:
        """None where nothing is kept: switched off, no store, or no cache folder of our own.

        Without SPOTTRAIN_CACHE_DIR torch compiles into a folder that all programs of the user share.
        To be called after `use_folder`, which sets what torch reads from `environ`.
        """
        if run.compile_cache is CompileCacheMode.OFF or store is None or run.cache_dir is None:
            return None
        return cls(
            store=store,
            places=folders_of(environ),
            facts=CompileTarget.here(run.image_digest),
            job=run.job,
            attempt=attempt,
            drop=run.compile_cache is CompileCacheMode.DROP,
        )

    def restore(self) -> RestoredCache | None:
        """Puts the stored files into the folders; None where there are none, or none that can be used.

        To be called before the first compile.
        """
        started = self._clock()
        try:
            if self._drop:
                self._forget()
            entry = self._entry()
            if entry is None:
                log.event("compile-cache-restored", hit=False, key=self.key[:12])
                return None
            unpack(self._archive(entry), self._places)
        except Exception as error:
            # Whatever is wrong with it, the answer is the same: compile.
            self._unusable = True
            log.event("compile-cache-unusable", key=self.key[:12], why=_why(error))
            return None
        restored = RestoredCache(files=entry.files, bytes=entry.bytes, seconds=self._clock() - started)
        log.event("compile-cache-restored", hit=True, key=self.key[:12], **asdict(restored))
        return restored

    def save_if_changed(self) -> bool:
        """Stores the folders if they hold other files than what is stored, and says whether it did.

        Nothing is stored while the compiler writes; the next call tries again.
        """
        if self._failures >= TRIES or not self._one_at_a_time.acquire(blocking=False):
            return False
        try:
            return self._save()
        except Exception as error:
            self._failures += 1
            log.event("compile-cache-not-saved", key=self.key[:12], why=_why(error))
            return False
        finally:
            self._one_at_a_time.release()

    def _save(self) -> bool:
        started = self._clock()
        files = listing(self._places)
        # A lock that is held now: packing would be in vain.
        if not files or files == self._stored or compiling(self._places):
            return False
        contents = _contents(files)
        new = self._unusable or not self._is_stored(contents)
        if new:
            body = pack(self._places, files)
            if listing(self._places) != files or compiling(self._places):
                return False  # what was packed may be half a file
            entry = self._describe(body, files, contents)
            self._publish(entry, body)
            seconds = self._clock() - started
            log.event(
                "compile-cache-saved",
                key=self.key[:12],
                files=entry.files,
                bytes=entry.bytes,
                seconds=seconds,
            )
        self._stored, self._unusable = files, False
        return new

    def _is_stored(self, contents: str) -> bool:
        """By the attempt it was restored from, or by another node of the gang that compiled the same."""
        try:
            entry = self._entry()
        except ValueError:
            return False  # damaged, and about to be replaced
        return entry is not None and entry.contents == contents

    def _describe(self, body: memoryview, files: Listing, contents: str) -> CacheEntry:
        sha256 = hashlib.sha256(body).hexdigest()
        return CacheEntry(
            format=FORMAT,
            facts=asdict(self._facts),
            archive=f"{self.key}-{sha256}.tar.gz",
            sha256=sha256,
            bytes=len(body),
            files=len(files),
            contents=contents,
            job=self._job,
            attempt=self._attempt,
            savedAt=log.rfc3339(self._clock()),
        )

    def _publish(self, entry: CacheEntry, body: memoryview) -> None:
        """The archive, then the entry that names it: at every moment an entry names a whole archive.

        Another writer may take ours for an old one and delete it between our two writes, so it is looked for
        afterwards. HEAD needs a fence; here a lost race costs a compile, and the next save mends it.
        """
        archive = COMPILE_CACHE_PREFIX + entry.archive
        before = self._store.list(COMPILE_CACHE_PREFIX)
        self._store.put(archive, body)
        self._store.put(_entry_key(self.key), canonical(asdict(entry)))
        if archive not in self._store.list(archive):
            self._store.put(archive, body)
        self._prune(before)

    def _prune(self, before: list[str]) -> None:
        """Deletes what was there before this save and nothing names any more, and the oldest keys."""
        named = self._entry()
        kept = COMPILE_CACHE_PREFIX + named.archive if named else ""
        archives = _entry_key(self.key).removesuffix(".json") + "-"
        old = [key for key in before if key.startswith(archives) and key != kept]
        for other in self._oldest([key for key in before if key.endswith(".json")]):
            old += [key for key in before if key.startswith(other.removesuffix(".json"))]
        self._store.delete(old)

    def _oldest(self, entries: list[str]) -> list[str]:
        """Those beyond KEYS_KEPT, other than our own; first those that cannot be read."""
        others = [key for key in entries if key != _entry_key(self.key)]
        surplus = len(others) + 1 - KEYS_KEPT
        return sorted(others, key=self._saved_at)[:surplus] if surplus > 0 else []

    def _saved_at(self, key: str) -> str:
        found = self._store.get(key)
        try:
            return CacheEntry.from_json(found.body.decode()).savedAt if found else ""
        except ValueError:
            return ""

    def _entry(self) -> CacheEntry | None:
        """Raises ValueError where it is damaged, or of another machine."""
        found = self._store.get(_entry_key(self.key))
        if found is None:
            return None
        entry = CacheEntry.from_json(found.body.decode())
        if entry.format != FORMAT or canonical(entry.facts) != canonical(asdict(self._facts)):
            raise ValueError("it was made for another machine, or in another format")
        if not re.fullmatch(rf"{self.key}-[0-9a-f]{{64}}\.tar\.gz", entry.archive):
            raise ValueError(f"its entry names {entry.archive!r}, which is no archive of this key")
        return entry

    def _archive(self, entry: CacheEntry) -> bytes:
        found = self._store.get(COMPILE_CACHE_PREFIX + entry.archive)
        if found is None:
            raise ValueError(f"the archive {entry.archive} is missing")
        if hashlib.sha256(found.body).hexdigest() != entry.sha256:
            raise ValueError(f"the archive {entry.archive} is not what was saved: its SHA-256 differs")
        return found.body

    def _forget(self) -> None:
        """Deletes what is stored for all machines: if this attempt dies before it saves, the next one, on
        whatever machine, must not restore what killed the last."""
        keys = self._store.list(COMPILE_CACHE_PREFIX)
        self._store.delete(keys)
        log.event("compile-cache-dropped", objects=len(keys))


def _entry_key(key: str) -> str:
    return f"{COMPILE_CACHE_PREFIX}{key}.json"


def _contents(files: Listing) -> str:
    return hashlib.sha256(canonical({name: size for name, (size, _) in files.items()})).hexdigest()


def _why(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"

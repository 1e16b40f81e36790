"""The compiler's cache folders, stored beside the checkpoints: a restarted pod does not compile again.

torch is pointed at the folders before it is imported. The first process of each node restores them in a
thread, during the import of torch and the checkpoint download. It saves them after the first steps and at the
end. No error here ends a run: the kernels are compiled again, in this attempt or in the next one.

    compile-cache/{key}.json               the current archive, its checksum, what it was compiled for
    compile-cache/{key}-{sha256}.tar.gz    the files; named by content, so that concurrent writers never mix

**An archive is code.** Anyone who can write the prefix can run code in the pod (docs/cluster/security.md). So
it is read only from the job's own URI, never from the URI that a job starts from.
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
from spottrain.contract import COMPILE_CACHE_PREFIX, CompileCacheMode, is_own
from spottrain.core import log
from spottrain.core.run_config import RunConfig
from spottrain.storage.base import Store

KEYS_KEPT: Final = 8
"""Number of machine types whose caches are kept. A fleet has a few; daily image changes create many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheEntry:
    """The contents of `{key}.json`."""

    format: int
    facts: Mapping[str, Any]
    archive: str
    """Object name below COMPILE_CACHE_PREFIX."""
    sha256: str
    bytes: int
    """Size of the archive."""
    files: int
    contents: str
    """SHA-256 of the files' names and sizes; shows a node that another one has saved the same files."""
    savedAt: str

    @classmethod
    def from_json(cls, text: str) -> CacheEntry:
        """Parses an entry. Raises ValueError if its fields or types are wrong."""
        try:
            entry = cls(**json.loads(text))
        except TypeError as error:
            raise ValueError(f"its entry lacks fields of format {FORMAT}: {error}") from error
        if not all(isinstance(word, str) for word in (entry.archive, entry.sha256, entry.savedAt)):
            raise ValueError(f"its entry has fields of other types than format {FORMAT}")
        return entry


class CompileCache:
    """The compile cache of one node. `restore` and `save_if_changed` are thread-safe and never raise."""

    def __init__(
        self,
        *,
        store: Store,
        places: Folders,
        facts: CompileTarget,
        drop: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.key = facts.key()
        self._store = store
        self._places = places
        self._facts = facts
        self._drop = drop
        self._clock = clock
        self._seen: Listing = {}
        """Files that this process has saved or found saved; another node may have replaced them since."""
        self._unusable = False
        """Whether the stored cache could not be restored, so that the next save replaces it."""
        self._one_at_a_time = threading.Lock()

    @classmethod
    def of(cls, store: Store | None, run: RunConfig, environ: Mapping[str, str]) -> CompileCache | None:
        """Returns the run's cache; None if it is off, or if there is no store or no separate cache folder.

        Without SPOTTRAIN_CACHE_DIR torch compiles into a folder that all programs of the user share.
        Must be called after `use_folder`, which sets the variables in `environ` that torch reads.
        """
        if run.compile_cache is CompileCacheMode.OFF or store is None or run.cache_dir is None:
            return None
        return cls(
            store=store,
            places=folders_of(environ),
            facts=CompileTarget.here(run.image_digest),
            drop=run.compile_cache is CompileCacheMode.DROP,
        )

    def restore(self) -> CacheEntry | None:
        """Unpacks the stored files into the folders; returns what was there, None if it is not usable.

        Must be called before the first compile.
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
            # Any error has the same effect: the kernels are compiled.
            self._unusable = True
            log.event("compile-cache-unusable", key=self.key[:12], why=_why(error))
            return None
        self._log("compile-cache-restored", entry, started, hit=True)
        return entry

    def save_if_changed(self) -> bool:
        """Stores the folders if their files differ from the stored ones; returns whether it did.

        Nothing is stored while the compiler is writing; the next call tries again.
        """
        if not self._one_at_a_time.acquire(blocking=False):
            return False
        try:
            return self._save()
        except Exception as error:
            log.event("compile-cache-not-saved", key=self.key[:12], why=_why(error))
            return False
        finally:
            self._one_at_a_time.release()

    def _save(self) -> bool:
        started = self._clock()
        files = listing(self._places)
        # While a compile lock is held, the files may be incomplete.
        if not files or files == self._seen or compiling(self._places):
            return False
        contents = _contents(files)
        if not self._unusable and self._is_stored(contents):
            self._seen = files
            return False
        body = pack(self._places, files)
        if listing(self._places) != files or compiling(self._places):
            return False  # the archive may hold an incomplete file
        sha256 = hashlib.sha256(body).hexdigest()
        entry = CacheEntry(
            format=FORMAT,
            facts=asdict(self._facts),
            archive=f"{self.key}-{sha256}.tar.gz",
            sha256=sha256,
            bytes=len(body),
            files=len(files),
            contents=contents,
            savedAt=log.rfc3339(self._clock()),
        )
        self._publish(entry, body)
        self._seen, self._unusable = files, False
        self._log("compile-cache-saved", entry, started)
        return True

    def _log(self, event: str, entry: CacheEntry, started: float, **facts: Any) -> None:
        seconds = self._clock() - started
        log.event(event, **facts, key=self.key[:12], files=entry.files, bytes=entry.bytes, seconds=seconds)

    def _is_stored(self, contents: str) -> bool:
        """Returns whether an earlier attempt or another node of the gang has stored the same files."""
        try:
            entry = self._entry()
        except ValueError:
            return False  # damaged, and about to be replaced
        return entry is not None and entry.contents == contents

    def _publish(self, entry: CacheEntry, body: memoryview) -> None:
        """Writes the archive, then the entry that names it, so that an entry always names a whole archive.

        Another writer may delete the archive as outdated between the two writes, so its presence is checked
        afterwards. No fencing is needed: a lost race costs one compile, and the next save repairs it.
        """
        archive = COMPILE_CACHE_PREFIX + entry.archive
        before = self._stored()
        self._store.put(archive, body)
        self._store.put(_entry_key(self.key), canonical(asdict(entry)))
        if archive not in self._store.list(archive):
            self._store.put(archive, body)
        self._prune(before)

    def _stored(self) -> list[str]:
        return [key for key in self._store.list(COMPILE_CACHE_PREFIX) if is_own(key)]

    def _prune(self, before: list[str]) -> None:
        """Deletes archives from before this save that no entry names, and the caches of the oldest keys."""
        named = self._entry()
        kept = COMPILE_CACHE_PREFIX + named.archive if named else ""
        archives = _entry_key(self.key).removesuffix(".json") + "-"
        old = [key for key in before if key.startswith(archives) and key != kept]
        for other in self._oldest([key for key in before if key.endswith(".json")]):
            old += [key for key in before if key.startswith(other.removesuffix(".json"))]
        self._store.delete(old)

    def _oldest(self, entries: list[str]) -> list[str]:
        """Returns the entries beyond KEYS_KEPT, unreadable ones first, but never this cache's own."""
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
        """Reads the stored entry. Raises ValueError if it is damaged or of another machine."""
        found = self._store.get(_entry_key(self.key))
        if found is None:
            return None
        entry = CacheEntry.from_json(found.body.decode())
        if entry.format != FORMAT or canonical(entry.facts) != canonical(asdict(self._facts)):
            raise ValueError("it was made for another machine, or in another format")
        if not re.fullmatch(rf"{self.key}-[0-9a-f]{{64}}\.tar\.gz", entry.archive):
            raise ValueError(f"its entry names {entry.archive!r}, which is not an archive of this key")
        return entry

    def _archive(self, entry: CacheEntry) -> bytes:
        found = self._store.get(COMPILE_CACHE_PREFIX + entry.archive)
        if found is None:
            raise ValueError(f"the archive {entry.archive} is missing")
        if hashlib.sha256(found.body).hexdigest() != entry.sha256:
            raise ValueError(f"the archive {entry.archive} is damaged: its SHA-256 differs")
        return found.body

    def _forget(self) -> None:
        """Deletes the stored caches of all machine types.

        If this attempt dies before it saves, the next one must not restore a harmful cache on any machine.
        """
        keys = self._stored()
        self._store.delete(keys)
        log.event("compile-cache-dropped", objects=len(keys))


def _entry_key(key: str) -> str:
    return f"{COMPILE_CACHE_PREFIX}{key}.json"


def _contents(files: Listing) -> str:
    return hashlib.sha256(canonical({name: size for name, (size, _) in files.items()})).hexdigest()


def _why(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"

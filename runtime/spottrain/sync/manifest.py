"""The manifest of a folder's checkpoint: paths, modes, times, links, and where the contents are stored.

The contents that a commit sends lie in a folder of its own (`contract.blobs_of`), whose name holds the term
of the claim and a random part. Later checkpoints of the same files name them there. So a key is never
written for a second purpose, and it is safe to delete

* what no checkpoint in HEAD names, of a term below the owner's: a later claim takes over what HEAD names
  then, and adds keys of its own term only;
* what a commit of the owner itself has dropped, or sent in vain, once that commit is done: a successor
  takes over that HEAD, or a later one of the same owner.

A process that was superseded may delete late. It can only delete what the HEAD of its own last commit does
not name, which is what no successor can name either.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Final

from spottrain.checkpoint.head.state import Head
from spottrain.checkpoint.manifest import FORMAT, Damaged, canonical, require_format
from spottrain.contract import CHUNK_BYTES, MANIFEST_NAME, Reason, term_of_blob, term_of_key
from spottrain.errors import CheckpointError
from spottrain.storage.base import Store
from spottrain.sync.folder import PERMISSIONS, PRIVATE, Owner

SYNC: Final = "sync"
"""`kind` of such a manifest."""


class OtherKind(CheckpointError):
    """`spottrain run` wrote the checkpoint."""

    reason = Reason.CHECKPOINT_INCOMPATIBLE


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFile:
    size: int
    mode: int
    mtime_ns: int
    chunks: tuple[str, ...]
    """Key of the content of each `chunkBytes` bytes; it ends with the SHA-256."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncManifest:
    step: int
    files: Mapping[str, StoredFile] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)
    folders: Mapping[str, int] = field(default_factory=dict)
    """Modes by path."""
    owners: Mapping[str, Owner] = field(default_factory=dict)
    """By path of any kind; of what it lacks the owner is not known, as in older manifests."""
    attempt: int = 0
    """The attempt that has committed it."""
    atEnd: bool = False
    """Committed because all containers had ended, without a sign that it is whole. It counts if the script's
    exit code was 0 in that attempt; otherwise its last write may have been cut off."""
    chunk_bytes: int = CHUNK_BYTES

    @property
    def blobs(self) -> frozenset[str]:
        return frozenset(key for file in self.files.values() for key in file.chunks)

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files.values())

    def chunks_of(self, file: StoredFile) -> Iterator[tuple[str, int, int]]:
        """Yields key, offset and bytes of each part of a file."""
        for number, key in enumerate(file.chunks):
            offset = number * self.chunk_bytes
            yield key, offset, min(self.chunk_bytes, file.size - offset)

    def to_bytes(self) -> bytes:
        places: dict[str, int] = {}
        owners: dict[Owner, list[str]] = {}  # most often there is one
        for path, owner in self.owners.items():
            owners.setdefault(owner, []).append(path)
        body = {
            "format": FORMAT,
            "kind": SYNC,
            "step": self.step,
            "attempt": self.attempt,
            "atEnd": self.atEnd,
            "chunkBytes": self.chunk_bytes,
            "folders": dict(self.folders),
            "links": dict(self.links),
            "files": {path: _file_facts(file, places) for path, file in self.files.items()},
            "owners": [[*owner, paths] for owner, paths in sorted(owners.items())],
        }
        body["places"] = list(places)
        return canonical(body | {"sha256": hashlib.sha256(canonical(body)).hexdigest()})

    @classmethod
    def from_bytes(cls, text: bytes) -> SyncManifest:
        """Raises Damaged, OtherKind, or CheckpointError if it is of another format."""
        try:
            raw: Any = json.loads(text)
            require_format(raw["format"])
            if raw.pop("sha256") != hashlib.sha256(canonical(raw)).hexdigest():
                raise Damaged("the manifest's checksum does not match")
            if raw["kind"] != SYNC:
                raise OtherKind(
                    f"the checkpoint is of kind {raw['kind']}: `spottrain run` wrote it, and `spottrain "
                    "sync` cannot make a folder of it. Use another checkpoint URI"
                )
            found = cls(
                step=raw["step"],
                attempt=raw["attempt"],
                atEnd=raw["atEnd"],
                chunk_bytes=raw["chunkBytes"],
                folders=raw["folders"],
                links=raw["links"],
                files={path: _file(facts, raw["places"]) for path, facts in raw["files"].items()},
                owners={
                    path: (int(user), int(group))
                    for user, group, paths in raw.get("owners", ())
                    for path in paths
                },
            )
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise Damaged(f"the manifest is not readable ({type(error).__name__}: {error})") from error
        found.require_sound()
        return found

    def require_sound(self) -> None:
        """Raises Damaged if a path leads out of the folder, or if a file is not described as a whole."""
        paths = [*self.files, *self.links, *self.folders]
        for path in paths:
            parts = path.split("/")
            outside = not all(parts) or "\0" in path or not {".", ".."}.isdisjoint(parts)
            if outside or parts[0] == PRIVATE:
                raise Damaged(f"the manifest has the invalid path {path!r}")
            above = {str(each) for each in PurePosixPath(path).parents} - {"."}
            if not above <= self.folders.keys():
                raise Damaged(f"the manifest does not list the folders of {path!r}")
        if len(paths) != len(set(paths)):
            raise Damaged("the manifest lists a path twice")
        for path, file in self.files.items():
            if len(file.chunks) != -(-file.size // self.chunk_bytes):
                raise Damaged(f"the manifest does not describe all of {path!r}")


def _file_facts(file: StoredFile, places: dict[str, int]) -> list[Any]:
    """Of a key only the last part is written out: many share their folder."""
    chunks = []
    for key in file.chunks:
        place, _, digest = key.rpartition("/")
        chunks.append(f"{places.setdefault(place, len(places))}/{digest}")
    return [file.size, file.mode, file.mtime_ns, chunks]


def _file(facts: list[Any], places: list[str]) -> StoredFile:
    size, mode, mtime_ns, chunks = facts
    keys = []
    for each in chunks:
        place, _, digest = each.partition("/")
        keys.append(f"{places[int(place)]}/{digest}")
    return StoredFile(size=size, mode=mode & PERMISSIONS, mtime_ns=mtime_ns, chunks=tuple(keys))


def digest_of(key: str) -> str:
    """Returns the SHA-256 (hex) of the content at the key."""
    return key.rpartition("/")[2]


def read_manifest(store: Store, key: str) -> SyncManifest:
    """Raises Damaged if it is missing or invalid, OtherKind, or CheckpointError if of another format."""
    found = store.get(key + MANIFEST_NAME)
    if found is None:
        raise Damaged(f"{MANIFEST_NAME} is missing")
    return SyncManifest.from_bytes(found.body)


@dataclass(frozen=True, kw_only=True, slots=True)
class Named(Container[str]):
    """The contents that the checkpoints in HEAD name, or may name."""

    keys: Set[str]
    unreadable: Mapping[str, str] = field(default_factory=dict)
    """Why checkpoints cannot be read, by key. One may name any content of its own or of an earlier term."""

    def __contains__(self, key: object) -> bool:
        term = term_of_blob(str(key)) or 0
        return key in self.keys or any((term_of_key(each) or term) >= term for each in self.unreadable)


def unnamed(keys: Iterable[str], named: Container[str], *, below: int) -> list[str]:
    """Returns the keys of terms under `below` that are not in `named`; keys of another form are ignored."""
    return [
        key for key in keys if (term := term_of_blob(key)) is not None and term < below and key not in named
    ]


def named_by(store: Store, head: Head, read: dict[str, SyncManifest | None]) -> Named:
    """Returns the contents that the checkpoints in HEAD name. `read`: manifests by key; it is added to."""
    unreadable: dict[str, str] = {}
    for key in head.keys - read.keys():
        try:
            read[key] = manifest_or_none(store, key)
        except (Damaged, CheckpointError) as error:
            unreadable[key] = str(error)
    keys = {blob for key in head.keys if (manifest := read.get(key)) for blob in manifest.blobs}
    return Named(keys=keys, unreadable=unreadable)


def manifest_or_none(store: Store, key: str) -> SyncManifest | None:
    """Returns the manifest; None if `spottrain run` wrote it. Raises Damaged, or CheckpointError."""
    try:
        return read_manifest(store, key)
    except OtherKind:
        return None

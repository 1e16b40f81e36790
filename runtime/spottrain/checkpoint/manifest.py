"""What a checkpoint consists of: the contents of its `manifest.json`. Written and read by the checkpoint
code and by `spottrain checkpoints`; docs/checkpoints.md is its reference. No torch here.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any, Final

from spottrain.contract import CHUNK_BYTES, Reason
from spottrain.errors import CheckpointError

FORMAT: Final = 2
STATE: Final = "state"
FOLDER: Final = "folder"


class Damaged(Exception):
    """This checkpoint cannot be read as it was written; an older one may do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A box of a tensor, contiguous in a shard."""

    shard: str
    offset: int
    """Of its first byte in the shard's file."""
    start: tuple[int, ...]
    """Of the box in the tensor, one number for each dimension."""
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """One tensor; its pieces cover it exactly once."""

    name: str
    dtype: str
    """As torch spells it: float32, bfloat16, ..."""
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One object of the checkpoint, below its key."""

    name: str
    bytes: int
    chunks: tuple[str, ...]
    """SHA-256 (hex) of each `chunkBytes` of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class File:
    """One file of a folder that a library wrote (kind "folder")."""

    path: str
    """Relative, with slashes."""
    shard: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    step: int
    world: int = 1
    """Number of ranks that wrote it."""
    kind: str = STATE
    tree: Any = None
    """See `tree.py`; what all ranks share."""
    ranks: tuple[Any, ...] = ()
    """A tree of each rank: random state, and what else is its own."""
    tensors: tuple[StoredTensor, ...] = ()
    """By the numbers that the trees name."""
    shards: tuple[Shard, ...] = ()
    files: tuple[File, ...] = ()
    torch: str = ""
    chunk_bytes: int = CHUNK_BYTES

    @property
    def size(self) -> int:
        """Bytes of all shards."""
        return sum(shard.bytes for shard in self.shards)

    def to_bytes(self) -> bytes:
        body = {
            "format": FORMAT,
            "torch": self.torch,
            "step": self.step,
            "world": self.world,
            "kind": self.kind,
            "chunkBytes": self.chunk_bytes,
            "tree": self.tree,
            "ranks": list(self.ranks),
            "tensors": [asdict(each) for each in self.tensors],
            "shards": [asdict(each) for each in self.shards],
            "files": [asdict(each) for each in self.files],
        }
        return canonical(body | {"sha256": hashlib.sha256(canonical(body)).hexdigest()})

    @classmethod
    def from_bytes(cls, text: bytes) -> Manifest:
        """Raises Damaged, or CheckpointError where it is of another format."""
        try:
            raw: Any = json.loads(text)
            _require_format(raw["format"])
            if raw.pop("sha256") != hashlib.sha256(canonical(raw)).hexdigest():
                raise Damaged("the manifest's checksum does not fit")
            return cls(
                step=raw["step"],
                world=raw["world"],
                kind=raw["kind"],
                tree=raw["tree"],
                ranks=tuple(raw["ranks"]),
                tensors=tuple(stored(each) for each in raw["tensors"]),
                shards=tuple(shard(each) for each in raw["shards"]),
                files=tuple(File(**each) for each in raw["files"]),
                torch=raw["torch"],
                chunk_bytes=raw["chunkBytes"],
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Damaged(f"the manifest is not readable ({type(error).__name__}: {error})") from error


def stored(raw: dict[str, Any]) -> StoredTensor:
    pieces = tuple(
        Piece(shard=p["shard"], offset=p["offset"], start=tuple(p["start"]), shape=tuple(p["shape"]))
        for p in raw["pieces"]
    )
    return StoredTensor(name=raw["name"], dtype=raw["dtype"], shape=tuple(raw["shape"]), pieces=pieces)


def shard(raw: dict[str, Any]) -> Shard:
    return Shard(name=raw["name"], bytes=raw["bytes"], chunks=tuple(raw["chunks"]))


def _require_format(number: Any) -> None:
    if number == FORMAT:
        return
    newer = isinstance(number, int) and number > FORMAT
    raise CheckpointError(
        f"the checkpoint has format {number}, of {'a newer' if newer else 'an older'} spottrain; this one "
        f"reads format {FORMAT}. Use the image that it was made with, or another checkpoint URI",
        reason=Reason.CHECKPOINT_INCOMPATIBLE,
    )


def canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()

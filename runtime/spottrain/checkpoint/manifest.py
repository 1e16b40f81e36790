"""The contents of a checkpoint's `manifest.json`; docs/checkpoint-format.md is the reference.

This module does not import torch.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from spottrain.contract import CHUNK_BYTES, Reason
from spottrain.errors import CheckpointError

TYPES: Final = {
    "bool": ("BOOL", 1),
    "uint8": ("U8", 1),
    "int8": ("I8", 1),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "int16": ("I16", 2),
    "uint16": ("U16", 2),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "int32": ("I32", 4),
    "uint32": ("U32", 4),
    "float32": ("F32", 4),
    "int64": ("I64", 8),
    "uint64": ("U64", 8),
    "float64": ("F64", 8),
    "complex64": ("C64", 8),
}
"""Names of torch's types: what safetensors calls them (huggingface/safetensors README), bytes per element."""
ALIGNMENT: Final = 64
"""Of the first tensor in a safetensors file."""
FORMAT: Final = 2
STATE: Final = "state"
FOLDER: Final = "folder"
MODEL: Final = "model"
"""Key of the model's state in the tree."""
BESIDE: Final = "beside"
"""Key of the names of tensors that are not of the model; also in the metadata of a safetensors file."""


class Damaged(Exception):
    """The checkpoint's objects are missing or altered; an older checkpoint may be readable."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A box of a tensor, stored contiguously in a shard."""

    shard: str
    offset: int
    """Byte offset in the shard's file."""
    start: tuple[int, ...]
    """First index of the box in each dimension of the tensor."""
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """One tensor; its pieces cover it exactly once."""

    name: str
    dtype: str
    """torch's name: float32, bfloat16, ..."""
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One object of the checkpoint, below its key."""

    name: str
    bytes: int
    chunks: tuple[str, ...]
    """SHA-256 (hex) of each chunk of `chunkBytes` bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class File:
    """One file of a folder that a library wrote (kind "folder")."""

    path: str
    """Relative path with slashes."""
    shard: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    step: int
    world: int = 1
    """Number of ranks that wrote it."""
    kind: str = STATE
    tree: Any = None
    """Tree of the state shared by all ranks (see `tree.py`)."""
    ranks: tuple[Any, ...] = ()
    """One tree per rank: its random state and other state of its own."""
    tensors: tuple[StoredTensor, ...] = ()
    """Indexed by the numbers in the trees."""
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
        whole = body | {"sha256": hashlib.sha256(canonical(body)).hexdigest()}
        return json.dumps(whole, separators=(",", ":"), allow_nan=False).encode()  # dicts keep their order

    @classmethod
    def from_bytes(cls, text: bytes) -> Manifest:
        """Parses a manifest. Raises Damaged, or CheckpointError if it has another format."""
        try:
            raw: Any = json.loads(text)
            require_format(raw["format"])
            if raw.pop("sha256") != hashlib.sha256(canonical(raw)).hexdigest():
                raise Damaged("the manifest's checksum does not match")
            _require_state(raw["kind"])
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


def model_tensors(manifest: Manifest) -> dict[str, StoredTensor]:
    """Returns the model's tensors by name.

    If the training averages its weights, these are the averages, as in evaluations and final weights.
    """
    return {name: manifest.tensors[number] for name, number in model_numbers(manifest).items()}


def model_numbers(manifest: Manifest) -> dict[str, int]:
    """Returns the numbers of `model_tensors` by name."""
    tree = manifest.tree if isinstance(manifest.tree, dict) else {}
    numbers = dict(_named(tree.get(MODEL), ""))
    objects = tree.get("objects") or {"extra.ema": tree.get("ema")}  # "ema": of a Trainer of 0.3.0
    average = objects.get("extra.ema")
    averages = {}
    if isinstance(average, dict) and average.get("updated"):
        averages = dict(_named(average.get("average"), ""))
    average_of = {numbers[name]: average for name, average in averages.items() if name in numbers}
    return {name: average_of.get(number, number) for name, number in numbers.items()}


def names_beside(manifest: Manifest) -> list[str]:
    """Returns those of these names that are not of the model itself."""
    return list(manifest.tree.get(BESIDE, [])) if isinstance(manifest.tree, dict) else []


def _named(plain: Any, path: str) -> Iterator[tuple[str, int]]:
    """Yields name and number of each tensor (the markers are those of `checkpoint/tree.py`)."""
    if not isinstance(plain, dict):
        return
    if "$tensor" in plain:
        yield path, plain["$tensor"]
        return
    items = plain["$dict"] if "$dict" in plain else plain.items()
    for key, value in items:
        yield from _named(value, f"{path}.{key}" if path else str(key))


def stored(raw: dict[str, Any]) -> StoredTensor:
    pieces = tuple(
        Piece(shard=p["shard"], offset=p["offset"], start=tuple(p["start"]), shape=tuple(p["shape"]))
        for p in raw["pieces"]
    )
    return StoredTensor(name=raw["name"], dtype=raw["dtype"], shape=tuple(raw["shape"]), pieces=pieces)


def shard(raw: dict[str, Any]) -> Shard:
    return Shard(name=raw["name"], bytes=raw["bytes"], chunks=tuple(raw["chunks"]))


def require_format(number: Any) -> None:
    """Raises CheckpointError unless this is the format that is read here."""
    if number == FORMAT:
        return
    newer = isinstance(number, int) and number > FORMAT
    raise CheckpointError(
        f"the checkpoint has format {number}, of {'a newer' if newer else 'an older'} spottrain; this "
        f"one reads format {FORMAT}. Use the image that wrote it, or another checkpoint URI",
        reason=Reason.CHECKPOINT_INCOMPATIBLE,
    )


def _require_state(kind: Any) -> None:
    if kind == "sync":
        raise CheckpointError(
            "the checkpoint is a folder that `spottrain sync` has stored, of files that another "
            "library wrote; `spottrain sync` restores it. For `spottrain run` use another checkpoint URI",
            reason=Reason.CHECKPOINT_INCOMPATIBLE,
        )


def canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def file_header(
    tensors: Iterable[tuple[str, str, Sequence[int]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, list[int]]:
    """Returns the header of a safetensors file, and the offsets in the file of each tensor and of its end.

    The header is its length, JSON, and spaces up to the alignment. `tensors`: name, type as in TYPES, shape.
    """
    entries: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    offsets = [0]
    for name, dtype, shape in tensors:
        kind, width = TYPES[dtype]
        end = offsets[-1] + math.prod(shape) * width
        entries[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [offsets[-1], end]}
        offsets.append(end)
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    return header, [len(header) + offset for offset in offsets]

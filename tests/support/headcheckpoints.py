"""Checkpoints of format 2 made by hand, from docs/checkpoint-format.md: no code of the saving side is in it.

Used by the tests of `spottrain checkpoints`.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from spottrain.checkpoint.head.owner import HeadOwner
from spottrain.checkpoint.head.state import Entry
from spottrain.contract import MANIFEST_NAME
from spottrain.storage.base import Store

CHUNK: Final = 16
"""`chunkBytes` here, so that a few numbers fill several chunks."""


def canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


@dataclass(kw_only=True)
class Made:
    """A checkpoint with a model of two tensors: `bias`, and `weight` (2 x 4), of which each of two ranks
    stored the half of the columns."""

    step: int = 7
    bias: Sequence[float] = (1.0, 2.0, 3.0)
    weight: Sequence[Sequence[float]] = ((0.0, 1.0, 2.0, 3.0), (4.0, 5.0, 6.0, 7.0))
    tree: Any = None
    more: dict[str, Any] = field(default_factory=dict)
    """Fields of the manifest that are to differ."""

    def objects(self) -> dict[str, bytes]:
        """Name below the checkpoint's key, and body."""
        halves = [[row[0:2] for row in self.weight], [row[2:4] for row in self.weight]]
        first: dict[str, list[Any]] = {"model.bias": [list(self.bias)], "model.weight@0,0": halves[0]}
        shards = {
            "r00000-00.safetensors": _shard(first),
            "r00001-00.safetensors": _shard({"model.weight@0,2": halves[1]}),
        }
        files = {name: body for name, (body, _) in shards.items()}
        places = {key: (name, at) for name, (_, starts) in shards.items() for key, at in starts.items()}
        return files | {MANIFEST_NAME: self._manifest(files, places)}

    def _manifest(self, files: dict[str, bytes], places: dict[str, tuple[str, int]]) -> bytes:
        def piece(key: str, start: list[int], shape: list[int]) -> dict[str, Any]:
            name, at = places[key]
            return {"shard": name, "offset": at, "start": start, "shape": shape}

        tree = {"model": {"bias": {"$tensor": 0}, "weight": {"$tensor": 1}}, "step": self.step}
        pieces = [piece("model.weight@0,0", [0, 0], [2, 2]), piece("model.weight@0,2", [0, 2], [2, 2])]
        whole = [piece("model.bias", [0], [len(self.bias)])]
        body: dict[str, Any] = {
            "format": 2,
            "step": self.step,
            "torch": "2.15.0",
            "world": 2,
            "kind": "state",
            "chunkBytes": CHUNK,
            "tree": tree if self.tree is None else self.tree,
            "ranks": [{}, {}],
            "tensors": [
                {"name": "model.bias", "dtype": "float32", "shape": [len(self.bias)], "pieces": whole},
                {"name": "model.weight", "dtype": "float32", "shape": [2, 4], "pieces": pieces},
            ],
            "shards": [
                {"name": name, "bytes": len(file), "chunks": sums(file)} for name, file in files.items()
            ],
            "files": [],
        } | self.more
        return canonical(body | {"sha256": hashlib.sha256(canonical(body)).hexdigest()})

    def put(self, store: Store, key: str) -> int:
        objects = self.objects()
        for name, body in objects.items():
            store.put(key + name, body)
        return sum(map(len, objects.values()))


def sums(body: bytes) -> list[str]:
    return [hashlib.sha256(body[at : at + CHUNK]).hexdigest() for at in range(0, len(body), CHUNK)]


def _shard(tensors: dict[str, list[Any]]) -> tuple[bytes, dict[str, int]]:
    """A safetensors file of float32 rows, and where each tensor begins in it."""
    header: dict[str, Any] = {}
    data = b""
    for name, rows in tensors.items():
        body = b"".join(struct.pack(f"<{len(row)}f", *row) for row in rows)
        shape = [len(rows), len(rows[0])] if len(rows) > 1 else [len(rows[0])]
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + len(body)]}
        data += body
    text = canonical(header)
    starts = {name: 8 + len(text) + each["data_offsets"][0] for name, each in header.items()}
    return struct.pack("<Q", len(text)) + text + data, starts


def save(
    store: Store,
    owner: HeadOwner,
    step: int,
    *,
    best: bool = False,
    keep: int = 3,
    time: float = 1000.0,
    tree: Any = None,
) -> Entry:
    """Uploads and commits a checkpoint as a job would; deletes nothing."""
    key = owner.new_key(step)
    size = Made(step=step, tree=tree).put(store, key)
    entry = Entry(key=key, step=step, time=time, bytes=size, keptAs="best" if best else "")
    owner.commit(entry, keep)
    return entry

"""Judges a scene by what lies in the store and in the records of the script, not by what the runtime says.

The reader of checkpoints is one of its own: it knows docs/checkpoint-format.md and the bytes, and works on
the files below a folder store or below the S3 server's own folder. `runs.py` judges what became of the runs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from spottrain.checkpoint.head.state import Head
from spottrain.errors import RunError

from tests.chaos import digests

WIDTHS: Final = {"float32": 4, "float64": 8, "int64": 8, "uint8": 1, "bfloat16": 2, "float16": 2, "int32": 4}


class Broken(Exception):
    """What HEAD names is not all there as it was written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A store at a moment. `states`: digests of what HEAD names, by step; those of a rank's own parts are
    called `random/0` and so on."""

    head: Head | None = None
    raw: bytes = b""
    states: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    final: str = ""
    """SHA-256 of the weights that the job has left; empty where there are none."""

    @property
    def newest(self) -> int:
        """Step of the checkpoint that a successor goes on from; 0 where there is none."""
        return self.head.checkpoints[0].step if self.head and self.head.checkpoints else 0


def look(root: Path) -> Found:
    """Reads HEAD and everything that it names."""
    path = root / "HEAD"
    final = root / "final" / "model.safetensors"
    weights = hashlib.sha256(final.read_bytes()).hexdigest() if final.exists() else ""
    if not path.exists():
        left = sorted(p.parent.name for p in root.glob("checkpoints/*/manifest.json"))
        orphans = f"there is no HEAD, but there are {left}"
        return Found(problems=(orphans,) if left else (), final=weights)
    raw = path.read_bytes()
    try:
        head = Head.from_json(raw)
    except RunError as error:
        return Found(raw=raw, problems=(f"HEAD cannot be read: {error}",), final=weights)
    states: dict[int, dict[str, str]] = {}
    problems: list[str] = []
    for entry in head.checkpoints:
        try:
            manifest = _manifest(root / entry.key)
            states[entry.step] = _state(root / entry.key, manifest)
            if manifest["step"] != entry.step:
                problems.append(
                    f"HEAD says step {entry.step} of {entry.key}, its manifest {manifest['step']}"
                )
        except (Broken, OSError, ValueError, KeyError) as error:
            problems.append(f"HEAD names {entry.key}, which is not whole: {type(error).__name__}: {error}")
    return Found(head=head, raw=raw, states=states, problems=tuple(problems), final=weights)


def _manifest(folder: Path) -> dict[str, Any]:
    raw: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    said = raw.pop("sha256")
    text = json.dumps(raw, sort_keys=True, separators=(",", ":"), allow_nan=False)
    if hashlib.sha256(text.encode()).hexdigest() != said:
        raise Broken("the manifest has another checksum")
    return raw


def _state(folder: Path, manifest: dict[str, Any]) -> dict[str, str]:
    shards = {shard["name"]: _shard(folder, shard, manifest["chunkBytes"]) for shard in manifest["shards"]}

    def leaf(number: int) -> str:
        return _tensor(manifest["tensors"][number], shards)

    tree = manifest["tree"]
    parts = digests.shared_parts(tree, leaf)
    for rank, tree in enumerate(manifest["ranks"]):
        parts |= {f"{name}/{rank}": found for name, found in digests.own_parts(tree, leaf).items()}
    return parts


def _shard(folder: Path, shard: dict[str, Any], chunk: int) -> bytes:
    path: Path = folder / shard["name"]
    body = path.read_bytes()
    sums = [hashlib.sha256(body[at : at + chunk]).hexdigest() for at in range(0, len(body), chunk)]
    if len(body) != shard["bytes"] or sums != shard["chunks"]:
        raise Broken(f"{shard['name']} is not what the manifest says")
    return body


def _tensor(stored: dict[str, Any], shards: Mapping[str, bytes]) -> str:
    """Scenes have no sharded parameters: a tensor is one piece."""
    (piece,) = stored["pieces"]
    if piece["shape"] != stored["shape"]:
        raise Broken(f"{stored['name']} is not whole")
    size = WIDTHS[stored["dtype"]]
    for length in stored["shape"]:
        size *= length
    body = shards[piece["shard"]][piece["offset"] : piece["offset"] + size]
    if len(body) != size:
        raise Broken(f"{stored['name']} ends after {len(body)} of {size} bytes")
    return digests.tensor_digest(stored["dtype"], stored["shape"], body)

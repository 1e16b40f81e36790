"""`spottrain checkpoints export`: writes the model's weights as one safetensors file with plain names. Of a
folder that `spottrain sync` has stored it writes the folder.

It uses no pickle: every framework reads safetensors, and reading it executes no code.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Final

from spottrain.checkpoint.head.state import Entry
from spottrain.checkpoint.manifest import (
    BESIDE,
    FOLDER,
    MODEL,
    Damaged,
    Manifest,
    StoredTensor,
    model_tensors,
    names_beside,
)
from spottrain.cli.output import Answer, size
from spottrain.cli.reading import WIDTHS, Shards, choose, head_of, manifest_of
from spottrain.contract import CHUNK_BYTES, FINAL_PREFIX, MANIFEST_NAME, Reason
from spottrain.errors import CheckpointError, ConfigurationError
from spottrain.storage.base import KeyMissing, Store, Truncated

from spottrain_cli.checkpoints import synced

WEIGHTS_FILE: Final = "model.safetensors"
"""Where libraries store the weights, in a checkpoint of kind folder."""
ALIGNMENT: Final = 64
FINAL: Final = "final"
"""Used in place of a step: the final weights of a finished run."""


def export(store: Store, which: str, target: Path) -> Answer:
    """Writes to `target`. Raises CheckpointError if the checkpoint is damaged; then nothing is left."""
    if target.exists():
        raise ConfigurationError(f"{target} exists already and is not overwritten; give another name")
    if which == FINAL:
        if (final := _final_of(store)) is None:
            raise ConfigurationError(f"there are no final weights at {store.uri}: no run there has finished")
        return _exported(target, f"the final weights of step {final.step}", final.step, final.write)
    entry = choose(head_of(store), which)
    try:
        if (folder := synced.folder_of(store, entry)) is not None:
            return synced.write(store, entry, folder, target)
        manifest, _ = manifest_of(store, entry.key)
    except Damaged as error:
        raise _damaged(f"step {entry.step}", error) from error
    shards = Shards(store, entry.key, manifest)
    if manifest.kind != FOLDER:
        write = partial(_state, manifest, shards, entry)
    elif WEIGHTS_FILE in {each.path for each in manifest.files} or (final := _final_of(store)) is None:
        write = partial(_folder, manifest, shards, entry)
    elif final.checkpoint == entry.key:  # the same weights, in a format that every framework reads
        return _exported(target, f"the final weights of step {entry.step}", entry.step, final.write)
    else:
        raise ConfigurationError(
            f"{_without_weights(manifest, entry)}. The final weights, of step {final.step}, can be exported: "
            f"--step {FINAL}"
        )
    return _exported(target, f"step {entry.step}", entry.step, write)


def _exported(target: Path, of: str, step: int, write: Callable[[BinaryIO], int]) -> Answer:
    """write: returns the number of tensors; 0 if it is unknown."""
    try:
        with _appearing(target) as file:
            count = write(file)
            written = file.tell()
    except Damaged as error:
        raise _damaged(of, error) from error
    what = f"{count} tensors" if count else "the library's file"
    facts = {"step": step, "file": str(target), "bytes": written, "tensors": count}
    return Answer(facts=facts, lines=[f"{target}: {what} of {of}, {size(written)}"])


def _damaged(what: str, error: Damaged) -> CheckpointError:
    return CheckpointError(
        f"{what} cannot be exported: {error}; choose another --step (spottrain checkpoints verify URI shows "
        "which are intact)",
        reason=Reason.CHECKPOINT_DAMAGED,
    )


@contextlib.contextmanager
def _appearing(target: Path) -> Iterator[BinaryIO]:
    """Opens a file that appears only when it is complete."""
    part = target.with_name(target.name + ".part")
    try:
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.rename(target)
    except OSError as error:
        raise ConfigurationError(f"{target} cannot be written: {error.strerror or error}") from error
    finally:
        part.unlink(missing_ok=True)


def _folder(manifest: Manifest, shards: Shards, entry: Entry, file: BinaryIO) -> int:
    names = {each.path: each.shard for each in manifest.files}
    if WEIGHTS_FILE not in names:
        raise ConfigurationError(_without_weights(manifest, entry))
    shard = next(each for each in manifest.shards if each.name == names[WEIGHTS_FILE])
    for number in range(len(shard.chunks)):
        file.write(shards.chunk(shard, number))
    return 0


def _without_weights(manifest: Manifest, entry: Entry) -> str:
    there = ", ".join(sorted(each.path for each in manifest.files)) or "nothing"
    text = f"step {entry.step} is a folder written by another library, without {WEIGHTS_FILE}"
    return f"{text}; its files are: {there}"


# --- the final weights ----------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True, slots=True)
class _FinalWeights:
    store: Store
    step: int
    checkpoint: str
    """Key of the checkpoint with the same weights."""
    files: list[dict[str, Any]]
    """Name, bytes and sha256 of each."""

    def write(self, file: BinaryIO) -> int:
        """Writes all files as a single one and returns the number of tensors. Raises Damaged."""
        headers = [self._header(each["name"], each["bytes"]) for each in self.files]
        metadata: dict[str, str] = {}
        entries: dict[str, Any] = {}
        beside: list[str] = []
        at = 0
        for each, (start, header) in zip(self.files, headers, strict=True):
            words = header.pop("__metadata__", {})
            metadata |= words
            beside += json.loads(words.get(BESIDE, "[]"))
            for name, tensor in header.items():
                begin, end = tensor["data_offsets"]
                entries[name] = tensor | {"data_offsets": [at + begin, at + end]}
            at += each["bytes"] - start
        if beside:
            metadata[BESIDE] = json.dumps(beside)
        file.write(_header_bytes({"__metadata__": metadata | {"step": str(self.step)}} | entries))
        for each, (start, _) in zip(self.files, headers, strict=True):
            self._copy(each, start, file)
        return len(entries)

    def _header(self, name: str, most: int) -> tuple[int, dict[str, Any]]:
        """Returns the offset of the tensors' bytes in a file, and its safetensors header."""
        size = int.from_bytes(self._read(name, 0, 8), "little")
        if size > most:
            raise Damaged(f"{FINAL_PREFIX}{name} has no header")
        return 8 + size, json.loads(self._read(name, 8, size))

    def _copy(self, part: dict[str, Any], start: int, file: BinaryIO) -> None:
        total = hashlib.sha256()
        for at in range(0, part["bytes"], CHUNK_BYTES):
            body = self._read(part["name"], at, min(CHUNK_BYTES, part["bytes"] - at))
            total.update(body)
            file.write(memoryview(body)[max(start - at, 0) :])
        if total.hexdigest() != part["sha256"]:
            raise Damaged(f"{FINAL_PREFIX}{part['name']} does not match its checksum")

    def _read(self, name: str, offset: int, count: int) -> bytearray:
        body = bytearray(count)
        try:
            self.store.read_into(FINAL_PREFIX + name, offset, memoryview(body))
        except (KeyMissing, Truncated):
            raise Damaged(f"{FINAL_PREFIX}{name} is missing, or too short") from None
        return body


def _final_of(store: Store) -> _FinalWeights | None:
    """Returns the final weights, if any. Raises ConfigurationError for a format of another version."""
    found = store.get(FINAL_PREFIX + MANIFEST_NAME)
    if found is None:
        return None
    try:
        facts = json.loads(found.body)
        return _FinalWeights(
            store=store, step=facts["step"], checkpoint=facts["checkpoint"], files=facts["files"]
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"{FINAL_PREFIX}{MANIFEST_NAME} at {store.uri} does not name the files of the final weights: "
            "another version of spottrain wrote it, or it is damaged. "
            f"If {FINAL_PREFIX}{WEIGHTS_FILE} is there, copy it as it is; or export a checkpoint: "
            "--step N (spottrain checkpoints list URI shows them)"
        ) from error


# --- our own state --------------------------------------------------------------------------------------
def _state(manifest: Manifest, shards: Shards, entry: Entry, file: BinaryIO) -> int:
    """Writes the model's weights. Tied tensors are written once per name: the format has no aliases."""
    weights = weights_of(manifest)
    if not weights:
        raise ConfigurationError(
            f"step {entry.step} has no model (no tensors under {MODEL!r}); choose another --step"
        )
    file.write(_header(weights, entry, names_beside(manifest)))
    for tensor in weights.values():
        file.write(assemble(tensor, shards))
    return len(weights)


def weights_of(manifest: Manifest) -> dict[str, StoredTensor]:
    """Returns the weights by name, wide types first, so that each tensor is aligned without gaps."""
    named = model_tensors(manifest)
    return dict(sorted(named.items(), key=lambda item: (-WIDTHS[item[1].dtype][1], item[0])))


def _header(weights: dict[str, StoredTensor], entry: Entry, beside: list[str]) -> bytes:
    said = {"format": "pt", "step": str(entry.step), "checkpoint": entry.key}
    entries: dict[str, Any] = {"__metadata__": said | ({BESIDE: json.dumps(beside)} if beside else {})}
    at = 0
    for name, tensor in weights.items():
        kind, width = WIDTHS[tensor.dtype]
        end = at + width * prod(tensor.shape)
        entries[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    return _header_bytes(entries)


def _header_bytes(entries: dict[str, Any]) -> bytes:
    """Encodes a safetensors header like `checkpoint/layout.py`, which needs torch."""
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def assemble(tensor: StoredTensor, shards: Shards) -> bytearray:
    """Returns the bytes of the whole tensor in row-major order, assembled from the pieces of all ranks."""
    width = WIDTHS[tensor.dtype][1]
    if len(tensor.pieces) == 1:
        return shards.read(tensor.pieces[0].shard, tensor.pieces[0].offset, width * prod(tensor.shape))
    whole = bytearray(width * prod(tensor.shape))
    for piece in tensor.pieces:
        box = shards.read(piece.shard, piece.offset, width * prod(piece.shape))
        _place(memoryview(box), memoryview(whole), tensor.shape, piece.start, piece.shape, width)
    return whole


def _place(
    box: memoryview,
    whole: memoryview,
    shape: tuple[int, ...],
    start: tuple[int, ...],
    part: tuple[int, ...],
    width: int,
) -> None:
    """Copies a piece into the whole tensor, in runs that are contiguous in both."""
    if not box:
        return
    last = len(shape) - 1
    while last > 0 and part[last] == shape[last]:
        last -= 1
    strides = [width * prod(shape[d + 1 :]) for d in range(last + 1)]
    run = part[last] * strides[last]
    outer = itertools.product(*(range(n) for n in part[:last]))
    for number, index in enumerate(outer):
        at = sum((start[d] + i) * strides[d] for d, i in enumerate(index)) + start[last] * strides[last]
        whole[at : at + run] = box[number * run : (number + 1) * run]

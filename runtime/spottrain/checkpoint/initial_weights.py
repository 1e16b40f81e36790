"""Weights that a training begins from (`checkpoint.initFrom`): another run's, or those of a folder or file.

    source (rank 0): HEAD -> final weights, or the newest whole checkpoint  -> fits -> read, group by group
    all ranks:       each tensor from rank 0 -> this rank's part of the model's parameter

Rank 0 alone reads, so the store is asked once and all ranks get the same bytes. The other run's HEAD is read
and never changed. Its objects may be deleted meanwhile: then HEAD is read again, and its newest checkpoint is
read from the beginning, which overwrites all that was set before.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Final, Protocol

import torch

from spottrain.checkpoint.head.owner import without_head
from spottrain.checkpoint.head.state import Entry, Head, HeadState
from spottrain.checkpoint.layout import grouped
from spottrain.checkpoint.manifest import FOLDER, Damaged, Manifest, model_numbers, names_beside
from spottrain.checkpoint.plain_state import model_state, plain
from spottrain.checkpoint.reader import CONNECTIONS, read_manifest, read_tensors, read_whole
from spottrain.checkpoint.weights_files import (
    Body,
    SafetensorsFile,
    TensorInfo,
    files_in,
    local_body,
    torch_tensors,
)
from spottrain.contract import CHECKPOINTS_PREFIX, CHUNK_BYTES, FINAL_PREFIX, HEAD_KEY, MANIFEST_NAME, Reason
from spottrain.core import log
from spottrain.core.run_config import InitFrom
from spottrain.core.text import counted
from spottrain.core.uri import is_path
from spottrain.distributed import process_group
from spottrain.distributed.control_channel import ControlChannel, broadcast_facts, receive_facts
from spottrain.distributed.dtensor import box_of, is_sharded, local
from spottrain.distributed.world import World
from spottrain.errors import CheckpointError, ConfigurationError, StoreError, StoreUnavailable
from spottrain.storage.base import KeyMissing, Store, Truncated

GROUP_BYTES: Final = 2**30
"""Bytes of tensors that rank 0 reads at a time from a checkpoint."""
SHOWN: Final = 5
"""Number of names that an error lists; it only counts the rest."""
NAMES: Final = "weights"
"""Control message: names of the tensors that rank 0 sends next; none at the end."""
LIBRARY_FILE: Final = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
"""The weights in a checkpoint that Hugging Face's libraries wrote."""
LIGHTNING_FILE: Final = "lightning.ckpt"

Groups = Iterator[Mapping[str, torch.Tensor]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """Weights that can be read."""

    part: str = ""
    """What they are of the source, for messages; "" for all of it."""
    key: str = ""
    """Other content has another key."""
    step: int | None
    """The other run's step; None: unknown."""
    tensors: Mapping[str, TensorInfo]
    read: Callable[[Collection[str]], Groups]
    """Yields these tensors in groups, on the CPU. Raises Damaged."""


class WeightsSource(Protocol):
    def newest(self, unreadable: Mapping[str, str]) -> Weights:
        """Returns the weights to read. `unreadable`: why, by key, for those that could not be read.

        Raises CheckpointError if nothing is left, and StoreError.
        """


class InitialWeights:
    """Sets the weights of a model before its first step. All ranks call `load`.

    `open_store` opens another run's store, to read.
    """

    def __init__(
        self,
        given: InitFrom,
        *,
        world: World,
        control: ControlChannel | None,
        folder: Path,
        open_store: Callable[[str], Store],
    ) -> None:
        self._given, self._world, self._control = given, world, control
        self._folder, self._open_store = folder, open_store

    def load(self, model: torch.nn.Module) -> dict[str, Any]:
        """Returns what a checkpoint keeps of it. Raises RunError if the weights are absent or do not fit."""
        here = {name: each for name, each in model_state(model).items() if isinstance(each, torch.Tensor)}
        if self._world.first:
            try:
                return self._lead(model, here)
            except StoreUnavailable:
                raise
            except (CheckpointError, ConfigurationError, StoreError) as error:
                text = f"checkpoint.initFrom {self._given.source}: {error}"
                raise type(error)(text, reason=error.reason) from error
        while names := (facts := receive_facts(self._control, NAMES))["names"]:
            for name in names:
                self._place(here[name], None)
        return dict(facts["record"])

    def _lead(self, model: torch.nn.Module, here: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        source, began, unreadable = self._source(), time.time(), dict[str, str]()
        while True:
            weights = source.newest(unreadable)
            names = fitting(model, here, weights, self._given.ignore)
            try:
                for group in weights.read(names):
                    broadcast_facts(self._control, NAMES, {"names": list(group)})
                    for name, tensor in group.items():
                        self._place(here[name], tensor)
                break
            except Damaged as error:
                unreadable[weights.key] = f"{weights.part}: {error}"
                log.event("damaged", step=weights.step, key=weights.part, error=f"{error} (initFrom)")
        given, left_out = self._given.source, len(here) - len(names)
        source_of = f"{weights.part} of {given}" if weights.part else given
        record = {"source": source_of, "step": weights.step, "tensors": len(names), "left_out": left_out}
        broadcast_facts(self._control, NAMES, {"names": [], "record": record})
        log.event(
            "initialized",
            source=source_of,
            step=weights.step,
            tensors=len(names),
            left_out=left_out or None,
            seconds=time.time() - began,
        )
        return record

    def _source(self) -> WeightsSource:
        """A path is of another run if it is a folder with HEAD or with checkpoints, else of weights."""
        given = self._given.source
        path = self._folder / given
        found = (path / HEAD_KEY).is_file() or any(path.glob(f"{CHECKPOINTS_PREFIX}t*-s*/{MANIFEST_NAME}"))
        return OtherRun(self._open_store(given)) if found or not is_path(given) else LocalFiles(path)

    def _place(self, target: torch.Tensor, tensor: torch.Tensor | None) -> None:
        """Sets this rank's part of a parameter to rank 0's `tensor`. `tensor`: None on other ranks."""
        mine = local(target.detach())
        if tensor is None:
            whole = torch.empty(target.shape, dtype=target.dtype, device=mine.device)
        else:
            whole = tensor.to(device=mine.device, dtype=target.dtype).contiguous()
        process_group.broadcast_from_rank0(whole, self._world)
        if is_sharded(target):
            box = box_of(target)
            whole = whole[tuple(slice(b, b + n) for b, n in zip(box.start, box.shape, strict=True))]
        with torch.no_grad():
            mine.copy_(whole)


# --- which tensors --------------------------------------------------------------------------------------
def fitting(
    model: torch.nn.Module, here: Mapping[str, torch.Tensor], weights: Weights, ignore: Collection[str]
) -> list[str]:
    """Returns the names to read. Raises CheckpointError if the weights are not those of this model.

    A name that is tied to another one need not be there: libraries store such tensors once.
    """
    there = {name: info for name, info in weights.tensors.items() if not _ignored(name, ignore)}
    asked = {name: each for name, each in here.items() if not _ignored(name, ignore)}
    unused = [each for each in ignore if not any(fnmatchcase(n, each) for n in (*here, *weights.tensors))]
    set_by_others = {id(here[name]) for name in there if name in here}
    owned = {id(each) for each in (*plain(model).parameters(), *plain(model).buffers())}
    missing = [n for n, each in asked.items() if n not in there and id(each) not in set_by_others]
    unexpected = [name for name in there if name not in here]
    both = {name: asked[name] for name in there if name in asked}
    other = [
        f"{n}: {why}" for n, each in both.items() if (why := _difference(there[n], each, id(each) in owned))
    ]
    parts = [
        _listed(missing, "missing there"),
        _listed(unexpected, "there and not in the model"),
        _listed(other, "of another kind"),
        _listed(unused, "in ignore and match nothing"),
        "" if both or missing else "ignore leaves nothing to load",
    ]
    if problem := "; ".join(filter(None, parts)):
        raise CheckpointError(
            f"{weights.part or 'it'} does not fit the model: {problem}. Name weights of this model, or leave "
            "parameters out by checkpoint.initFrom.ignore (--init-ignore), such as 'head.*': they begin as "
            "the script makes them",
            reason=Reason.CHECKPOINT_INCOMPATIBLE,
        )
    return list(both)


def _ignored(name: str, ignore: Collection[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in ignore)


def _difference(there: TensorInfo, here: torch.Tensor, owned: bool) -> str:
    """Returns why a stored tensor cannot become this one; "" if it can."""
    if torch.nn.parameter.is_lazy(here) or here.device.type == "meta":
        return "it has no memory in the model yet (a lazy module, or the device meta)"
    if there.shape != tuple(here.shape):
        return f"shape {there.shape} there, {tuple(here.shape)} here"
    if _number(there.dtype) != _number(here.dtype):
        return f"{there.dtype} there, {here.dtype} here"
    return "" if owned else "the model's state_dict() computes it"


def _number(dtype: torch.dtype) -> tuple[bool, bool]:
    """Returns the kind of number; only within it a cast keeps the meaning."""
    return dtype.is_floating_point, dtype.is_complex


def _listed(names: list[str], what: str) -> str:
    if not names:
        return ""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{len(names)} {what} ({', '.join(names[:SHOWN])}{more})"


# --- a folder or file -----------------------------------------------------------------------------------
class LocalFiles:
    """Weights in local files, such as those of an image."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def newest(self, unreadable: Mapping[str, str]) -> Weights:
        try:
            if unreadable:
                raise Damaged("; ".join(unreadable.values()))
            return self._weights()
        except (Damaged, OSError) as error:
            words = f"{self._path} cannot be read: {getattr(error, 'strerror', None) or error}"
            raise CheckpointError(words, reason=Reason.CHECKPOINT_DAMAGED) from error

    def _weights(self) -> Weights:
        path = self._path
        if not path.exists():
            raise CheckpointError(
                f"there is no {path} in the container; name a folder with *.safetensors files, a file, or "
                "another run's checkpoint URI",
                reason=Reason.CHECKPOINT_MISSING,
            )
        if path.is_dir() or path.suffix == ".safetensors":
            paths = files_in(path) if path.is_dir() else [path]
            files = [SafetensorsFile(local_body(each)) for each in paths]
            return of_files(files)
        return of_tensors(torch_tensors(path, str(path)))


def of_files(
    files: list[SafetensorsFile], *, part: str = "", key: str = "", step: int | None = None
) -> Weights:
    """Returns the model's weights in safetensors files. Raises Damaged."""
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        if twice := tensors.keys() & file.tensors.keys():
            raise Damaged(f"two of its files have a {min(twice)}")
        tensors |= {name: info for name, info in file.tensors.items() if name not in file.beside}

    def read(names: Collection[str]) -> Groups:
        for file in files:
            if wanted := [name for name in names if name in file.tensors]:
                yield file.read(wanted)

    return Weights(part=part, key=key, step=step, tensors=tensors, read=read)


def of_tensors(
    found: Mapping[str, torch.Tensor], *, part: str = "", key: str = "", step: int | None = None
) -> Weights:
    tensors = {name: TensorInfo(dtype=each.dtype, shape=tuple(each.shape)) for name, each in found.items()}

    def read(names: Collection[str]) -> Groups:
        yield {name: found[name] for name in names}

    return Weights(part=part, key=key, step=step, tensors=tensors, read=read)


# --- another run ----------------------------------------------------------------------------------------
class OtherRun:
    """What another run has left at its checkpoint URI: its final weights if it is done, else a checkpoint."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def newest(self, unreadable: Mapping[str, str]) -> Weights:
        tried = dict(unreadable)
        while True:
            head = self._head()
            if head.state in (HeadState.DONE, HeadState.DELETED) and (final := self._final(tried)):
                return final
            entry = next((each for each in head.resumable if each.key not in tried), None)
            if entry is None:
                raise self._nothing_left(head, tried)
            try:
                return self._checkpoint(entry)
            except Damaged as error:
                tried[entry.key] = f"{entry.key}: {error}"
                log.event("damaged", step=entry.step, key=entry.key, error=f"{error} (initFrom)")

    def _head(self) -> Head:
        found = self._store.get(HEAD_KEY)
        if found is None:
            raise CheckpointError(
                f"{without_head(self._store)}; for a folder with weights give its path and no URI",
                reason=Reason.CHECKPOINT_MISSING,
            )
        return Head.from_json(found.body)

    def _nothing_left(self, head: Head, tried: Mapping[str, str]) -> CheckpointError:
        if not tried:
            return CheckpointError(
                f"job {head.job} has no checkpoint there (its state is {head.state}); begin this job when it "
                "has one",
                reason=Reason.CHECKPOINT_MISSING,
            )
        return CheckpointError(
            f"none of its {counted(len(tried), 'checkpoint')} can be read ({'; '.join(tried.values())}); "
            "restore the objects, or name other weights",
            reason=Reason.CHECKPOINT_DAMAGED,
        )

    # --- final weights ---
    def _final(self, tried: Mapping[str, str]) -> Weights | None:
        """Returns the final weights; None if there are none. Raises CheckpointError if they are damaged."""
        found = self._store.get(FINAL_PREFIX + MANIFEST_NAME)
        if found is None:
            return None
        key = f"{FINAL_PREFIX}{found.etag}"  # other weights, if a run writes them again meanwhile
        try:
            if key in tried:
                raise Damaged(tried[key])
            facts: Any = json.loads(found.body)
            files = [SafetensorsFile(self._final_body(each)) for each in facts["files"]]
            return of_files(files, part=FINAL_PREFIX, key=key, step=int(facts["step"]))
        except (Damaged, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"the final weights in {FINAL_PREFIX} are damaged ({error}); restore them, or download "
                "a checkpoint (spottrain checkpoints download --step N) and name that folder",
                reason=Reason.CHECKPOINT_DAMAGED,
            ) from error

    def _final_body(self, facts: Mapping[str, Any]) -> Body:
        name, size, digest = f"{FINAL_PREFIX}{facts['name']}", int(facts["bytes"]), facts["sha256"]

        def part(offset: int, count: int) -> bytearray:
            buffer = bytearray(count)
            self._fill(name, offset, memoryview(buffer))
            return buffer

        def whole() -> bytearray:
            body = bytearray(size)
            chunks = [memoryview(body)[at : at + CHUNK_BYTES] for at in range(0, size, CHUNK_BYTES)]
            read, starts = hashlib.sha256(), range(0, size, CHUNK_BYTES)
            with ThreadPoolExecutor(CONNECTIONS) as pool:
                for chunk, _ in zip(chunks, pool.map(partial(self._fill, name), starts, chunks), strict=True):
                    read.update(chunk)  # while later ones arrive
            if read.hexdigest() != digest:
                raise Damaged(f"{name} does not match its checksum")
            return body

        return Body(name=name, size=size, part=part, whole=whole)

    def _fill(self, name: str, offset: int, buffer: memoryview) -> None:
        try:
            self._store.read_into(name, offset, buffer)
        except (KeyMissing, Truncated):
            raise Damaged(f"{name} is missing, or too short") from None

    # --- checkpoints ---
    def _checkpoint(self, entry: Entry) -> Weights:
        manifest = read_manifest(self._store, entry.key)
        if manifest.kind == FOLDER:
            return self._of_library(entry, manifest)
        numbers = model_numbers(manifest)
        for name in names_beside(manifest):
            numbers.pop(name, None)
        stored = {name: manifest.tensors[number] for name, number in numbers.items()}
        tensors = {
            name: TensorInfo(dtype=getattr(torch, each.dtype), shape=each.shape)
            for name, each in stored.items()
        }

        def read(names: Collection[str]) -> Groups:
            sizes = {name: prod(tensors[name].shape) * tensors[name].dtype.itemsize for name in names}
            for group in grouped(sizes, GROUP_BYTES):
                found = read_tensors(self._store, entry.key, manifest, {numbers[name] for name in group})
                yield {name: found[numbers[name]] for name in group}

        return Weights(part=entry.key, key=entry.key, step=entry.step, tensors=tensors, read=read)

    def _of_library(self, entry: Entry, manifest: Manifest) -> Weights:
        shards = {shard.name: shard for shard in manifest.shards}
        bodies = {file.path: self._body(entry, manifest, shards[file.shard]) for file in manifest.files}
        if LIGHTNING_FILE in bodies:
            found = torch_tensors(bodies[LIGHTNING_FILE].whole(), LIGHTNING_FILE)
            return of_tensors(found, part=entry.key, key=entry.key, step=entry.step)
        paths = [path for path in bodies if LIBRARY_FILE.fullmatch(path)]
        if not paths or "model_1.safetensors" in bodies:
            has = "the files of several models" if paths else "no model.safetensors"
            raise CheckpointError(
                f"{entry.key} was written by a library and has {has}, so its weights cannot be read: wait "
                "until that run is done and has left its final weights, or name a file of weights",
                reason=Reason.CHECKPOINT_INCOMPATIBLE,
            )
        files = [SafetensorsFile(bodies[path]) for path in sorted(paths)]
        return of_files(files, part=entry.key, key=entry.key, step=entry.step)

    def _body(self, entry: Entry, manifest: Manifest, shard: Any) -> Body:
        def part(offset: int, count: int) -> bytearray:
            buffer = bytearray(count)
            self._fill(entry.key + shard.name, offset, memoryview(buffer))
            return buffer

        def whole() -> bytearray:
            return read_whole(self._store, entry.key, manifest, shard)

        return Body(name=shard.name, size=shard.bytes, part=part, whole=whole)

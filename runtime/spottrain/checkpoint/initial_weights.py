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
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from spottrain.checkpoint.head.owner import without_head
from spottrain.checkpoint.head.state import Entry, Head, HeadState
from spottrain.checkpoint.layout import grouped
from spottrain.checkpoint.manifest import FOLDER, Damaged, model_numbers, names_beside
from spottrain.checkpoint.plain_state import model_state, plain
from spottrain.checkpoint.reader import CONNECTIONS, read_manifest, read_tensors
from spottrain.checkpoint.weights_files import Body, SafetensorsFile, files_in, local_body, torch_tensors
from spottrain.contract import CHECKPOINTS_PREFIX, CHUNK_BYTES, FINAL_PREFIX, HEAD_KEY, MANIFEST_NAME, Reason
from spottrain.core import log
from spottrain.core.log_format import counted
from spottrain.core.run_config import InitFrom
from spottrain.core.uri import is_path
from spottrain.distributed import process_group
from spottrain.distributed.control_channel import ControlChannel
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

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    tensors: Tensors
    """By name, on any device: only their dtypes and shapes count."""
    read: Callable[[Collection[str]], Iterator[Tensors]]
    """Yields these tensors in groups, on the CPU. Raises Damaged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsSource:
    """Weights to try."""

    open: Callable[[], Weights]
    """Raises Damaged, CheckpointError or StoreError."""
    part: str = ""
    """What they are of the source, for messages; "" for all of it."""
    key: str = ""
    """Other content has another key."""
    step: int | None = None
    """The other run's step; None: unknown."""


class InitialWeights:
    """Sets the weights of a model before its first step. All ranks call `load`.

    `open_store` opens another run's store, to read.
    """

    def __init__(
        self,
        given: InitFrom,
        *,
        world: World,
        control: ControlChannel,
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
        while names := (facts := self._control.receive(NAMES))["names"]:
            for name in names:
                self._place(here[name], None)
        return dict(facts["record"])

    def _lead(self, model: torch.nn.Module, here: Tensors) -> dict[str, Any]:
        newest, began, unreadable = self._newest(), time.time(), dict[str, str]()
        while True:
            source = newest(unreadable)
            try:
                weights = source.open()
                names = fitting(model, here, weights.tensors, self._given.ignore, source.part or "it")
                for group in weights.read(names):
                    self._control.broadcast(NAMES, {"names": list(group)})
                    for name, tensor in group.items():
                        self._place(here[name], tensor)
                break
            except Damaged as error:
                unreadable[source.key] = str(error)
                if source.key:
                    log.event("damaged", step=source.step, key=source.key, error=f"{error} (initFrom)")
        given, left_out = self._given.source, len(here) - len(names)
        source_of = f"{source.part} of {given}" if source.part else given
        record = {"source": source_of, "step": source.step, "tensors": len(names), "left_out": left_out}
        self._control.broadcast(NAMES, {"names": [], "record": record})
        log.event("initialized", **record | {"left_out": left_out or None}, seconds=time.time() - began)
        return record

    def _newest(self) -> Callable[[Mapping[str, str]], WeightsSource]:
        """Returns what finds the weights to read, given why others, by key, could not be read.

        A path is of another run if it is a folder with HEAD or with checkpoints, else of weights.
        """
        given = self._given.source
        path = self._folder / given
        found = (path / HEAD_KEY).is_file() or any(path.glob(f"{CHECKPOINTS_PREFIX}t*-s*/{MANIFEST_NAME}"))
        if found or not is_path(given):
            return OtherRun(self._open_store(given)).newest
        return partial(local_source, path)

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
    model: torch.nn.Module, here: Tensors, there: Tensors, ignore: Collection[str], part: str
) -> list[str]:
    """Returns the names to read. Raises CheckpointError if the weights are not those of this model.

    A name that is tied to another one need not be there: libraries store such tensors once.
    """

    def asked(tensors: Tensors) -> dict[str, torch.Tensor]:
        return {name: t for name, t in tensors.items() if not any(fnmatchcase(name, p) for p in ignore)}

    unused = [each for each in ignore if not any(fnmatchcase(name, each) for name in (*here, *there))]
    there, wanted = asked(there), asked(here)
    both = {name: each for name, each in wanted.items() if name in there}
    set_by_others = {id(here[name]) for name in there if name in here}
    missing = [n for n, each in wanted.items() if n not in there and id(each) not in set_by_others]
    owned = {id(each) for each in (*plain(model).parameters(), *plain(model).buffers())}
    other = [
        f"{n}: {why}" for n, each in both.items() if (why := _difference(there[n], each, id(each) in owned))
    ]
    parts = [
        _listed(missing, "missing there"),
        _listed([name for name in there if name not in here], "there and not in the model"),
        _listed(other, "of another kind"),
        _listed(unused, "in ignore and match nothing"),
        "" if both or missing else "ignore leaves nothing to load",
    ]
    if problem := "; ".join(filter(None, parts)):
        raise CheckpointError(
            f"{part} does not fit the model: {problem}. Name weights of this model, or leave "
            "parameters out by checkpoint.initFrom.ignore (--init-ignore), such as 'head.*': they begin as "
            "the script makes them",
            reason=Reason.CHECKPOINT_INCOMPATIBLE,
        )
    return list(both)


def _difference(there: torch.Tensor, here: torch.Tensor, owned: bool) -> str:
    """Returns why a stored tensor cannot become this one; "" if it can."""
    if torch.nn.parameter.is_lazy(here) or here.device.type == "meta":
        return "it has no memory in the model yet (a lazy module, or the device meta)"
    if there.shape != here.shape:
        return f"shape {tuple(there.shape)} there, {tuple(here.shape)} here"
    kinds = ((each.dtype.is_floating_point, each.dtype.is_complex) for each in (there, here))
    if len(set(kinds)) > 1:  # only within one kind of number a cast keeps the meaning
        return f"{there.dtype} there, {here.dtype} here"
    return "" if owned else "the model's state_dict() computes it"


def _listed(names: list[str], what: str) -> str:
    if not names:
        return ""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{len(names)} {what} ({', '.join(names[:SHOWN])}{more})"


# --- a folder or file -----------------------------------------------------------------------------------
def local_source(path: Path, unreadable: Mapping[str, str]) -> WeightsSource:
    """Weights in local files, such as those of an image. Raises CheckpointError."""
    if unreadable:
        words = f"{path} cannot be read: {'; '.join(unreadable.values())}"
        raise CheckpointError(words, reason=Reason.CHECKPOINT_DAMAGED)
    if not path.exists():
        raise CheckpointError(
            f"there is no {path} in the container; name a folder with *.safetensors files, a file, or "
            "another run's checkpoint URI",
            reason=Reason.CHECKPOINT_MISSING,
        )

    def opened() -> Weights:
        try:
            if not path.is_dir() and path.suffix != ".safetensors":
                found = torch_tensors(path)
                return Weights(tensors=found, read=lambda names: iter([{n: found[n] for n in names}]))
            paths = files_in(path) if path.is_dir() else [path]
            return of_files([SafetensorsFile(local_body(each)) for each in paths])
        except OSError as error:
            raise Damaged(error.strerror or str(error)) from error

    return WeightsSource(open=opened)


def of_files(files: list[SafetensorsFile]) -> Weights:
    """Returns the model's weights in safetensors files. Raises Damaged."""
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        if twice := tensors.keys() & file.tensors.keys():
            raise Damaged(f"two of its files have a {min(twice)}")
        tensors |= {name: each for name, each in file.tensors.items() if name not in file.beside}

    def read(names: Collection[str]) -> Iterator[Tensors]:
        for file in files:
            if wanted := [name for name in names if name in file.tensors]:
                yield file.read(wanted)

    return Weights(tensors=tensors, read=read)


# --- another run ----------------------------------------------------------------------------------------
class OtherRun:
    """What another run has left at its checkpoint URI: its final weights if it is done, else a checkpoint."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def newest(self, unreadable: Mapping[str, str]) -> WeightsSource:
        """Returns what to read. Raises CheckpointError if nothing is left, and StoreError."""
        found = self._store.get(HEAD_KEY)
        if found is None:
            raise CheckpointError(
                f"{without_head(self._store)}; for a folder with weights give its path and no URI",
                reason=Reason.CHECKPOINT_MISSING,
            )
        head = Head.from_json(found.body)
        if head.state in (HeadState.DONE, HeadState.DELETED) and (final := self._final(unreadable)):
            return final
        for entry in head.resumable:
            if entry.key not in unreadable:
                read = partial(self._checkpoint, entry)
                return WeightsSource(part=entry.key, key=entry.key, step=entry.step, open=read)
        if not unreadable:
            raise CheckpointError(
                f"job {head.job} has no checkpoint there (its state is {head.state}); begin this job when it "
                "has one",
                reason=Reason.CHECKPOINT_MISSING,
            )
        tried = "; ".join(f"{key}: {why}" for key, why in unreadable.items())
        raise CheckpointError(
            f"none of its {counted(len(unreadable), 'checkpoint')} can be read ({tried}); "
            "restore the objects, or name other weights",
            reason=Reason.CHECKPOINT_DAMAGED,
        )

    # --- final weights ---
    def _final(self, unreadable: Mapping[str, str]) -> WeightsSource | None:
        """Returns the final weights; None if there are none. Raises CheckpointError if they are damaged."""
        found = self._store.get(FINAL_PREFIX + MANIFEST_NAME)
        if found is None:
            return None
        key = f"{FINAL_PREFIX}{found.etag}"  # other weights, if a run writes them again meanwhile
        try:
            if key in unreadable:
                raise ValueError(unreadable[key])
            facts: Any = json.loads(found.body)
            bodies = [self._body(each) for each in facts["files"]]
            step = int(facts["step"])
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"the final weights in {FINAL_PREFIX} are damaged ({error}); restore them, or download "
                "a checkpoint (spottrain checkpoints download --step N) and name that folder",
                reason=Reason.CHECKPOINT_DAMAGED,
            ) from error

        def opened() -> Weights:
            return of_files([SafetensorsFile(body) for body in bodies])

        return WeightsSource(part=FINAL_PREFIX, key=key, step=step, open=opened)

    def _body(self, facts: Mapping[str, Any]) -> Body:
        name, size, digest = f"{FINAL_PREFIX}{facts['name']}", int(facts["bytes"]), facts["sha256"]

        def fill(offset: int, buffer: memoryview) -> None:
            try:
                self._store.read_into(name, offset, buffer)
            except (KeyMissing, Truncated):
                raise Damaged(f"{name} is missing, or too short") from None

        def part(offset: int, count: int) -> bytearray:
            buffer = bytearray(count)
            fill(offset, memoryview(buffer))
            return buffer

        def whole() -> bytearray:
            body, starts = bytearray(size), range(0, size, CHUNK_BYTES)
            chunks = [memoryview(body)[at : at + CHUNK_BYTES] for at in starts]
            read = hashlib.sha256()
            with ThreadPoolExecutor(CONNECTIONS) as pool:
                for chunk, _ in zip(chunks, pool.map(fill, starts, chunks), strict=True):
                    read.update(chunk)  # while later ones arrive
            if read.hexdigest() != digest:
                raise Damaged(f"{name} does not match its checksum")
            return body

        return Body(name=name, size=size, part=part, whole=whole)

    # --- checkpoints ---
    def _checkpoint(self, entry: Entry) -> Weights:
        manifest = read_manifest(self._store, entry.key)
        if manifest.kind == FOLDER:
            raise CheckpointError(
                f"{entry.key} was written by a library: wait until that run is done and has left its final "
                f"weights, or download it (spottrain checkpoints download --step {entry.step}) and name that "
                "folder",
                reason=Reason.CHECKPOINT_INCOMPATIBLE,
            )
        numbers = model_numbers(manifest)
        for name in names_beside(manifest):
            numbers.pop(name, None)
        stored = {name: manifest.tensors[number] for name, number in numbers.items()}
        tensors = {
            name: torch.empty(each.shape, dtype=getattr(torch, each.dtype), device="meta")
            for name, each in stored.items()
        }

        def read(names: Collection[str]) -> Iterator[Tensors]:
            for group in grouped({name: tensors[name].nbytes for name in names}, GROUP_BYTES):
                found = read_tensors(self._store, entry.key, manifest, {numbers[name] for name in group})
                yield {name: found[numbers[name]] for name in group}

        return Weights(tensors=tensors, read=read)

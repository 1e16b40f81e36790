"""The codec of a checkpoint: nested values and tensors <-> a JSON tree and safetensors shards. No pickle.

Loading executes nothing. `checkpoint` moves the bytes; this module knows no store and no training.

    manifest  {format, torch, step, tree, tensors, shards, sha256}; see Stored and Shard
    tree      JSON; a tensor is {"$tensor": number}; tuples, int keys and non-finite numbers are tagged alike
    shard     safetensors file of at most SHARD_BYTES; a larger tensor is cut into flat pieces
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import safetensors.torch
import torch
from safetensors import SafetensorError

from spottrain.contract import Reason
from spottrain.errors import CheckpointError

FORMAT: Final = 1
SHARD_BYTES: Final = 256 * 2**20


class Damaged(Exception):
    """This checkpoint cannot be read as it was written; an older one may do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """Where a tensor is: its flat pieces in order, each (name of the shard, key in it)."""

    name: str
    dtype: str
    shape: list[int]
    pieces: list[tuple[str, str]]


# --- snapshot ---------------------------------------------------------------------------------------
class Snapshotter:
    """Copies a tree's tensors to the CPU, so that training can go on while they are written.

    The copies go into the buffers of the snapshot before (fresh memory costs many times as much): at most
    one snapshot of one Snapshotter may be in use at a time. Tensors that are tied in the original are tied
    in the copy, and so stored once.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def take(self, tree: Any) -> Any:
        """A copy of `tree` that shares nothing with it."""
        seen: dict[tuple[Any, ...], torch.Tensor] = {}
        copied = _map_tensors(tree, "", lambda tensor, path: self._copy(tensor, path, seen))
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()  # copies from a GPU run behind
        return copied

    def _copy(
        self, tensor: torch.Tensor, path: str, seen: dict[tuple[Any, ...], torch.Tensor]
    ) -> torch.Tensor:
        tensor = tensor.detach()
        identity = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and identity in seen:
            return seen[identity]
        buffer = self._buffers.get(path)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        self._buffers[path] = seen[identity] = buffer.copy_(tensor, non_blocking=tensor.is_cuda)
        return buffer


def _map_tensors(value: Any, path: str, change: Callable[[torch.Tensor, str], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value, path)
    if isinstance(value, Mapping):
        return {
            key: _map_tensors(item, f"{path}.{key}" if path else str(key), change)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        items = [_map_tensors(item, f"{path}.{n}", change) for n, item in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    return value


# --- encode -----------------------------------------------------------------------------------------
class Encoded:
    """A tree ready to be stored. Raises CheckpointError where it holds what a checkpoint cannot."""

    def __init__(self, tree: Any, *, step: int, shard_bytes: int = SHARD_BYTES) -> None:
        self.step = step
        self._tensors: list[tuple[str, torch.Tensor]] = []
        self._number_of: dict[int, int] = {}
        self._tree = self._plain(tree, "")
        self.stored: list[Stored] = []
        self._plan: dict[str, dict[str, torch.Tensor]] = {}
        self._place(shard_bytes)

    def shards(self) -> Iterator[tuple[str, Callable[[], bytes]]]:
        """(name, maker of the bytes) of each shard; the bytes are made when they are needed, not before."""
        for name, tensors in self._plan.items():
            yield name, partial(safetensors.torch.save, tensors)

    def manifest(self, shards: list[Shard]) -> bytes:
        body = {
            "format": FORMAT,
            "torch": str(torch.__version__),
            "step": self.step,
            "tree": self._tree,
            "tensors": [asdict(stored) for stored in self.stored],
            "shards": [asdict(shard) for shard in shards],
        }
        return _canonical(body | {"sha256": hashlib.sha256(_canonical(body)).hexdigest()})

    def _plain(self, value: Any, path: str) -> Any:
        if isinstance(value, torch.Tensor):
            return {"$tensor": self._number(value, path)}
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {"$float": str(float(value))}
        if isinstance(value, list | tuple):
            items = [self._plain(item, f"{path}.{n}") for n, item in enumerate(value)]
            return {"$tuple": items} if isinstance(value, tuple) else items
        if isinstance(value, Mapping):
            pairs = [
                (key, self._plain(item, f"{path}.{key}" if path else str(key))) for key, item in value.items()
            ]
            if all(isinstance(key, str) and not key.startswith("$") for key, _ in pairs):
                return dict(pairs)
            return {"$dict": [[self._plain(key, path), item] for key, item in pairs]}
        raise CheckpointError(
            f"the state holds a {type(value).__name__} at {path or 'its top'}, which cannot be stored; "
            "use numbers, strings, lists, dicts and tensors in state_dict()",
            reason=Reason.CHECKPOINT_INCOMPATIBLE,
        )

    def _number(self, tensor: torch.Tensor, path: str) -> int:
        if id(tensor) not in self._number_of:
            self._number_of[id(tensor)] = len(self._tensors)
            self._tensors.append((path, tensor))
        return self._number_of[id(tensor)]

    def _place(self, shard_bytes: int) -> None:
        """Fills shard after shard, in the order of the tree."""
        room = 0
        for number, (path, tensor) in enumerate(self._tensors):
            pieces: list[tuple[str, str]] = []
            length = max(1, shard_bytes // tensor.element_size())
            whole = tensor.numel() <= length
            for part in [tensor.contiguous()] if whole else torch.split(tensor.contiguous().view(-1), length):
                size = part.numel() * part.element_size()
                if size > room or not self._plan:
                    self._plan[f"{len(self._plan):05d}.safetensors"] = {}
                    room = shard_bytes
                shard = next(reversed(self._plan))
                key = f"{number}" if whole else f"{number}.{len(pieces)}"
                self._plan[shard][key] = part
                room -= size
                pieces.append((shard, key))
            dtype = str(tensor.dtype).removeprefix("torch.")
            self.stored.append(Stored(name=path, dtype=dtype, shape=list(tensor.shape), pieces=pieces))


# --- decode -----------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    step: int
    tree: Any
    tensors: list[Stored]
    shards: list[Shard]

    @classmethod
    def from_bytes(cls, text: bytes) -> Manifest:
        """Raises Damaged, or CheckpointError where it is of a newer format."""
        try:
            raw: Any = json.loads(text)
            if raw["format"] > FORMAT:
                raise CheckpointError(
                    f"the checkpoint has format {raw['format']}, of a newer spottrain; this one reads "
                    f"up to {FORMAT}. Use the newer image",
                    reason=Reason.CHECKPOINT_INCOMPATIBLE,
                )
            if raw.pop("sha256") != hashlib.sha256(_canonical(raw)).hexdigest():
                raise Damaged("the manifest's checksum does not fit")
            return cls(
                step=raw["step"],
                tree=raw["tree"],
                tensors=[Stored(**item) for item in raw["tensors"]],
                shards=[Shard(**item) for item in raw["shards"]],
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Damaged(f"the manifest is not readable ({type(error).__name__}: {error})") from error

    def decode(self, shards: Mapping[str, Mapping[str, torch.Tensor]]) -> Any:
        """The tree, from the opened shards by name."""
        tensors: dict[int, torch.Tensor] = {}

        def tensor(number: int) -> torch.Tensor:
            if number not in tensors:
                stored = self.tensors[number]
                parts = [shards[shard][key] for shard, key in stored.pieces]
                flat = parts[0] if len(parts) == 1 else torch.cat([part.view(-1) for part in parts])
                tensors[number] = flat.view(stored.shape)
            return tensors[number]

        return _restore(self.tree, tensor)


def open_shard(expected: Shard, body: bytes | None) -> dict[str, torch.Tensor]:
    """The tensors of one shard. Raises Damaged where it is missing, cut short or changed."""
    if body is None:
        raise Damaged(f"{expected.name} is missing")
    if len(body) != expected.bytes:
        raise Damaged(f"{expected.name} has {len(body)} bytes instead of {expected.bytes}")
    if hashlib.sha256(body).hexdigest() != expected.sha256:
        raise Damaged(f"{expected.name} has a wrong checksum")
    try:
        return safetensors.torch.load(body)
    except SafetensorError as error:
        raise Damaged(f"{expected.name} is no safetensors file ({error})") from error


def _restore(value: Any, tensor: Callable[[int], torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_restore(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    if "$tensor" in value:
        return tensor(value["$tensor"])
    if "$tuple" in value:
        return tuple(_restore(item, tensor) for item in value["$tuple"])
    if "$dict" in value:
        return {_restore(key, tensor): _restore(item, tensor) for key, item in value["$dict"]}
    if "$float" in value:
        return float(value["$float"])
    return {key: _restore(item, tensor) for key, item in value.items()}


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


# --- weights ----------------------------------------------------------------------------------------
def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 over names, types, shapes and bytes, in the order of names."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        total.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return total.hexdigest()


def weights_file(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """A safetensors file that `load_weights` reads and `Module.load_state_dict` takes as it is.

    Tied weights are written under each of their names.
    """
    return safetensors.torch.save({name: tensor.detach().cpu().clone() for name, tensor in tensors.items()})


def load_weights(path: str | Path) -> dict[str, torch.Tensor]:
    """The weights that a finished run left in `<checkpoint URI>/final/model.safetensors`, by name."""
    return safetensors.torch.load(Path(path).read_bytes())


def explain_mismatch(saved: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
    """Why saved weights do not fit this model, as a sentence; None where they do."""
    for name in here:
        if name not in saved:
            return f"the checkpoint has no {name}, which the model has"
        before, now = (getattr(state[name], "shape", None) for state in (saved, here))  # None: no tensor
        if before != now:
            return f"{name} has shape {_plain(before)} in the checkpoint and {_plain(now)} in the model"
    extra = next((name for name in saved if name not in here), None)
    return None if extra is None else f"the model has no {extra}, which the checkpoint has"


def _plain(shape: torch.Size | None) -> str:
    return "none" if shape is None else str(tuple(shape))

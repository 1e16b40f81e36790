"""Model weights by themselves: what a finished run leaves in `final/`. Used by `keeper` and people.

One file, `model.safetensors`; or, where that would be larger than `most`, several beside an index, in the way
of Hugging Face's libraries. Only one file is in memory at a time, so a model that is sharded over many ranks
because no machine has room for it can be left as well.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, Final

import safetensors.torch
import torch

from spottrain.checkpoint.layout import SAFETENSORS, SHARD_BYTES, header_bytes
from spottrain.contract import Reason
from spottrain.core.container import ContainerMemory, gib
from spottrain.distributed import dtensor
from spottrain.errors import CheckpointError, ConfigurationError

FILE: Final = "model.safetensors"
INDEX: Final = f"{FILE}.index.json"
PART: Final = "model-{number:05d}-of-{count:05d}.safetensors"
BESIDE: Final = "beside"
"""Key of a file's metadata: names of the tensors, as a JSON list, that are not the model's own."""


def most_bytes(known: ContainerMemory | None) -> int:
    """Of one file: half of what the container has left; a tensor on its way into it may need as much."""
    return SHARD_BYTES if known is None else max(1, min(SHARD_BYTES, known.left // 2))


def require_room(state: Mapping[str, Any], known: ContainerMemory | None) -> None:
    """Before there is anything to lose: a tensor of the final weights is in memory as a whole, and a training
    that cannot leave its weights would fail at the end of every attempt. Raises ConfigurationError.
    """
    sizes = {name: _bytes(each) for name, each in state.items() if isinstance(each, torch.Tensor)}
    name = max(sizes, key=lambda each: sizes[each], default="")
    if known is not None and name and 2 * sizes[name] > known.left:
        raise ConfigurationError(
            f"the final weights are written tensor by tensor, and {name} alone has {gib(sizes[name])}: with "
            f"its copy that is more than the {gib(known.left)} that {known.whose} leaves; raise "
            f"resources.limits.memory by {gib(2 * sizes[name] - known.left)} or more",
            reason=Reason.OUT_OF_MEMORY,
        )


class FinalWeights:
    """Tensors by name, as the files that they become. Tied ones are there under each of their names.

    beside: names of those that are not the model's own (`trained.Together`). Raises CheckpointError.
    """

    def __init__(
        self, state: Mapping[str, Any], *, beside: Collection[str] = (), most: int = SHARD_BYTES
    ) -> None:
        tensors = {name: each for name, each in state.items() if isinstance(each, torch.Tensor)}
        _require_storable(tensors)
        # Wide types first: so each tensor is aligned without holes, which the format forbids.
        order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
        self._tensors = {name: tensors[name] for name in order}
        self._groups = _groups(self._tensors, most)
        self._beside = set(beside)
        self._digests: dict[str, str] = {}

    def files(self, *, first: bool, keep: bool) -> Iterator[tuple[str, memoryview]]:
        """Name and body of each file, which is gone when the next is asked for. All ranks must go to the end,
        for sharded tensors are gathered on the way. first: whether this rank takes the digests; keep: whether
        it wants the files. The others get none.
        """
        for number, names in enumerate(self._groups, 1):
            header, starts, size = self._header(names)
            file = torch.empty(len(header) + size if keep else 0, dtype=torch.uint8)
            if keep:
                file[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
            for name in names:
                tensor = dtensor.gathered(self._tensors[name])
                if not first:
                    continue
                start = len(header) + starts[name]
                place = file[start : start + _bytes(tensor)] if keep else None
                self._digests[name] = _taken(tensor, place)
            if keep:
                yield self._name(number), file.numpy().data

    def _name(self, number: int) -> str:
        count = len(self._groups)
        return FILE if count == 1 else PART.format(number=number, count=count)

    @property
    def digest(self) -> str:
        """Of a rank that was first, once the files are written."""
        return _digest({name: (self._tensors[name], found) for name, found in self._digests.items()})

    @property
    def index(self) -> bytes | None:
        """Where each tensor is; None where there is one file."""
        if len(self._groups) == 1:
            return None
        where = {name: self._name(number) for number, names in enumerate(self._groups, 1) for name in names}
        total = sum(map(_bytes, self._tensors.values()))
        words = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        return json.dumps(words, indent=1).encode()

    def _header(self, names: list[str]) -> tuple[bytes, dict[str, int], int]:
        """The file's header, where each tensor begins after it, and bytes of all of them."""
        beside = sorted(self._beside.intersection(names))
        said = {"format": "pt"} | ({BESIDE: json.dumps(beside)} if beside else {})
        entries: dict[str, Any] = {"__metadata__": said}
        starts: dict[str, int] = {}
        at = 0
        for name in names:
            tensor = self._tensors[name]
            shape, offsets = list(tensor.shape), [at, at + _bytes(tensor)]
            entries[name] = {"dtype": SAFETENSORS[tensor.dtype], "shape": shape, "data_offsets": offsets}
            starts[name], at = at, offsets[1]
        return header_bytes(entries), starts, at


def _groups(tensors: Mapping[str, torch.Tensor], most: int) -> list[list[str]]:
    """Names of each file; a tensor that is larger than a file may be has one of its own."""
    groups: list[list[str]] = [[]]
    room = most
    for name, tensor in tensors.items():
        size = _bytes(tensor)
        if size > room and groups[-1]:
            groups.append([])
            room = most
        groups[-1].append(name)
        room -= size
    return groups


def _require_storable(tensors: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype not in SAFETENSORS:
            raise CheckpointError(
                f"the model's {name} is of type {tensor.dtype}, which a safetensors file cannot hold; the "
                "weights were not stored. Keep it in a type that it can (complex64, float64), or out of "
                "state_dict()",
                reason=Reason.CHECKPOINT_INCOMPATIBLE,
            )


def _bytes(tensor: torch.Tensor) -> int:
    """Of all of it, also where this rank holds a part."""
    return prod(tensor.shape) * tensor.element_size()


def _taken(tensor: torch.Tensor, place: torch.Tensor | None) -> str:
    """SHA-256 of its bytes, which are copied to their place in a file on the way."""
    tensor = tensor.detach()
    if not tensor.numel():
        return hashlib.sha256(b"").hexdigest()
    if place is None:
        place = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
    else:
        place.view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return hashlib.sha256(place.numpy().data).hexdigest()


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 over names, types, shapes and the SHA-256 of the bytes, in the order of names."""
    return _digest({name: (each, _taken(each, None)) for name, each in tensors.items()})


def _digest(found: Mapping[str, tuple[torch.Tensor, str]]) -> str:
    total = hashlib.sha256()
    for name, (tensor, of_bytes) in sorted(found.items()):
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {of_bytes}\n".encode())
    return total.hexdigest()


def load_weights(path: str | Path, of: str = "") -> dict[str, torch.Tensor]:
    """The weights that a finished run left in `<checkpoint URI>/final/`, by name.

    path: the folder, or `model.safetensors` in it; where there is an index instead, all files are read.
    of: "": the model's, which its `load_state_dict` takes. Else what was trained beside it: "extra.<name>"
        for a module that the loop was given, "loose" for single parameters; by the names within that.
    """
    found: dict[str, torch.Tensor] = {}
    beside: set[str] = set()
    for file in _files(Path(path)):
        body = file.read_bytes()
        said = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")]).get("__metadata__", {})
        beside |= set(json.loads(said.get(BESIDE, "[]")))
        found |= safetensors.torch.load(body)
    if not of:
        return {name: each for name, each in found.items() if name not in beside}
    return {name.removeprefix(f"{of}."): found[name] for name in beside if name.startswith(f"{of}.")}


def _files(path: Path) -> list[Path]:
    path = path / FILE if path.is_dir() else path
    index = path.with_name(INDEX)
    if path.exists() or path.name != FILE or not index.exists():
        return [path]
    return [
        path.with_name(name) for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))
    ]

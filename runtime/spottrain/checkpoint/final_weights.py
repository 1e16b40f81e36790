"""Final model weights: the files that a finished run writes to `final/`.

They are one file, `model.safetensors`. If it would exceed `most` bytes, they are several files and an index,
as Hugging Face's libraries write them. Only one file is in memory at a time, so a sharded model that fits on
no single machine can be written as well.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, Final

import torch

from spottrain.checkpoint.layout import SAFETENSORS, SHARD_BYTES, dtype_name, grouped
from spottrain.checkpoint.manifest import BESIDE, Damaged, file_header
from spottrain.checkpoint.tensor_memory import byte_view
from spottrain.checkpoint.weights_files import FILE, SafetensorsFile, local_body
from spottrain.contract import Reason
from spottrain.core.container import ContainerMemory
from spottrain.distributed import dtensor
from spottrain.errors import CheckpointError

INDEX: Final = f"{FILE}.index.json"
PART: Final = "model-{number:05d}-of-{count:05d}.safetensors"
WEIGHTS: Final = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors(\.index\.json)?")
"""Names of all of these files."""


def most_bytes(known: ContainerMemory | None) -> int:
    """Returns the size limit of one file: half of the memory left; copying a tensor may need the rest."""
    return SHARD_BYTES if known is None else max(1, min(SHARD_BYTES, known.left // 2))


Content = tuple[torch.dtype, tuple[int, ...], str]
"""Dtype, shape and SHA-256 of the bytes of a tensor."""


class FinalWeights:
    """Tensors by name and the files made of them. Tied tensors are stored under each of their names.

    `beside`: names of the tensors that are not the model's own (see `outside_parameters`). `most`: size limit
    of a file in bytes. Raises CheckpointError if safetensors cannot hold a tensor's dtype.
    """

    def __init__(
        self, state: Mapping[str, Any], *, beside: Collection[str] = (), most: int = SHARD_BYTES
    ) -> None:
        tensors = {name: each for name, each in state.items() if isinstance(each, torch.Tensor)}
        require_storable(tensors)
        # Wide dtypes first aligns each tensor without gaps, which the format forbids.
        order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
        self._tensors = {name: tensors[name] for name in order}
        sizes = {name: _bytes(each) for name, each in self._tensors.items()}
        self._groups = grouped(sizes, most) or [[]]
        self._beside = set(beside)
        self.contents: dict[str, Content] = {}
        """What the files hold; complete on the rank with `first`, after `files` is exhausted."""

    def files(self, *, first: bool, keep: bool) -> Iterator[tuple[str, memoryview]]:
        """Yields name and body of each file; a body is valid until the next one is requested.

        All ranks must exhaust the iterator, because it gathers sharded tensors. `first`: whether this rank
        computes the digests; `keep`: whether it gets the files, which requires `first`.
        """
        for number, names in enumerate(self._groups, 1):
            header, offsets = self._header(names)
            size = offsets[-1] if keep else mmap.PAGESIZE
            # Aligned to pages, so that a folder's store can write it past the page cache.
            memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            file = torch.frombuffer(memory, dtype=torch.uint8)
            if keep:
                file[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
            for name, (start, end) in zip(names, pairwise(offsets), strict=True):
                tensor = dtensor.gathered(self._tensors[name])
                if first:
                    self.contents[name] = _content(tensor, file[start:end] if keep else None)
            if keep:
                body = memoryview(memory)
                del memory, file
                yield self._name(number), body
                del body

    def _name(self, number: int) -> str:
        count = len(self._groups)
        return FILE if count == 1 else PART.format(number=number, count=count)

    @property
    def digest(self) -> str:
        """Digest of all tensors; valid as `contents` is."""
        return _digest(self.contents)

    @property
    def index(self) -> bytes | None:
        """Index that maps each tensor to its file, as JSON; None if there is only one file."""
        if len(self._groups) == 1:
            return None
        where = {name: self._name(number) for number, names in enumerate(self._groups, 1) for name in names}
        total = sum(map(_bytes, self._tensors.values()))
        words = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        return json.dumps(words, indent=1).encode()

    def _header(self, names: list[str]) -> tuple[bytes, list[int]]:
        beside = sorted(self._beside.intersection(names))
        metadata = {"format": "pt"} | ({BESIDE: json.dumps(beside)} if beside else {})
        found = ((name, self._tensors[name]) for name in names)
        tensors = ((name, dtype_name(each.dtype), each.shape) for name, each in found)
        return file_header(tensors, metadata)


def require_storable(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises CheckpointError if safetensors cannot hold a tensor's dtype."""
    for name, tensor in tensors.items():
        if tensor.dtype not in SAFETENSORS:
            raise CheckpointError(
                f"the model's {name} has dtype {tensor.dtype}, which a safetensors file cannot store. "
                "Convert it (complex64, float64), or keep it out of state_dict()",
                reason=Reason.CHECKPOINT_INCOMPATIBLE,
            )


def _bytes(tensor: torch.Tensor) -> int:
    """Returns the bytes of the whole tensor, even if this rank holds only a part."""
    return prod(tensor.shape) * tensor.element_size()


def _content(tensor: torch.Tensor, place: torch.Tensor | None = None) -> Content:
    """Copies the tensor's bytes to `place`, if given."""
    tensor = tensor.detach()
    if not tensor.numel():
        place = torch.empty(0, dtype=torch.uint8)
    elif place is None:
        place = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
    else:
        place.view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return tensor.dtype, tuple(tensor.shape), hashlib.sha256(byte_view(place)).hexdigest()


def equal_weights(contents: Mapping[str, Content], paths: Iterable[Path]) -> bool:
    """Whether safetensors files hold these tensors. Of tensors with equal values one is enough, because
    Hugging Face's libraries leave out those that the model ties together.
    """
    found: dict[str, Content] = {}
    try:
        for path in paths:
            file = SafetensorsFile(local_body(path))
            for name in file.tensors:
                found[name] = _content(file.read([name])[name])
                if contents.get(name) != found[name]:
                    return False
    except Damaged:
        return False
    values = set(found.values())
    return all(name in found or content in values for name, content in contents.items())


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Returns a SHA-256 over the names, dtypes, shapes and SHA-256 of the bytes, in order of names."""
    return _digest({name: _content(each) for name, each in tensors.items()})


def _digest(contents: Mapping[str, Content]) -> str:
    total = hashlib.sha256()
    for name, (dtype, shape, of_bytes) in sorted(contents.items()):
        total.update(f"{name} {dtype} {shape} {of_bytes}\n".encode())
    return total.hexdigest()

"""Reads tensors from files of weights: safetensors, and what `torch.save` has stored.

Executes no code from a file. The package safetensors is not needed: an image of one's own may lack it.
"""

from __future__ import annotations

import io
import json
import mmap
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

import torch

from spottrain.checkpoint.layout import SAFETENSORS
from spottrain.checkpoint.manifest import BESIDE, Damaged
from spottrain.checkpoint.plain_state import clean
from spottrain.contract import Reason
from spottrain.errors import CheckpointError

DTYPES: Final = {name: dtype for dtype, name in SAFETENSORS.items()}
MAX_HEADER: Final = 100 * 2**20
"""Largest header in bytes, as in the safetensors package."""
INDEX: Final = ".safetensors.index.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorInfo:
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Body:
    """The bytes of one file, wherever it is. Both may raise Damaged."""

    name: str
    size: int
    part: Callable[[int, int], bytes | bytearray]
    """Returns so many bytes from an offset on. They need not be verified."""
    whole: Callable[[], bytearray | mmap.mmap]
    """Returns all bytes, verified where there is a checksum."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """Where a tensor is in a safetensors file, in bytes."""

    info: TensorInfo
    begin: int
    end: int


class SafetensorsFile:
    """The tensors of one file by name. Raises Damaged if it is not a safetensors file."""

    def __init__(self, body: Body) -> None:
        self._body = body
        size = int.from_bytes(body.part(0, 8), "little") if body.size >= 8 else 0
        if not 2 <= size <= min(MAX_HEADER, body.size - 8):
            raise Damaged(f"{body.name} is no safetensors file: it has no header")
        try:
            raw: Any = json.loads(bytes(body.part(8, size)))
            metadata = raw.pop("__metadata__", {})
            self.beside = frozenset(json.loads(metadata.get(BESIDE, "[]")))
            """Names of tensors that are not of the model itself."""
            self._places = {name: self._place(name, entry, 8 + size) for name, entry in raw.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Damaged(
                f"the header of {body.name} is not readable ({type(error).__name__}: {error})"
            ) from error

    def _place(self, name: str, entry: Mapping[str, Any], start: int) -> _Place:
        begin, end = entry["data_offsets"]
        info = TensorInfo(dtype=DTYPES[entry["dtype"]], shape=tuple(entry["shape"]))
        if end - begin != prod(info.shape) * info.dtype.itemsize or not 0 <= begin <= end:
            raise ValueError(f"{name} has other bytes than its shape")
        if start + end > self._body.size:
            raise ValueError(f"{name} ends behind the end of the file")
        return _Place(info=info, begin=start + begin, end=start + end)

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        return {name: place.info for name, place in self._places.items()}

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Returns these tensors on the CPU, in the memory of the file's bytes. Raises Damaged."""
        memory = torch.frombuffer(self._body.whole(), dtype=torch.uint8)
        return {name: _viewed(memory, self._places[name]) for name in names}


def _viewed(memory: torch.Tensor, place: _Place) -> torch.Tensor:
    piece = memory[place.begin : place.end]
    if place.begin % place.info.dtype.itemsize:  # the format does not align tensors
        piece = piece.clone()
    return piece.view(place.info.dtype).view(place.info.shape)


def local_body(path: Path) -> Body:
    """Returns the bytes of a local file, which are mapped and not read into memory. Raises OSError."""

    def part(offset: int, count: int) -> bytes:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(count)

    def whole() -> mmap.mmap:
        try:
            with path.open("rb") as file:  # copied on write: torch wants memory that it could write to
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise Damaged(f"{path}: {error.strerror or error}") from error

    return Body(name=str(path), size=path.stat().st_size, part=part, whole=whole)


def files_in(folder: Path) -> list[Path]:
    """Returns the safetensors files of a folder: those of its index, else all.

    An adapter of PEFT is left out where it lies beside the weights of the whole model.

    Raises CheckpointError if there are none.
    """
    indexes = sorted(folder.glob(f"*{INDEX}"))
    if len(indexes) > 1:
        raise _unusable(f"{folder} has several indexes ({', '.join(each.name for each in indexes)})")
    if not indexes:
        found = sorted(folder.glob("*.safetensors"))
        found = [each for each in found if not each.name.startswith("adapter_")] or found
        if not found:
            raise _unusable(
                f"{folder} has no *.safetensors file; name a folder that has some, or one file of "
                "torch.save(model.state_dict(), ...)"
            )
        return found
    try:
        names = sorted(set(json.loads(indexes[0].read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _unusable(
            f"{indexes[0]} has no readable weight_map ({type(error).__name__}: {error})"
        ) from error
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise _unusable(f"{indexes[0]} names {missing[0]}, which is not in that folder")
    return [folder / name for name in names]


def write_torch_file(paths: Iterable[Path], target: Path) -> None:
    """Writes the tensors of safetensors files as one state_dict, by torch.save. Raises Damaged."""
    found: dict[str, torch.Tensor] = {}
    for path in paths:
        file = SafetensorsFile(local_body(path))
        found |= {name: each.clone() for name, each in file.read(file.tensors).items()}
    torch.save(found, target)


def torch_tensors(source: Path | bytearray | mmap.mmap, name: str) -> dict[str, torch.Tensor]:
    """Returns the tensors of a state_dict that torch.save has stored. Raises CheckpointError.

    A dict with the key "state_dict", as Lightning writes it, gives what is below that key.
    """
    lazily = isinstance(source, Path) and zipfile.is_zipfile(source)
    file: Any = source if isinstance(source, Path) else io.BytesIO(source)
    try:
        found: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=lazily)
    except Exception as error:  # pickle raises whatever the bytes lead to
        why = (str(error).splitlines() or [""])[0][:200]
        raise _unusable(
            f"{name} cannot be read by torch.load(weights_only=True) ({type(error).__name__}: {why}); store "
            "the weights alone: torch.save(model.state_dict(), path)"
        ) from error
    if isinstance(found, Mapping) and isinstance(found.get("state_dict"), Mapping):
        found = found["state_dict"]
    if not isinstance(found, Mapping) or not found:
        raise _unusable(f"{name} holds no state_dict, but a {type(found).__name__}: {_TO_DO}")
    if odd := [key for key, each in found.items() if not isinstance(each, torch.Tensor)]:
        raise _unusable(
            f"{name} holds no state_dict: its {odd[0]!r} is a {type(found[odd[0]]).__name__}. {_TO_DO}"
        )
    return {clean(str(key)): each for key, each in found.items()}


_TO_DO: Final = "Store the weights alone: torch.save(model.state_dict(), path)"


def _unusable(why: str) -> CheckpointError:
    return CheckpointError(why, reason=Reason.CHECKPOINT_INCOMPATIBLE)

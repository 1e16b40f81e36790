"""Reads tensors from files of weights: safetensors, and what `torch.save` has stored.

Executes no code from a file. The package safetensors is not needed: an image of one's own may lack it.
"""

from __future__ import annotations

import json
import mmap
import os
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
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
FILE: Final = "model.safetensors"
"""Final weights that are one file."""
INDEX: Final = ".safetensors.index.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Body:
    """The bytes of one file, wherever it is. Both may raise Damaged."""

    name: str
    size: int
    part: Callable[[int, int], bytes | bytearray]
    """Returns so many bytes from an offset on. They need not be verified."""
    whole: Callable[[], bytearray | mmap.mmap]
    """Returns all bytes, verified where there is a checksum."""


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
            self.tensors = {name: _described(entry) for name, entry in raw.items()}
            """On the device meta."""
            offsets = {name: [8 + size + each for each in raw[name]["data_offsets"]] for name in raw}
            for name, (begin, end) in offsets.items():
                if end - begin != self.tensors[name].nbytes or not 8 + size <= begin <= end <= body.size:
                    raise ValueError(f"{name} lies elsewhere than its shape and the file's size say")
            self._begins = {name: begin for name, (begin, _) in offsets.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise Damaged(
                f"the header of {body.name} is not readable ({type(error).__name__}: {error})"
            ) from error

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Returns these tensors on the CPU, in the memory of the file's bytes. Raises Damaged."""
        memory = torch.frombuffer(self._body.whole(), dtype=torch.uint8)
        found = {}
        for name in names:
            like, begin = self.tensors[name], self._begins[name]
            piece = memory[begin : begin + like.nbytes]
            if begin % like.itemsize:  # the format does not align tensors
                piece = piece.clone()
            found[name] = piece.view(like.dtype).view(like.shape)
        return found


def _described(entry: Mapping[str, Any]) -> torch.Tensor:
    return torch.empty(tuple(entry["shape"]), dtype=DTYPES[entry["dtype"]], device="meta")


def local_body(path: Path) -> Body:
    """Returns the bytes of a local file, which are mapped and not read into memory. Raises OSError."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        # copied on write: torch wants memory that it could write to
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if size else bytearray()
    return Body(
        name=str(path), size=size, part=lambda at, count: mapped[at : at + count], whole=lambda: mapped
    )


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


def load_weights(path: str | Path, of: str = "") -> dict[str, torch.Tensor]:
    """Loads the weights that a finished run wrote to `<checkpoint URI>/final/`.

    Args:
        path: A local copy of that folder, or `model.safetensors` in it. If the folder has an index instead,
            all files that it lists are read.
        of: Which weights. "": the model's. "extra.<name>": those of a module given by `extra=`.
            "loose": those of single parameters that belong to no module.

    Returns:
        CPU tensors by name, without the prefix `of`; empty if the run trained nothing of that name. With
        `of=""`, the model's `load_state_dict` accepts them.

    Raises:
        OSError: A file is missing or cannot be read.
        CheckpointError: A file holds no weights, or the folder has none.
    """
    path = Path(path) / FILE if Path(path).is_dir() else Path(path)
    try:
        paths = files_in(path.parent) if path.name == FILE and not path.exists() else [path]
        found, beside = _all_of(paths)
    except Damaged as error:
        raise _unusable(str(error)) from error
    if not of:
        return {name: each for name, each in found.items() if name not in beside}
    return {name.removeprefix(f"{of}."): found[name] for name in beside if name.startswith(f"{of}.")}


def write_torch_file(paths: Iterable[Path], target: Path) -> None:
    """Writes the tensors of safetensors files as one state_dict, by torch.save. Raises Damaged."""
    torch.save(_all_of(paths)[0], target)


def _all_of(paths: Iterable[Path]) -> tuple[dict[str, torch.Tensor], set[str]]:
    """Returns copies of all tensors, and the names of those that are not of the model itself."""
    found: dict[str, torch.Tensor] = {}
    beside: set[str] = set()
    for path in paths:
        file = SafetensorsFile(local_body(path))
        found |= {name: each.clone() for name, each in file.read(file.tensors).items()}
        beside |= file.beside
    return found, beside


def torch_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Returns the tensors of a state_dict that torch.save has stored. Raises CheckpointError.

    A dict with the key "state_dict", as Lightning writes it, gives what is below that key.
    """
    try:
        found: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # pickle raises whatever the bytes lead to
        why = (str(error).splitlines() or [""])[0][:200]
        raise _unusable(
            f"{path} cannot be read by torch.load(weights_only=True) ({type(error).__name__}: {why}); store "
            "the weights alone: torch.save(model.state_dict(), path)"
        ) from error
    if isinstance(found, Mapping) and isinstance(found.get("state_dict"), Mapping):
        found = found["state_dict"]
    if not isinstance(found, Mapping) or not found:
        raise _unusable(f"{path} holds no state_dict, but a {type(found).__name__}: {_TO_DO}")
    if odd := [key for key, each in found.items() if not isinstance(each, torch.Tensor)]:
        raise _unusable(
            f"{path} holds no state_dict: its {odd[0]!r} is a {type(found[odd[0]]).__name__}. {_TO_DO}"
        )
    return {clean(str(key)): each for key, each in found.items()}


_TO_DO: Final = "Store the weights alone: torch.save(model.state_dict(), path)"


def _unusable(why: str) -> CheckpointError:
    return CheckpointError(why, reason=Reason.CHECKPOINT_INCOMPATIBLE)

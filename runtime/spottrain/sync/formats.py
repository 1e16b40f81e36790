"""Formats that say themselves whether a file is whole: zip, safetensors, JSON.

torch.save, numpy.savez and Keras write zip files.
"""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path
from typing import BinaryIO, Final

ZIP_START: Final = b"PK\x03\x04"
LARGEST_HEADER: Final = 100 * 2**20
"""Of safetensors, by its own rule."""
LARGEST_JSON: Final = 16 * 2**20


def says_whole(path: Path) -> bool | None:
    """Returns whether the file is whole, by its format; None where the format does not say so for certain.

    Raises OSError.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(9)
        if start.startswith(ZIP_START):
            return _zip(path)
        if start[8:] == b"{" and (length := int.from_bytes(start[:8], "little")) <= LARGEST_HEADER:
            return _safetensors(file, size, length)
        if path.suffix == ".json" and start.lstrip()[:1] in (b"{", b"[") and size <= LARGEST_JSON:
            return _json(start + file.read())
    return None


def _zip(path: Path) -> bool:
    """Whether it has its directory, which comes last."""
    try:
        with zipfile.ZipFile(path):
            return True
    except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError):  # whatever cut-off bytes say
        return False


def _safetensors(file: BinaryIO, size: int, length: int) -> bool | None:
    """Whether the bytes of all tensors are there. Some versions reserve the size first: holes say nothing."""
    if 8 + length > size:
        return False
    try:
        file.seek(8)
        header = json.loads(file.read(length))
        end = max((each["data_offsets"][1] for name, each in header.items() if name[:2] != "__"), default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        return None
    if 8 + length + end != size:
        return False
    return None if _has_holes(file.fileno(), size) else True


def _has_holes(file: int, size: int) -> bool:
    try:
        hole = os.lseek(file, 0, os.SEEK_HOLE) if hasattr(os, "SEEK_HOLE") else size
    except OSError:
        hole = size
    return hole < size or os.fstat(file).st_blocks * 512 < size


def _json(text: bytes) -> bool | None:
    """Whether it is one value. What is not may be several, or have comments."""
    try:
        json.loads(text)
    except ValueError:
        return None
    return True

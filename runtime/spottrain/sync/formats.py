"""Formats that say themselves whether a file is whole: zip, safetensors, JSON.

torch.save, numpy.savez and Keras write zip files, whose end record comes last.
"""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import BinaryIO, Final

ZIP_START: Final = b"PK\x03\x04"
ZIP_END: Final = struct.Struct("<4s4H2LH")
"""Signature, 2 numbers of disks, 2 counts of entries, the directory's bytes and offset, a comment's bytes."""
ZIP64_END: Final = struct.Struct("<4sQ2H2L4Q")
ZIP64_LOCATOR: Final = struct.Struct("<4sLQL")
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
            return _zip(file, size)
        if start[8:] == b"{" and int.from_bytes(start[:8], "little") <= LARGEST_HEADER:
            return _safetensors(file, size)
        if path.suffix == ".json" and start.lstrip()[:1] in (b"{", b"[") and size <= LARGEST_JSON:
            return _json(start + file.read())
    return None


def _zip(file: BinaryIO, size: int) -> bool:
    """Whether it ends with an end record that names a directory in the file. Checkpoints have no comment."""
    at = size - ZIP_END.size
    sign, *_, count, length, offset, comment = ZIP_END.unpack(_read(file, at, ZIP_END.size))
    if sign != b"PK\x05\x06" or comment:
        return False
    end = at
    locator = at - ZIP64_LOCATOR.size
    if locator > 0:
        sign, _, at, _ = ZIP64_LOCATOR.unpack(_read(file, locator, ZIP64_LOCATOR.size))
        if sign == b"PK\x06\x07":
            if at + ZIP64_END.size > locator:
                return False
            sign, *_, count, length, offset = ZIP64_END.unpack(_read(file, at, ZIP64_END.size))
            end = at
            if sign != b"PK\x06\x06":
                return False
    if offset + length != end:
        return False
    return not count or _read(file, offset, 4) == b"PK\x01\x02"


def _read(file: BinaryIO, at: int, count: int) -> bytes:
    """Returns zeros where the file has no such bytes."""
    file.seek(max(at, 0))
    return file.read(count).ljust(count, b"\0") if at >= 0 else bytes(count)


def _safetensors(file: BinaryIO, size: int) -> bool | None:
    """Whether the bytes of all tensors are there. Some versions reserve the size first: holes say nothing."""
    length = int.from_bytes(_read(file, 0, 8), "little")
    if 8 + length > size:
        return False
    try:
        header = json.loads(_read(file, 8, length))
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

"""Distinguishes a URI from a plain path, and compares them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

SCHEME: Final = re.compile("[A-Za-z][A-Za-z0-9+.-]*:")
"""Start of a URI: its scheme (RFC 3986)."""


def is_path(uri: str) -> bool:
    """Whether `uri` is a plain path. Text that begins with a scheme, even an unknown one, is not."""
    return SCHEME.match(uri) is None


def same_place(one: str, other: str, folder: Path) -> bool:
    """Whether two checkpoint URIs name the same prefix or folder. `folder`: what relative paths refer to."""
    return _normalised(one, folder) == _normalised(other, folder)


def _normalised(uri: str, folder: Path) -> str:
    if is_path(uri):
        return str((folder / uri).resolve())
    if uri.startswith("file:///"):
        return str(Path(unquote(urlsplit(uri).path)).resolve())
    return uri.rstrip("/")

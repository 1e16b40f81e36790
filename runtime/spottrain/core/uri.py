"""Distinguishes a URI from a plain path."""

from __future__ import annotations

import re
from typing import Final

SCHEME: Final = re.compile("[A-Za-z][A-Za-z0-9+.-]*:")
"""Start of a URI: its scheme (RFC 3986)."""


def is_path(uri: str) -> bool:
    """Whether `uri` is a plain path. Text that begins with a scheme, even an unknown one, is not."""
    return SCHEME.match(uri) is None

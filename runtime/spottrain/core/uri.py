"""Tells a URI from a plain path."""

from __future__ import annotations

import re
from typing import Final

SCHEME: Final = re.compile("[A-Za-z][A-Za-z0-9+.-]*:")
"""How a URI begins (RFC 3986)."""


def is_path(uri: str) -> bool:
    """Whether it is a plain path. What begins with a scheme, known or mistyped, is never one."""
    return SCHEME.match(uri) is None

"""Checkpoint URIs and plain paths: reads what a person gave, tells them apart, and compares them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from spottrain.errors import ConfigurationError

SCHEME: Final = re.compile("[A-Za-z][A-Za-z0-9+.-]*:")
"""Start of a URI: its scheme (RFC 3986)."""

UNEXPANDED: Final = re.compile(r"\$[({A-Za-z_]")
"""A variable that a shell, or Kubernetes, would have replaced."""
WITHOUT_COLON: Final = re.compile("(s3|gs|file)//")


def given(text: str, name: str) -> str:
    """Returns a URI or path as it was meant: env files and YAML keep spaces, line ends, quotes and ~.

    Args:
        text: What was given.
        name: Where it was given, for messages.

    Raises:
        ConfigurationError: It would name another place than its author meant.
    """
    uri = text.strip()
    if len(uri) > 1 and uri[0] == uri[-1] and uri[0] in "\"'":
        uri = uri[1:-1].strip()
    if not uri:
        raise ConfigurationError(f"{name}={text!r} is blank: give a URI or a path, or leave it out")
    if not uri.isprintable():
        raise ConfigurationError(f"{name}={text!r} contains a character that cannot be seen: remove it")
    if UNEXPANDED.search(uri):
        raise ConfigurationError(
            f"{name}={text!r} contains a variable that nothing has replaced: write out its value"
        )
    if WITHOUT_COLON.match(uri):
        scheme, rest = uri.split("//", 1)
        raise ConfigurationError(f"{name}={text!r} is not valid: write {scheme}://{rest}")
    if not uri.startswith("~"):
        return uri
    try:
        return str(Path(uri).expanduser())
    except RuntimeError as error:
        raise ConfigurationError(f"{name}={text!r}: {error}; write out the path") from error


def is_path(uri: str) -> bool:
    """Whether `uri` is a plain path. Text that begins with a scheme, even an unknown one, is not."""
    return SCHEME.match(uri) is None


def same_place(one: str, other: str, folder: Path) -> bool:
    """Whether two checkpoint URIs name the same prefix or folder. `folder`: what relative paths refer to."""
    return _normalised(one, folder) == _normalised(other, folder)


def folder_of(uri: str) -> str | None:
    """Returns the folder of a path or file: URI; None for a URI of a store."""
    if is_path(uri):
        return uri
    return unquote(urlsplit(uri).path) if uri.startswith("file:///") else None


def _normalised(uri: str, folder: Path) -> str:
    path = folder_of(uri)
    return uri.rstrip("/") if path is None else str((folder / path).resolve())

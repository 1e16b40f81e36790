"""Reads the objects of a YAML or JSON file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final

import yaml

from spottrain_cli.errors import UsageError

STDIN: Final = "-"


def read(name: str) -> list[dict[str, Any]]:
    """Returns the objects of a file (- is standard input), those of a List one by one.

    Raises:
        UsageError: the file cannot be read, or is no YAML, or holds something else than objects.
    """
    where = "standard input" if name == STDIN else name
    try:
        text = sys.stdin.read() if name == STDIN else Path(name).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"{where} is not a text in UTF-8; give a YAML or JSON file") from None
    except OSError as error:
        raise UsageError(f"{where} cannot be read: {error.strerror}") from error
    try:
        found = [each for each in yaml.load_all(text, Loader=_Loader) if each is not None]
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise UsageError(f"{where}{line} is not YAML: {getattr(error, 'problem', None) or error}") from error
    except RecursionError:
        raise UsageError(f"{where} is nested too deeply to be a manifest") from None
    return [item for each in found for item in _items(each, where)]


class _Loader(yaml.SafeLoader):
    """As Kubernetes reads YAML: a time stays a text."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in found if tag != "tag:yaml.org,2002:timestamp"]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _items(document: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(document, dict) or not all(isinstance(key, str) for key in document):
        raise UsageError(
            f"{where} holds {str(document)[:40]!r} and must hold Kubernetes objects, with apiVersion and kind"
        )
    if document.get("kind") == "List" and isinstance(document.get("items"), list):
        return [item for each in document["items"] for item in _items(each, where)]
    return [document]

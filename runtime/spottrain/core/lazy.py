"""Imports names of a package on first use, by a module-level `__getattr__`. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from typing import Any


def names(package: str, home: Mapping[str, str], modules: Collection[str] = ()) -> Callable[[str], Any]:
    """Returns a module's `__getattr__`. home: the module that defines each name; modules: submodule names."""

    def get(name: str) -> Any:
        if name in modules:
            return import_module(f"{package}.{name}")
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(home[name]), name)

    return get

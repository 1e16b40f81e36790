"""Names of a package imported on first use: `__getattr__` of spottrain and its packages. No torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from typing import Any


def names(package: str, home: Mapping[str, str], modules: Collection[str] = ()) -> Callable[[str], Any]:
    """A module's `__getattr__`. home: the module that defines each name; modules: submodules themselves."""

    def get(name: str) -> Any:
        if name in modules:
            return import_module(f"{package}.{name}")
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(home[name]), name)

    return get

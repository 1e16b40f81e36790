"""Arguments that several of the benchmarks have, each with its own defaults."""

from __future__ import annotations

import argparse
from typing import Any, Final

from bench.scale.world import Size

SHARED: Final[dict[str, tuple[type, str]]] = {
    "jobs": (int, ""),
    "workers": (int, "of each job"),
    "nodes": (int, ""),
    "gpus": (int, "of each node"),
    "zones": (int, "over which the nodes are spread, at most 6"),
    "stop_seconds": (float, "from the DELETE of a pod to its trainer's end"),
    "seed": (int, "of what is random"),
}


def parser(about: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """Returns a parser with these of the shared arguments; a benchmark adds those of its own."""
    found = argparse.ArgumentParser(description=about, formatter_class=argparse.RawTextHelpFormatter)
    for name, default in defaults.items():
        kind, words = SHARED[name]
        add(found, name, kind, default, words)
    return found


def add(to: argparse.ArgumentParser, name: str, kind: type, default: Any, words: str) -> None:
    known = "" if default is None else f"(default: {default})"
    to.add_argument(
        f"--{name.replace('_', '-')}", type=kind, default=default, help=f"{words} {known}".strip()
    )


def size(options: argparse.Namespace) -> Size:
    """Returns the cluster that was asked for; what a benchmark has no argument for is the default."""
    given = {name: value for name, value in vars(options).items() if name in Size.__dataclass_fields__}
    return Size(**given)

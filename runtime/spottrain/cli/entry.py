"""The `spottrain` command. It blocks signals before anything else is imported.

A pod has the runtime alone: run, profile, sync, inject and checkpoints delete. Every other verb is the
command line's (spottrain_cli), which a pod does not have.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from spottrain.core.startup_signals import hold_signals, release_signals

TRAINS = ("run", "profile", "sync")
"""Verbs that end with a save, so signals are held from the start."""
IN_PODS = ("inject", "checkpoints delete")
"""The others that a pod needs."""


def main() -> int:
    hold_signals()
    words = sys.argv[1:]
    if not trains(words):  # without the imports of a training, which take longer than its own
        release_signals()
        return _run_other(words)
    from spottrain.cli.main import main

    return main(words)


def trains(words: Sequence[str]) -> bool:
    """Whether the command runs a training here. `profile` does with a script; else it is about a job."""
    verb = words[0] if words else ""
    return verb in TRAINS and (verb != "profile" or _names_script(words[1:]))


def _names_script(words: Sequence[str]) -> bool:
    named = any(word == "-m" or word.endswith(".py") or os.path.isfile(word) for word in words)
    return named or not has_command_line()


def has_command_line() -> bool:
    from importlib.util import find_spec

    return find_spec("spottrain_cli") is not None


def _run_other(words: list[str]) -> int:
    """Runs a verb that does not train. Returns its exit code."""
    from importlib import import_module

    others = has_command_line()
    if words[:1] == ["inject"] or (words[:2] == ["checkpoints", "delete"] and not others):
        return int(import_module(f"spottrain.cli.{words[0]}").main(words[1:]))
    if others:
        return int(import_module("spottrain_cli.app").main(words))
    if words and not words[0].startswith("-"):
        here = f"{words[0]!r} is no command of the runtime ({', '.join([*TRAINS, *IN_PODS])})"
        there = "the command line has the others: pip install 'spottrain[cli]'"
        print(f"spottrain: {here}; {there}", file=sys.stderr)
        return 2
    return int(import_module("spottrain.cli.main").main(words))  # its help, its version

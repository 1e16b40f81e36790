"""Which verbs are the runtime's. Light: every start of `spottrain` imports it.

A pod has the runtime alone. Every other verb is the command line's (spottrain_cli), which it does not have.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence

TRAINS = ("run", "profile", "sync")
"""Verbs that end with a save, so signals are held from the start."""
IN_PODS = ("inject", "checkpoints delete")
"""The others that a pod needs."""


def trains(words: Sequence[str]) -> bool:
    """Whether the command runs a training here. `profile` does with a script; else it is about a job."""
    verb = words[0] if words else ""
    return verb in TRAINS and (verb != "profile" or _names_script(words[1:]))


def _names_script(words: Sequence[str]) -> bool:
    named = any(word == "-m" or word.endswith(".py") or os.path.isfile(word) for word in words)
    return named or not has_command_line()


def has_command_line() -> bool:
    return importlib.util.find_spec("spottrain_cli") is not None


def run_other(words: Sequence[str]) -> int:
    """Runs a verb that does not train. Returns its exit code."""
    words = list(words)
    others = has_command_line()
    if words[:1] == ["inject"] or (words[:2] == ["checkpoints", "delete"] and not others):
        return int(importlib.import_module(f"spottrain.cli.{words[0]}").main(words[1:]))
    if others:
        return int(importlib.import_module("spottrain_cli.app").main(words))
    if words and not words[0].startswith("-"):
        here = f"{words[0]!r} is no command of the runtime ({', '.join([*TRAINS, *IN_PODS])})"
        there = "the command line has the others: pip install 'spottrain[cli]'"
        print(f"spottrain: {here}; {there}", file=sys.stderr)
        return 2
    from spottrain.cli.main import show_help

    return show_help(words)

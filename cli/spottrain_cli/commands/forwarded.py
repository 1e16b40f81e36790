"""Verbs that read their own arguments: those of the runtime, and plan and checkpoints."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

import typer

RUNTIME = {
    "run": "Run a training script: saved before it is interrupted, resumed from there.",
    "profile": "Run a training script and profile some of its steps.",
    "sync": "Keep a folder of any program's checkpoints in a store.",
    "inject": "Write the runtime to a folder, for an image that lacks it.",
}
VERBS = {
    "plan": ("spottrain_cli.plan", "What a training needs and costs: time, memory, network, hardware."),
}
UNREAD = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


def add_to(app: typer.Typer) -> None:
    for verb, about in RUNTIME.items():
        _add(app, verb, "spottrain.cli.main", about, first=[verb])
    for verb, (module, about) in VERBS.items():
        _add(app, verb, module, about)


def _add(app: typer.Typer, verb: str, module: str, about: str, first: Sequence[str] = ()) -> None:
    @app.command(verb, help=about, context_settings=UNREAD)
    def run(context: typer.Context) -> None:
        raise typer.Exit(importlib.import_module(module).main([*first, *context.args]))

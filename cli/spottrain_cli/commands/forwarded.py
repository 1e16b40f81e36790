"""Verbs of the runtime, which reads their arguments itself."""

from __future__ import annotations

import typer

RUNTIME = {
    "run": "Run a training script: saved before it is interrupted, resumed from there.",
    "sync": "Keep a folder of any program's checkpoints in a store.",
    "inject": "Write the runtime to a folder, for an image that lacks it.",
}
UNREAD = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


def add_to(app: typer.Typer) -> None:
    for verb, about in RUNTIME.items():
        _add(app, verb, about)


def _add(app: typer.Typer, verb: str, about: str) -> None:
    @app.command(verb, help=about, context_settings=UNREAD)
    def run(context: typer.Context) -> None:
        from spottrain.cli.main import main

        raise typer.Exit(main([verb, *context.args]))

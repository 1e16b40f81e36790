"""Verbs of the runtime, which reads their arguments itself."""

from __future__ import annotations

import typer

SETTINGS = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


def run(context: typer.Context) -> None:
    """Run a training script: saved before it is interrupted, resumed from there."""
    _forward("run", context)


def sync(context: typer.Context) -> None:
    """Keep a folder of any program's checkpoints in a store."""
    _forward("sync", context)


def inject(context: typer.Context) -> None:
    """Write the runtime to a folder, for an image that lacks it."""
    from spottrain.cli.inject import main

    raise typer.Exit(main(context.args))


def _forward(verb: str, context: typer.Context) -> None:
    from spottrain.cli.main import main

    raise typer.Exit(main([verb, *context.args]))

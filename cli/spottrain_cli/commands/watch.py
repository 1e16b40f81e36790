"""`spottrain watch JOB`."""

from __future__ import annotations

from typing import Annotated

import typer

from spottrain_cli.commands.options import Context, Job, Kubeconfig, Namespace, access
from spottrain_cli.output import Format, FormatOption


def watch(
    job: Job,
    every: Annotated[
        float, typer.Option(metavar="SECONDS", min=1, help="Between two lines, where there is no terminal.")
    ] = 30.0,
    namespace: Namespace = "",
    context: Context = "",
    kubeconfig: Kubeconfig = "",
    output: FormatOption = Format.TEXT,
) -> None:
    """Watch a job until it ends: step, loss, speed, time left, age of the checkpoint, interruptions.

    It goes on when the connection was lost. Exit code 0: the job succeeded; 1: it failed, was stopped, or is
    invalid; 3: it was deleted.

    \b
      spottrain watch bert
      spottrain watch vision/bert --every 300 >> bert.log
    """
    from spottrain_cli import watching

    raise typer.Exit(watching.watch(access(namespace, context, kubeconfig), job, every=every, form=output))

"""`spottrain interrupt JOB`."""

from __future__ import annotations

import sys

import typer

from spottrain_cli.commands.options import Context, Job, Kubeconfig, Namespace, access
from spottrain_cli.output import Format, FormatOption


def interrupt(
    job: Job,
    namespace: Namespace = "",
    context: Context = "",
    kubeconfig: Kubeconfig = "",
    output: FormatOption = Format.TEXT,
) -> None:
    """Interrupt a job that trains, as the loss of its nodes would: a fire drill.

    Says whether and how fast it saved, and waits until it trains again. It counts as no failure. Exit code 1:
    steps were lost, or the job does not train.

    \b
      spottrain interrupt bert
    """
    from spottrain_cli import steering
    from spottrain_cli.output import print_facts

    where = sys.stdout if output is Format.TEXT else sys.stderr
    figures = steering.interrupt(
        access(namespace, context, kubeconfig), job, lambda sentence: print(sentence, file=where, flush=True)
    )
    if output is not Format.TEXT:
        print_facts(figures, output)
    raise typer.Exit(1 if figures["lostSteps"] else 0)

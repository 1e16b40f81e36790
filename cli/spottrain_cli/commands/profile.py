"""`spottrain profile SCRIPT`, which the runtime does, and `spottrain profile JOB|URI`."""

from __future__ import annotations

from typing import Annotated

import typer

from spottrain_cli.commands.options import Context, Kubeconfig, Namespace, access
from spottrain_cli.output import Format, FormatOption


def profile(
    what: Annotated[
        str, typer.Argument(metavar="SCRIPT|JOB|URI", help="What to profile, or whose profile to show.")
    ],
    endpoint: Annotated[
        str, typer.Option("--endpoint", help="URL of the store's server, in place of the job's.")
    ] = "",
    namespace: Namespace = "",
    context: Context = "",
    kubeconfig: Kubeconfig = "",
    output: FormatOption = Format.TEXT,
) -> None:
    """Show where the time of a job's steps went and what to change; or profile a script here.

    A SCRIPT (a file that is there, or a name that ends in .py) is run, and some of its steps are profiled: it
    takes --wait, --warmup and --active STEPS and the options of `spottrain run`.

    \b
      spottrain profile train.py
      spottrain profile --wait 20 --active 3 train.py --lr 1e-4
      spottrain profile bert
      spottrain profile s3://bucket/bert -o json
    """
    from spottrain_cli import profiles
    from spottrain_cli.checkpoints.source import open_source
    from spottrain_cli.output import show

    source = open_source(what, endpoint, access(namespace, context, kubeconfig))
    found, last = profiles.read(source.store)
    show(profiles.lines(found, last, name=what), profiles.facts(found, last), output)

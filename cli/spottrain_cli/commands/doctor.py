"""`spottrain doctor [JOB|FILE]`."""

from __future__ import annotations

from typing import Annotated

import typer

from spottrain_cli.commands.options import Context, Kubeconfig, Namespace, access
from spottrain_cli.output import Format, FormatOption


def doctor(
    job: Annotated[
        str, typer.Argument(metavar="[JOB|FILE]", help="A job, or its manifest; default: the cluster alone.")
    ] = "",
    namespace: Namespace = "",
    context: Context = "",
    kubeconfig: Kubeconfig = "",
    output: FormatOption = Format.TEXT,
) -> None:
    """Check the cluster, your rights, the bucket and a job, and say how to mend what is wrong.

    The bucket is tried from this machine with your credentials: a small object is written there and deleted.
    Exit code 1 if a check fails.

    \b
      spottrain doctor
      spottrain doctor -n vision bert
      spottrain doctor job.yaml -o json
    """
    from spottrain_cli.doctor import findings, judging, reading
    from spottrain_cli.output import show, width

    found = judging.judge(reading.read(access(namespace, context, kubeconfig), job))
    show(findings.lines(found, width=width()), findings.facts(found), output)
    if findings.failed(found):
        raise typer.Exit(1)

"""`spottrain status JOB`."""

from __future__ import annotations

from spottrain_cli.commands.options import Context, Job, Kubeconfig, Namespace, access
from spottrain_cli.output import Format, FormatOption


def status(
    job: Job,
    namespace: Namespace = "",
    context: Context = "",
    kubeconfig: Kubeconfig = "",
    output: FormatOption = Format.TEXT,
) -> None:
    """Show how a job stands: its attempts, why they ended and what that cost, and what happens next.

    \b
      spottrain status bert
      spottrain status vision/bert -o yaml
    """
    from datetime import UTC, datetime

    from spottrain_cli import cluster, timeline
    from spottrain_cli.output import show, width

    found = cluster.find(access(namespace, context, kubeconfig), job)
    lines = timeline.status(found, now=datetime.now(UTC), width=width())
    show(lines, timeline.facts(found), output)

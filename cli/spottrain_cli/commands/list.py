"""`spottrain list`."""

from __future__ import annotations

from spottrain_cli.commands.options import AllNamespaces, Context, Kubeconfig, Namespace, access
from spottrain_cli.output import Format, FormatOption


def list_jobs(
    all_namespaces: AllNamespaces = False,
    namespace: Namespace = "",
    context: Context = "",
    kubeconfig: Kubeconfig = "",
    output: FormatOption = Format.TEXT,
) -> None:
    """List the jobs of a namespace, the newest first.

    \b
      spottrain list
      spottrain list -n vision -o json
      spottrain list -A
    """
    from datetime import UTC, datetime

    from spottrain_cli import cluster, overview
    from spottrain_cli.output import show, width

    where = access(namespace, context, kubeconfig, all_namespaces=all_namespaces)
    jobs = cluster.all_jobs(where)
    lines = overview.lines(jobs, where=where.place, now=datetime.now(UTC), width=width())
    facts = None if output is Format.TEXT else overview.as_facts(jobs)
    show(lines, facts, output)

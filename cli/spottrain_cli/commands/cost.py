"""`spottrain cost [JOB]`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from spottrain_cli.commands.options import AllNamespaces, Context, Kubeconfig, Namespace, access
from spottrain_cli.errors import NotFound, UsageError
from spottrain_cli.output import Format, FormatOption

if TYPE_CHECKING:
    from spottrain_cli.jobs import Job


def cost(
    job: Annotated[str, typer.Argument(metavar="[JOB]", help="Default: all, and sums.")] = "",
    all_namespaces: AllNamespaces = False,
    namespace: Namespace = "",
    context: Context = "",
    kubeconfig: Kubeconfig = "",
    file: Annotated[
        str,
        typer.Option(
            "--file",
            metavar="FILE",
            help="JSON by `kubectl get tj -o json` instead of a cluster; - is stdin; -n chooses in it.",
        ),
    ] = "",
    output: FormatOption = Format.TEXT,
) -> None:
    """Show what a job, or the jobs of a namespace, cost and saved, and where their time went.

    \b
      spottrain cost bert
      spottrain cost -A -o json
    """
    from datetime import UTC, datetime

    from spottrain_cli import cluster, cost_report, cost_sums
    from spottrain_cli.output import show

    if job and all_namespaces:
        raise UsageError("a JOB is in one namespace: leave out --all-namespaces, or JOB")
    if file and (all_namespaces or context or kubeconfig):
        raise UsageError("--file asks no cluster: leave out --all-namespaces, --context and --kubeconfig")
    now, where = datetime.now(UTC), access(namespace, context, kubeconfig, all_namespaces=all_namespaces)
    one: Job | None = None
    found: list[Job] = []
    if file:
        one, found, place = _of_file(file, job, namespace)
    elif job:
        one, place = cluster.find(where, job), ""
    else:
        found, place = cluster.all_jobs(where), where.place
    if one is not None:
        show(cost_report.lines(one, now=now), cost_report.facts(one, now=now), output)
    else:
        show(cost_sums.lines(found, where=place), cost_sums.all_facts(found, now=now), output)


def _of_file(file: str, name: str, namespace: str) -> tuple[Job | None, list[Job], str]:
    """Returns the one job that is meant, or all of the namespace, and what they are called."""
    from spottrain_cli import jobs, kubectl

    source = "the input" if file == kubectl.STDIN else file
    document = kubectl.read_file(file, source)
    found = [job for job in jobs.jobs(document, source) if namespace in ("", job.namespace)]
    where = f"{source}, namespace {namespace}" if namespace else source
    if name:
        return _named(found, name, where), [], where
    if isinstance(document, dict) and document.get("kind") == jobs.KIND:
        if not found:
            raise NotFound(f"{source} has no job in namespace {namespace}")
        return found[0], [], where
    return None, found, where


def _named(found: list[Job], name: str, where: str) -> Job:
    own = [job for job in found if job.name == name]
    if len(own) > 1:
        places = ", ".join(sorted({job.namespace for job in own}))
        raise UsageError(f"{where} has {len(own)} jobs of the name {name}: choose by --namespace ({places})")
    if not own:
        there = ", ".join(sorted({job.name for job in found})) or "none"
        raise NotFound(f"{where} has no job of the name {name}; its jobs: {there}")
    return own[0]

"""`spottrain delete JOB`."""

from __future__ import annotations

from spottrain_cli.commands.options import Context, Job, Kubeconfig, Namespace, Yes, access
from spottrain_cli.output import Format, FormatOption


def delete(
    job: Job,
    yes: Yes = False,
    namespace: Namespace = "",
    context: Context = "",
    kubeconfig: Kubeconfig = "",
    output: FormatOption = Format.TEXT,
) -> None:
    """Delete a job. Its checkpoints stay, unless its deletionPolicy is Delete.

    \b
      spottrain delete bert
      spottrain delete vision/bert --yes
    """
    from spottrain_cli import cluster, steering, timeline
    from spottrain_cli.output import confirm, show

    where = access(namespace, context, kubeconfig)
    found = cluster.find(where, job)
    words = steering.deletion(found)
    confirm(f"Delete {found.ref} ({found.phase or 'new'})? {words}", sure=yes)
    steering.delete(where, found)
    show([f"{found.ref} is being deleted. {words}"], timeline.facts(found), output)

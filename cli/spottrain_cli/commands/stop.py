"""`spottrain stop JOB` and `spottrain resume JOB`."""

from __future__ import annotations

from spottrain_cli.commands.options import Context, Job, Kubeconfig, Namespace, access
from spottrain_cli.output import Format, FormatOption


def stop(
    job: Job,
    namespace: Namespace = "",
    context: Context = "",
    kubeconfig: Kubeconfig = "",
    output: FormatOption = Format.TEXT,
) -> None:
    """Stop a job: it saves a checkpoint and gives its nodes back, until it is resumed.

    \b
      spottrain stop bert
    """
    from spottrain_cli import steering, timeline
    from spottrain_cli.output import show

    words, after = steering.stop(access(namespace, context, kubeconfig), job)
    show([words], timeline.facts(after), output)


def resume(
    job: Job,
    namespace: Namespace = "",
    context: Context = "",
    kubeconfig: Kubeconfig = "",
    output: FormatOption = Format.TEXT,
) -> None:
    """Resume a job that was stopped, from its last checkpoint.

    \b
      spottrain resume bert
    """
    from spottrain_cli import steering, timeline
    from spottrain_cli.output import show

    words, after = steering.resume(access(namespace, context, kubeconfig), job)
    show([words], timeline.facts(after), output)

"""`spottrain stop JOB` and `spottrain resume JOB`."""

from __future__ import annotations

from spottrain_cli.commands.options import Context, Job, Kubeconfig, Namespace, access


def stop(job: Job, namespace: Namespace = "", context: Context = "", kubeconfig: Kubeconfig = "") -> None:
    """Stop a job: it saves a checkpoint and gives its nodes back, until it is resumed.

    \b
      spottrain stop bert
    """
    from spottrain_cli import steering

    print(steering.stop(access(namespace, context, kubeconfig), job))


def resume(job: Job, namespace: Namespace = "", context: Context = "", kubeconfig: Kubeconfig = "") -> None:
    """Resume a job that was stopped, from its last checkpoint.

    \b
      spottrain resume bert
    """
    from spottrain_cli import steering

    print(steering.resume(access(namespace, context, kubeconfig), job))

"""Options that verbs share: which job, and which cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from spottrain_cli.errors import UsageError

if TYPE_CHECKING:
    from spottrain_cli.kubectl import Access

Job = Annotated[str, typer.Argument(metavar="JOB", help="NAME or NAMESPACE/NAME.")]
Namespace = Annotated[str, typer.Option("-n", "--namespace", help="Default: that of the context.")]
AllNamespaces = Annotated[bool, typer.Option("-A", "--all-namespaces", help="The jobs of all namespaces.")]
Context = Annotated[str, typer.Option("--context", help="kubectl's context. Default: the current one.")]
Kubeconfig = Annotated[str, typer.Option("--kubeconfig", help="kubectl's configuration file.")]
Yes = Annotated[bool, typer.Option("-y", "--yes", help="Do not ask for confirmation.")]


def access(namespace: str, context: str, kubeconfig: str, *, all_namespaces: bool = False) -> Access:
    from spottrain_cli.kubectl import Access

    if namespace and all_namespaces:
        raise UsageError("leave out --namespace or --all-namespaces")
    return Access(namespace=namespace, context=context, kubeconfig=kubeconfig, all_namespaces=all_namespaces)

"""`spottrain submit FILE`: from a script or a manifest to a job."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from spottrain_cli.commands.options import Context, Kubeconfig, Namespace, Yes, access
from spottrain_cli.errors import UsageError
from spottrain_cli.kubectl import Access
from spottrain_cli.output import Format, FormatOption

HELP = """Send a training: a manifest, or a script with what it needs.

It says what will happen (nodes, price, checkpoints, what survives a reclaim and how that is known), and asks.
Of a script the working directory is packed: what git would commit and .spottrainignore does not name. It goes
to BUCKET/code/SHA256.tar.gz, and the pod runs the script in it. Its own arguments follow after --.

\b
  spottrain submit trainingjob.yaml --wait
  spottrain submit train.py --image team/train:1 --bucket s3://my-bucket/runs
  spottrain submit train.py --image team/train:1 --gpus 8 --workers 2 --bucket s3://runs/team -- --lr 3e-4
  spottrain submit /app/train.py --no-pack --image team/train:1 --bucket s3://my-bucket/runs --on-demand
"""
SCRIPT = "For a script"


def submit(
    context: typer.Context,
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="A manifest (.yaml, .json, -) or a script (.py).")
    ],
    args: Annotated[
        list[str] | None, typer.Argument(metavar="-- ARGS", help="Arguments of the script.")
    ] = None,
    image: Annotated[
        str, typer.Option(help="Image: Python, torch, what the script imports.", rich_help_panel=SCRIPT)
    ] = "",
    name: Annotated[str, typer.Option(help="Default: the script's name.", rich_help_panel=SCRIPT)] = "",
    gpus: Annotated[int, typer.Option(min=0, help="GPUs of each worker.", rich_help_panel=SCRIPT)] = 1,
    workers: Annotated[
        int, typer.Option(min=1, help="Pods that train together.", rich_help_panel=SCRIPT)
    ] = 1,
    spot: Annotated[
        bool, typer.Option("--spot/--on-demand", help="Which nodes.", rich_help_panel=SCRIPT)
    ] = True,
    bucket: Annotated[
        str, typer.Option(metavar="URI", help="Prefix for checkpoints and code.", rich_help_panel=SCRIPT)
    ] = "",
    endpoint: Annotated[
        str, typer.Option(metavar="URL", help="URL of an S3-compatible server.", rich_help_panel=SCRIPT)
    ] = "",
    secret: Annotated[
        str,
        typer.Option(metavar="NAME", help="Secret with the bucket's credentials.", rich_help_panel=SCRIPT),
    ] = "",
    service_account: Annotated[
        str, typer.Option(metavar="NAME", help="Service account of the pods.", rich_help_panel=SCRIPT)
    ] = "",
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Variable; again for more.", rich_help_panel=SCRIPT),
    ] = None,
    cpu: Annotated[str, typer.Option(help="CPUs of each worker, such as 8.", rich_help_panel=SCRIPT)] = "",
    memory: Annotated[
        str, typer.Option(help="Memory of each worker, such as 32Gi.", rich_help_panel=SCRIPT)
    ] = "",
    deadline: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help="RFC 3339: spot while there is time, on-demand after.",
            rich_help_panel=SCRIPT,
        ),
    ] = "",
    max_cost: Annotated[
        str, typer.Option(metavar="USD", help="Suspend the job at this cost.", rich_help_panel=SCRIPT)
    ] = "",
    sync_path: Annotated[
        str,
        typer.Option(
            metavar="FOLDER", help="The script writes its own checkpoints there.", rich_help_panel=SCRIPT
        ),
    ] = "",
    pack: Annotated[
        bool | None,
        typer.Option("--pack/--no-pack", help="Default: pack a script that is here.", rich_help_panel=SCRIPT),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Create nothing; print the manifest.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Until it ends; the exit code says how.")] = False,
    follow: Annotated[bool, typer.Option("--follow", help="The same, with its logs.")] = False,
    yes: Yes = False,
    namespace: Namespace = "",
    kube_context: Context = "",
    kubeconfig: Kubeconfig = "",
    output: FormatOption = Format.TEXT,
) -> None:
    from spottrain_cli import output as out
    from spottrain_cli.submit import journey
    from spottrain_cli.submit.script import Script

    where = access(namespace, kube_context, kubeconfig)
    if file.endswith(".py"):
        wanted = Script(
            path=file,
            image=image,
            args=tuple(args or ()),
            name=name,
            namespace=namespace,
            workers=workers,
            gpus=gpus,
            cpu=cpu,
            memory=memory,
            env=_variables(env or []),
            bucket=bucket,
            endpoint=endpoint,
            secret=secret,
            service_account=service_account,
            sync_path=sync_path,
            spot=spot,
            deadline=deadline,
            max_cost=max_cost,
        )
        submission = journey.of_script(where, wanted, pack)
    else:
        _only_for_scripts(context, file)
        submission = journey.of_file(file)
    checked = journey.checked(where, submission.manifest)
    print("\n".join(journey.said(submission, checked)), file=sys.stderr)
    if dry_run:
        out.print_facts(_readable(checked), Format.YAML if output is Format.TEXT else output)
        return
    out.confirm("Send it?", sure=yes)
    journey.send(submission)
    created = journey.create(where, submission.manifest)
    ref = f"{created['metadata']['namespace']}/{created['metadata']['name']}"
    if output is not Format.TEXT and not (wait or follow):
        out.print_facts(_readable(created), output)
    job = journey.looked_at(where, ref)
    if job is None:
        print(f"{ref}: no operator has looked at it yet; `spottrain doctor` says why", file=sys.stderr)
    if output is Format.TEXT:
        print(f"{ref} is sent; `spottrain watch {ref}` shows it, `spottrain logs -f {ref}` what it prints")
    if follow:
        raise typer.Exit(_with_logs(where, ref, endpoint))
    if wait:
        from spottrain_cli import watching

        raise typer.Exit(watching.watch(where, ref, every=30.0, form=output))


def _variables(given: list[str]) -> tuple[tuple[str, str], ...]:
    for each in given:
        if not each.partition("=")[1] or not each.partition("=")[0]:
            raise UsageError(f"--env {each!r} must be NAME=VALUE")
    return tuple((each.partition("=")[0], each.partition("=")[2]) for each in given)


def _only_for_scripts(context: typer.Context, file: str) -> None:
    """Refuses options that a manifest has its own words for."""
    script_only = [p for p in context.command.params if getattr(p, "rich_help_panel", None) == SCRIPT]
    given = [p for p in script_only if _was_given(context, p.name or "")]
    if context.params.get("args"):
        raise UsageError(f"{file} is a manifest, which has the script's arguments itself")
    if given:
        raise UsageError(f"{given[0].opts[0]} is for scripts; write it into {file}")


def _was_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _readable(created: dict[str, Any]) -> dict[str, Any]:
    created["metadata"].pop("managedFields", None)
    return created


def _with_logs(where: Access, ref: str, endpoint: str) -> int:
    """Prints the job's logs until it has ended. Returns the exit code that says how."""
    from spottrain_cli import cluster
    from spottrain_cli import follow as following
    from spottrain_cli.commands import logs

    logs.logs(ref, follow=True, endpoint=endpoint, context=where.context, kubeconfig=where.kubeconfig)
    code = following.code_of(cluster.find(where, ref))
    return 1 if code is None else code

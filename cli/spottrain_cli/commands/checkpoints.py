"""`spottrain checkpoints VERB JOB|URI`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spottrain_cli.commands.options import Context, Kubeconfig, Namespace, Yes, access
from spottrain_cli.errors import CommandError, UsageError
from spottrain_cli.output import Format, FormatOption, print_facts

if TYPE_CHECKING:
    from spottrain.cli.output import Answer

    from spottrain_cli.checkpoints.source import Source

app = typer.Typer(
    help="Get the model of a job; inspect and manage its checkpoints.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Place = Annotated[
    str,
    typer.Argument(metavar="JOB|URI", help="NAME, NAMESPACE/NAME, s3://..., gs://..., or a folder: ./..."),
]
Endpoint = Annotated[
    str, typer.Option("--endpoint", metavar="URL", help="Of an S3-compatible server. Default: the job's.")
]
EarlierJobs = Annotated[bool, typer.Option("--earlier-jobs", help="Also checkpoints of earlier jobs.")]
Step = Annotated[str, typer.Option("--step", metavar="N|newest|best", help="Which checkpoint.")]


# --- get --------------------------------------------------------------------------------------------------
@app.command()
def download(
    where: Place,
    to: Annotated[Path, typer.Option("--to", metavar="FOLDER", help="New, empty, or of the same download.")],
    step: Annotated[
        str,
        typer.Option(
            metavar="N|final|newest|best",
            help="Default: what a run that is done has left, else the newest checkpoint.",
        ),
    ] = "",
    form: Annotated[
        str,
        typer.Option(
            "--format", metavar="safetensors|pt", help="pt: one state_dict by torch.save, in memory."
        ),
    ] = "safetensors",
    endpoint: Endpoint = "",
    namespace: Namespace = "",
    context: Context = "",
    kubeconfig: Kubeconfig = "",
    output: FormatOption = Format.TEXT,
) -> None:
    """Write the model to a folder that from_pretrained reads. It changes nothing in the store.

    What the script has saved after its training; else the final weights with config and tokenizer, or a LoRA
    adapter as PEFT writes it; of a folder that is synced, that folder.

    \b
      spottrain checkpoints download bert --to bert
      spottrain checkpoints download s3://bucket/run --to run --step 2000
    """
    from spottrain_cli.checkpoints import downloading

    _require_step(step, "final", "newest", "best")
    if form not in downloading.FORMS:
        raise UsageError(f"--format {form}: use {' or '.join(downloading.FORMS)}")
    _require_folder(to)

    def act(at: Source) -> Answer:
        return downloading.run(at, step, to, form)

    _run(where, endpoint, namespace, context, kubeconfig, output, act)


# --- look -------------------------------------------------------------------------------------------------
@app.command("list")
def list_(
    where: Place,
    endpoint: Endpoint = "",
    namespace: Namespace = "",
    context: Context = "",
    kubeconfig: Kubeconfig = "",
    output: FormatOption = Format.TEXT,
) -> None:
    """Show the owner of a URI, its checkpoints, and objects that none of them uses.

    \b
      spottrain checkpoints list bert
      spottrain checkpoints list s3://bucket/run -o json
    """
    from spottrain_cli.checkpoints.listing import listing

    def act(at: Source) -> Answer:
        return listing(at.store, now=time.time())

    _run(where, endpoint, namespace, context, kubeconfig, output, act)


@app.command()
def jobs(
    prefix: Annotated[str, typer.Argument(metavar="URI", help="A prefix that URIs of jobs begin with.")],
    deleted: Annotated[
        bool, typer.Option("--deleted", help="Those that no TrainingJob uses any more; asks the cluster.")
    ] = False,
    file: Annotated[
        str,
        typer.Option(
            "--file", metavar="FILE", help="JSON of `kubectl get tj -A -o json`, or -: asks no cluster."
        ),
    ] = "",
    endpoint: Endpoint = "",
    context: Context = "",
    kubeconfig: Kubeconfig = "",
    output: FormatOption = Format.TEXT,
) -> None:
    """List the checkpoint URIs of jobs below a prefix.

    \b
      spottrain checkpoints jobs s3://ml-team/runs --deleted
    """
    from spottrain_cli import kubectl
    from spottrain_cli.checkpoints import jobs_below

    def act(at: Source) -> Answer:
        found = jobs_below.find(at.store)
        if deleted and file:
            source = "the input" if file == kubectl.STDIN else file
            known = jobs_below.jobs_of(kubectl.read_file(file, source), source)
            found = jobs_below.deleted_only(found, known)
        elif deleted:
            every = access("", context, kubeconfig, all_namespaces=True)
            found = jobs_below.deleted_only(found, jobs_below.jobs_of(kubectl.get(every), "kubectl's answer"))
        return jobs_below.listing(at.store, found, now=time.time())

    _require_uri(prefix)
    _run(prefix, endpoint, "", context, kubeconfig, output, act)


@app.command()
def verify(
    where: Place,
    step: Annotated[str, typer.Option(metavar="N|newest|best|all", help="Which checkpoints.")] = "all",
    endpoint: Endpoint = "",
    namespace: Namespace = "",
    context: Context = "",
    kubeconfig: Kubeconfig = "",
    output: FormatOption = Format.TEXT,
) -> None:
    """Read checkpoints in full and compare them with their checksums. Exit code 1: one cannot be used.

    \b
      spottrain checkpoints verify bert --step best
    """
    from spottrain_cli.checkpoints.verifying import verify

    _require_step(step, "newest", "best", "all")

    def act(at: Source) -> Answer:
        return verify(at.store, step)

    _run(where, endpoint, namespace, context, kubeconfig, output, act)


@app.command()
def logs(
    where: Place,
    attempt: Annotated[int | None, typer.Option(min=1, metavar="N", help="Default: all.")] = None,
    rank: Annotated[int | None, typer.Option(min=0, metavar="R", help="Default: all.")] = None,
    endpoint: Endpoint = "",
    namespace: Namespace = "",
    context: Context = "",
    kubeconfig: Kubeconfig = "",
    output: FormatOption = Format.TEXT,
) -> None:
    """Print what the store has of the output of ranks, also of a job that is deleted.

    \b
      spottrain checkpoints logs s3://bucket/run --attempt 2 --rank 0
    """
    from spottrain_cli.checkpoints.logs import logs

    def act(at: Source) -> Answer:
        return logs(at.store, attempt=attempt, rank=rank)

    _run(where, endpoint, namespace, context, kubeconfig, output, act)


# --- change -----------------------------------------------------------------------------------------------
@app.command()
def prune(
    where: Place,
    keep: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Keep the newest N that can be read, and the best.")
    ] = None,
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="With --keep: compare sizes only, and read nothing.")
    ] = False,
    orphans: Annotated[
        bool, typer.Option("--orphans", help="Delete objects that no checkpoint uses.")
    ] = False,
    earlier_jobs: EarlierJobs = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would go, and change nothing.")
    ] = False,
    yes: Yes = False,
    endpoint: Endpoint = "",
    namespace: Namespace = "",
    context: Context = "",
    kubeconfig: Kubeconfig = "",
    output: FormatOption = Format.TEXT,
) -> None:
    """Delete old checkpoints, or unused objects, at a URI that no running job owns.

    \b
      spottrain checkpoints prune bert --keep 1 --orphans --dry-run
    """
    from spottrain_cli.checkpoints.pruning import prune

    def act(at: Source) -> Answer:
        return prune(
            at.store,
            keep=keep,
            verify=not no_verify,
            orphans=orphans,
            earlier_jobs=earlier_jobs,
            dry_run=dry_run,
            sure=yes,
        )

    _run(where, endpoint, namespace, context, kubeconfig, output, act)


@app.command()
def copy(
    where: Place,
    to: Annotated[str, typer.Option("--to", metavar="URI", help="Empty, or of a job that is done.")],
    step: Step = "newest",
    to_endpoint: Annotated[str, typer.Option(metavar="URL", help="Default: the source's.")] = "",
    endpoint: Endpoint = "",
    namespace: Namespace = "",
    context: Context = "",
    kubeconfig: Kubeconfig = "",
    output: FormatOption = Format.TEXT,
) -> None:
    """Copy one checkpoint to another URI, to move a run or to branch it.

    \b
      spottrain checkpoints copy bert --step best --to s3://bucket/branch
    """
    from spottrain.cli.reading import open_there

    from spottrain_cli.checkpoints.copying import copy

    _require_step(step, "newest", "best")

    def act(at: Source) -> Answer:
        return copy(at.store, open_there(to, to_endpoint or at.store.endpoint or None), step)

    _run(where, endpoint, namespace, context, kubeconfig, output, act)


@app.command()
def release(
    where: Place,
    yes: Yes = False,
    endpoint: Endpoint = "",
    namespace: Namespace = "",
    context: Context = "",
    kubeconfig: Kubeconfig = "",
    output: FormatOption = Format.TEXT,
) -> None:
    """Free a URI whose owner died without releasing it.

    \b
      spottrain checkpoints release s3://bucket/run
    """
    from spottrain_cli.checkpoints.release import release

    def act(at: Source) -> Answer:
        return release(at.store, sure=yes)

    _run(where, endpoint, namespace, context, kubeconfig, output, act)


@app.command()
def repair(
    where: Place,
    endpoint: Endpoint = "",
    namespace: Namespace = "",
    context: Context = "",
    kubeconfig: Kubeconfig = "",
    output: FormatOption = Format.TEXT,
) -> None:
    """Make HEAD again, where it was removed or is broken, from the checkpoints that are there.

    \b
      spottrain checkpoints repair s3://bucket/run
    """
    from spottrain_cli.checkpoints.repairing import repair

    _run(where, endpoint, namespace, context, kubeconfig, output, lambda at: repair(at.store))


@app.command()
def delete(
    where: Place,
    job_uid: Annotated[
        str,
        typer.Option(metavar="UID", help="The owner's, of a job that has ended for certain; in use or not."),
    ] = "",
    earlier_jobs: EarlierJobs = False,
    yes: Yes = False,
    endpoint: Endpoint = "",
    namespace: Namespace = "",
    context: Context = "",
    kubeconfig: Kubeconfig = "",
    output: FormatOption = Format.TEXT,
) -> None:
    """Delete the checkpoints, logs and caches of a job that has ended. The final weights stay.

    \b
      spottrain checkpoints delete s3://bucket/run
    """
    from spottrain.cli.checkpoints import delete

    def act(at: Source) -> Answer:
        return delete(at.store, job_uid, earlier_jobs=earlier_jobs, sure=yes)

    _run(where, endpoint, namespace, context, kubeconfig, output, act)


# --- what all of them share -------------------------------------------------------------------------------
def _run(
    where: str,
    endpoint: str,
    namespace: str,
    context: str,
    kubeconfig: str,
    output: Format,
    act: Callable[[Source], Answer],
) -> None:
    """Opens the store, acts, and prints the answer."""
    from spottrain.checkpoint.manifest import Damaged

    from spottrain_cli.checkpoints.source import open_source

    try:
        answer = act(open_source(where, endpoint, access(namespace, context, kubeconfig)))
    except Damaged as error:
        raise CommandError(str(error)) from error
    if output is not Format.TEXT:
        print_facts(answer.facts, output)
    elif answer.body is None:
        print("\n".join(answer.lines))
    else:
        for part in answer.body:
            sys.stdout.buffer.write(part)
            sys.stdout.buffer.flush()
    if not answer.ok:
        raise typer.Exit(1)


def _require_step(text: str, *words: str) -> None:
    if text and text not in words and not text.isdecimal():
        raise UsageError(f"--step {text}: use a number, {' or '.join(words)}")


def _require_folder(path: Path) -> None:
    from spottrain.core.uri import is_path

    if not is_path(os.fspath(path)):
        raise UsageError(f"--to {path} is a URI: name a folder on this machine")


def _require_uri(text: str) -> None:
    from spottrain_cli.checkpoints.source import is_uri

    if not is_uri(text):
        raise UsageError(f"{text} is no URI: write s3://..., gs://..., or a path that begins with / or a dot")

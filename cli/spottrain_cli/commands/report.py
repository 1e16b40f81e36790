"""`spottrain report JOB|URI`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from spottrain_cli.commands.options import Context, Kubeconfig, Namespace, access
from spottrain_cli.errors import CommandError, NotFound, UsageError

if TYPE_CHECKING:
    from spottrain_cli.kubectl import Access
    from spottrain_cli.report.facts import Report

STDOUT: Final = "-"


def report(
    where: Annotated[
        str,
        typer.Argument(
            metavar="JOB|URI", help="NAME, NAMESPACE/NAME, s3://..., gs://..., or a folder: ./..."
        ),
    ],
    output: Annotated[
        str,
        typer.Option("-o", "--output", metavar="FILE", help="Default: NAME-report.html here; - is stdout."),
    ] = "",
    open_: Annotated[bool, typer.Option("--open", help="Show it in the browser.")] = False,
    endpoint: Annotated[
        str, typer.Option("--endpoint", metavar="URL", help="Of an S3-compatible server. Default: the job's.")
    ] = "",
    namespace: Namespace = "",
    context: Context = "",
    kubeconfig: Kubeconfig = "",
) -> None:
    """Write how a job went to one HTML page: attempts, loss, speed, time, cost, and what was slow.

    The page needs nothing else, and may be sent around. Of a URI it is made without a cluster.

    \b
      spottrain report bert --open
      spottrain report ./checkpoints/train -o run.html
    """
    from spottrain_cli.checkpoints.source import is_uri
    from spottrain_cli.report.page import page

    if open_ and output == STDOUT:
        raise UsageError("--open shows a file: name one by --output, or leave it out")
    file = Path(output or f"{_name(where)}-report.html")
    if output != STDOUT:
        _require_place(file)
    found = (
        _of_uri(where, endpoint)
        if is_uri(where)
        else _of_job(where, endpoint, access(namespace, context, kubeconfig))
    )
    text = page(found)
    if output == STDOUT:
        sys.stdout.write(text)
        return
    _write(file, text)
    print(file)
    if open_ and not typer.launch(file.absolute().as_uri()) == 0:
        raise CommandError(f"no browser could be started: open {file} yourself")


# --- what is on it ----------------------------------------------------------------------------------------
def _of_uri(uri: str, endpoint: str) -> Report:
    import time

    from spottrain.cli.reading import open_existing

    from spottrain_cli.report.facts import of_series
    from spottrain_cli.report.reading import read_series

    store = open_existing(uri, endpoint or None)
    found = read_series(store)
    if not found:
        raise NotFound(
            f"there is no series of steps at {store.uri}: no attempt has saved a checkpoint there yet, or it "
            "trained without spottrain's library, or an older one; for a job on a cluster give its name"
        )
    return of_series(uri, found, now=time.time())


def _of_job(ref: str, endpoint: str, where: Access) -> Report:
    from datetime import UTC, datetime

    from spottrain_cli import cluster
    from spottrain_cli.report.facts import of_job
    from spottrain_cli.report.reading import read_of_job

    job = cluster.find(where, ref)
    found, note = read_of_job(job, endpoint)
    if note:
        print(f"spottrain: {note}", file=sys.stderr)
    return of_job(job, found, now=datetime.now(UTC), note=note)


# --- the file ---------------------------------------------------------------------------------------------
def _name(where: str) -> str:
    """Returns the last word of a job's name or a URI, as the name of a file."""
    last = where.rstrip("/").rpartition("/")[2]
    return "".join(each if each.isalnum() or each in "-_." else "-" for each in last).strip(".-") or "job"


def _require_place(file: Path) -> None:
    """Raises UsageError unless the file is new, or a report."""
    from spottrain_cli.report.page import MARK

    try:
        if file.is_dir():
            raise UsageError(f"{file} is a folder: name a file by --output")
        with file.open("rb") as there:
            begin = there.read(1000)
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}; name another by --output") from error
    if begin and MARK.encode() not in begin:
        raise UsageError(f"{file} is there and is no report: it stays; name another file by --output")


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}; name another by --output") from error

"""`spottrain logs JOB`."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from spottrain_cli.commands.options import Context, Job, Kubeconfig, Namespace, access
from spottrain_cli.output import Format, FormatOption

if TYPE_CHECKING:
    from spottrain_cli.logs import Line


def logs(
    job: Job,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Go on until the job has ended, over interruptions.")
    ] = False,
    attempt: Annotated[int | None, typer.Option(min=1, metavar="N", help="Default: all.")] = None,
    rank: Annotated[int | None, typer.Option(min=0, metavar="R", help="Default: all.")] = None,
    endpoint: Annotated[
        str, typer.Option(metavar="URL", help="Of an S3-compatible server. Default: the job's.")
    ] = "",
    namespace: Namespace = "",
    context: Context = "",
    kubeconfig: Kubeconfig = "",
    output: FormatOption = Format.TEXT,
) -> None:
    """Print what all attempts and ranks of a job printed, in order, also of pods that are gone.

    Those are read from the store, beside the checkpoints, with your own credentials.

    \b
      spottrain logs bert
      spottrain logs -f vision/bert
      spottrain logs bert --attempt 2 --rank 0 | grep loss
    """
    from spottrain_cli import logs as reading
    from spottrain_cli.log_sources import Wanted

    def say(sentence: str) -> None:
        print(f"spottrain: {sentence}", file=sys.stderr, flush=True)

    where, last = access(namespace, context, kubeconfig), None
    wanted = Wanted(attempt=attempt, rank=rank)
    for line in reading.read(where, job, wanted, following=follow, endpoint=endpoint, say=say):
        if last not in (None, line.attempt):
            print(f"==> attempt {line.attempt} <==", file=sys.stderr, flush=True)
        last = line.attempt
        sys.stdout.buffer.write(_shown(line, output))
        if follow:
            sys.stdout.buffer.flush()


def _shown(line: Line, form: Format) -> bytes:
    """Returns the line as it was printed, or an object in a line, as an item of a list in YAML."""
    if form is Format.TEXT:
        return (f"{line.source}: ".encode() if line.source else b"") + line.body
    text = line.body.decode(errors="replace").rstrip("\r\n")
    found = json.dumps({"attempt": line.attempt, "source": line.source, "line": text})
    return f"{'- ' if form is Format.YAML else ''}{found}\n".encode()

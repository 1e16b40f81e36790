"""`spottrain rehearse`: does the script survive, before money is spent?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spottrain_cli.output import Format, FormatOption, console, print_facts

if TYPE_CHECKING:
    from spottrain_cli.rehearsal.verdict import Verdict

EXAMPLES = """Examples:

  spottrain rehearse job.yaml

  spottrain rehearse job.yaml --reclaims 5 --seed 7

  spottrain rehearse job.yaml --python .venv/bin/python   (for an image of your own)

Exit codes: 0 survived, with no other results than without reclaims; 1 not, and it says why; 2 the manifest
cannot be used; 4 no local cluster is up.
"""


def rehearse(
    manifest: Annotated[
        Path, typer.Argument(help="A TrainingJob, with its script beside it or in our image.")
    ],
    reclaims: Annotated[int, typer.Option(min=1, max=20, help="How many nodes are taken away.")] = 2,
    seed: Annotated[
        int | None, typer.Option(help="Seed of their moments; default: another one each time.")
    ] = None,
    max_steps: Annotated[
        int | None,
        typer.Option(
            min=2, help="Steps of the training; default: enough for the reclaims, at most the job's."
        ),
    ] = None,
    python: Annotated[str, typer.Option(help="A Python with what the job's image has.", metavar="PATH")] = "",
    timeout: Annotated[float, typer.Option(min=10, help="Longest seconds of each run of the job.")] = 1800,
    output: FormatOption = Format.TEXT,
) -> None:
    """Run a job on this machine while its nodes are reclaimed: does it survive, and with equal results?

    It runs on the local cluster of `make cluster-up`, undisturbed, then with reclaims at random moments.
    """
    import random
    import signal
    import sys

    from spottrain_cli.rehearsal.story import Options, rehearse

    options = Options(
        manifest=manifest,
        reclaims=reclaims,
        seed=random.randrange(1_000_000) if seed is None else seed,
        max_steps=max_steps,
        python=python,
        seconds=timeout,
    )
    text = output is Format.TEXT
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what it has made is deleted at either signal
    verdict = rehearse(options, lambda line: print(line, file=None if text else sys.stderr, flush=True))
    if text:
        _show(verdict)
    else:
        print_facts(verdict.facts() | {"seed": options.seed}, output)
    raise typer.Exit(0 if verdict.survived else 1)


def _show(verdict: Verdict) -> None:
    from rich.table import Table

    screen = console()
    if verdict.losses:
        table = Table("reclaim", "node", "at step", "lost", "saved in", "trains again in", box=None)
        for number, loss in enumerate(verdict.losses, 1):
            row = (loss.reclaim.node, loss.reclaim.step, loss.lost_steps, loss.saved, loss.resumed)
            table.add_row(str(number), *("-" if each in (None, "") else str(each) for each in row))
        screen.print()
        screen.print(table)
    screen.print(f"\n{verdict.sentence[0].upper()}{verdict.sentence[1:].removesuffix('.')}.")

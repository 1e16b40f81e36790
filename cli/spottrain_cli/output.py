"""What a verb prints: for a person by rich, for a program as JSON or YAML."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from spottrain_cli.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

STYLES: Final = {
    "green": "Succeeded|Running",
    "red": "Failed|Invalid",
    "yellow": "Pending|Starting|Waiting|Stopping|Suspended",
}
"""Colours of status.phase, as a regular expression."""


class Format(StrEnum):
    TEXT = "text"
    JSON = "json"
    YAML = "yaml"


FormatOption = Annotated[Format, typer.Option("-o", "--output", help="Format of the output.")]
"""A parameter `output: FormatOption = Format.TEXT` of each verb that shows something."""


def console(*, stderr: bool = False) -> Console:
    """No colour and no boxes where nobody looks; rich itself honours NO_COLOR, TERM and COLUMNS."""
    from rich.console import Console

    return Console(
        stderr=stderr, highlight=False, soft_wrap=not (sys.stderr if stderr else sys.stdout).isatty()
    )


def print_facts(facts: Any, form: Format) -> None:
    """Prints `facts`, which JSON can hold, as JSON or YAML."""
    if form is Format.YAML:
        import yaml

        print(yaml.safe_dump(facts, sort_keys=False, allow_unicode=True), end="")
    else:
        print(json.dumps(facts, indent=1))


def width() -> int:
    """Returns the columns of the terminal; 0 where the output is no terminal, and lines have no limit."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 0


def show(lines: Iterable[str], facts: Any, form: Format) -> None:
    """Prints lines for a person, with the phases of jobs in colour, or `facts` for a program."""
    if form is not Format.TEXT:
        print_facts(facts, form)
        return
    if not sys.stdout.isatty():
        print("\n".join(lines))
        return
    from rich.text import Text

    out = console()
    for line in lines:
        out.print(coloured(Text(line)), soft_wrap=True)


def coloured(line: Text) -> Text:
    for style, phases in STYLES.items():
        line.highlight_regex(rf"\b({phases})\b", style)
    return line


def confirm(question: str, *, sure: bool) -> None:
    """Asks for confirmation on standard error, unless `sure`. Raises UsageError without a yes."""
    if sure:
        return
    if not sys.stdin.isatty():
        raise UsageError("nothing was changed, because nobody could be asked; --yes confirms it in advance")
    if not typer.confirm(question, err=True):
        raise typer.Abort

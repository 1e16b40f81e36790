"""What a verb prints: for a person by rich, for a program as JSON or YAML."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console


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

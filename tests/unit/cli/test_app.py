"""The program as a whole: its verbs, their help, and the page about them."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from spottrain_cli import errors
from spottrain_cli.app import EPILOG, VERBS, app, main

RUNTIME = {name for name, (place, _) in VERBS.items() if place.startswith("forwarded")}
PAGE = Path(__file__).resolve().parents[3] / "docs" / "cli.md"


def leaves(command: Any, *above: str) -> Iterator[tuple[str, Any]]:
    """Each verb with its full name, such as `checkpoints list`."""
    for name, each in getattr(command, "commands", {}).items():
        if hasattr(each, "commands"):
            yield from leaves(each, *above, name)
        else:
            yield " ".join([*above, name]), each


ALL = dict(leaves(typer.main.get_command(app)))


@pytest.mark.parametrize("name", sorted(ALL.keys() - RUNTIME))
def test_the_help_of_a_verb_has_an_example(name: str) -> None:
    shown = f"{ALL[name].help}\n{ALL[name].epilog}"
    examples = [line.strip() for line in shown.splitlines() if line.startswith("  ")]
    assert any(f"spottrain {name}" in each for each in examples), examples


def test_options_of_one_name_mean_the_same_everywhere() -> None:
    short: dict[str, set[str]] = {}
    for command in ALL.values():
        for option in command.params:
            for given in option.opts:
                if re.fullmatch("-[a-zA-Z]", given):
                    short.setdefault(given, set()).add(option.opts[-1])
    assert {name: each for name, each in short.items() if len(each) > 1} == {}


def test_the_page_has_every_verb_and_no_other() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    named = {verb for row in rows for verb in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert named == {name.split()[0] for name in ALL}


def test_exit_codes_are_those_of_the_errors() -> None:
    codes = set(re.findall(r"^(\d+) ", errors.__doc__ or "", re.MULTILINE))
    said = re.findall(r"(?:[:,]\s+)(\d+) (?=done|the answer|wrong|not\s|cluster|Ctrl)", EPILOG)
    assert set(said) | {str(errors.INTERRUPTED)} == codes


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["stauts", "bert"], "Did you mean 'status'? See spottrain --help"),
        (["list", "--namespac", "x"], "--namespace"),
        (["status"], "Missing argument 'JOB'; see spottrain status --help"),
    ],
)
def test_a_slip_is_one_sentence_that_names_what_was_meant(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    said = capsys.readouterr()
    assert says in said.err and said.err.count("\n") == 1 and not said.out


def test_a_verb_imports_no_other_verb_and_no_torch() -> None:
    code = (
        "import sys\nfrom spottrain_cli.app import main\nmain(['list', '--help'])\n"
        "heavy = {'torch', 'boto3', 'rich', 'yaml', 'spottrain.cli.main', 'spottrain_cli.commands.plan'}\n"
        "sys.exit(str(sorted(heavy & sys.modules.keys()) or 0))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr.strip() == "0", done.stderr

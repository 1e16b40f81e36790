"""examples/README.md says of each kind what its script and manifest say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.examples import EXAMPLES, KINDS, ROOT, Kind

README = (EXAMPLES / "README.md").read_text()


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_the_row_of_a_kind_has_its_number_of_changed_lines(kind: Kind) -> None:
    row = next(line for line in README.splitlines() if f"({kind.name}.yaml)" in line)
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[0].startswith(f"[{kind.script.name}]")
    assert re.search(r"\d+", cells[2]) and int(re.findall(r"\d+", cells[2])[0]) == kind.lines
    assert cells[3].startswith("yes") == kind.exact
    assert not kind.page or f"({Path(kind.page).name}#" in cells[2]


def test_every_example_has_a_row() -> None:
    here = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".yaml")}
    assert here <= set(re.findall(r"\]\(([\w.-]+)\)", README))


@pytest.mark.parametrize("kind", [k for k in KINDS.values() if k.page], ids=lambda kind: kind.name)
def test_without_the_lines_of_the_diff_nothing_is_left_of_spottrain(kind: Kind) -> None:
    assert kind.script.read_text() != kind.plain() and "spottrain" not in kind.plain()
    assert (ROOT / kind.page).is_file()

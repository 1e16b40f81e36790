"""examples/README.md says of each kind what its script and manifest say."""

from __future__ import annotations

import re

import pytest

from tests.support.examples import EXAMPLES, KINDS, ROOT, Kind, changed_lines, undone

README = (EXAMPLES / "README.md").read_text()
DIFF = """\
--- before
+++ examples/one.py
@@
 a
-b = 1
+b = 2

+c
@@
-d
 e
"""


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_the_row_of_a_kind_has_its_number_of_changed_lines(kind: Kind) -> None:
    row = next(line for line in README.splitlines() if f"({kind.name}.yaml)" in line)
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert re.fullmatch(rf"\[{re.escape(kind.script.name)}\]\({re.escape(kind.script.name)}\) \*", cells[0])
    assert re.search(r"\d+", cells[2]) and int(re.findall(r"\d+", cells[2])[0]) == kind.lines
    assert cells[3].startswith("yes") == kind.exact
    assert not kind.page or kind.page.removeprefix("docs/") in cells[2]


def test_every_example_has_a_row() -> None:
    here = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".yaml")}
    assert here <= set(re.findall(r"\]\(([\w.-]+)\)", README))


@pytest.mark.parametrize("kind", [k for k in KINDS.values() if k.page], ids=lambda kind: kind.name)
def test_without_the_lines_of_the_diff_nothing_is_left_of_spottrain(kind: Kind) -> None:
    assert kind.script.read_text() != kind.plain() and "spottrain" not in kind.plain()
    assert (ROOT / kind.page).is_file()


def test_a_diff_is_undone_and_its_lines_are_counted() -> None:
    assert undone("a\nb = 2\n\nc\ne\n", DIFF) == "a\nb = 1\n\nd\ne\n"
    assert changed_lines(DIFF) == 3
    with pytest.raises(AssertionError, match="0 places"):
        undone("a\nb = 3\n\nc\ne\n", DIFF)

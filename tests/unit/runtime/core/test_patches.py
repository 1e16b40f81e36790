"""Attributes of other code are replaced in one place, and can be put back."""

from __future__ import annotations

import re
from pathlib import Path

import spottrain
from spottrain.core import patches


class Base:
    def of_base(self) -> str:
        return "usual"


class Foreign(Base):
    def own(self) -> str:
        return "usual"


def ours(_: Foreign) -> str:
    return "ours"


def test_what_was_replaced_is_put_back_and_an_inherited_attribute_is_inherited_again() -> None:
    undo = [patches.replace(Foreign, name, ours) for name in ("own", "of_base")]
    assert (Foreign().own(), Foreign().of_base()) == ("ours", "ours")
    for each in undo:
        each()
    assert Foreign().own() == "usual" and "of_base" not in vars(Foreign)


def test_what_other_code_has_replaced_since_stays() -> None:
    it = Foreign()
    undo = patches.replace(it, "own", lambda: "ours")
    vars(it)["own"] = lambda: "theirs"
    undo()
    assert it.own() == "theirs"


def test_nothing_of_other_code_is_replaced_elsewhere() -> None:
    """mypy lets nobody assign to a method without this comment; the rest are names that it lets pass."""
    assigns = re.compile(r"type: ignore\[.*method-assign|\bsys\.excepthook = |\bsetattr\(kind, ")
    root = Path(spottrain.__file__).parent
    found = [path.name for path in root.rglob("*.py") if assigns.search(path.read_text())]
    assert found == []

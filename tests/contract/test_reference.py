"""The generated pages of docs/reference are what the program has now."""

from __future__ import annotations

import reference
from spottrain_operator import names


def test_the_generated_pages_are_up_to_date() -> None:
    old = [n for n, text in reference.pages().items() if (reference.FOLDER / n).read_text() != text]
    assert not old, f"run {reference.COMMAND}, and read the diff of docs/reference"


def test_each_reason_says_where_it_stands_and_what_it_says() -> None:
    places = {*names.Condition, "Event"}
    texts = reference.described(names, "Reason")
    assert texts.keys() == names.Reason.__members__.keys()
    for name, text in texts.items():
        where, _, words = text.partition(": ")
        assert words and set(where.split(", ")) <= places, name

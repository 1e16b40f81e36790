"""What a rank has printed is cut into parts, and nothing that can be stored is lost or stored twice."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from spottrain.contract import log_key, part_of_log
from spottrain.lifecycle.log_capture.uploader import Limits, RankLog


def book(printed: bytes = b"", **limits: Any) -> RankLog:
    it = RankLog(3, Limits(**limits))
    it.add(printed, 0.0)
    return it


def bodies(it: RankLog, now: float, *, last: bool = False) -> list[bytes]:
    """Of all that is due, each stored at once."""
    found = []
    while body := it.due(now, last=last):
        it.stored()
        found.append(body)
    return found


def test_a_part_is_closed_a_while_after_its_first_byte_and_not_without_one() -> None:
    it = book(every=30.0)
    assert bodies(it, 100.0) == []
    it.add(b"a\n", 100.0)
    it.add(b"b\n", 129.0)
    assert bodies(it, 129.9) == []
    assert bodies(it, 130.0) == [b"a\nb\n"]
    assert bodies(it, 1000.0) == [], "nothing new, no object"
    it.add(b"c\n", 1000.0)
    assert bodies(it, 1000.0, last=True) == [b"c\n"], "at the end, however young"


def test_a_part_that_is_full_is_closed_at_the_end_of_a_line() -> None:
    it = book(b"1234\n5678\n9", part=10)
    assert bodies(it, 0.0) == [b"1234\n5678\n"] and it.number == 1
    it.add(b"x" * 25, 0.0)
    assert bodies(it, 0.0) == [b"9" + b"x" * 9, b"x" * 10], "or where there is no end, anywhere"
    assert it.number == 3


def test_while_a_part_is_being_stored_the_newest_ones_wait_and_the_others_are_dropped() -> None:
    it = book(b"1234567\n", part=8, waiting=25)
    it.due(0.0)
    for number in range(6):
        it.add(f"of {number:>4}\n".encode(), 1.0)
    it.stored()
    first, *others = bodies(it, 1.0)
    assert b"event=logs-missing bytes=24" in first and first.endswith(b"\nof    3\n"), "whole lines"
    assert others == [b"of    4\n", b"of    5\n"]


def test_a_part_that_failed_is_tried_again_unchanged_when_the_next_would_come() -> None:
    it = book(b"a\n", every=30.0)
    assert it.due(30.0) == b"a\n"
    it.failed(31.0)
    it.add(b"b\n", 32.0)
    assert it.due(60.9) == b"" and it.unstored == 4
    assert (it.due(61.0), it.number) == (b"a\n", 1)
    it.stored()
    assert bodies(it, 62.0) == [b"b\n"] and it.unstored == 0


def test_no_more_than_so_much_is_kept_and_the_log_says_that_once() -> None:
    it = book(most=6)
    assert it.add(b"abc\n", 0.0) == ""
    line = it.add(b"defg\n", 0.0)
    assert "event=logs-full of=3 bytes=6" in line and it.add(b"more\n", 0.0) == ""
    assert bodies(it, 0.0, last=True) == [b"abc\nde\n" + line.encode()]


@settings(max_examples=50)
@given(
    st.lists(
        st.tuples(st.binary(max_size=9), st.sampled_from(["store", "fail", "wait"]), st.integers(0, 40)),
        max_size=20,
    )
)
def test_whatever_happens_the_parts_in_order_are_what_was_printed(
    moves: list[tuple[bytes, str, int]],
) -> None:
    it, now, stored, printed = book(part=8), 0.0, dict[int, bytes](), b""
    for data, act, seconds in moves:
        it.add(data, now)
        printed += data
        now += seconds
        if act != "wait" and (body := it.due(now)):
            # Of a try that failed it may have arrived all the same.
            assert stored.setdefault(it.number, body) == body, "a part that was tried never changes"
            if act == "fail":
                it.failed(now)
            else:
                it.stored()
    while body := it.due(now, last=True):
        assert stored.setdefault(it.number, body) == body
        it.stored()
    assert b"".join(stored[number] for number in sorted(stored)) == printed
    assert sorted(stored) == list(range(1, len(stored) + 1))


@pytest.mark.parametrize(
    ("key", "is_of"),
    [
        ("logs/attempt-000012/rank-00034/000056.log", (12, 34, 56)),
        ("logs/attempt-000001/notes.txt", None),
        ("checkpoints/" + log_key(1, 1, 1), None),
    ],
)
def test_a_key_of_a_part_is_read_as_it_is_written(key: str, is_of: tuple[int, int, int] | None) -> None:
    assert part_of_log(key) == is_of
    assert is_of is None or log_key(*is_of) == key

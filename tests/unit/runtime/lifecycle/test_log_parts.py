"""What a rank has printed is cut into parts, and nothing that can be stored is lost or stored twice."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from spottrain.contract import log_key, part_of_log
from spottrain.lifecycle.log_capture.parts import Limits, LogPart, RankLog


def book(**limits: Any) -> RankLog:
    return RankLog(lambda n: f"<{n} missing>\n", lambda n: f"<{n} kept>\n", Limits(**limits))


def bodies(it: RankLog, now: float) -> list[bytes]:
    """Of all that is due, each stored at once."""
    found = []
    it.turn(now)
    while (part := it.take(now)) is not None:
        it.stored(part)
        found.append(part.body)
    return found


def test_a_part_is_closed_a_while_after_its_first_byte_and_not_without_one() -> None:
    it = book(every=30.0)
    assert bodies(it, 100.0) == []
    it.add(b"a\n", 100.0)
    it.add(b"b\n", 129.0)
    assert bodies(it, 129.9) == []
    assert bodies(it, 130.0) == [b"a\nb\n"]
    assert bodies(it, 1000.0) == [], "nothing new, no object"


def test_a_part_that_is_full_is_closed_at_the_end_of_a_line() -> None:
    it = book(part=10)
    it.add(b"1234\n5678\n9", 0.0)
    assert bodies(it, 0.0) == [b"1234\n5678\n"]
    it.add(b"x" * 25, 0.0)
    assert bodies(it, 0.0) == [b"9" + b"x" * 9, b"x" * 10], "or where there is no end, anywhere"


def test_in_a_hurry_a_part_is_closed_however_young() -> None:
    it = book()
    it.add(b"a\n", 0.0)
    it.turn(0.0, hurry=True)
    part = it.take(0.0)
    assert part is not None and part.body == b"a\n"


def test_one_part_is_on_its_way_at_a_time_and_numbers_have_no_gap() -> None:
    it = book(part=2)
    it.add(b"a\nb\n", 0.0)
    it.turn(0.0)
    first = it.take(0.0)
    assert first == LogPart(number=1, body=b"a\n") and it.take(0.0) is None
    it.stored(first)
    assert it.take(0.0) == LogPart(number=2, body=b"b\n")


def test_a_part_that_failed_is_tried_again_unchanged_when_the_next_would_come() -> None:
    it = book(every=30.0)
    it.add(b"a\n", 0.0)
    it.turn(30.0)
    part = it.take(30.0)
    it.failed(31.0)
    it.add(b"b\n", 32.0)
    it.turn(60.9)
    assert it.take(60.9) is None
    again = it.take(61.0)
    assert part is not None and again == LogPart(number=part.number, body=part.body, tries=1)
    it.stored(again)
    assert bodies(it, 62.0) == [b"b\n"]


def test_while_the_store_takes_nothing_the_oldest_go_and_a_line_says_so() -> None:
    it = book(part=2, waiting=2)
    it.add(b"a\n", 0.0)
    it.turn(0.0)
    first = it.take(0.0)
    assert first is not None
    for letter in b"bcdef":
        it.add(bytes([letter]) + b"\n", 0.0)
        it.turn(0.0)
    it.stored(first)
    assert bodies(it, 0.0) == [b"<6 missing>\ne\n", b"f\n"]


def test_a_name_that_is_taken_is_left_to_whoever_has_it() -> None:
    it = book(part=2)
    it.add(b"a\nb\n", 0.0)
    it.turn(0.0)
    part = it.take(0.0)
    assert part is not None
    moved = it.taken(part, newest=7)
    assert moved == LogPart(number=8, body=b"a\n")
    it.failed(0.0)
    again = it.take(1000.0)
    assert again is not None and (again.number, again.tries) == (8, 1), "its own name from then on"
    it.stored(again)
    following = it.take(1000.0)
    assert following is not None and following.number == 9


def test_no_more_than_so_much_is_kept_and_the_log_says_that_once() -> None:
    it = book(most=6)
    assert it.add(b"abc\n", 0.0) == ""
    assert it.add(b"defg\n", 0.0) == "<6 kept>\n"
    assert it.add(b"more\n", 0.0) == ""
    assert [part.body for part in it.rest()] == [b"abc\nde\n<6 kept>\n"]
    assert it.rest() == []


def test_at_the_end_what_had_failed_and_all_the_rest_are_left_but_not_what_is_on_its_way() -> None:
    it = book(part=2)
    it.add(b"a\nb\nc\nd", 0.0)
    it.turn(0.0)
    assert it.take(0.0) == LogPart(number=1, body=b"a\n")
    assert it.rest() == [LogPart(number=2, body=b"b\nc\nd")]
    it.failed(0.0)
    it.add(b"e\n", 0.0)
    assert it.rest() == [LogPart(number=1, body=b"a\n", tries=1), LogPart(number=3, body=b"e\n")]


@given(
    st.lists(
        st.tuples(st.binary(max_size=9), st.sampled_from(["store", "fail", "wait"]), st.integers(0, 40)),
        max_size=40,
    )
)
def test_whatever_happens_the_parts_in_order_are_what_was_printed(
    moves: list[tuple[bytes, str, int]],
) -> None:
    it, now, stored, printed = book(part=8, waiting=1000), 0.0, dict[int, bytes](), b""
    for data, act, seconds in moves:
        it.add(data, now)
        printed += data
        now += seconds
        it.turn(now)
        part = it.take(now) if act != "wait" else None
        if part is not None and act == "fail":
            stored.setdefault(part.number, part.body)  # it may have arrived all the same
            it.failed(now)
        elif part is not None:
            assert stored.get(part.number, part.body) == part.body, "a part that was tried never changes"
            stored[part.number] = part.body
            it.stored(part)
    for part in it.rest():
        assert stored.get(part.number, part.body) == part.body
        stored[part.number] = part.body
    assert b"".join(stored[number] for number in sorted(stored)) == printed
    assert sorted(stored) == list(range(1, len(stored) + 1))


def test_a_key_of_a_part_is_read_as_it_is_written_and_in_order() -> None:
    assert log_key(2, 0, 1) == "logs/attempt-000002/rank-00000/000001.log"
    assert part_of_log(log_key(12, 34, 56)) == (12, 34, 56)
    assert part_of_log("logs/attempt-000001/notes.txt") is None
    assert part_of_log("checkpoints/" + log_key(1, 1, 1)) is None

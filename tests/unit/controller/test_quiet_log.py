"""Which of repeated log lines are written."""

from __future__ import annotations

from spottrain_operator.io.logs import QuietLog


def test_a_line_is_repeated_after_a_minute_or_with_other_words_or_when_it_was_over_meanwhile() -> None:
    now = 100.0
    quiet = QuietLog(lambda: now)
    assert quiet.due("a", "no") and quiet.due("b", "no"), "each subject counts by itself"
    now += 59
    assert not quiet.due("a", "no")
    assert quiet.due("a", "never")
    now += 59
    assert not quiet.due("a", "never"), "the minute counts from the line that was written last"
    assert quiet.due("b", "no")
    quiet.reset("a")
    assert quiet.due("a", "never")

"""The judge: nothing to say where all went well, and a sentence for each fault that is put in."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.chaosop.audit import Entry, Mark
from tests.chaosop.judge import Verdict, judge
from tests.chaosop.play import Seen
from tests.chaosop.scene import Blow, Policy
from tests.chaosop.truth import Deed

POLICY = Policy(failures=3, interruptions=100)
OVER = "2026-11-21T12:10:00.000000Z"


def status(**changes: Any) -> dict[str, Any]:
    """Of a job that a notice and a crash have hit, and that got done."""
    records = [
        {"number": 1, "cause": "SpotNotice"},
        {"number": 2, "cause": "Failed", "charged": True},
        {"number": 3, "cause": "Done"},
    ]
    ends = [{"type": "Succeeded", "status": "True"}, {"type": "Running", "status": "False"}]
    counters = {"attempt": 3, "failures": 1, "interruptions": 1}
    return {"phase": "Succeeded", "conditions": ends, "attempts": records} | counters | changes


def at(minute: int) -> str:
    return f"2026-11-21T12:{minute:02d}:00.000000Z"


SEEN = Seen(
    deeds=(
        Deed(attempt=1, blow=Blow.NOTICE),
        Deed(attempt=2, blow=Blow.CRASHED),
        Deed(attempt=3, blow=Blow.DONE),
    ),
    status=status(),
    later=status(),
    over_at=OVER,
)
LOG = [
    entry
    for n in (1, 2, 3)
    for entry in (
        Entry(at=at(3 * n - 3), namespace="chaos-1", pod=f"job-{n}-0"),
        Entry(at=at(3 * n - 2), namespace="chaos-1", mark=Mark.CLAIM, attempt=n),
        Entry(at=at(3 * n - 1), namespace="chaos-1", mark=Mark.RELEASE, attempt=n),
    )
]


def verdict(seen: Seen = SEEN, log: list[Entry] = LOG) -> Verdict:
    return judge(seen, log, POLICY)


def test_of_a_job_that_was_treated_well_there_is_nothing_to_say() -> None:
    assert verdict() == Verdict()


def test_a_pod_that_was_made_twice_is_a_duplicate() -> None:
    again = Entry(at=at(2), namespace="chaos-1", pod="job-1-0")
    assert verdict(log=[*LOG, again]).duplicates == ("pod job-1-0 was made more than once",)


def test_two_attempts_at_once_are_a_duplicate() -> None:
    log = [e for e in LOG if not (e.mark is Mark.RELEASE and e.attempt == 2)]
    assert verdict(log=log).duplicates == ("attempt 3 claimed before 2 had let go",)


def test_what_did_not_come_is_said() -> None:
    assert verdict(replace(SEEN, stuck=("nothing has happened",))).stuck == ("nothing has happened",)


def test_one_failure_too_many_or_too_few_is_a_miscount() -> None:
    for wrong in (0, 2):
        found = verdict(replace(SEEN, status=status(failures=wrong), later=status(failures=wrong)))
        assert found.miscounted == (f"{wrong} failures, and there were 1",)


def test_one_interruption_too_many_or_too_few_is_a_miscount() -> None:
    for wrong in (0, 2):
        found = verdict(replace(SEEN, status=status(interruptions=wrong), later=status(interruptions=wrong)))
        assert found.miscounted == (f"{wrong} interruptions, and there were 1",)


def test_a_phase_that_the_deeds_do_not_lead_to_is_a_miscount() -> None:
    failed = status(phase="Failed", conditions=[{"type": "Failed", "status": "True"}])
    found = verdict(replace(SEEN, status=failed, later=failed))
    assert found.miscounted == ("phase Failed, and it is to be Succeeded",)
    early = verdict(replace(SEEN, deeds=SEEN.deeds[:2]))
    assert early.miscounted == ("phase Succeeded, and it is to be not over",)


def test_right_sums_of_wrongly_charged_attempts_are_a_miscount() -> None:
    records = [
        {"number": 1, "cause": "Failed", "charged": True},
        {"number": 2, "cause": "SpotNotice"},
        {"number": 3, "cause": "Done"},
    ]
    found = verdict(replace(SEEN, status=status(attempts=records)))
    assert found.miscounted == ("attempt 1 (Failed) is charged", "attempt 2 (SpotNotice) is not charged")


def test_a_job_that_goes_on_after_its_end_has_risen_again() -> None:
    for later in (status(attempt=4), status(phase="Running"), status(conditions=[]), status(failures=2)):
        (words,) = verdict(replace(SEEN, later=later)).resurrected
        assert words.startswith("after the end it went on: Succeeded, attempt 3")


def test_a_pod_that_is_made_after_the_end_is_a_resurrection() -> None:
    late = Entry(at=at(11), namespace="chaos-1", pod="job-4-0")
    assert verdict(log=[*LOG, late]).resurrected == ("pod job-4-0 was made after the end",)

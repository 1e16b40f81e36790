"""What the agent decides: tables of metadata answers and of what node and pods carry."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone

import pytest
from spottrain_operator import names
from spottrain_operator.agent import plan
from spottrain_operator.agent.findings import (
    NOTHING,
    Finding,
    Findings,
    found,
    rfc3339,
)
from spottrain_operator.agent.plan import Advised, Json, Marks, NodeNotice, View

from tests.unit.agent.fakes import DEADLINE, DEADLINE_TEXT, FOREIGN_TAINT, SECOND, SEEN, TAINT

SPOT = "AWS spot/instance-action"
WATCH = "watch"
TERMINATE = Finding(source=SPOT, action="terminate", at=DEADLINE)
HIBERNATE = Finding(source=SPOT, action="hibernate", id="2026-11-21T10:02:00Z")
PREEMPTED = Finding(source="GCP instance/preempted", action="preempted", after=25.0)
REBOOT = Finding(source="Azure scheduled event Reboot", action="Reboot", id="e1", at=DEADLINE, lead=120.0)
REBALANCE = Finding(ends=False, source="AWS rebalance", action="rebalance", at=SEEN - 60 * SECOND)
MIGRATE = Finding(ends=False, source="GCP maintenance", action="MIGRATE")
NOTICE = NodeNotice(cause=TERMINATE, deadline=DEADLINE, seen=SEEN)
MARKS = {
    names.DEADLINE_ANNOTATION: DEADLINE_TEXT,
    names.SOURCE_ANNOTATION: SPOT,
    names.NOTICE_SEEN_ANNOTATION: "2026-11-21T10:00:00.250000Z",
}
ADVISED = names.SAVE_ADVISED_ANNOTATION
TOLD = Marks(notice=NOTICE)


def after(*answers: Findings, now: datetime = SEEN) -> View:
    """The view after these answers to one question, one second apart, the last of them now."""
    view = View()
    for age, answer in reversed(list(enumerate(reversed(answers)))):
        view = plan.advance(view, WATCH, answer, now - age * SECOND)
    return view


# --- answers -------------------------------------------------------------------------------------------
def seen(cause: Finding, seconds: float = 120, ago: float = 0) -> NodeNotice:
    """A notice first read so many seconds ago, whose deadline came so many seconds after that."""
    first = SEEN - ago * SECOND
    return NodeNotice(cause=cause, deadline=first + seconds * SECOND, seen=first)


ANSWERS: dict[str, tuple[list[Findings], NodeNotice | None]] = {
    "nothing": ([NOTHING], None),
    "terminate: the announced time is the deadline": ([NOTHING, found(TERMINATE)], NOTICE),
    "hibernate: at once": ([found(HIBERNATE)], seen(HIBERNATE, 0)),
    "no time: seconds from the first reading": ([found(PREEMPTED)], seen(PREEMPTED, 25)),
    "nothing is the end of a notice": ([found(TERMINATE), NOTHING], None),
    "read again: it keeps its deadline and its time": ([found(PREEMPTED)] * 3, seen(PREEMPTED, 25, ago=2)),
    "gone and back: a new one": ([found(PREEMPTED), NOTHING, found(PREEMPTED)], seen(PREEMPTED, 25)),
    "the earliest of two": ([found(PREEMPTED), found(PREEMPTED, TERMINATE)], seen(PREEMPTED, 25, ago=1)),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_make_a_notice(name: str) -> None:
    answers, notice = ANSWERS[name]
    assert plan.marks(after(*answers), SEEN).notice == notice


def test_a_notice_whose_time_changes_is_a_new_one() -> None:
    earlier = Finding(source=SPOT, action="terminate", at=DEADLINE - 30 * SECOND)
    notice = plan.marks(after(found(TERMINATE), found(earlier)), SEEN).notice
    assert notice == NodeNotice(cause=earlier, deadline=DEADLINE - 30 * SECOND, seen=SEEN)


def test_one_question_says_nothing_about_anothers_answer() -> None:
    view = plan.advance(after(found(TERMINATE)), "other", NOTHING, SEEN + SECOND)
    assert plan.marks(view, SEEN + SECOND).notice == NOTICE
    assert set(view.heard) == {WATCH, "other"}


@pytest.mark.parametrize("overdue", [timedelta(0), timedelta(seconds=1), timedelta(days=3000)], ids=str)
def test_an_end_that_is_overdue_leaves_the_seconds_of_one_that_has_begun(overdue: timedelta) -> None:
    late = Finding(source=SPOT, action="terminate", at=SEEN - overdue)
    view = after(found(late))
    expected = NodeNotice(cause=late, deadline=SEEN + 10 * SECOND, seen=SEEN)
    assert plan.marks(view, SEEN).notice == expected
    assert plan.marks(view, SEEN + 60 * SECOND).notice == expected


def test_an_end_that_is_seconds_away_is_not_put_off() -> None:
    soon = Finding(source=SPOT, action="terminate", at=SEEN + SECOND)
    notice = plan.marks(after(found(soon)), SEEN).notice
    assert notice is not None and notice.deadline == SEEN + SECOND


def test_a_maintenance_is_a_notice_only_when_it_is_near() -> None:
    view = plan.advance(View(), WATCH, found(REBOOT), DEADLINE - timedelta(days=14))
    for before in (timedelta(days=14), 121 * SECOND):
        assert plan.marks(view, DEADLINE - before).notice is None
    near = NodeNotice(cause=REBOOT, deadline=DEADLINE, seen=DEADLINE - 120 * SECOND)
    for before in (120 * SECOND, -SECOND):  # the second: it is over and still there
        assert plan.marks(view, DEADLINE - before).notice == near


def test_a_maintenance_that_is_first_read_when_it_is_near_was_seen_then() -> None:
    near = DEADLINE - 50 * SECOND
    notice = plan.marks(plan.advance(View(), WATCH, found(REBOOT), near), near).notice
    assert notice == NodeNotice(cause=REBOOT, deadline=DEADLINE, seen=near)


@pytest.mark.parametrize(
    ("begun_at", "deadline"),
    [
        pytest.param(DEADLINE + SECOND, DEADLINE, id="in its time: it keeps the deadline"),
        pytest.param(DEADLINE - 5 * SECOND, DEADLINE, id="a little early"),
        pytest.param(
            DEADLINE - 600 * SECOND,
            DEADLINE - 590 * SECOND,
            id="early, for somebody has acknowledged it: seconds",
        ),
    ],
)
def test_an_event_that_begins_and_says_no_time_any_more(begun_at: datetime, deadline: datetime) -> None:
    begun = Finding(source=REBOOT.source, action="Reboot", id="e1", after=10.0)
    view = plan.advance(View(), WATCH, found(REBOOT), DEADLINE - 900 * SECOND)
    view = plan.advance(view, WATCH, found(begun), begun_at)
    notice = plan.marks(view, begun_at).notice
    assert notice is not None and notice.deadline == deadline


def test_an_event_that_begins_is_no_other_event() -> None:
    other = Finding(source=REBOOT.source, action="Reboot", id="e2", after=10.0)
    view = plan.advance(after(found(REBOOT), now=DEADLINE), WATCH, found(other), DEADLINE)
    notice = plan.marks(view, DEADLINE).notice
    assert notice is not None and notice.cause == other


# --- advice --------------------------------------------------------------------------------------------
FUTURE = Finding(ends=False, source="s", action="a", at=SEEN + timedelta(days=9))
ADVICE: dict[str, tuple[list[Finding], Advised | None]] = {
    "none": ([], None),
    "its own time": ([REBALANCE], Advised(cause=REBALANCE, at=SEEN - 60 * SECOND)),
    "no time: that of the first reading": ([MIGRATE], Advised(cause=MIGRATE, at=SEEN)),
    "the newest": ([REBALANCE, MIGRATE], Advised(cause=MIGRATE, at=SEEN)),
    "a notice is none": ([TERMINATE], None),
    "a time that lies ahead: that of the first reading": ([FUTURE], Advised(cause=FUTURE, at=SEEN)),
    "an hour old: none": ([replace(FUTURE, at=SEEN - timedelta(hours=1))], None),
}


@pytest.mark.parametrize("name", ADVICE)
def test_advice_has_a_time(name: str) -> None:
    findings, advised = ADVICE[name]
    assert plan.marks(after(found(*findings)), SEEN).advised == advised


def test_a_maintenance_far_away_is_advice_once() -> None:
    first = DEADLINE - timedelta(days=7)
    view = plan.advance(View(), WATCH, found(REBOOT), first)
    view = plan.advance(view, WATCH, found(REBOOT), first + timedelta(minutes=59))
    assert plan.marks(view, first + timedelta(minutes=59)) == Marks(advised=Advised(cause=REBOOT, at=first))
    assert plan.marks(view, first + timedelta(minutes=60)) == Marks()


def test_advice_stands_beside_a_notice() -> None:
    assert plan.marks(after(found(TERMINATE, REBALANCE)), SEEN) == Marks(
        notice=NOTICE, advised=Advised(cause=REBALANCE, at=SEEN - 60 * SECOND)
    )


def test_what_could_not_be_read_takes_nothing_from_the_rest() -> None:
    answer = Findings(found=(TERMINATE,), unclear="3 is no event")
    assert plan.marks(after(answer), SEEN).notice == NOTICE


# --- patches -------------------------------------------------------------------------------------------
def node_of(*, taints: tuple[Json, ...] = (), annotations: dict[str, str]) -> Json:
    return {
        "metadata": {"resourceVersion": "7", "annotations": annotations},
        "spec": {"taints": list(taints)},
    }


@pytest.mark.parametrize(
    ("carried", "phase", "patched"),
    [
        pytest.param(None, "Running", True, id="no deadline yet"),
        pytest.param(None, "Pending", True, id="still starting"),
        pytest.param(None, "Succeeded", False, id="succeeded"),
        pytest.param(None, "Failed", False, id="failed"),
        pytest.param(DEADLINE_TEXT, "Running", False, id="has it"),
        pytest.param("2026-11-21T11:02:00+01:00", "Running", False, id="has it, written in another zone"),
        pytest.param("2026-11-21T10:01:00.000000Z", "Running", False, id="has an earlier one"),
        pytest.param("2026-11-21T10:03:00.000000Z", "Running", True, id="has a later one"),
        pytest.param("soon", "Running", True, id="has one that is no time"),
        pytest.param("2026-11-21T10:01:00", "Running", True, id="has one without a zone"),
    ],
)
def test_a_pod_is_told_the_deadline_unless_it_knows_of_one_no_later(
    carried: str | None, phase: str, patched: bool
) -> None:
    annotations = {names.DEADLINE_ANNOTATION: carried} if carried else {}
    pod = {"metadata": {"uid": "u", "annotations": annotations}, "status": {"phase": phase}}
    expected = {
        "uid": "u",
        "annotations": {
            names.DEADLINE_ANNOTATION: DEADLINE_TEXT,
            names.SOURCE_ANNOTATION: "AWS spot/instance-action",
        },
    }
    assert plan.pod_patch(NOTICE, pod) == ({"metadata": expected} if patched else None)


def test_a_notice_marks_the_node_and_leaves_foreign_taints_alone() -> None:
    node = node_of(taints=(FOREIGN_TAINT,), annotations={"theirs": "1"})
    assert plan.node_patch(TOLD, node) == {
        "metadata": {"resourceVersion": "7", "annotations": MARKS},
        "spec": {"taints": [FOREIGN_TAINT, TAINT]},
    }


@pytest.mark.parametrize(
    ("taints", "annotations"),
    [
        pytest.param((TAINT,), MARKS, id="as written"),
        pytest.param(
            ({**TAINT, "timeAdded": "2026-11-21T10:00:01Z"},), MARKS, id="with the server's timeAdded"
        ),
        pytest.param((FOREIGN_TAINT, TAINT), {**MARKS, "theirs": "1"}, id="beside foreign ones"),
    ],
)
def test_a_node_that_is_marked_is_not_written_again(
    taints: tuple[dict[str, str], ...], annotations: dict[str, str]
) -> None:
    node = node_of(taints=taints, annotations=annotations)
    assert plan.node_patch(TOLD, node) is None


def test_an_agent_that_restarts_keeps_the_time_at_which_the_notice_was_first_seen() -> None:
    again = NodeNotice(cause=TERMINATE, deadline=DEADLINE, seen=SEEN + 40 * SECOND)
    node = node_of(taints=(), annotations=MARKS)
    patch = plan.node_patch(Marks(notice=again), node)
    assert patch is not None and patch["metadata"]["annotations"] == {}


def test_a_stale_mark_of_an_older_notice_is_replaced() -> None:
    stale = {**TAINT, "value": "1600000000"}
    old = {names.DEADLINE_ANNOTATION: "2020-09-13T12:26:40.000000Z", names.SOURCE_ANNOTATION: SPOT}
    old[names.NOTICE_SEEN_ANNOTATION] = "2020-09-13T12:24:40.000000Z"
    patch = plan.node_patch(TOLD, node_of(taints=(stale,), annotations=old))
    assert patch is not None
    assert patch["spec"]["taints"] == [TAINT]
    changed = patch["metadata"]["annotations"]
    assert changed == {key: MARKS[key] for key in (names.DEADLINE_ANNOTATION, names.NOTICE_SEEN_ANNOTATION)}


@pytest.mark.parametrize(
    ("taints", "annotations"),
    [
        pytest.param((TAINT, FOREIGN_TAINT), MARKS, id="all of it"),
        pytest.param((TAINT, FOREIGN_TAINT), {}, id="a taint alone"),
        pytest.param((FOREIGN_TAINT,), MARKS, id="annotations alone"),
        pytest.param((FOREIGN_TAINT,), {ADVISED: "2026-11-21T09:00:00.000000Z"}, id="advice alone"),
    ],
)
def test_without_a_notice_every_mark_of_ours_goes(
    taints: tuple[dict[str, str], ...], annotations: dict[str, str]
) -> None:
    node = node_of(taints=taints, annotations={**annotations, "theirs": "1"})
    assert plan.node_patch(Marks(), node) == {
        "metadata": {"resourceVersion": "7", "annotations": dict.fromkeys(annotations)},
        "spec": {"taints": [FOREIGN_TAINT]},
    }


def test_without_a_notice_a_node_that_carries_nothing_of_ours_is_left_alone() -> None:
    node = node_of(taints=(FOREIGN_TAINT,), annotations={"theirs": "1"})
    assert plan.node_patch(Marks(), node) is None


@pytest.mark.parametrize(
    ("carried", "written"),
    [
        pytest.param(None, "2026-11-21T09:59:00.250000Z", id="none yet"),
        pytest.param("2026-11-21T08:00:00.000000Z", "2026-11-21T09:59:00.250000Z", id="an older one"),
        pytest.param("2026-11-21T09:59:00.250000Z", None, id="the same"),
    ],
)
def test_advice_is_written_beside_the_marks_of_a_notice(carried: str | None, written: str | None) -> None:
    annotations = MARKS | ({ADVISED: carried} if carried else {})
    node = node_of(taints=(TAINT,), annotations=annotations)
    patch = plan.node_patch(
        Marks(notice=NOTICE, advised=Advised(cause=REBALANCE, at=SEEN - 60 * SECOND)), node
    )
    expected = {"resourceVersion": "7", "annotations": {ADVISED: written}}
    assert patch == ({"metadata": expected, "spec": {"taints": [TAINT]}} if written else None)


def test_advice_alone_taints_nothing_and_takes_the_marks_of_a_notice_away() -> None:
    node = node_of(taints=(TAINT, FOREIGN_TAINT), annotations=MARKS)
    patch = plan.node_patch(Marks(advised=Advised(cause=MIGRATE, at=SEEN)), node)
    assert patch == {
        "metadata": {
            "resourceVersion": "7",
            "annotations": {ADVISED: "2026-11-21T10:00:00.250000Z", **dict.fromkeys(MARKS)},
        },
        "spec": {"taints": [FOREIGN_TAINT]},
    }


@pytest.mark.parametrize(
    ("source", "told", "kept"),
    [
        pytest.param(PREEMPTED.source, SEEN + 5 * SECOND, True, id="reckoned by the agent before this one"),
        pytest.param(PREEMPTED.source, SEEN - SECOND, False, id="over: of an earlier life of this machine"),
        pytest.param(PREEMPTED.source, SEEN + 60 * SECOND, False, id="later: of an earlier life"),
        pytest.param(SPOT, SEEN + 5 * SECOND, False, id="of another source"),
    ],
)
def test_an_agent_that_restarts_gives_no_more_time_than_the_one_before(
    source: str, told: datetime, kept: bool
) -> None:
    carried = {names.SOURCE_ANNOTATION: source, names.DEADLINE_ANNOTATION: rfc3339(told)}
    node = node_of(annotations=carried)
    patch = plan.node_patch(plan.marks(after(found(PREEMPTED)), SEEN), node)
    deadline = told if kept else SEEN + 25 * SECOND
    assert patch is not None
    assert patch["spec"]["taints"][0]["value"] == str(int(deadline.timestamp()))
    changed = patch["metadata"]["annotations"].get(names.DEADLINE_ANNOTATION)
    assert changed == (None if kept else rfc3339(deadline))


def test_times_are_written_in_utc_with_microseconds() -> None:
    local = datetime(2026, 11, 21, 12, 2, tzinfo=timezone(timedelta(hours=2)))
    assert rfc3339(local) == DEADLINE_TEXT
    assert datetime.fromisoformat(DEADLINE_TEXT) == local.astimezone(UTC)

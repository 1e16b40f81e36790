"""What the agent decides: tables of metadata answers and of what node and pods carry."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest
from spottrain_operator import names
from spottrain_operator.agent import plan
from spottrain_operator.agent.plan import InstanceAction, Node, NoNotice, Notice, Pod, Unreadable, View

from tests.unit.agent.fakes import DEADLINE, DEADLINE_TEXT, FOREIGN_TAINT, SECOND, SEEN, TAINT

TERMINATE = InstanceAction(action="terminate", time=DEADLINE)
STOP = InstanceAction(action="stop", time=DEADLINE)
HIBERNATE = InstanceAction(action="hibernate", time=DEADLINE)
NOTICE = Notice(cause=TERMINATE, deadline=DEADLINE, seen=SEEN)
NONE = NoNotice()
ERROR = Unreadable(why="time-out")
MARKS = {
    names.DEADLINE_ANNOTATION: DEADLINE_TEXT,
    names.SOURCE_ANNOTATION: "AWS spot/instance-action",
    names.NOTICE_SEEN_ANNOTATION: "2026-11-21T10:00:00.250000Z",
}


@pytest.mark.parametrize(
    ("view", "answer", "then"),
    [
        pytest.param(None, ERROR, None, id="an error first: nothing is known"),
        pytest.param(None, NONE, NONE, id="a 404 first: no notice"),
        pytest.param(NONE, TERMINATE, NOTICE, id="terminate: the announced time is the deadline"),
        pytest.param(
            NONE, STOP, Notice(cause=STOP, deadline=DEADLINE, seen=SEEN), id="stop: the same as terminate"
        ),
        pytest.param(
            NONE, HIBERNATE, Notice(cause=HIBERNATE, deadline=SEEN, seen=SEEN), id="hibernate: at once"
        ),
        pytest.param(NONE, ERROR, NONE, id="an error after a 404 changes nothing"),
        pytest.param(NOTICE, ERROR, NOTICE, id="an error is never the end of a notice"),
        pytest.param(NOTICE, NONE, NONE, id="a 404 is the end of a notice"),
    ],
)
def test_an_answer_moves_the_view(view: View, answer: plan.Answer, then: View) -> None:
    assert plan.advance(view, answer, SEEN) == then


def test_a_notice_that_is_read_again_keeps_its_deadline_and_its_time() -> None:
    first = plan.advance(NONE, HIBERNATE, SEEN)
    assert plan.advance(first, HIBERNATE, SEEN + SECOND) is first


def test_a_notice_whose_time_changes_is_a_new_one() -> None:
    earlier = InstanceAction(action="terminate", time=DEADLINE - 30 * SECOND)
    then = plan.advance(NOTICE, earlier, SEEN + SECOND)
    assert isinstance(then, Notice) and then.deadline == DEADLINE - 30 * SECOND


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
    pod = Pod(namespace="ml", name="p", uid="u", phase=phase, annotations=annotations)
    expected = {
        "uid": "u",
        "annotations": {
            names.DEADLINE_ANNOTATION: DEADLINE_TEXT,
            names.SOURCE_ANNOTATION: "AWS spot/instance-action",
        },
    }
    assert plan.pod_patch(NOTICE, pod) == ({"metadata": expected} if patched else None)


def test_a_notice_marks_the_node_and_leaves_foreign_taints_alone() -> None:
    node = Node(resource_version="7", taints=(FOREIGN_TAINT,), annotations={"theirs": "1"})
    assert plan.node_patch(NOTICE, node) == {
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
    node = Node(resource_version="7", taints=taints, annotations=annotations)
    assert plan.node_patch(NOTICE, node) is None


def test_an_agent_that_restarts_keeps_the_time_at_which_the_notice_was_first_seen() -> None:
    again = Notice(cause=TERMINATE, deadline=DEADLINE, seen=SEEN + 40 * SECOND)
    node = Node(resource_version="7", taints=(), annotations=MARKS)
    patch = plan.node_patch(again, node)
    assert patch is not None and patch["metadata"]["annotations"] == {}


def test_a_stale_mark_of_an_older_notice_is_replaced() -> None:
    stale = {**TAINT, "value": "1600000000"}
    old = {**MARKS, names.DEADLINE_ANNOTATION: "2020-09-13T12:26:40.000000Z"}
    patch = plan.node_patch(NOTICE, Node(resource_version="7", taints=(stale,), annotations=old))
    assert patch is not None
    assert patch["spec"]["taints"] == [TAINT]
    assert (
        patch["metadata"]["annotations"][names.NOTICE_SEEN_ANNOTATION] == MARKS[names.NOTICE_SEEN_ANNOTATION]
    )


@pytest.mark.parametrize(
    ("taints", "annotations"),
    [
        pytest.param((TAINT, FOREIGN_TAINT), MARKS, id="all of it"),
        pytest.param((TAINT, FOREIGN_TAINT), {}, id="a taint alone"),
        pytest.param((FOREIGN_TAINT,), MARKS, id="annotations alone"),
    ],
)
def test_without_a_notice_every_mark_of_ours_goes(
    taints: tuple[dict[str, str], ...], annotations: dict[str, str]
) -> None:
    node = Node(resource_version="7", taints=taints, annotations={**annotations, "theirs": "1"})
    assert plan.node_patch(None, node) == {
        "metadata": {"resourceVersion": "7", "annotations": dict.fromkeys(annotations)},
        "spec": {"taints": [FOREIGN_TAINT]},
    }


def test_without_a_notice_a_node_that_carries_nothing_of_ours_is_left_alone() -> None:
    node = Node(resource_version="7", taints=(FOREIGN_TAINT,), annotations={"theirs": "1"})
    assert plan.node_patch(None, node) is None


def test_times_are_written_in_utc_with_microseconds() -> None:
    local = datetime(2026, 11, 21, 12, 2, tzinfo=timezone(timedelta(hours=2)))
    assert plan.rfc3339(local) == DEADLINE_TEXT
    assert datetime.fromisoformat(DEADLINE_TEXT) == local.astimezone(UTC)

"""What the operator decides, scene by scene."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from spottrain.contract import Env, Outcome
from spottrain_operator.api.observed import Observed, PodView, Refusal, Waiting
from spottrain_operator.api.training_job import Job, Status
from spottrain_operator.control.actions import Create, Delete, Plan
from spottrain_operator.control.plan import plan
from spottrain_operator.names import Reason

from tests.builders import (
    NOW,
    after,
    deleted,
    ended_pod,
    make_job,
    make_node,
    make_observed,
    make_pod,
    manifests,
    notice,
    raw_spec,
    sample,
    started,
    status_of,
    told,
)
from tests.unit.controller.stories import Story, follows

SAVED = told(Outcome.INTERRUPTED, pod=deleted(), startStep=3, step=9, durableStep=9)
NO_NODES = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
SECRET = Waiting(reason="CreateContainerConfigError", message='secret "s3" not found')
PENDING: dict[str, Any] = {"node": "", "phase": "Pending"}


def second(*pods: PodView, **status: Any) -> Observed:
    return make_observed(*pods, job=make_job(status=started(2, **status)))


def failed_before(failures: int, policy: dict[str, Any] | None = None, code: int = 1, **pod: Any) -> Observed:
    job = make_job(raw_spec(failurePolicy=policy or {}), status=started(failures=failures))
    return make_observed(ended_pod(code=code, **pod), job=job)


UNCOUNTED = "attempt=2 failures=0 interruptions=0"
SCENES: dict[str, tuple[Observed, str]] = {
    "a new job has no attempt before the API server has accepted its pod": (
        make_observed(job=make_job(), admitted=False),
        "attempt=0 !creates",
    ),
    "an accepted job has its attempt written before its pod is made": (
        make_observed(job=make_job()),
        "attempt=1 creates=0 !deletes Accepted=True",
    ),
    "a pod that cannot be scheduled is a condition": (
        make_observed(make_pod(**PENDING, unschedulable=NO_NODES)),
        "Scheduled=False/Unschedulable !deletes !creates failures=0",
    ),
    "a container that cannot start is a condition": (
        make_observed(make_pod(phase="Pending", running_since=None, waiting=SECRET)),
        "Running=False/CreateContainerConfigError !creates failures=0 again=300",
    ),
    "done is success, and the pod stays for its logs": (
        make_observed(told(Outcome.DONE, step=100, durableStep=100, outputURI="s3://bucket/run/final/")),
        "Succeeded=True attempt=1 releases=0 !deletes !creates durable=100",
    ),
    "a failure is charged and the next start waits": (
        make_observed(ended_pod(code=1, message="Traceback: boom")),
        "attempt=2 failures=1 interruptions=0 charged1 start=+10 !creates",
    ),
    "the failure after the last allowed one ends the job": (
        failed_before(3),
        "Failed=True/TooManyFailures attempt=1 failures=4 !creates",
    ),
    "the interruption after the last allowed one ends the job": (
        failed_before(0, {"maxInterruptions": 0}, code=75, notice=notice()),
        "Failed=True/TooManyInterruptions",
    ),
    "an attempt says from which checkpoint it goes on": (
        make_observed(make_pod(2), job=make_job(status=started(2)), sample=sample(40, 2, startStep=33)),
        "durable=33 tells=CheckpointRestored",
    ),
    "superseded counts nowhere and does not spin": (
        make_observed(told(Outcome.SUPERSEDED)),
        f"{UNCOUNTED} start=+10",
    ),
    "an interruption is not charged and the next attempt starts at once": (
        make_observed(SAVED),
        "attempt=2 failures=0 interruptions=1 durable=9 interrupted releases=0 creates=0 start=now",
    ),
    "a node that is gone takes its pod with it": (
        make_observed(make_pod(), nodes=()),
        "cause1=NodeLost attempt=2 interruptions=1 deletes=0 releases=0 creates=0",
    ),
    "a silent node is waited for during the grace": (
        make_observed(
            make_pod(deleted=after(-5), deletion_grace=110), nodes=(make_node(ready=False),)
        ),
        "attempt=1 again",
    ),
    "and is dead when that is over": (
        make_observed(
            make_pod(deleted=after(-31), deletion_grace=110), nodes=(make_node(ready=False),)
        ),
        "attempt=2",
    ),
    "a stale pod is deleted": (second(make_pod(1), make_pod(2)), "deletes-of-1 !deletes-of-2 attempt=2"),
    "a stale pod on a dead node is forced away": (
        second(make_pod(1, node="node-z", **deleted()), make_pod(2)),
        "deletes-of-1 !deletes-of-2 releases=0",
    ),
    "an attempt that vanished is an interruption": (
        make_observed(),
        "cause1=PodDeleted attempt=2 interruptions=1",
    ),
    "a deleted job makes nothing": (
        make_observed(job=make_job(status=started(), deletionTimestamp="2026-03-01T12:00:00Z")),
        "!creates !releases phase=Stopping",
    ),
    "and lets its pods go": (
        make_observed(
            make_pod(**deleted()),
            job=make_job(status=started(), deletionTimestamp="2026-03-01T12:00:00Z"),
        ),
        "releases=0 !creates phase=Stopping",
    ),
}  # fmt: skip


@pytest.mark.parametrize("scene", SCENES)
def test_the_operator_decides_by_what_is_there(scene: str) -> None:
    observed, expected = SCENES[scene]
    follows(expected, observed)


def test_a_pod_on_a_node_that_is_gone_has_no_time_and_no_gate() -> None:
    made = plan(make_observed(make_pod(), nodes=()))
    assert graces(made) == [0] and status_of(made).gate_until is None


def test_after_a_crash_between_status_and_pod_the_same_pod_is_made() -> None:
    job = Story(Status())
    first = job.look("creates=0")
    assert job.look("unwritten").after == first.after


@pytest.mark.parametrize(
    ("reason", "admitted", "seconds", "expected"),
    [
        (Reason.INVALID_TEMPLATE, False, 300, "Accepted=False/InvalidTemplate phase=Invalid"),
        (Reason.QUOTA_EXCEEDED, True, 20, "Scheduled=False/QuotaExceeded phase=Waiting"),
    ],
)
def test_what_the_api_server_refuses_is_a_condition_and_tried_again_in_its_time(
    reason: Reason, admitted: bool, seconds: int, expected: str
) -> None:
    retry = timedelta(seconds=seconds)
    refusal = Refusal(generation=1, reason=reason, message="no, because", at=NOW, retry=retry)
    unseen = replace(started().attempts[0], started=None, created_workers=0)
    job = Story(replace(started(), attempts=(unseen,)) if admitted else Status())
    job.look(f"{expected} !creates again={seconds}", refusal=refusal, admitted=admitted)
    again = "creates=0" if admitted else "!creates"
    job.look(f"{again} failures=0 interruptions=0", at=seconds + 1, refusal=refusal, admitted=admitted)


def test_the_backoff_doubles_up_to_five_minutes_and_then_the_attempt_starts() -> None:
    for failures, seconds in ((1, 20), (2, 40), (4, 160), (5, 300), (9, 300)):
        follows(f"start=+{seconds}", failed_before(failures, {"maxFailures": 100}))
    job = Story()
    job.look("start=+10", ended_pod(code=1))
    job.look("!creates again=5", at=5)
    job.look("creates=0", at=10)


def test_the_next_attempt_is_told_what_is_durable() -> None:
    (pod,) = manifests(plan(make_observed(SAVED)))
    env = {e["name"]: e.get("value", "") for e in pod["spec"]["containers"][0]["env"]}
    assert env["SPOTTRAIN_KNOWN_DURABLE_STEP"] == "9" and "SPOTTRAIN_GATE_UNTIL" not in env
    assert env["SPOTTRAIN_ATTEMPT"] == "2"


SAVING = make_pod(1, notice=notice(100), deleted=after(98), deletion_grace=98)
DOOMED = make_node(notice=notice(100))


# --- notices --------------------------------------------------------------------------------------------
def doomed_and_told(seconds: float = 100, job: Job | None = None, **pod: Any) -> Observed:
    """The node has a notice, and its pod has carried the deadline for a second."""
    pods = make_pod(**({"notice": notice(seconds)} | pod))
    return make_observed(pods, job=job, nodes=(make_node(notice=notice(seconds)),), annotated_at=after(-1))


def next_up(attempt: int) -> Status:
    """The attempt has a record, and no pod yet."""
    status = started(attempt)
    unseen = replace(status.attempts[-1], started=None, created_workers=0, node="")
    return replace(status, attempts=(*status.attempts[:-1], unseen))


def doomed_and_deleted(job: Job | None = None) -> Observed:
    """The same pod a moment later: it saves."""
    return make_observed(SAVING, job=job, nodes=(DOOMED,))


def gates(made: Plan) -> list[datetime | None]:
    """Until when the pods that are created wait for an earlier attempt."""
    envs = ({e["name"]: e.get("value") for e in m["spec"]["containers"][0]["env"]} for m in manifests(made))
    return [
        datetime.fromtimestamp(int(env[Env.GATE_UNTIL]), UTC) if Env.GATE_UNTIL in env else None
        for env in envs
    ]


def graces(made: Plan) -> list[int | None]:
    return [a.grace for a in made.before if isinstance(a, Delete)]


def test_under_notice_the_pod_is_told_first_and_deleted_a_moment_later() -> None:
    doomed = (make_node(notice=notice(100)),)
    follows("annotates=0 !deletes again=1", make_observed(make_pod(), nodes=doomed))
    fresh = make_observed(make_pod(notice=notice(100)), nodes=doomed, annotated_at=NOW)
    follows("!annotates !deletes again", fresh)


def test_under_notice_the_pod_is_deleted_and_replaced_off_the_doomed_node() -> None:
    made = follows("deletes=0 attempt=1 !cause1 !creates again", doomed_and_told())
    assert graces(made) == [98]
    made = follows("attempt=2 interruptions=1 cause1=SpotNotice creates=0 !deletes", doomed_and_deleted())
    status = status_of(made)
    assert status.gate_until == after(98 + 10) and not status.attempts[0].ended
    assert gates(made) == [after(108)] and "node-a" in str(manifests(made)[0]["spec"]["affinity"])


def test_a_notice_leaves_two_seconds_and_never_lengthens_a_pods_grace() -> None:
    late = make_observed(make_pod(), nodes=(make_node(notice=notice(0.5)),))
    assert graces(follows("annotates=0 deletes=0", late)) == [2]
    assert graces(plan(doomed_and_told(grace=25))) == [25]


def test_where_the_runtime_was_not_seen_the_next_attempt_waits_for_the_end() -> None:
    job = make_job(status=started(trained=False))
    follows("deletes=0 !creates attempt=1", doomed_and_told(job=job))
    ended = told(Outcome.INTERRUPTED, pod={"notice": notice(100), **deleted()})
    follows("attempt=2", make_observed(ended, job=job, nodes=(make_node(notice=notice(100)),)))


def test_the_pod_that_was_replaced_reports_later_and_changes_no_counter() -> None:
    bumped = make_job(status=status_of(plan(doomed_and_deleted())))
    old = told(Outcome.INTERRUPTED, pod={"notice": notice(100), **deleted()}, step=9, durableStep=9)
    o = make_observed(old, make_pod(2, **PENDING), job=bumped)
    status = status_of(follows("attempt=2 interruptions=1 failures=0 releases=0", o))
    assert (status.attempts[0].exit_code, status.attempts[0].durable_step) == (75, 9)


def test_a_replaced_attempt_that_gets_done_after_all_ends_the_job() -> None:
    bumped = make_job(status=status_of(plan(doomed_and_deleted())))
    old = told(Outcome.DONE, pod={"notice": notice(100), **deleted()})
    nodes = (make_node(), make_node("node-b"))
    o = make_observed(old, make_pod(2, node="node-b"), job=bumped, nodes=nodes)
    follows("Succeeded=True releases=0 deletes=0 cause1=SpotNotice interruptions=1", o)


# --- steps ----------------------------------------------------------------------------------------------
def test_the_successor_tells_what_its_predecessor_had_saved() -> None:
    job = make_job(status=started(2))
    o = make_observed(make_pod(2), job=job, sample=sample(40, 2, startStep=33))
    status = status_of(follows("durable=33", o))
    assert status.attempts[0].durable_step == status.attempts[1].start_step == 33


def test_the_step_shown_never_falls_below_what_is_durable() -> None:
    job = Story()
    job.look("durable=120", told(Outcome.INTERRUPTED, step=120, durableStep=120), sample=sample(90))
    assert job.status.progress and job.status.progress.step == 120
    job.look("attempt=2", make_pod(2), sample=sample(0, 2))
    assert job.status.progress and job.status.progress.step == 120, "it has not restored yet"


def test_progress_alone_is_written_once_a_minute() -> None:
    job = Story()
    for at, step, shown in ((0, 5, 5), (30, 50, 5), (61, 50, 50)):
        made = job.look("", make_pod(), at=at, sample=replace(sample(step), at=after(at)))
        assert job.status.progress and job.status.progress.step == shown
        assert (made.status is None) == (at == 30)


def test_a_status_is_written_only_when_it_says_something_new_and_its_times_move_only_on_flips() -> None:
    job = Story()
    job.look("Scheduled=False Running=False", make_pod(**PENDING))
    job.look("Scheduled=True Running=True", make_pod(), at=60)
    moved = {c.type for c in job.status.conditions if c.last_transition_time == after(60)}
    assert moved == {"Scheduled", "Running"}
    job.look("unwritten !warns !tells", make_pod(), at=500)


# --- gates: attempts made while an earlier one still saves ----------------------------------------------
def test_a_third_attempt_waits_for_the_first_that_still_saves() -> None:
    job, nodes = Story(status_of(plan(doomed_and_deleted()))), (DOOMED, make_node("node-b"))
    job.look("attempt=3", SAVING, ended_pod(2, 1, node="node-b"), nodes=nodes)
    made = job.look("creates=0", SAVING, nodes=nodes, at=20)
    assert gates(made) == [after(108)]
    affinity = str(manifests(made)[0]["spec"]["affinity"])
    assert "node-a" in affinity and "node-b" not in affinity, "the crash was not the node's fault"


OTHERS = {
    "it has ended": (ended_pod(2, 75, node="node-b", **deleted()), 108),
    "it saves too, for longer": (make_pod(2, node="node-b", deleted=after(200), deletion_grace=30), 210),
    "it saves too, but not as long": (make_pod(2, node="node-b", deleted=after(10), deletion_grace=10), 108),
    "its node is gone": (make_pod(2, node="node-gone", deleted=after(300), deletion_grace=300), 108),
}


@pytest.mark.parametrize("second", OTHERS)
@pytest.mark.parametrize("clock", [-110, 0, 600])
def test_an_attempt_waits_for_every_earlier_one_that_may_still_write_by_the_api_servers_clock(
    second: str, clock: float
) -> None:
    """A deletion's time comes from the API server; a wrong clock of the operator changes no gate."""
    pod, until = OTHERS[second]
    job = make_job(status=next_up(3))
    nodes = (make_node(), make_node("node-b"))
    made = follows("attempt=3 creates=0", make_observed(SAVING, pod, job=job, nodes=nodes, now=after(clock)))
    assert gates(made) == [after(until)] and status_of(made).gate_until == after(until)


def test_no_pod_is_made_before_the_time_of_an_earlier_one_to_save_is_known() -> None:
    job = Story(next_up(3))
    job.look("deletes-of-1 !creates", make_pod(1), ended_pod(2, 75))
    made = job.look("creates=0 !deletes-of-1", SAVING, ended_pod(2, 75))
    assert gates(made) == [after(108)]


def test_a_job_that_is_suspended_and_resumed_while_an_attempt_saves_waits_for_that_one() -> None:
    job, nodes = Story(status_of(plan(doomed_and_deleted()))), (DOOMED, make_node("node-b"))
    gated = make_pod(2, node="node-b", created=NOW)
    stopped = ended_pod(2, 75, node="node-b", **deleted())
    job.look("deletes-of-2", SAVING, gated, nodes=nodes, spec={"suspend": True}, at=1)
    job.look("cause2=Suspended attempt=2", SAVING, stopped, nodes=nodes, at=2)
    made = job.look("attempt=3 creates=0", SAVING, nodes=nodes, spec={"suspend": False}, at=3)
    assert gates(made) == [after(108)]


def test_a_gate_is_forgotten_once_all_earlier_pods_have_ended() -> None:
    made = follows("attempt=3", second(ended_pod(2, 75, **deleted()), gate_until=after(60)))
    assert status_of(made).gate_until is None and gates(made) == [None]


# --- nodes that a pod is kept off -----------------------------------------------------------------------
def kept_off(*names: str, **more: Any) -> PodView:
    words = "0/2 nodes are available: 1 node(s) didn't match Pod's node affinity/selector."
    return replace(make_pod(2, **PENDING, unschedulable=words), avoids=names, **more)


def test_a_pod_that_is_kept_off_a_node_for_no_reason_any_more_is_replaced_and_nothing_is_counted() -> None:
    job = Story(started(2))
    job.look("stopping2=Replaced deletes=0", kept_off("node-a"))
    made = job.look(
        "attempt=3 interruptions=1 failures=0 cause2=Replaced creates=0 start=now",
        kept_off("node-a", **deleted()),
    )
    (pod,) = manifests(made)
    assert "affinity" not in pod["spec"]


@pytest.mark.parametrize("nodes", [(DOOMED,), (make_node(notice=notice(-5)),), (), (make_node(ready=False),)])
def test_a_pod_stays_while_the_node_it_is_kept_off_is_doomed_gone_or_silent(nodes: Any) -> None:
    Story(started(2)).look("!deletes attempt=2 again=30", kept_off("node-a"), nodes=nodes)


@pytest.mark.parametrize(
    "pod",
    [
        make_pod(2, node="node-b"),
        kept_off("node-a", deleted=after(0)),
        kept_off("node-a", unschedulable=""),
        kept_off(),
    ],
)
def test_a_pod_that_has_a_node_or_goes_already_or_waits_for_no_node_is_left_alone(pod: PodView) -> None:
    job = Story(started(2))
    made = job.look("!stopping", pod, nodes=(make_node(), make_node("node-b")))
    assert not [a for a in made.after if isinstance(a, Create) and a.attempt == 2]

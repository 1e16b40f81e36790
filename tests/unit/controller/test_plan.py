"""What the operator decides, scene by scene."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from spottrain.contract import Outcome
from spottrain_operator.api.observed import (
    Action,
    Annotate,
    Check,
    Create,
    Delete,
    Observed,
    Plan,
    Refusal,
    Release,
    Waiting,
)
from spottrain_operator.api.training_job import Job
from spottrain_operator.control.plan import plan
from spottrain_operator.names import Condition, Phase, Reason

from tests.builders import (
    NOW,
    after,
    condition,
    deleted,
    ended_pod,
    make_job,
    make_node,
    make_observed,
    make_pod,
    notice,
    raw_spec,
    sample,
    started,
    status_of,
    told,
)


def kinds(actions: tuple[Action, ...]) -> list[type]:
    return [type(a) for a in actions]


def test_a_new_job_is_checked_before_anything_is_written() -> None:
    made = plan(make_observed(job=make_job(), admitted=False))
    assert kinds(made.after) == [Check] and made.status is None


def test_an_accepted_job_has_its_attempt_written_before_its_pod_is_made() -> None:
    made = plan(make_observed(job=make_job()))
    assert status_of(made).attempt == 1 and kinds(made.after) == [Create] and not made.before
    assert status_of(made).is_true(Condition.ACCEPTED)


def test_after_a_crash_between_status_and_pod_the_same_pod_is_made() -> None:
    first = plan(make_observed(job=make_job()))
    again = plan(make_observed(job=make_job(status=first.status)))
    assert again.status is None and again.after == first.after


def test_a_refused_template_is_a_condition_and_no_loop() -> None:
    no = Refusal(
        generation=1,
        reason=Reason.INVALID_TEMPLATE,
        message="unknown field spec.foo",
        at=NOW,
        retry=timedelta(minutes=5),
    )
    made = plan(make_observed(job=make_job(), admitted=False, refusal=no))
    accepted = condition(made, Condition.ACCEPTED)
    assert (accepted.status, accepted.message) == ("False", "unknown field spec.foo")
    assert not made.after and status_of(made).phase == Phase.INVALID
    assert made.recheck_after and made.recheck_after.total_seconds() == pytest.approx(300, abs=1)
    again = plan(make_observed(job=make_job(status=made.status), admitted=False, refusal=no, now=after(301)))
    assert kinds(again.after) == [Check], "the cluster may have been mended"


def test_a_full_quota_waits_and_costs_nothing() -> None:
    no = Refusal(
        generation=1,
        reason=Reason.QUOTA_EXCEEDED,
        message="exceeded quota: gpus",
        at=NOW,
        retry=timedelta(seconds=20),
    )
    unseen = replace(started().attempts[0], started=None, ranks=())
    job = make_job(status=replace(started(), attempts=(unseen,)))
    made = plan(make_observed(job=job, refusal=no))
    scheduled = condition(made, Condition.SCHEDULED)
    assert scheduled.reason == Reason.QUOTA_EXCEEDED and "gpus" in scheduled.message
    assert status_of(made).phase == Phase.WAITING and not made.after
    assert made.recheck_after and made.recheck_after.total_seconds() == pytest.approx(20, abs=1)
    later = plan(make_observed(job=make_job(status=made.status), refusal=no, now=after(21)))
    assert kinds(later.after) == [Create]
    assert (status_of(made).failures, status_of(made).interruptions) == (0, 0)


def test_an_invalid_spec_is_a_sentence() -> None:
    spec = raw_spec()
    spec["template"]["spec"]["hostname"] = "me"
    made = plan(make_observed(job=make_job(spec), admitted=False))
    accepted = condition(made, Condition.ACCEPTED)
    assert "spec.template.spec.hostname" in accepted.message and not made.after


def test_a_pod_that_cannot_be_scheduled_is_a_condition() -> None:
    words = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    made = plan(make_observed(make_pod(node="", phase="Pending", unschedulable=words)))
    scheduled = condition(made, Condition.SCHEDULED)
    assert (scheduled.status, scheduled.message) == ("False", words)
    assert not made.before and not made.after and status_of(made).failures == 0


@pytest.mark.parametrize("reason", ["ImagePullBackOff", "CreateContainerConfigError"])
def test_a_container_that_cannot_start_is_a_condition_in_the_kubelets_words(reason: str) -> None:
    pod = make_pod(
        phase="Pending", running_since=None, waiting=Waiting(reason=reason, message='secret "s3" not found')
    )
    made = plan(make_observed(pod))
    run = condition(made, Condition.RUNNING)
    assert run.reason == reason and 'secret "s3" not found' in run.message
    assert status_of(made).failures == 0 and not made.after and made.recheck_after is None


def test_done_is_success_and_the_pod_stays_for_its_logs() -> None:
    pod = told(Outcome.DONE, step=100, durableStep=100, outputURI="s3://bucket/run/final/")
    made = plan(make_observed(pod))
    assert status_of(made).is_true(Condition.SUCCEEDED) and status_of(made).attempt == 1
    assert status_of(made).output and kinds(made.after) == [Release]
    assert status_of(made).attempts[0].durable_step == 100


@pytest.mark.parametrize(
    "pods",
    [(), (make_pod(),), (ended_pod(code=1),), (make_pod(notice=notice()),)],
    ids=["none", "run", "bad", "doomed"],
)
def test_terminal_is_terminal(pods: tuple) -> None:  # type: ignore[type-arg]
    done = plan(make_observed(told(Outcome.DONE))).status
    made = plan(make_observed(*pods, job=make_job(status=done)))
    assert Create not in kinds(made.after) and Check not in kinds(made.after)
    if made.status is not None:
        assert made.status.attempt == 1 and made.status.is_true(Condition.SUCCEEDED)
        assert made.status.failures == 0 and made.status.interruptions == 0


def test_a_failure_is_charged_and_the_next_start_waits() -> None:
    made = plan(make_observed(ended_pod(code=1, message="Traceback: boom")))
    status = status_of(made)
    assert (status.attempt, status.failures, status.interruptions) == (2, 1, 0)
    assert status.next_start == after(10) and Create not in kinds(made.after)
    assert status.attempts[0].charged and "boom" in status.attempts[0].evidence
    waiting = plan(make_observed(job=make_job(status=status), now=after(5)))
    assert not waiting.after and waiting.recheck_after and waiting.recheck_after.total_seconds() < 6
    assert kinds(plan(make_observed(job=make_job(status=status), now=after(10))).after) == [Create]


def test_the_backoff_doubles_up_to_five_minutes() -> None:
    for failures, seconds in ((1, 20), (2, 40), (4, 160), (5, 300), (9, 300)):
        policy = {"maxFailures": 100}
        job = make_job(raw_spec(failurePolicy=policy), status=started(failures=failures))
        assert status_of(plan(make_observed(ended_pod(code=1), job=job))).next_start == after(seconds)


def test_the_failure_after_the_last_allowed_one_ends_the_job() -> None:
    made = plan(make_observed(ended_pod(code=1), job=make_job(status=started(failures=3))))
    failed = condition(made, Condition.FAILED)
    assert failed.reason == Reason.TOO_MANY_FAILURES and status_of(made).attempt == 1
    assert status_of(made).failures == 4 and Create not in kinds(made.after)


def test_the_interruption_after_the_last_allowed_one_ends_the_job() -> None:
    spec = raw_spec(failurePolicy={"maxInterruptions": 0})
    made = plan(make_observed(ended_pod(code=75, notice=notice()), job=make_job(spec, status=started())))
    failed = condition(made, Condition.FAILED)
    assert failed.reason == Reason.TOO_MANY_INTERRUPTIONS


def test_bad_configuration_ends_the_job_with_the_trainers_words() -> None:
    pod = told(Outcome.BAD_CONFIGURATION, reason="StoreDenied", message="S3 refuses the credentials")
    failed = status_of(plan(make_observed(pod))).condition(Condition.FAILED)
    assert failed and (failed.reason, failed.message) == ("StoreDenied", "S3 refuses the credentials")


def test_superseded_counts_nowhere_and_does_not_spin() -> None:
    status = status_of(plan(make_observed(told(Outcome.SUPERSEDED))))
    assert (status.attempt, status.failures, status.interruptions) == (2, 0, 0)
    assert status.next_start == after(10)


def test_an_interruption_is_not_charged_and_the_next_attempt_starts_at_once() -> None:
    made = plan(make_observed(told(Outcome.INTERRUPTED, pod=deleted(), startStep=3, step=9, durableStep=9)))
    status = status_of(made)
    assert (status.attempt, status.failures, status.interruptions) == (2, 0, 1)
    assert status.known_durable_step == 9 and status.gate_until is None
    assert kinds(made.after) == [Release, Create]
    create = made.after[-1]
    assert isinstance(create, Create)
    env = {e["name"]: e.get("value", "") for e in create.manifest["spec"]["containers"][0]["env"]}
    assert env["SPOTTRAIN_KNOWN_DURABLE_STEP"] == "9" and env["SPOTTRAIN_GATE_UNTIL"] == "0"
    assert env["SPOTTRAIN_ATTEMPT"] == "2"


def doomed_and_told(seconds: float = 100, job: Job | None = None, **pod: Any) -> Observed:
    """The node has a notice, and its pod has carried the deadline for a second."""
    pods = make_pod(**({"notice": notice(seconds)} | pod))
    return make_observed(pods, job=job, nodes=(make_node(notice=notice(seconds)),), annotated_at=after(-1))


def test_under_notice_the_pod_is_told_first_and_deleted_a_moment_later() -> None:
    doomed = (make_node(notice=notice(100)),)
    made = plan(make_observed(make_pod(), nodes=doomed))
    assert kinds(made.before) == [Annotate] and not made.after
    assert made.recheck_after and 0.9 < made.recheck_after.total_seconds() < 1.2
    fresh = plan(make_observed(make_pod(notice=notice(100)), nodes=doomed, annotated_at=NOW))
    assert not fresh.before and fresh.recheck_after


def test_under_notice_the_pod_is_deleted_and_replaced_off_the_doomed_node() -> None:
    made = plan(doomed_and_told())
    assert kinds(made.before) == [Delete]
    delete = made.before[0]
    assert isinstance(delete, Delete) and delete.grace == 98
    status = status_of(made)
    assert (status.attempt, status.interruptions) == (2, 1) and status.gate_until == after(98 + 10)
    assert status.attempts[0].cause == "SpotNotice" and status.attempts[0].ended is None
    assert kinds(made.after) == [Create]
    create = made.after[0]
    assert isinstance(create, Create)
    env = {e["name"]: e.get("value", "") for e in create.manifest["spec"]["containers"][0]["env"]}
    assert env["SPOTTRAIN_GATE_UNTIL"] == str(int(after(108).timestamp()))
    assert "node-a" in str(create.manifest["spec"]["affinity"])


def test_a_notice_that_leaves_no_time_still_leaves_two_seconds() -> None:
    made = plan(make_observed(make_pod(), nodes=(make_node(notice=notice(0.5)),)))
    assert kinds(made.before) == [Annotate, Delete]
    assert isinstance(made.before[1], Delete) and made.before[1].grace == 2


def test_a_notice_never_lengthens_a_pods_grace() -> None:
    made = plan(doomed_and_told(grace=25))
    assert isinstance(made.before[0], Delete) and made.before[0].grace == 25


def test_without_early_replacement_the_next_attempt_waits_for_the_end() -> None:
    job = make_job(raw_spec(capacity={"replaceDuringNotice": False}), status=started())
    doomed = (make_node(notice=notice(100)),)
    made = plan(doomed_and_told(job=job))
    assert kinds(made.before) == [Delete] and not made.after
    assert made.status is None or made.status.attempt == 1
    ended = told(Outcome.INTERRUPTED, pod={"notice": notice(100), **deleted()})
    assert status_of(plan(make_observed(ended, job=job, nodes=doomed))).attempt == 2


def test_the_pod_that_was_replaced_reports_later_and_changes_no_counter() -> None:
    bumped = status_of(plan(doomed_and_told()))
    old = told(Outcome.INTERRUPTED, pod={"notice": notice(100), **deleted()}, step=9, durableStep=9)
    made = plan(make_observed(old, make_pod(2, node="", phase="Pending"), job=make_job(status=bumped)))
    status = status_of(made)
    assert (status.attempt, status.interruptions, status.failures) == (2, 1, 0)
    assert status.attempts[0].exit_code == 75 and status.attempts[0].durable_step == 9
    assert kinds(made.after) == [Release]


def test_a_replaced_attempt_that_gets_done_after_all_ends_the_job() -> None:
    bumped = status_of(plan(doomed_and_told()))
    old = told(Outcome.DONE, pod={"notice": notice(100), **deleted()})
    nodes = (make_node(), make_node("node-b"))
    made = plan(make_observed(old, make_pod(2, node="node-b"), job=make_job(status=bumped), nodes=nodes))
    assert status_of(made).is_true(Condition.SUCCEEDED) and kinds(made.after) == [Release, Delete]
    assert status_of(made).attempts[0].cause == "SpotNotice" and status_of(made).interruptions == 1


def test_a_node_that_is_gone_takes_its_pod_with_it() -> None:
    made = plan(make_observed(make_pod(), nodes=()))
    assert kinds(made.before) == [Delete] and kinds(made.after) == [Release, Create]
    assert isinstance(made.before[0], Delete) and made.before[0].grace == 0
    status = status_of(made)
    assert (status.attempt, status.interruptions, status.gate_until) == (2, 1, None)
    assert status.attempts[0].cause == "NodeLost" and "node-a" in status.attempts[0].evidence


def test_a_silent_node_is_dead_when_the_grace_is_over() -> None:
    silent = (make_node(ready=False),)
    soon = make_pod(deleted=after(-5), deletion_grace=110)
    waiting = plan(make_observed(soon, nodes=silent))
    assert waiting.recheck_after and (waiting.status is None or waiting.status.attempt == 1)
    late = make_pod(deleted=after(-31), deletion_grace=110)
    assert status_of(plan(make_observed(late, nodes=silent))).attempt == 2


def test_a_stale_pod_is_the_first_to_go() -> None:
    made = plan(make_observed(make_pod(1), make_pod(2), job=make_job(status=started(2))))
    assert kinds(made.before) == [Delete] and isinstance(made.before[0], Delete)
    assert made.before[0].pod.attempt == 1


def test_a_stale_pod_on_a_dead_node_is_forced_away() -> None:
    stale = make_pod(1, node="node-z", **deleted())
    made = plan(make_observed(stale, make_pod(2), job=make_job(status=started(2))))
    assert kinds(made.after) == [Delete, Release]


def test_an_attempt_that_vanished_is_an_interruption() -> None:
    status = status_of(plan(make_observed()))
    assert (status.attempt, status.interruptions) == (2, 1)
    assert status.attempts[0].cause == "PodDeleted" and status.attempts[0].ended is not None


def test_the_successor_tells_what_its_predecessor_had_saved() -> None:
    status = replace(started(2), attempts=(replace(started(2).attempts[0]), started(2).attempts[1]))
    made = plan(make_observed(make_pod(2), job=make_job(status=status), sample=sample(40, 2, startStep=33)))
    assert status_of(made).attempts[0].durable_step == 33
    assert status_of(made).attempts[1].start_step == 33 and status_of(made).known_durable_step == 33


def test_the_step_shown_never_falls_below_what_is_durable() -> None:
    ended = told(Outcome.INTERRUPTED, step=120, durableStep=120)
    status = status_of(plan(make_observed(ended, job=make_job(status=started()), sample=sample(90))))
    assert status.progress and status.progress.step == status.known_durable_step == 120
    starting = make_observed(
        make_pod(2), job=make_job(status=replace(status, attempt=2)), sample=sample(0, 2)
    )
    assert (shown := status_of(plan(starting)).progress) and shown.step == 120, "it has not restored yet"


def test_progress_alone_is_written_once_a_minute() -> None:
    first = status_of(plan(make_observed(make_pod(), sample=sample(5))))
    assert first.progress and first.progress.step == 5

    def at(seconds: float, pod: Observed | None = None) -> Plan:
        later = replace(sample(50), at=after(seconds))
        return plan(make_observed(make_pod(), job=make_job(status=first), sample=later, now=after(seconds)))

    assert at(30).status is None
    assert status_of(at(61)).progress.step == 50  # type: ignore[union-attr]


def test_a_deleted_job_makes_nothing_and_lets_its_pods_go() -> None:
    job = make_job(status=started(), deletionTimestamp="2026-03-01T12:00:00Z")
    made = plan(make_observed(make_pod(**deleted()), job=job))
    assert kinds(made.after) == [Release] and made.status is None
    assert not plan(make_observed(job=job)).after


def test_an_interruption_is_over_when_the_next_attempt_trains() -> None:
    status = status_of(plan(make_observed(told(Outcome.INTERRUPTED, pod=deleted()))))
    assert status.is_true(Condition.INTERRUPTED)
    trains = sample(attempt=2)
    made = plan(make_observed(make_pod(2), job=make_job(status=status), sample=trains))
    interrupted = condition(made, Condition.INTERRUPTED)
    assert interrupted.status == "False" and status_of(made).phase == Phase.RUNNING


def test_a_status_is_written_only_when_it_says_something_new() -> None:
    first = plan(make_observed(make_pod()))
    again = plan(make_observed(make_pod(), job=make_job(status=first.status), now=after(500)))
    assert again.status is None and not again.events


def test_transition_times_move_only_on_flips() -> None:
    first = status_of(plan(make_observed(make_pod(node="", phase="Pending"))))
    second = status_of(plan(make_observed(make_pod(), job=make_job(status=first), now=after(60))))
    moved = {c.type for c in second.conditions if c.last_transition_time == after(60)}
    assert moved == {"Scheduled", "Running"}

"""Whether our runtime trains in a job's image: what is said of it, and what follows where it does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from spottrain.contract import Outcome, Reason
from spottrain_operator.api.observed import Create, Ended, Limits, Observed, Plan, PodView, Sample, Silence
from spottrain_operator.api.training_job import Status
from spottrain_operator.control.plan import plan
from spottrain_operator.names import Cause, Condition, Phase

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
from tests.unit.controller.fake_cluster import World

UNSEEN = started(conditions=())
"""The status of a job of which nothing but its pods was seen."""
REFUSED = Silence(pod_uid=make_pod().uid, refused=True)
UNREACHABLE = replace(REFUSED, refused=False)


def since(seconds: float, **more: Any) -> PodView:
    """A pod whose container runs for so long."""
    return make_pod(running_since=NOW - timedelta(seconds=seconds), **more)


def look(
    *pods: PodView,
    status: Status = UNSEEN,
    spec: dict[str, Any] | None = None,
    silence: Silence | None = None,
    sample: Sample | None = None,
    **more: Any,
) -> tuple[Plan, Status]:
    observed: Observed = make_observed(*pods, job=make_job(spec, status=status), sample=sample, **more)
    made = plan(replace(observed, silence=silence))
    return made, made.status or status


def warnings(made: Plan) -> Sequence[str]:
    return [e.reason for e in made.events if e.warning]


# --- exit code 0 ----------------------------------------------------------------------------------------
def test_a_script_that_exits_0_without_our_runtime_fails_for_good_and_hears_of_the_ways_out() -> None:
    made, status = look(ended_pod(code=0), status=UNSEEN)
    failed = condition(status, Condition.FAILED)
    assert (status.phase, failed.reason, status.attempt) == (Phase.FAILED, "NoRuntime", 1)
    assert "spottrain run" in failed.message and "checkpoint.mode: Self" in failed.message
    assert warnings(made) == ["NoRuntime"]


def test_where_the_runtime_was_seen_the_sentence_says_that_the_checkpoints_are_kept() -> None:
    _, status = look(ended_pod(code=0), status=started())
    failed = condition(status, Condition.FAILED)
    assert failed.reason == "NotDone" and "onExisting: Resume" in failed.message
    assert "checkpoint.managed" not in failed.message


def test_a_script_that_ended_untrained_under_spottrain_run_fails_in_its_own_words() -> None:
    ended = told(Outcome.UNTRAINED, reason=Reason.NOT_TRAINED, message="The script ended by itself.")
    _, status = look(ended)
    failed = condition(status, Condition.FAILED)
    assert failed.reason == "NotTrained" and failed.message.startswith("The script ended by itself. Either")


def test_where_the_image_saves_by_itself_an_untrained_end_is_success() -> None:
    own = raw_spec(checkpoint={"mode": "Self"})
    for ended in (ended_pod(code=0), told(Outcome.UNTRAINED, reason=Reason.NOT_TRAINED)):
        assert look(ended, spec=own)[1].phase == Phase.SUCCEEDED


def test_the_message_done_is_success_whatever_launcher_stands_between() -> None:
    for code in (0, 1):
        ended = replace(
            told(Outcome.DONE, step=9),
            ended=Ended(exit_code=code, message=told(Outcome.DONE).ended.message),  # type: ignore[union-attr]
        )
        assert look(ended)[1].phase == Phase.SUCCEEDED
    early = told(Outcome.DONE, reason=Reason.EARLY_STOPPED, message="no better for 3 evaluations")
    assert condition(look(early)[1], Condition.SUCCEEDED).reason == "EarlyStopped"


def test_a_script_that_claims_done_in_its_log_alone_is_not_believed() -> None:
    """terminationMessagePolicy FallbackToLogsOnError: the kubelet gives the log's end as the message."""
    _, status = look(ended_pod(code=1, message='step 9\n{"outcome": "done"}'))
    assert status.failures == 1 and not status.terminal


def test_another_rank_of_a_gang_may_exit_0_without_a_message() -> None:
    spec = raw_spec(workers=2)
    job_status = started(conditions=())
    record = replace(job_status.attempts[0], workers=2)
    status = replace(job_status, attempts=(record,))
    other = ended_pod(code=0, rank=1)
    first = make_pod(rank=0)
    made, now = look(first, other, status=status, spec=spec)
    assert not now.terminal and not now.attempts[0].stopping, made.message
    _, end = look(ended_pod(code=0), other, status=status, spec=spec)
    assert condition(end, Condition.FAILED).reason == "NoRuntime"


# --- Running --------------------------------------------------------------------------------------------
def test_training_is_said_when_the_runtime_trains_and_not_before() -> None:
    running = condition(look(since(5))[1], Condition.RUNNING)
    assert (running.status, running.reason) == ("True", "WaitingForRuntime")
    _, status = look(since(5), sample=sample(state="Starting", step=0))
    assert condition(status, Condition.RUNNING).reason == "WaitingForTraining"
    assert status.phase == Phase.STARTING
    _, status = look(since(5), sample=sample())
    assert condition(status, Condition.RUNNING).reason == "Training" and status.phase == Phase.RUNNING


def test_the_sentence_grows_clearer_with_time_and_each_change_is_looked_for() -> None:
    sentences = []
    for seconds in (5, 61, 301):
        made, status = look(since(seconds), silence=REFUSED)
        assert status.phase == Phase.STARTING
        sentences.append(condition(status, Condition.RUNNING).message)
    assert len(set(sentences)) == 3 and "9477" in sentences[1] and "5 min" in sentences[2]
    made, _ = look(since(5))
    assert made.recheck_after and timedelta(seconds=54) < made.recheck_after < timedelta(seconds=56)
    made, _ = look(since(61))
    assert made.recheck_after and timedelta(seconds=238) < made.recheck_after < timedelta(seconds=240)


def test_each_attempt_answers_again() -> None:
    _, status = look(make_pod(2, running_since=after(-5)), status=started(2))
    assert condition(status, Condition.RUNNING).reason == "WaitingForRuntime"


def test_an_image_that_saves_by_itself_is_waited_for_by_nobody() -> None:
    own = raw_spec(checkpoint={"mode": "Self"})
    made, status = look(since(900), spec=own, silence=REFUSED)
    assert condition(status, Condition.RUNNING).reason == "Training"
    assert status.condition(Condition.RUNTIME_ATTACHED) is None and not warnings(made)


# --- RuntimeAttached ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("silence", "reason", "words"),
    [(REFUSED, "NoRuntime", "checkpoint.mode: Self"), (UNREACHABLE, "RuntimeUnreachable", "NetworkPolicies")],
)
def test_a_runtime_that_never_answers_is_missed_after_five_minutes_with_a_warning(
    silence: Silence, reason: str, words: str
) -> None:
    made, status = look(since(299), silence=silence)
    assert status.condition(Condition.RUNTIME_ATTACHED) is None and not warnings(made)
    made, status = look(since(300), silence=silence)
    attached = condition(status, Condition.RUNTIME_ATTACHED)
    assert (attached.status, attached.reason) == ("False", reason) and words in attached.message
    assert warnings(made) == [reason]
    again, _ = look(since(900), status=status, silence=silence, now=after(0))
    assert not warnings(again), "it is said once"


def test_how_long_an_import_may_take_can_be_set() -> None:
    observed = make_observed(since(400), job=make_job(status=UNSEEN))
    patient = replace(observed, silence=REFUSED, limits=Limits(runtime_patience=timedelta(minutes=20)))
    status = status_of(plan(patient))
    assert status.condition(Condition.RUNTIME_ATTACHED) is None


def test_before_this_process_has_asked_nothing_is_missed_and_it_looks_again_soon() -> None:
    made, status = look(since(900))
    assert status.condition(Condition.RUNTIME_ATTACHED) is None
    assert made.recheck_after and made.recheck_after <= timedelta(seconds=11)
    of_another = replace(REFUSED, pod_uid="another")
    assert look(since(900), silence=of_another)[1].condition(Condition.RUNTIME_ATTACHED) is None


def test_a_script_that_uses_nothing_of_ours_under_spottrain_run_is_missed_too() -> None:
    starting = sample(state="Starting", step=0)
    _, status = look(since(300), sample=starting)
    _, status = look(since(300), status=status, sample=starting)
    assert condition(status, Condition.RUNTIME_ATTACHED).reason == "NotTraining"


def test_what_has_trained_once_is_attached_for_the_rest_of_the_job() -> None:
    _, status = look(make_pod(), sample=sample())
    assert condition(status, Condition.RUNTIME_ATTACHED).status == "True"
    _, later = look(make_pod(running_since=after(-900)), status=status, silence=REFUSED)
    assert condition(later, Condition.RUNTIME_ATTACHED).status == "True"


def test_a_late_runtime_takes_the_warning_back() -> None:
    _, status = look(since(300), silence=REFUSED)
    _, status = look(since(320), status=status, sample=sample())
    assert condition(status, Condition.RUNTIME_ATTACHED).status == "True"


def test_a_termination_message_shows_the_runtime_where_its_port_cannot_be_reached() -> None:
    _, status = look(told(Outcome.INTERRUPTED, step=3, startStep=0, pod=deleted()))
    assert condition(status, Condition.RUNTIME_ATTACHED).status == "True" and status.attempt == 2


# --- spec.training --------------------------------------------------------------------------------------
def test_fields_that_the_loop_does_not_apply_are_named_in_a_condition_and_an_event() -> None:
    made, status = look(make_pod(), sample=sample(ignoredSettings="emaDecay,data.numWorkers"))
    applied = condition(status, Condition.SETTINGS_APPLIED)
    assert (applied.status, applied.reason) == ("False", "FieldsIgnored")
    assert "emaDecay, data.numWorkers" in applied.message and "job_settings" in applied.message
    assert warnings(made) == ["FieldsIgnored"]
    again, _ = look(make_pod(), status=status, sample=sample(9, ignoredSettings="emaDecay,data.numWorkers"))
    assert not warnings(again), "it is said once"


def test_where_nobody_could_ask_the_termination_message_names_them() -> None:
    ended = told(Outcome.DONE, step=3, ignoredSettings="emaDecay")
    assert condition(look(ended)[1], Condition.SETTINGS_APPLIED).reason == "FieldsIgnored"


def test_a_loop_that_applies_everything_is_worth_no_condition_unless_it_did_not_before() -> None:
    _, status = look(make_pod(), sample=sample())
    assert status.condition(Condition.SETTINGS_APPLIED) is None
    _, before = look(make_pod(), sample=sample(ignoredSettings="emaDecay"))
    _, starting = look(make_pod(), status=before, sample=sample(state="Restoring"))
    assert condition(starting, Condition.SETTINGS_APPLIED).status == "False", "not known yet"
    _, after_all = look(make_pod(), status=before, sample=sample())
    assert condition(after_all, Condition.SETTINGS_APPLIED).status == "True"


# --- interruptions --------------------------------------------------------------------------------------
def noticed(seconds: float, status: Status = UNSEEN, **more: Any) -> tuple[Plan, Status]:
    doomed = make_node(notice=notice(100))
    pod = since(seconds, notice=notice(100), **deleted())
    return look(pod, status=status, nodes=(doomed,), **more)


def test_no_attempt_is_made_beside_one_whose_runtime_was_never_seen() -> None:
    made, status = noticed(30)
    assert status.attempt == 1 and not [a for a in made.after if isinstance(a, Create)]
    assert noticed(30, started())[1].attempt == 2, "our runtime waits at its gate"


def ended(ran: float, code: int = 143, **more: Any) -> PodView:
    """A pod that was deleted, and whose container had run for so long."""
    end = Ended(exit_code=code, started=after(-1 - ran), finished=after(-1), message="Terminated")
    return make_pod(phase="Failed", ended=end, **(deleted() | more))


def test_the_first_interruption_ends_a_job_without_our_runtime() -> None:
    _, status = look(since(300), silence=REFUSED)
    made, status = look(ended(400, code=137), status=status)
    failed = condition(status, Condition.FAILED)
    assert (failed.reason, status.attempt, status.interruptions) == ("NoRuntime", 1, 1)
    assert "step 0 again" in failed.message and "checkpoint.mode: Self" in failed.message
    assert status.attempts[0].cause == Cause.POD_DELETED and not status.attempts[0].charged
    assert "NoRuntime" in warnings(made)


def test_an_operator_that_was_away_knows_it_by_how_the_container_ended() -> None:
    assert condition(look(ended(301))[1], Condition.FAILED).reason == "NoRuntime"


def test_a_node_that_is_lost_ends_a_job_that_was_missed_its_runtime() -> None:
    _, status = look(since(300), silence=REFUSED)
    _, status = look(since(400), status=status, nodes=())
    assert condition(status, Condition.FAILED).reason == "NoRuntime"
    assert status.attempts[0].cause == Cause.NODE_LOST


@pytest.mark.parametrize(
    ("name", "pod", "status"),
    [
        ("before a runtime could have been imported", ended(200), UNSEEN),
        ("killed, so that no message could be written", ended(900, code=137), UNSEEN),
        ("with a runtime that had not saved yet", ended(900), started()),
        ("with a message", told(Outcome.INTERRUPTED, message="before it began", pod=deleted()), UNSEEN),
        (
            "before its container ran",
            make_pod(phase="Pending", node="", running_since=None, **deleted()),
            UNSEEN,
        ),
    ],
)
def test_a_job_that_is_interrupted_before_its_first_checkpoint_goes_on(
    name: str, pod: PodView, status: Status
) -> None:
    assert look(pod, status=status)[1].attempt == 2, name


def test_a_node_that_is_lost_behind_a_network_policy_is_no_evidence() -> None:
    _, status = look(since(300), silence=UNREACHABLE)
    assert look(since(400), status=status, nodes=())[1].attempt == 2


def test_a_suspension_is_no_interruption() -> None:
    _, status = look(since(300), silence=REFUSED)
    record = replace(status.attempts[0], stopping="Suspended", evidence="spec.suspend is true", charged=False)
    status = replace(status, attempts=(record,))
    assert not look(ended(400), status=status, spec=raw_spec(suspend=True))[1].terminal


def test_a_crash_is_charged_as_ever() -> None:
    _, status = look(since(300), silence=REFUSED)
    _, status = look(ended_pod(code=1), status=status)
    assert (status.attempt, status.failures) == (2, 1)


async def test_a_plain_script_under_a_notice_runs_once_and_alone() -> None:
    w = World()
    w.runtime_answers = False
    await w.begin()
    w.pass_time(400)
    pod = w.caches.pods.of(next(iter(w.caches.jobs.keys())))[0]
    w.memory.silences[pod.job] = Silence(pod_uid=pod.uid, refused=True)
    await w.settle()
    w._start()  # another operator process, which remembers nothing
    w.cluster.give_notice("node-a", 100)
    await w.settle()
    w.pass_time(5)
    await w.settle()
    assert w.cluster.posted == [w.pod(1)]
    w.cluster.end(w.pod(1), 143)
    await w.settle()
    assert w.status.phase == "Failed" and w.cluster.posted == [w.pod(1)]

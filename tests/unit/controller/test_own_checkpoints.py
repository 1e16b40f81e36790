"""Jobs whose image has no runtime of ours: their ends, their order, and what is shown of them."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from spottrain_operator.api.observed import Annotate, Create, Delete, Ended, NodeView, PodView
from spottrain_operator.api.training_job import AttemptRecord, Job, ProgressStatus, Status
from spottrain_operator.control.plan import plan
from spottrain_operator.names import Cause, Condition, Phase
from spottrain_operator.rendering import trainer_pod

from tests.builders import (
    NOW,
    POOL,
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
)
from tests.unit.controller.fake_cluster import World

OWN = raw_spec(checkpoint={"mode": "Self"})
NOTICED = make_node(notice=notice())


def _job(status: Status | None = None) -> Job:
    return make_job(OWN, status=status or started())


# --- what it is told ----------------------------------------------------------------------------------
def test_spot_capacity_with_checkpoints_of_its_own_is_accepted() -> None:
    job = _job()
    assert job.spec is not None and job.spec.capacity.type == "Spot" and not job.spec.checkpoint.uri


def test_it_is_told_who_it_is_and_nothing_of_checkpoints() -> None:
    told = trainer_pod.environment(_job(), Status(attempt=2, known_durable_step=3, gate_until=after(9)), 110)
    assert told["SPOTTRAIN_ATTEMPT"] == "2" and told["SPOTTRAIN_GRACE_SECONDS"] == "110"
    assert told["SPOTTRAIN_DEADLINE_FILE"]
    words = ("CHECKPOINT", "GATE", "DURABLE", "COMPILE", "DIGEST")
    assert not [name for name in told if any(word in name for word in words)]


def test_its_credentials_and_certificates_are_given_all_the_same() -> None:
    ca_bundle = {"configMapKeyRef": {"name": "ca"}}
    checkpoint = {"mode": "Self", "credentialsSecretRef": {"name": "s3"}, "caBundle": ca_bundle}
    manifest = trainer_pod.pod(make_job(raw_spec(checkpoint=checkpoint)), Status(attempt=1), POOL)
    trainer = manifest["spec"]["containers"][0]
    assert trainer["envFrom"] == [{"secretRef": {"name": "s3"}}]
    assert "AWS_CA_BUNDLE" in {e["name"] for e in trainer["env"]}


# --- why it ended -------------------------------------------------------------------------------------
def _past(code: int, **more: Any) -> PodView:
    end = Ended(exit_code=code, finished=NOW - timedelta(seconds=60))
    return make_pod(phase="Failed", ended=end, **more)


DRAINED: dict[str, Any] = {"disruption": "EvictionByEvictionAPI: evicting"}
UNCHARGED: list[tuple[str, PodView, NodeView, Cause]] = [
    (f"exit {code} {name}", replace(ended_pod(code=code), **more), node, cause)
    for code in (0, 143, 137, 1)
    for name, more, node, cause in (
        ("under a notice", {}, NOTICED, Cause.SPOT_NOTICE),
        ("under a notice of its own", {"notice": notice()}, make_node(), Cause.SPOT_NOTICE),
        ("after a deletion", deleted(), make_node(), Cause.POD_DELETED),
        ("in a drain", DRAINED, make_node(), Cause.DISRUPTED),
        (
            "at node shutdown",
            {"reason": "Terminated", "message": "shutdown"},
            make_node(),
            Cause.NODE_SHUTDOWN,
        ),
    )
]


@pytest.mark.parametrize(("pod", "node", "cause"), [c[1:] for c in UNCHARGED], ids=[c[0] for c in UNCHARGED])
def test_an_end_that_was_asked_for_is_an_interruption(pod: PodView, node: NodeView, cause: Cause) -> None:
    status = status_of(plan(make_observed(pod, job=_job(), nodes=(node,))))
    assert (status.attempt, status.failures, status.interruptions) == (2, 0, 1)
    assert status.attempts[0].cause == cause and not status.is_true(Condition.SUCCEEDED)


CHARGED: list[tuple[str, PodView, str]] = [
    ("143 unasked", ended_pod(code=143), "exit code 143 (SIGTERM, and no notice, deletion or memory limit"),
    ("137 unasked", ended_pod(code=137), "exit code 137 (SIGKILL, and no notice, deletion or memory limit"),
    (
        "137 for memory",
        ended_pod(code=137, reason="OOMKilled", memory_limit="2Gi"),
        "OOMKilled): its limit is 2Gi",
    ),
    ("143 before the deletion", _past(143, **deleted(10)), "exit code 143"),
    ("76 is no word of ours", ended_pod(code=76, message="bad protocol"), "exit code 76: bad protocol"),
    ("a crash", ended_pod(code=1, message="boom"), "exit code 1: boom"),
]


@pytest.mark.parametrize(("pod", "words"), [c[1:] for c in CHARGED], ids=[c[0] for c in CHARGED])
def test_an_end_that_nobody_asked_for_is_a_failure(pod: PodView, words: str) -> None:
    status = status_of(plan(make_observed(pod, job=_job())))
    assert (status.attempt, status.failures, status.interruptions) == (2, 1, 0)
    assert words in status.attempts[0].evidence


def test_exit_0_that_nobody_asked_for_is_success() -> None:
    status = status_of(plan(make_observed(ended_pod(code=0), job=_job())))
    assert status.is_true(Condition.SUCCEEDED) and status.phase == Phase.SUCCEEDED


# --- one after the other ------------------------------------------------------------------------------
def test_a_notice_makes_no_early_replacement_because_no_gate_would_hold_it() -> None:
    pod = make_pod(notice=notice(100))
    made = plan(make_observed(pod, job=_job(), nodes=(NOTICED,), annotated_at=after(-2)))
    assert [type(a) for a in made.before] == [Delete] and not any(isinstance(a, Create) for a in made.after)
    assert made.status is None or made.status.attempt == 1


def test_it_is_told_of_its_end_before_it_is_deleted() -> None:
    made = plan(make_observed(make_pod(), job=_job(), nodes=(NOTICED,)))
    assert [type(a) for a in made.before] == [Annotate]


async def test_the_next_attempt_waits_for_the_end_of_the_one_that_saves() -> None:
    w = World(spec=OWN)
    await w.begin()
    w.cluster.give_notice("node-a", 100)
    await w.settle()
    w.pass_time(2)
    await w.settle()
    assert w.cluster.pods[w.pod(1)]["metadata"].get("deletionTimestamp")
    assert w.status.attempt == 1 and w.cluster.posted == [w.pod(1)]
    w.cluster.end(w.pod(1), 143)
    await w.settle()
    assert (w.status.attempt, w.status.failures, w.status.interruptions) == (2, 0, 1)
    assert w.cluster.posted == [w.pod(1), w.pod(2)] and w.status.gate_until is None


# --- what is shown ------------------------------------------------------------------------------------
def test_its_progress_is_unknown_and_a_person_sees_so() -> None:
    status = status_of(plan(make_observed(make_pod(), job=_job())))
    assert status.progress is not None and status.progress.state == "Unknown"
    running = condition(status, Condition.RUNNING)
    assert running.status == "True" and status.phase == Phase.RUNNING
    assert "its progress is unknown, because spec.checkpoint.mode is Self" in running.message
    again = plan(make_observed(make_pod(), job=_job(status), now=after(300)))
    assert again.status is None, "it is written once"


def test_progress_is_unknown_only_while_the_trainer_runs_and_is_no_word_for_ours() -> None:
    waits = make_pod(phase="Pending", running_since=None, node="")
    made = plan(make_observed(waits, job=_job(replace(started(), attempts=(AttemptRecord(number=1),)))))
    assert status_of(made).progress is None
    assert status_of(plan(make_observed(make_pod()))).progress is None


def test_the_next_attempt_is_unknown_again() -> None:
    known = replace(started(2), progress=ProgressStatus(state="", time=NOW))
    status = status_of(plan(make_observed(make_pod(2), job=_job(known))))
    assert status.progress is not None and status.progress.state == "Unknown"


def test_an_image_that_answers_all_the_same_is_believed() -> None:
    known = replace(started(), progress=ProgressStatus(state="Unknown", time=NOW))
    status = status_of(plan(make_observed(make_pod(), job=_job(known), sample=sample(7))))
    assert status.progress is not None and (status.progress.state, status.progress.step) == ("Training", 7)

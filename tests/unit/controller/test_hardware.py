"""What hardware and kubelet do to a trainer: silent nodes, failed GPUs, a stopped process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from spottrain.contract import Outcome
from spottrain.contract import Reason as TrainerReason
from spottrain_operator.api.observed import NodeView, Observed, PodView
from spottrain_operator.api.training_job import AttemptRecord, Job
from spottrain_operator.api.views import node_view, pod_view
from spottrain_operator.control.actions import Create
from spottrain_operator.control.plan import plan
from spottrain_operator.names import Cause, Condition
from spottrain_operator.policies import hang, placement
from spottrain_operator.policies.cause import ending_of

from tests.builders import (
    after,
    books_of,
    condition,
    deleted,
    ended_pod,
    make_job,
    make_node,
    make_observed,
    make_pod,
    raw_spec,
    sample,
    started,
    told,
)
from tests.unit.controller.stories import Story, follows
from tests.unit.controller.test_interruptions import disruption, raw_node, raw_pod

SILENT = node_view(raw_node(conditions={"Ready": "Unknown Kubelet stopped posting node status."}))
BAD_GPU = "condition GPUXIDErrors=True (Xid 79)"


def silent_pod(seconds_ago: float) -> PodView:
    """Deleted by Kubernetes because its node is silent; nobody has told its end."""
    raw = raw_pod(deleted=-seconds_ago, **disruption("DeletionByTaintManager"))
    view = pod_view(raw)
    assert view is not None
    return view


def test_a_silent_node_is_told_of_and_its_pod_does_not_count_as_running_until_it_is_back() -> None:
    job = Story()
    job.look("Running=False/NodeNotReady phase=Waiting warns=NodeNotReady", make_pod(), nodes=(SILENT,))
    assert (job.status.ready_workers, job.status.workers) == (0, 1)
    job.look("Running=True", make_pod())


def test_what_kubernetes_deletes_because_its_node_is_silent_is_a_lost_node() -> None:
    ending = ending_of(silent_pod(31), make_observed(silent_pod(31), nodes=(SILENT,)))
    assert ending.cause is Cause.NODE_LOST and not ending.charged
    follows("Running=False !cause1", make_observed(silent_pod(10), nodes=(SILENT,)))


def test_what_has_ended_on_a_node_that_came_back_was_disrupted() -> None:
    pod = replace(silent_pod(31), ended=ended_pod(code=75).ended, phase="Failed")
    assert ending_of(pod, make_observed(pod, nodes=(make_node(),))).cause is Cause.DISRUPTED


def test_a_hang_on_a_silent_node_is_not_charged() -> None:
    ending = hang.stalled(stopped_since(40, nodes=(SILENT,)))
    assert ending is not None and (ending.cause, ending.charged) == (Cause.NODE_LOST, False)


# --- a pod that was deleted ----------------------------------------------------------------------------
def test_a_pod_that_somebody_deleted_does_not_just_run_on() -> None:
    deleting = make_observed(make_pod(**deleted(seconds_ago=3, grace=110)))
    follows("Running=False/StoppingAttempt phase=Stopping again=10", deleting)
    pod = make_pod(**deleted(seconds_ago=12, grace=110))
    trains, saves = sample(620), sample(620, state="Saving")
    follows("Running=False/StillTraining warns=StillTraining", make_observed(pod, sample=trains))
    follows("Running=False/StoppingAttempt", make_observed(pod, sample=saves))


# --- a process that is stopped ------------------------------------------------------------------------
def stopped_since(
    seconds: float, *, idle: float = 0.0, nodes: tuple[NodeView, ...] = (make_node(),)
) -> Observed:
    """A trainer under a limit of 20 s that answered so many seconds ago, and said to be idle for so long."""
    job = make_job(raw_spec(failurePolicy={"hangTimeoutSeconds": 20}), status=started())
    last = replace(sample(7, idleSeconds=idle, hangSeconds=20.0), at=after(-seconds))
    return make_observed(make_pod(), job=job, sample=last, nodes=nodes)


def test_a_trainer_that_answers_no_more_or_says_that_it_hangs_is_stalled() -> None:
    for seconds, idle in ((31, 0.0), (0, 21.0)):
        ending = hang.stalled(stopped_since(seconds, idle=idle))
        assert ending is not None and ending.cause is Cause.STALLED and ending.charged


def test_one_answer_that_is_late_is_no_hang() -> None:
    """It is asked every ten seconds: it may have got on since it said that it was idle for 18 of 20 s."""
    assert hang.stalled(stopped_since(3, idle=18.0)) is None
    assert hang.due(stopped_since(3, idle=18.0)) == after(27)


# --- failed GPUs --------------------------------------------------------------------------------------
def test_healthy_conditions_are_none() -> None:
    fine = {"GPUXIDErrors": "False", "AcceleratedHardwareReady": "True", "GPUMissing": "Unknown"}
    assert node_view(raw_node(conditions=fine)).fault == ""


def test_a_cuda_error_of_the_script_is_no_fault_of_the_node() -> None:
    script = ended_pod(code=1, message="RuntimeError: CUDA error: unspecified launch failure")
    assert ending_of(script, make_observed(script)).cause is Cause.FAILED


def test_a_device_plugins_word_on_the_trainers_devices_is_a_fault_of_the_node() -> None:
    raw = raw_pod(code=1)
    raw["status"]["containerStatuses"][0]["allocatedResourcesStatus"] = [
        {"name": "nvidia.com/gpu", "resources": [{"resourceID": "GPU-1", "health": "Unhealthy"}]}
    ]
    pod = pod_view(raw)
    assert pod is not None and ending_of(pod, make_observed(pod)).cause is Cause.NODE_FAULT


def test_a_hang_on_a_failed_gpu_is_not_charged() -> None:
    ending = hang.stalled(stopped_since(0, idle=21.0, nodes=(make_node(fault=BAD_GPU),)))
    assert ending is not None and (ending.cause, ending.node) == (Cause.NODE_FAULT, "node-a")


def test_an_interruption_is_counted_and_the_next_attempt_keeps_off_the_node() -> None:
    fault = told(Outcome.FAILED, reason=TrainerReason.NODE_FAULT, message="ECC")
    made = plan(make_observed(fault))
    assert made.status is not None and made.status.attempts[0].faulty_node == "node-a"
    assert (made.status.failures, made.status.interruptions) == (0, 1)
    o = make_observed(job=make_job(status=made.status), now=after(30))
    posted = next(a for a in plan(o).after if isinstance(a, Create))
    rules = posted.manifest["spec"]["affinity"]["nodeAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]
    assert {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["node-a"]} in rules[
        "nodeSelectorTerms"
    ][0]["matchExpressions"]


def faulted(hours: float) -> Job:
    """A gang whose first attempt ended by a fault of node-a so long ago."""
    record = AttemptRecord(
        number=1,
        cause="NodeFault",
        pool="default",
        faulty_node="node-a",
        ended=after(-3600 * hours),
    )
    next_one = AttemptRecord(number=2, pool="default", workers=2)
    return make_job(raw_spec(workers=2), status=replace(started(), attempt=2, attempts=(record, next_one)))


def test_a_survivor_comes_back_to_its_node_and_the_rank_of_the_failed_gpu_does_not() -> None:
    books = books_of(("node-a", "node-b"))
    o = make_observed(job=faulted(0), nodes=(make_node(), make_node("node-b")), books=books)
    nodes = placement.previous_nodes(o, o.job.status)
    assert {rank: node.name for rank, node in nodes.items()} == {1: "node-b"}
    assert placement.to_avoid(o, o.job.status) == ("node-a",)


def test_after_a_day_the_node_may_be_used_again() -> None:
    o = make_observed(job=faulted(24.1), nodes=(make_node(),))
    assert placement.to_avoid(o, o.job.status) == ()


# --- what is said of a pod without a node -----------------------------------------------------------------
def scheduled(o: Observed) -> str:
    return condition(follows("Scheduled=False/Unschedulable", o), Condition.SCHEDULED).message


def gang_in_one_zone(first: PodView, words: str, **capacity: Any) -> str:
    lost = make_pod(rank=1, node="", phase="Pending", unschedulable=words)
    record = replace(started().attempts[0], workers=2)
    job = make_job(raw_spec(workers=2, capacity=capacity), status=replace(started(), attempts=(record,)))
    return scheduled(make_observed(first, lost, job=job))


def test_a_gang_that_no_single_zone_fits_is_told_of_same_zone() -> None:
    pods = "1 Insufficient nvidia.com/gpu, 2 node(s) didn't match pod affinity rules."
    assert "sameZone" in gang_in_one_zone(make_pod(), pods)
    assert "sameZone" not in gang_in_one_zone(make_pod(), pods, sameZone=False)
    nodes = "1 Insufficient nvidia.com/gpu, 2 node(s) didn't match Pod's node affinity/selector."
    assert "sameZone" in gang_in_one_zone(make_pod(), nodes), "the zone may be in its node affinity"


TOLD = (
    make_observed(make_pod(), nodes=(SILENT,)),
    make_observed(silent_pod(10), nodes=(SILENT,)),
    make_observed(make_pod(**deleted(seconds_ago=3, grace=110))),
    make_observed(make_pod(**deleted(seconds_ago=12, grace=110)), sample=sample(620)),
    *(stopped_since(31, nodes=nodes) for nodes in ((make_node(),), (SILENT,), (make_node(fault=BAD_GPU),))),
    stopped_since(0, idle=21.0),
)
"""Scenes whose sentences are in tests/unit/sentences.txt."""

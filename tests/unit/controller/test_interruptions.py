"""Every row of docs/interruptions.md: what a node or pod shows, the cause, what it counts as, what is done.

From raw objects, as the API server gives them, to the plan.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from spottrain.contract import Outcome
from spottrain_operator.api.observed import Delete, Observed
from spottrain_operator.api.views import node_view, pod_events, pod_view
from spottrain_operator.api.wire import rfc3339
from spottrain_operator.control.plan import plan
from spottrain_operator.names import (
    ATTEMPT_LABEL,
    JOB_UID_LABEL,
    OUTCOME_FINALIZER,
    RANK_LABEL,
    Cause,
)

from tests.builders import KEY, NOW, OWNER, after, make_job, make_observed, raw_spec, started, word

Json = dict[str, Any]
PAGE = Path(__file__).resolve().parents[3] / "docs" / "interruptions.md"
SOON, AGO = rfc3339(after(60)), rfc3339(after(-20))


def unix(seconds: float) -> str:
    return str(int(after(seconds).timestamp()))


def node(*, taints: Json | None = None, conditions: Json | None = None, **meta: Any) -> Json:
    """`taints`: value by key. `conditions`: status by type, all since 20 seconds."""
    ready = {"Ready": "True"} | (conditions or {})
    shown = [
        {"type": kind, "status": status.partition(" ")[0], "message": status.partition(" ")[2]}
        | {"lastTransitionTime": AGO}
        for kind, status in ready.items()
    ]
    spec = {"taints": [{"key": k, "value": v, "effect": "NoSchedule"} for k, v in (taints or {}).items()]}
    metadata = {"name": "node-a", "resourceVersion": "1"} | meta
    return {"metadata": metadata, "spec": spec, "status": {"conditions": shown}}


def pod(*, deleted: float | None = None, code: int | None = None, said: str = "", **status: Any) -> Json:
    """`deleted`: seconds from now to its deletion deadline, of 110 s; `code`: it ended a second ago."""
    meta: Json = {
        "name": "pod",
        "namespace": KEY.namespace,
        "uid": "u",
        "resourceVersion": "1",
        "creationTimestamp": rfc3339(after(-600)),
        "labels": {ATTEMPT_LABEL: "1", RANK_LABEL: "0", JOB_UID_LABEL: KEY.uid},
        "finalizers": [OUTCOME_FINALIZER],
        "ownerReferences": [OWNER],
    }
    if deleted is not None:
        meta |= {"deletionTimestamp": rfc3339(after(deleted)), "deletionGracePeriodSeconds": 110}
    state: Json = {"running": {"startedAt": rfc3339(after(-590))}}
    shown: Json = {"phase": "Running"}
    if code is not None:
        state = {"terminated": {"exitCode": code, "message": said, "finishedAt": rfc3339(after(-1))}}
        shown = {"phase": "Failed" if code else "Succeeded"}
    if reason := status.pop("container_reason", ""):
        state["terminated"]["reason"] = reason
    if not status.pop("rejected", False):
        shown["containerStatuses"] = [{"name": "trainer", "state": state}]
    spec = {"nodeName": "node-a", "containers": [{"name": "trainer"}], "terminationGracePeriodSeconds": 110}
    return {"metadata": meta, "spec": spec, "status": shown | status}


def disruption(reason: str, value: str = "True") -> Json:
    return {"conditions": [{"type": "DisruptionTarget", "status": value, "reason": reason, "message": "m"}]}


SAVED = word(Outcome.INTERRUPTED, step=9, durableStep=9)
INTERRUPTION, FAILURE, NOTHING = (0, 1), (1, 0), (0, 0)


@dataclass(frozen=True, kw_only=True)
class Row:
    """`told`: a running pod here is asked to save and end."""

    pod: Json
    node: Json | None = field(default_factory=node)
    cause: Cause | None
    counts: tuple[int, int] = INTERRUPTION
    told: bool = False
    events: tuple[Json, ...] = ()
    """Of the pod."""


OURS = {
    "spottrain.io/termination-deadline": SOON,
    "spottrain.io/termination-source": "AWS spot/instance-action",
    "spottrain.io/notice-seen": AGO,
}
ROWS: dict[str, Row] = {
    "own-agent": Row(pod=pod(), node=node(annotations=OURS), cause=None, counts=NOTHING, told=True),
    "own-agent-end": Row(pod=pod(code=75, said=SAVED), node=node(annotations=OURS), cause=Cause.SPOT_NOTICE),
    "own-agent-crash": Row(pod=pod(code=1), node=node(annotations=OURS), cause=Cause.SPOT_NOTICE),
    "rebalance": Row(
        pod=pod(),
        node=node(annotations={"spottrain.io/save-advised": AGO}),
        cause=None,
        counts=NOTHING,
    ),
    "karpenter-disrupted": Row(
        pod=pod(),
        node=node(taints={"karpenter.sh/disrupted": ""}, deletionTimestamp=AGO),
        cause=None,
        counts=NOTHING,
        told=True,
    ),
    "karpenter-stamped": Row(
        pod=pod(),
        node=node(annotations={"karpenter.sh/nodeclaim-termination-timestamp": SOON}),
        cause=None,
        counts=NOTHING,
        told=True,
    ),
    "karpenter-evicts": Row(
        pod=pod(code=143, deleted=50),
        node=node(taints={"karpenter.sh/disrupted": ""}),
        cause=Cause.DISRUPTED,
    ),
    "nth-spot": Row(
        pod=pod(),
        node=node(
            taints={"aws-node-termination-handler/spot-itn": "e"},
            labels={"aws-node-termination-handler/action-time": unix(60)},
        ),
        cause=None,
        counts=NOTHING,
        told=True,
    ),
    "nth-drain": Row(
        pod=pod(code=75, said=SAVED, deleted=50),
        node=node(taints={"aws-node-termination-handler/scheduled-maintenance": "e"}),
        cause=Cause.DISRUPTED,
    ),
    "gke-impending": Row(
        pod=pod(code=143),
        node=node(taints={"cloud.google.com/impending-node-termination": ""}),
        cause=Cause.DISRUPTED,
    ),
    "gke-preempting": Row(
        pod=pod(), node=node(conditions={"GCESpotPreempting": "True"}), cause=None, counts=NOTHING, told=True
    ),
    "gke-maintenance": Row(
        pod=pod(code=143, deleted=50),
        node=node(labels={"cloud.google.com/active-node-maintenance": "ONGOING"}),
        cause=Cause.DISRUPTED,
    ),
    "aks-eviction": Row(
        pod=pod(),
        node=node(conditions={"PreemptionScheduled": "True"}),
        cause=None,
        counts=NOTHING,
        told=True,
    ),
    "aks-event": Row(
        pod=pod(code=143, deleted=50),
        node=node(conditions={"VMEventScheduled": "True Redeploy"}),
        cause=Cause.DISRUPTED,
    ),
    "aks-drain": Row(
        pod=pod(code=143, deleted=50),
        node=node(taints={"remediator.kubernetes.azure.com/unschedulable": ""}),
        cause=Cause.DISRUPTED,
    ),
    "cluster-autoscaler": Row(
        pod=pod(code=143, deleted=50),
        node=node(taints={"ToBeDeletedByClusterAutoscaler": unix(-30)}),
        cause=Cause.DISRUPTED,
    ),
    "leaving-crash": Row(
        pod=pod(code=1),
        node=node(taints={"ToBeDeletedByClusterAutoscaler": unix(-30)}),
        cause=Cause.FAILED,
        counts=FAILURE,
    ),
    "eviction": Row(
        pod=pod(code=143, deleted=50, **disruption("EvictionByEvictionAPI")), cause=Cause.DISRUPTED
    ),
    "taint-eviction": Row(
        pod=pod(code=143, deleted=50, **disruption("DeletionByTaintManager")), cause=Cause.DISRUPTED
    ),
    "scheduler-preemption": Row(
        pod=pod(code=75, said=SAVED, deleted=50, **disruption("PreemptionByScheduler")), cause=Cause.DISRUPTED
    ),
    "pod-gc": Row(pod=pod(code=137, **disruption("DeletionByPodGC")), cause=Cause.DISRUPTED),
    "node-pressure": Row(pod=pod(code=137, **disruption("TerminationByKubelet")), cause=Cause.DISRUPTED),
    "disruption-alone": Row(pod=pod(**disruption("EvictionByEvictionAPI")), cause=None, counts=NOTHING),
    "disruption-cleared": Row(
        pod=pod(code=1, **disruption("EvictionByEvictionAPI", "False")), cause=Cause.FAILED, counts=FAILURE
    ),
    "graceful-shutdown": Row(
        pod=pod(
            code=143, reason="Terminated", message="Pod was terminated in response to imminent node shutdown."
        ),
        cause=Cause.NODE_SHUTDOWN,
    ),
    "node-deleted": Row(pod=pod(), node=None, cause=Cause.NODE_LOST),
    "node-silent": Row(
        pod=pod(deleted=-40, **disruption("DeletionByTaintManager")),
        node=node(conditions={"Ready": "Unknown"}),
        cause=Cause.NODE_LOST,
    ),
    "node-silent-yet": Row(
        pod=pod(deleted=40), node=node(conditions={"Ready": "Unknown"}), cause=None, counts=NOTHING
    ),
    "out-of-service": Row(
        pod=pod(),
        node=node(taints={"node.kubernetes.io/out-of-service": "nodeshutdown"}),
        cause=Cause.NODE_LOST,
    ),
    "kubelet-rejects": Row(
        pod=pod(rejected=True, phase="Failed", reason="UnexpectedAdmissionError", message="no GPU"),
        cause=Cause.POD_REJECTED,
    ),
    "kubelet-out-of": Row(
        pod=pod(rejected=True, phase="Failed", reason="OutOfcpu", message="m"), cause=Cause.POD_REJECTED
    ),
    "deleted-by-hand": Row(pod=pod(code=75, said=SAVED, deleted=50), cause=Cause.POD_DELETED),
    "exit-0-on-sigterm": Row(pod=pod(code=0, deleted=50), cause=Cause.POD_DELETED),
    "saved-unasked": Row(pod=pod(code=75, said=SAVED), cause=Cause.INTERRUPTED),
    "store-unreachable": Row(
        pod=pod(code=69, said=word(Outcome.STORE_UNREACHABLE, message="s3://b/p at http://m did not answer")),
        cause=Cause.STORE_UNREACHABLE,
        counts=NOTHING,
    ),
    "gpu-word": Row(
        pod=pod(code=1, said=word(Outcome.FAILED, reason="NodeFault", message="uncorrectable ECC error")),
        cause=Cause.NODE_FAULT,
    ),
    "gpu-log": Row(
        pod=pod(code=1, said="RuntimeError: CUDA error: uncorrectable ECC error encountered"),
        cause=Cause.NODE_FAULT,
    ),
    "gpu-aks": Row(
        pod=pod(code=1), node=node(conditions={"GPUXIDErrors": "True Xid 79"}), cause=Cause.NODE_FAULT
    ),
    "gpu-eks": Row(
        pod=pod(code=1), node=node(conditions={"AcceleratedHardwareReady": "False"}), cause=Cause.NODE_FAULT
    ),
    "gpu-nvsentinel": Row(
        pod=pod(code=1), node=node(conditions={"SysLogsXIDError": "True Xid 79"}), cause=Cause.NODE_FAULT
    ),
    "gpu-taint": Row(
        pod=pod(code=1), node=node(taints={"nvidia.com/gpu.unhealthy": ""}), cause=Cause.NODE_FAULT
    ),
    "probe": Row(
        pod=pod(code=75, said=SAVED),
        events=({"reason": "Killing", "message": "Container trainer failed liveness probe"},),
        cause=Cause.FAILED,
        counts=FAILURE,
    ),
    "oom": Row(pod=pod(code=137, container_reason="OOMKilled"), cause=Cause.OUT_OF_MEMORY, counts=FAILURE),
    "storage-limit": Row(
        pod=pod(code=137, reason="Evicted", message="ephemeral storage"), cause=Cause.FAILED, counts=FAILURE
    ),
    "unexplained-sigkill": Row(pod=pod(code=137), cause=Cause.FAILED, counts=FAILURE),
    "exit-0-in-silence": Row(pod=pod(code=0), cause=Cause.BAD_CONFIGURATION, counts=FAILURE),
    "untrained": Row(
        pod=pod(code=0, said=word(Outcome.UNTRAINED, reason="NotTrained")),
        cause=Cause.BAD_CONFIGURATION,
        counts=FAILURE,
    ),
}


def observed(row: Row) -> Observed:
    view = pod_view(row.pod)
    assert view is not None
    nodes = (node_view(row.node),) if row.node is not None else ()
    made = make_observed(view, job=make_job(raw_spec(), status=started()), nodes=nodes)
    return replace(made, heard={view.uid: pod_events(row.events, view.trainer)})


@pytest.mark.parametrize("name", ROWS)
def test_a_row(name: str) -> None:
    row = ROWS[name]
    made = plan(observed(row))
    status = made.status or started()
    record = next(r for r in status.attempts if r.number == 1)
    assert record.cause == (row.cause or "")
    assert (status.failures, status.interruptions) == row.counts
    told = [a for a in made.before if not isinstance(a, Delete)]
    assert bool(told) == (row.told or name == "rebalance")
    if row.cause is not None:
        assert record.evidence, "and it says how that is known"


def test_the_page_has_each_row_and_no_other() -> None:
    lines = re.findall(r"^\| `([a-z0-9-]+)` \|.*\| ([A-Za-z-]+) \| ([a-z]+) \|", PAGE.read_text(), re.M)
    charges = {INTERRUPTION: "interruption", FAILURE: "failure", NOTHING: "nothing"}
    assert {(name, cause, counts) for name, cause, counts in lines} == {
        (name, str(row.cause or "-"), charges[row.counts]) for name, row in ROWS.items()
    }


def test_a_stale_notice_excuses_nothing() -> None:
    old = OURS | {
        "spottrain.io/termination-deadline": rfc3339(NOW - timedelta(minutes=30)),
        "spottrain.io/notice-seen": rfc3339(NOW - timedelta(minutes=32)),
    }
    made = plan(observed(Row(pod=pod(code=1), node=node(annotations=old), cause=Cause.FAILED)))
    assert made.status is not None and made.status.failures == 1

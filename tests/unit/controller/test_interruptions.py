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
from spottrain_operator.api.observed import Observed
from spottrain_operator.api.views import node_view, pod_view
from spottrain_operator.api.wire import rfc3339
from spottrain_operator.control.actions import Annotate
from spottrain_operator.control.plan import plan
from spottrain_operator.names import (
    ATTEMPT_LABEL,
    JOB_UID_LABEL,
    OUTCOME_FINALIZER,
    RANK_LABEL,
    Cause,
    pod_name,
)

from tests.builders import KEY, NOW, OWNER, after, make_job, make_observed, make_pod, raw_spec, started, word

Json = dict[str, Any]
PAGE = Path(__file__).resolve().parents[3] / "docs" / "interruptions.md"
SOON, AGO = rfc3339(after(60)), rfc3339(after(-20))


def unix(seconds: float) -> str:
    return str(int(after(seconds).timestamp()))


def raw_node(*, taints: Json | None = None, conditions: Json | None = None, **meta: Any) -> Json:
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


def raw_pod(*, deleted: float | None = None, code: int | None = None, said: str = "", **status: Any) -> Json:
    """`deleted`: seconds from now to its deletion deadline, of 110 s; `code`: it ended a second ago."""
    meta: Json = {
        "name": pod_name(KEY.name, KEY.uid, 1),
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


INTERRUPTION, FAILURE, NOTHING = (0, 1), (1, 0), (0, 0)


@dataclass(frozen=True)
class Row:
    """What the API server shows, and what follows. `told`: whether the pod is annotated."""

    pod: Json
    cause: Cause | None
    counts: tuple[int, int] = INTERRUPTION
    node: Json | None = field(default_factory=lambda: raw_node())
    told: bool = False
    """Of the pod."""


def asked(node: Json) -> Row:
    """A running pod there is annotated, and has not ended."""
    return Row(raw_pod(), None, NOTHING, node, told=True)


def drained(**node: Any) -> Row:
    """The pod was deleted on such a node, and its trainer ended by SIGTERM."""
    return Row(raw_pod(code=143, deleted=50), Cause.DISRUPTED, node=raw_node(**node))


def faulty(**node: Any) -> Row:
    return Row(raw_pod(code=1), Cause.NODE_FAULT, node=raw_node(**node))


OURS = {
    "spottrain.io/termination-deadline": SOON,
    "spottrain.io/termination-source": "AWS spot/instance-action",
    "spottrain.io/notice-seen": AGO,
}
SAVED: Json = {"code": 75, "said": word(Outcome.INTERRUPTED, step=9, durableStep=9)}
NTH = "aws-node-termination-handler"
SCALED_DOWN = {"ToBeDeletedByClusterAutoscaler": unix(-30)}
SHUT_DOWN: Json = {
    "reason": "Terminated",
    "message": "Pod was terminated in response to imminent node shutdown.",
}
SILENT_STORE = word(Outcome.STORE_UNREACHABLE, message="s3://b/p at http://m did not answer")
ECC = word(Outcome.FAILED, reason="NodeFault", message="uncorrectable ECC error")
ROWS: dict[str, Row] = {
    "own-agent": asked(raw_node(annotations=OURS)),
    "own-agent-end": Row(raw_pod(**SAVED), Cause.SPOT_NOTICE, node=raw_node(annotations=OURS)),
    "own-agent-crash": Row(raw_pod(code=1), Cause.SPOT_NOTICE, node=raw_node(annotations=OURS)),
    "rebalance": asked(raw_node(annotations={"spottrain.io/save-advised": AGO})),
    "karpenter-disrupted": asked(raw_node(taints={"karpenter.sh/disrupted": ""}, deletionTimestamp=AGO)),
    "karpenter-stamped": asked(raw_node(annotations={"karpenter.sh/nodeclaim-termination-timestamp": SOON})),
    "karpenter-evicts": drained(taints={"karpenter.sh/disrupted": ""}),
    "nth-spot": asked(raw_node(taints={f"{NTH}/spot-itn": "e"}, labels={f"{NTH}/action-time": unix(60)})),
    "nth-drain": Row(
        raw_pod(**SAVED, deleted=50),
        Cause.DISRUPTED,
        node=raw_node(taints={f"{NTH}/scheduled-maintenance": "e"}),
    ),
    "gke-impending": Row(
        raw_pod(code=143),
        Cause.DISRUPTED,
        node=raw_node(taints={"cloud.google.com/impending-node-termination": ""}),
    ),
    "gke-preempting": asked(raw_node(conditions={"GCESpotPreempting": "True"})),
    "gke-maintenance": drained(labels={"cloud.google.com/active-node-maintenance": "ONGOING"}),
    "aks-eviction": asked(raw_node(conditions={"PreemptionScheduled": "True"})),
    "aks-event": drained(conditions={"VMEventScheduled": "True Redeploy"}),
    "aks-drain": drained(taints={"remediator.kubernetes.azure.com/unschedulable": ""}),
    "cluster-autoscaler": drained(taints=SCALED_DOWN),
    "leaving-crash": Row(raw_pod(code=1), Cause.FAILED, FAILURE, raw_node(taints=SCALED_DOWN)),
    "eviction": Row(raw_pod(code=143, deleted=50, **disruption("EvictionByEvictionAPI")), Cause.DISRUPTED),
    "taint-eviction": Row(
        raw_pod(code=143, deleted=50, **disruption("DeletionByTaintManager")), Cause.DISRUPTED
    ),
    "scheduler-preemption": Row(
        raw_pod(**SAVED, deleted=50, **disruption("PreemptionByScheduler")), Cause.DISRUPTED
    ),
    "pod-gc": Row(raw_pod(code=137, **disruption("DeletionByPodGC")), Cause.DISRUPTED),
    "node-pressure": Row(raw_pod(code=137, **disruption("TerminationByKubelet")), Cause.DISRUPTED),
    "disruption-alone": Row(raw_pod(**disruption("EvictionByEvictionAPI")), None, NOTHING),
    "disruption-cleared": Row(
        raw_pod(code=1, **disruption("EvictionByEvictionAPI", "False")), Cause.FAILED, FAILURE
    ),
    "graceful-shutdown": Row(raw_pod(code=143, **SHUT_DOWN), Cause.NODE_SHUTDOWN),
    "node-deleted": Row(raw_pod(), Cause.NODE_LOST, node=None),
    "node-silent": Row(
        raw_pod(deleted=-40, **disruption("DeletionByTaintManager")),
        Cause.NODE_LOST,
        node=raw_node(conditions={"Ready": "Unknown"}),
    ),
    "node-silent-yet": Row(raw_pod(deleted=40), None, NOTHING, raw_node(conditions={"Ready": "Unknown"})),
    "status-unknown": Row(raw_pod(code=137, container_reason="ContainerStatusUnknown"), Cause.NODE_LOST),
    "restarted-machine": Row(raw_pod(code=255, container_reason="Unknown"), Cause.NODE_LOST),
    "out-of-service": Row(
        raw_pod(), Cause.NODE_LOST, node=raw_node(taints={"node.kubernetes.io/out-of-service": "x"})
    ),
    "kubelet-rejects": Row(
        raw_pod(rejected=True, phase="Failed", reason="UnexpectedAdmissionError", message="no GPU"),
        Cause.POD_REJECTED,
    ),
    "kubelet-out-of": Row(
        raw_pod(rejected=True, phase="Failed", reason="OutOfcpu", message="m"), Cause.POD_REJECTED
    ),
    "kubelet-rejects-again": Row(
        raw_pod(code=137, reason="UnexpectedAdmissionError", message="no healthy GPU"), Cause.POD_REJECTED
    ),
    "deleted-by-hand": Row(raw_pod(**SAVED, deleted=50), Cause.POD_DELETED),
    "exit-0-on-sigterm": Row(raw_pod(code=0, deleted=50), Cause.POD_DELETED),
    "saved-unasked": Row(raw_pod(**SAVED), Cause.INTERRUPTED),
    "store-unreachable": Row(raw_pod(code=69, said=SILENT_STORE), Cause.STORE_UNREACHABLE, NOTHING),
    "gpu-word": Row(raw_pod(code=1, said=ECC), Cause.NODE_FAULT),
    "gpu-log": Row(
        raw_pod(code=1, said="RuntimeError: CUDA error: uncorrectable ECC error encountered"),
        Cause.NODE_FAULT,
    ),
    "gpu-aks": faulty(conditions={"GPUXIDErrors": "True Xid 79"}),
    "gpu-eks": faulty(conditions={"AcceleratedHardwareReady": "False"}),
    "gpu-nvsentinel": faulty(conditions={"SysLogsXIDError": "True Xid 79"}),
    "gpu-taint": faulty(taints={"nvidia.com/gpu.unhealthy": ""}),
    "oom": Row(raw_pod(code=137, container_reason="OOMKilled"), Cause.OUT_OF_MEMORY, FAILURE),
    "storage-limit": Row(
        raw_pod(code=137, reason="Evicted", message="ephemeral storage"), Cause.FAILED, FAILURE
    ),
    "unexplained-sigkill": Row(raw_pod(code=137), Cause.FAILED, FAILURE),
    "exit-0-in-silence": Row(raw_pod(code=0), Cause.BAD_CONFIGURATION, FAILURE),
    "untrained": Row(
        raw_pod(code=0, said=word(Outcome.UNTRAINED, reason="NotTrained")), Cause.BAD_CONFIGURATION, FAILURE
    ),
}


def observed(row: Row) -> Observed:
    view = pod_view(row.pod)
    assert view is not None
    nodes = (node_view(row.node),) if row.node is not None else ()
    return make_observed(view, job=make_job(raw_spec(), status=started()), nodes=nodes)


@pytest.mark.parametrize("name", ROWS)
def test_a_row(name: str) -> None:
    row = ROWS[name]
    made = plan(observed(row))
    status = made.status or started()
    record = next(r for r in status.attempts if r.number == 1)
    assert record.cause == (row.cause or "")
    assert (status.failures, status.interruptions) == row.counts
    assert any(isinstance(a, Annotate) for a in made.before) == row.told
    if row.cause is not None:
        assert record.evidence, "and it says how that is known"


def test_the_page_has_each_row_and_no_other() -> None:
    parts = re.findall(r"^### ([\w ]+): (\w+)$(.*?)(?=^##|\Z)", PAGE.read_text(), re.M | re.S)
    charges = {INTERRUPTION: "interruption", FAILURE: "failure", NOTHING: "nothing"}
    found = [(name, *of) for *of, text in parts for name in re.findall(r"^- `([a-z0-9-]+)`: ", text, re.M)]
    assert sorted(found) == sorted(
        (name, str(row.cause or "No cause yet"), charges[row.counts]) for name, row in ROWS.items()
    )


def test_an_init_container_that_the_kubelet_found_gone_is_the_nodes_end_too() -> None:
    pod = raw_pod(rejected=True, phase="Failed")
    gone = {"exitCode": 137, "reason": "ContainerStatusUnknown", "message": "could not be located"}
    pod["status"]["initContainerStatuses"] = [{"name": "fetch", "state": {"terminated": gone}}]
    waits = {"waiting": {"reason": "PodInitializing"}}
    pod["status"]["containerStatuses"] = [{"name": "trainer", "state": waits}]
    made = plan(observed(Row(pod, Cause.NODE_LOST)))
    assert made.status is not None
    assert (made.status.attempts[0].cause, made.status.failures) == (Cause.NODE_LOST, 0)
    assert "container fetch" in made.status.attempts[0].evidence


def test_a_pod_that_was_deleted_before_its_container_began_was_deleted() -> None:
    gone = raw_pod(code=137, container_reason="ContainerStatusUnknown", deleted=50)
    made = plan(observed(Row(gone, Cause.POD_DELETED)))
    assert made.status is not None and made.status.attempts[0].cause == Cause.POD_DELETED


@pytest.mark.parametrize("code", [137, 255])
def test_a_pod_of_its_own_end_is_charged_for_an_exit_code_that_the_kubelet_also_makes_up(code: int) -> None:
    made = plan(observed(Row(raw_pod(code=code, container_reason="Error"), Cause.FAILED, FAILURE)))
    assert made.status is not None and made.status.failures == 1


@pytest.mark.parametrize(("given", "left"), [(None, 30), (15, 30), (105, 105)])
def test_the_time_that_the_pool_gives_counts_where_a_condition_says_none(
    given: int | None, left: int
) -> None:
    record = replace(started().attempts[0], notice_seconds=given)
    status = replace(started(), attempts=(record,))
    node = node_view(raw_node(conditions={"GCESpotPreempting": "True"}))
    assert node.notice is not None and node.notice.seen is not None
    o = make_observed(
        make_pod(), job=make_job(raw_spec(), status=status), nodes=(node,), now=node.notice.seen
    )
    (told,) = (a for a in plan(o).before if isinstance(a, Annotate))
    until = rfc3339(node.notice.seen + timedelta(seconds=left), timespec="microseconds")
    assert told.words["spottrain.io/termination-deadline"] == until


def test_a_stale_notice_excuses_nothing() -> None:
    old = OURS | {
        "spottrain.io/termination-deadline": rfc3339(NOW - timedelta(minutes=30)),
        "spottrain.io/notice-seen": rfc3339(NOW - timedelta(minutes=32)),
    }
    made = plan(observed(Row(raw_pod(code=1), Cause.FAILED, node=raw_node(annotations=old))))
    assert made.status is not None and made.status.failures == 1

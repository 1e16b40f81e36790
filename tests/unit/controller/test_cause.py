"""Why an attempt ended, row by row of design.md's order."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from spottrain.contract import Outcome, Reason
from spottrain_operator.api.observed import Ended, NodeView, PodView
from spottrain_operator.api.views import pod_view
from spottrain_operator.names import Cause
from spottrain_operator.policies.cause import why

from tests.builders import (
    KEY,
    NOW,
    OWNER,
    deleted,
    ended_pod,
    make_node,
    make_observed,
    make_pod,
    notice,
    told,
    word,
)

DISRUPTION: dict[str, Any] = {"disruption": "DeletionByTaintManager: node is tainted"}
EVICTED: dict[str, Any] = {"phase": "Failed", "reason": "Evicted", "message": "emptyDir exceeds 1Gi"}
TOO_LONG: dict[str, Any] = {
    "phase": "Failed",
    "reason": "DeadlineExceeded",
    "message": "active longer than 60 s",
}
NOTICED = make_node(notice=notice())


def _pod_at(seconds_ago: float, code: int, **more: Any) -> PodView:
    end = Ended(exit_code=code, finished=NOW - timedelta(seconds=seconds_ago))
    return make_pod(phase="Failed", ended=end, **more)


def _shut_down() -> PodView:
    return replace(ended_pod(code=0), reason="Terminated", message="in response to imminent node shutdown")


CASES: list[tuple[str, PodView, tuple[NodeView, ...], Cause, bool]] = [
    (
        "done is done even while it is deleted",
        told(Outcome.DONE, pod=deleted()),
        (NOTICED,),
        Cause.DONE,
        False,
    ),
    (
        "a rank of several that ran out of memory goes on smaller, and is not charged",
        told(Outcome.INTERRUPTED_LOST, reason=Reason.OUT_OF_MEMORY, message="rank 1 ran out of memory"),
        (make_node(),),
        Cause.INTERRUPTED,
        False,
    ),
    (
        "exit 0 without a word of the runtime is no success",
        ended_pod(code=0),
        (make_node(),),
        Cause.BAD_CONFIGURATION,
        True,
    ),
    (
        "a script that has not trained",
        told(Outcome.UNTRAINED, reason=Reason.NOT_TRAINED),
        (make_node(),),
        Cause.BAD_CONFIGURATION,
        True,
    ),
    ("rank 0 decides for its gang", ended_pod(code=0, rank=1), (make_node(),), Cause.DONE, False),
    (
        "exit 0 after a deletion is no success",
        ended_pod(code=0, **deleted()),
        (make_node(),),
        Cause.POD_DELETED,
        False,
    ),
    ("exit 0 under a notice is no success", ended_pod(code=0), (NOTICED,), Cause.SPOT_NOTICE, False),
    (
        "exit 0 under disruption is no success",
        ended_pod(code=0, **DISRUPTION),
        (make_node(),),
        Cause.DISRUPTED,
        False,
    ),
    (
        "exit 0 at node shutdown is no success",
        _shut_down(),
        (make_node(),),
        Cause.NODE_SHUTDOWN,
        False,
    ),
    ("64 is permanent even under a notice", ended_pod(code=64), (NOTICED,), Cause.BAD_CONFIGURATION, True),
    (
        "the message says 64 whatever the code",
        ended_pod(code=1, message=word(Outcome.BAD_CONFIGURATION, reason="StoreDenied", message="403")),
        (make_node(),),
        Cause.BAD_CONFIGURATION,
        True,
    ),
    ("a crash in a reclaimed node's last seconds", ended_pod(code=1), (NOTICED,), Cause.SPOT_NOTICE, False),
    ("a crash before the notice came", _pod_at(60, 1), (NOTICED,), Cause.FAILED, True),
    ("a notice on the pod", ended_pod(code=137, notice=notice()), (make_node(),), Cause.SPOT_NOTICE, False),
    (
        "an old notice excuses nothing",
        ended_pod(code=1),
        (make_node(notice=notice(-600)),),
        Cause.FAILED,
        True,
    ),
    ("75 without evidence", ended_pod(code=75), (make_node(),), Cause.INTERRUPTED, False),
    ("79 without evidence", ended_pod(code=79), (make_node(),), Cause.INTERRUPTED, False),
    ("75 after kubectl delete", ended_pod(code=75, **deleted()), (make_node(),), Cause.POD_DELETED, False),
    ("143 after kubectl delete", ended_pod(code=143, **deleted()), (make_node(),), Cause.POD_DELETED, False),
    ("it had crashed before the deletion", _pod_at(60, 1, **deleted(10)), (make_node(),), Cause.FAILED, True),
    ("76 is superseded", ended_pod(code=76), (make_node(),), Cause.SUPERSEDED, False),
    ("any other code", ended_pod(code=1, message="Traceback: boom"), (make_node(),), Cause.FAILED, True),
    ("143 unasked", ended_pod(code=143), (make_node(),), Cause.FAILED, True),
    (
        "the message outranks code 0",
        ended_pod(code=0, message=word(Outcome.FAILED)),
        (make_node(),),
        Cause.FAILED,
        True,
    ),
    (
        "OOM",
        ended_pod(code=137, reason="OOMKilled", memory_limit="1Gi"),
        (make_node(),),
        Cause.OUT_OF_MEMORY,
        True,
    ),
    ("the node is gone", make_pod(), (), Cause.NODE_LOST, False),
    ("the node is gone after a notice", make_pod(notice=notice()), (), Cause.SPOT_NOTICE, False),
    (
        "node shutdown",
        make_pod(
            phase="Failed",
            reason="Terminated",
            message="Pod was terminated in response to imminent node shutdown.",
        ),
        (make_node(),),
        Cause.NODE_SHUTDOWN,
        False,
    ),
    (
        "refused by the kubelet",
        make_pod(phase="Failed", reason="UnexpectedAdmissionError", message="no GPU"),
        (make_node(),),
        Cause.POD_REJECTED,
        False,
    ),
    (
        "evicted for node pressure",
        make_pod(phase="Failed", reason="Evicted", disruption="TerminationByKubelet: memory pressure"),
        (make_node(),),
        Cause.DISRUPTED,
        False,
    ),
    (
        "evicted for its own limit",
        make_pod(phase="Failed", reason="Evicted", message="emptyDir usage exceeds the limit 1Gi"),
        (make_node(),),
        Cause.FAILED,
        True,
    ),
    (
        "exit 0 of a pod that was evicted for its own limit is no success",
        replace(ended_pod(code=0), **EVICTED),
        (make_node(),),
        Cause.FAILED,
        True,
    ),
    (
        "exit 75 of a pod that was evicted for its own limit is charged",
        replace(ended_pod(code=75), **EVICTED),
        (make_node(),),
        Cause.FAILED,
        True,
    ),
    (
        "75 of a pod past its activeDeadlineSeconds is charged",
        replace(told(Outcome.INTERRUPTED), **TOO_LONG),
        (make_node(),),
        Cause.FAILED,
        True,
    ),
    (
        "a pod past its activeDeadlineSeconds before its trainer ran",
        make_pod(**TOO_LONG),
        (make_node(),),
        Cause.FAILED,
        True,
    ),
    (
        "an evicted trainer that says done is done",
        replace(told(Outcome.DONE), **EVICTED),
        (make_node(),),
        Cause.DONE,
        False,
    ),
    (
        "deleted before it had a node",
        make_pod(node="", phase="Pending", **deleted()),
        (),
        Cause.POD_DELETED,
        False,
    ),
]


@pytest.mark.parametrize(
    ("pod", "nodes", "cause", "charged"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_cause(pod: PodView, nodes: tuple[NodeView, ...], cause: Cause, charged: bool) -> None:
    ending = why(pod, make_observed(pod, nodes=nodes))
    assert (ending.cause, ending.charged) == (cause, charged), ending.evidence
    assert ending.evidence


def test_the_words_of_trainer_and_kubelet_are_kept() -> None:
    assert "boom" in why(ended_pod(code=1, message="boom"), make_observed()).evidence
    oom = why(ended_pod(code=137, reason="OOMKilled", memory_limit="2Gi"), make_observed())
    assert "137" in oom.evidence and "2Gi" in oom.evidence


@pytest.mark.parametrize(
    "text", ['{"outcome":"done","step":"x"}', '{"outcome":"done","step":-1}', "[]", "null", '"done"']
)
def test_a_message_that_is_not_well_formed_is_no_message(text: str) -> None:
    assert why(ended_pod(code=3, message=text), make_observed()).cause is Cause.FAILED


def test_an_eviction_is_told_in_the_kubelets_words() -> None:
    ending = why(replace(ended_pod(code=0, message="all is well"), **EVICTED), make_observed())
    assert (ending.evidence, ending.reason) == ("Evicted: emptyDir exceeds 1Gi", "Evicted")


def test_a_failing_init_container_is_named_with_its_code_and_its_words() -> None:
    states = [
        {"name": "first", "state": {"terminated": {"exitCode": 0, "message": "fine"}}},
        {
            "name": "fetch",
            "state": {"terminated": {"exitCode": 3, "reason": "Error", "message": "no route\n"}},
        },
    ]
    waiting = {"name": "trainer", "state": {"waiting": {"reason": "PodInitializing"}}}
    raw = raw_pod(status={"phase": "Failed", "initContainerStatuses": states, "containerStatuses": [waiting]})
    pod = pod_view(raw)
    assert pod is not None
    ending = why(pod, make_observed())
    assert (ending.cause, ending.charged) == (Cause.FAILED, True)
    assert ending.evidence == "init container fetch: exit code 3: no route"


def raw_pod(**more: Any) -> dict[str, Any]:
    meta = {"name": "p", "namespace": KEY.namespace, "uid": "p", "resourceVersion": "1"}
    meta |= {"creationTimestamp": "2026-03-01T11:50:00Z"}
    labels = {"labels": {"spottrain.io/attempt": "1"}, "ownerReferences": [OWNER]}
    spec = {"nodeName": "node-a", "containers": [{"name": "trainer"}]}
    return {"metadata": meta | labels, "spec": spec} | more

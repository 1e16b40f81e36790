"""Why an attempt ended, row by row of design.md's order."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from spottrain.contract import Outcome
from spottrain.contract import Reason as TrainerReason
from spottrain_operator.api.observed import Ended, NodeView, PodView
from spottrain_operator.api.views import pod_view
from spottrain_operator.names import Cause, pod_name
from spottrain_operator.policies.cause import ending_of

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


SHUTDOWN = "Pod was terminated in response to imminent node shutdown."
NODE = make_node()
LOST_MEMORY = told(
    Outcome.INTERRUPTED_LOST, reason=TrainerReason.OUT_OF_MEMORY, message="rank 1 ran out of memory"
)
DENIED = word(Outcome.BAD_CONFIGURATION, reason="StoreDenied", message="403")
OWN_LIMIT = make_pod(phase="Failed", reason="Evicted", message="emptyDir usage exceeds the limit 1Gi")
PRESSURE = make_pod(phase="Failed", reason="Evicted", disruption="TerminationByKubelet: memory pressure")
REJECTED = make_pod(phase="Failed", reason="UnexpectedAdmissionError", message="no GPU")
UNCHARGED: dict[str, tuple[PodView, NodeView | None, Cause]] = {
    "done is done even while it is deleted": (told(Outcome.DONE, pod=deleted()), NOTICED, Cause.DONE),
    "a rank of several that ran out of memory goes on smaller": (LOST_MEMORY, NODE, Cause.INTERRUPTED),
    "rank 0 decides for its gang": (ended_pod(code=0, rank=1), NODE, Cause.DONE),
    "exit 0 after a deletion": (ended_pod(code=0, **deleted()), NODE, Cause.POD_DELETED),
    "exit 0 under a notice": (ended_pod(code=0), NOTICED, Cause.SPOT_NOTICE),
    "exit 0 under disruption": (ended_pod(code=0, **DISRUPTION), NODE, Cause.DISRUPTED),
    "exit 0 at node shutdown": (_shut_down(), NODE, Cause.NODE_SHUTDOWN),
    "a crash in a reclaimed node's last seconds": (ended_pod(code=1), NOTICED, Cause.SPOT_NOTICE),
    "a notice on the pod": (ended_pod(code=137, notice=notice()), NODE, Cause.SPOT_NOTICE),
    "75 without evidence": (ended_pod(code=75), NODE, Cause.INTERRUPTED),
    "79 without evidence": (ended_pod(code=79), NODE, Cause.INTERRUPTED),
    "75 after kubectl delete": (ended_pod(code=75, **deleted()), NODE, Cause.POD_DELETED),
    "143 after kubectl delete": (ended_pod(code=143, **deleted()), NODE, Cause.POD_DELETED),
    "76 is superseded": (ended_pod(code=76), NODE, Cause.SUPERSEDED),
    "the node is gone": (make_pod(), None, Cause.NODE_LOST),
    "the node is gone after a notice": (make_pod(notice=notice()), None, Cause.SPOT_NOTICE),
    "node shutdown": (
        make_pod(phase="Failed", reason="Terminated", message=SHUTDOWN),
        NODE,
        Cause.NODE_SHUTDOWN,
    ),
    "rejected by the kubelet": (REJECTED, NODE, Cause.POD_REJECTED),
    "evicted for node pressure": (PRESSURE, NODE, Cause.DISRUPTED),
    "an evicted trainer that says done": (replace(told(Outcome.DONE), **EVICTED), NODE, Cause.DONE),
    "deleted before it had a node": (
        make_pod(node="", phase="Pending", **deleted()),
        None,
        Cause.POD_DELETED,
    ),
}
CHARGED: dict[str, tuple[PodView, NodeView | None, Cause]] = {
    "exit 0 without a word of the runtime": (ended_pod(code=0), NODE, Cause.BAD_CONFIGURATION),
    "a script that has not trained": (
        told(Outcome.UNTRAINED, reason=TrainerReason.NOT_TRAINED),
        NODE,
        Cause.BAD_CONFIGURATION,
    ),
    "64 is permanent even under a notice": (ended_pod(code=64), NOTICED, Cause.BAD_CONFIGURATION),
    "the message says 64 whatever the code": (
        ended_pod(code=1, message=DENIED),
        NODE,
        Cause.BAD_CONFIGURATION,
    ),
    "a crash before the notice came": (_pod_at(60, 1), NOTICED, Cause.FAILED),
    "an old notice excuses nothing": (ended_pod(code=1), make_node(notice=notice(-600)), Cause.FAILED),
    "it had crashed before the deletion": (_pod_at(60, 1, **deleted(10)), NODE, Cause.FAILED),
    "any other code": (ended_pod(code=1, message="Traceback: boom"), NODE, Cause.FAILED),
    "143 unasked": (ended_pod(code=143), NODE, Cause.FAILED),
    "the message outranks code 0": (ended_pod(code=0, message=word(Outcome.FAILED)), NODE, Cause.FAILED),
    "OOM": (ended_pod(code=137, reason="OOMKilled", memory_limit="1Gi"), NODE, Cause.OUT_OF_MEMORY),
    "evicted for its own limit": (OWN_LIMIT, NODE, Cause.FAILED),
    "exit 0, evicted for its own limit": (replace(ended_pod(code=0), **EVICTED), NODE, Cause.FAILED),
    "exit 75, evicted for its own limit": (replace(ended_pod(code=75), **EVICTED), NODE, Cause.FAILED),
    "75 past activeDeadlineSeconds": (replace(told(Outcome.INTERRUPTED), **TOO_LONG), NODE, Cause.FAILED),
    "past activeDeadlineSeconds before its trainer ran": (make_pod(**TOO_LONG), NODE, Cause.FAILED),
}


@pytest.mark.parametrize("name", [*UNCHARGED, *CHARGED])
def test_cause(name: str) -> None:
    pod, node, cause = (UNCHARGED | CHARGED)[name]
    ending = ending_of(pod, make_observed(pod, nodes=(node,) if node is not None else ()))
    assert (ending.cause, ending.charged) == (cause, name in CHARGED), ending.evidence
    assert ending.evidence


def test_the_words_of_trainer_and_kubelet_are_kept() -> None:
    assert "boom" in ending_of(ended_pod(code=1, message="boom"), make_observed()).evidence
    oom = ending_of(ended_pod(code=137, reason="OOMKilled", memory_limit="2Gi"), make_observed())
    assert "137" in oom.evidence and "2Gi" in oom.evidence


@pytest.mark.parametrize(
    "text", ['{"outcome":"done","step":"x"}', '{"outcome":"done","step":-1}', "[]", "null", '"done"']
)
def test_a_message_that_is_not_well_formed_is_no_message(text: str) -> None:
    assert ending_of(ended_pod(code=3, message=text), make_observed()).cause is Cause.FAILED


def test_an_eviction_is_told_in_the_kubelets_words() -> None:
    ending = ending_of(replace(ended_pod(code=0, message="all is well"), **EVICTED), make_observed())
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
    ending = ending_of(pod, make_observed())
    assert (ending.cause, ending.charged) == (Cause.FAILED, True)
    assert ending.evidence == "init container fetch: exit code 3: no route"


def raw_pod(**more: Any) -> dict[str, Any]:
    meta = {
        "name": pod_name(KEY.name, KEY.uid, 1),
        "namespace": KEY.namespace,
        "uid": "p",
        "resourceVersion": "1",
    }
    meta |= {"creationTimestamp": "2026-03-01T11:50:00Z"}
    labels = {"labels": {"spottrain.io/attempt": "1"}, "ownerReferences": [OWNER]}
    spec = {"nodeName": "node-a", "containers": [{"name": "trainer"}]}
    return {"metadata": meta | labels, "spec": spec} | more

"""Pods made while an earlier attempt still saves: their gate, and the nodes that they are kept off."""

from __future__ import annotations

from dataclasses import replace

from spottrain_operator.api.observed import Create, Delete, NodeView, Notice, Placement, Plan, PodView
from spottrain_operator.api.training_job import Status
from spottrain_operator.control.plan import plan
from spottrain_operator.names import Cause
from spottrain_operator.rendering import trainer_pod

from tests.builders import (
    KEY,
    POOL,
    after,
    deleted,
    ended_pod,
    make_job,
    make_node,
    make_observed,
    make_pod,
    notice,
    started,
    status_of,
)
from tests.unit.controller.fake_cluster import World

SAVING = make_pod(1, notice=notice(100), deleted=after(98), deletion_grace=98)
DOOMED = make_node(notice=notice(100))


def _under_notice(
    attempt: int = 1, end: Notice | None = None, node: str = "node-a", **status: object
) -> Plan:
    end = end or notice(100)
    pod = make_pod(attempt, notice=end, node=node)
    job = make_job(status=replace(started(attempt), **status))  # type: ignore[arg-type]
    nodes = (make_node(node, notice=end), make_node("node-z"))
    return plan(make_observed(pod, job=job, nodes=nodes, annotated_at=after(-1)))


def test_a_third_attempt_waits_for_the_first_that_still_saves() -> None:
    second = status_of(_under_notice())
    assert second.gate_until == after(108)
    bad = ended_pod(2, 1, node="node-b")
    made = plan(make_observed(SAVING, bad, job=make_job(status=second), nodes=(DOOMED, make_node("node-b"))))
    third = status_of(made)
    assert third.attempt == 3 and third.gate_until == after(108)
    later = plan(
        make_observed(SAVING, job=make_job(status=third), nodes=(DOOMED, make_node("node-b")), now=after(20))
    )
    create = next(a for a in later.after if isinstance(a, Create))
    env = {e["name"]: e.get("value") for e in create.manifest["spec"]["containers"][0]["env"]}
    assert env["SPOTTRAIN_GATE_UNTIL"] == str(int(after(108).timestamp()))
    affinity = str(create.manifest["spec"]["affinity"])
    assert "node-a" in affinity and "node-b" not in affinity, "the crash was not the node's fault"


def test_a_second_notice_never_shortens_the_gate_of_the_first() -> None:
    made = _under_notice(2, end=notice(10), node="node-b", gate_until=after(108))
    assert status_of(made).attempt == 3 and status_of(made).gate_until == after(108)
    longer = _under_notice(2, end=notice(100), node="node-b", gate_until=after(20))
    assert status_of(longer).gate_until == after(108)


def test_a_gate_that_has_passed_is_forgotten() -> None:
    job = make_job(status=started(2, gate_until=after(-1)))
    made = plan(make_observed(ended_pod(2, 75, **deleted()), job=job))
    assert status_of(made).attempt == 3 and status_of(made).gate_until is None


# --- nodes that a pod is kept off ---------------------------------------------------------------------
def _kept_off(*names: str, **more: object) -> PodView:
    words = "0/2 nodes are available: 1 node(s) didn't match Pod's node affinity/selector."
    pod = make_pod(2, node="", phase="Pending", unschedulable=words)
    return replace(pod, avoids=names, **more)  # type: ignore[arg-type]


def _replaced(pod: PodView, *nodes: NodeView, **status: object) -> Plan:
    job = make_job(status=replace(started(2), **status))  # type: ignore[arg-type]
    return plan(make_observed(pod, job=job, nodes=nodes))


def test_a_pod_carries_the_names_of_the_nodes_it_is_kept_off() -> None:
    meta = trainer_pod.pod(make_job(), Status(attempt=1), POOL, Placement(avoid=("n2", "n1")))["metadata"]
    assert meta["annotations"]["spottrain.io/avoids"] == "n1,n2"


def test_a_pod_that_is_kept_off_a_node_for_no_reason_any_more_is_replaced_and_nothing_is_counted() -> None:
    first = _replaced(_kept_off("node-a"), make_node())
    assert status_of(first).attempts[1].stopping == Cause.REPLACED, "said before it is done"
    assert [a.pod.attempt for a in first.after if isinstance(a, Delete)] == [2]
    gone = _kept_off("node-a", **deleted())
    made = plan(make_observed(gone, job=make_job(status=status_of(first)), nodes=(make_node(),)))
    status = status_of(made)
    assert (status.attempt, status.interruptions, status.failures) == (3, 1, 0)
    assert status.attempts[1].cause == Cause.REPLACED and "node-a" in status.attempts[1].evidence
    create = next(a for a in made.after if isinstance(a, Create))
    assert "affinity" not in create.manifest["spec"] and status.next_start is None


def test_a_pod_stays_while_the_node_it_is_kept_off_is_doomed_gone_or_silent() -> None:
    for nodes in ((DOOMED,), (make_node(notice=notice(-5)),), (), (make_node(ready=False),)):
        made = _replaced(_kept_off("node-a"), *nodes)
        assert not made.before and (made.status is None or made.status.attempt == 2)
        assert made.recheck_after and 29 < made.recheck_after.total_seconds() < 31


def test_a_pod_that_has_a_node_or_goes_already_or_waits_for_no_node_is_left_alone() -> None:
    for pod in (
        make_pod(2, node="node-b"),
        _kept_off("node-a", deleted=after(0)),
        _kept_off("node-a", unschedulable=""),
        _kept_off(),
    ):
        made = _replaced(pod, make_node(), make_node("node-b"))
        assert made.status is None or Cause.REPLACED not in {r.cause for r in made.status.attempts}


async def test_a_notice_that_is_withdrawn_frees_the_replacement_once() -> None:
    w = World()
    await w.begin()
    w.pass_time(60)
    w.cluster.give_notice("node-a", 40)
    await w.settle()
    w.pass_time(2)
    await w.settle()
    w.cluster.end(w.pod(1), 75)
    await w.settle()
    pod = w.cluster.pods[w.pod(2)]
    pod["status"]["conditions"] = [{"type": "PodScheduled", "status": "False", "message": "0/3 nodes"}]
    w.cluster._bump(pod)
    await w.settle()
    assert w.status.attempt == 2
    w.cluster.add_node("node-a")  # another machine, the same name
    w.pass_time(30)
    await w.settle()
    assert (w.status.attempt, w.status.interruptions) == (3, 1)
    assert list(w.cluster.pods) == [w.pod(3)] and w.cluster.posted == [w.pod(n) for n in (1, 2, 3)]
    assert "affinity" not in w.cluster.pods[w.pod(3)]["spec"] and KEY.name in w.pod(3)

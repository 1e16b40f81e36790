"""Volumes: what spec.dataCache makes of job, pod and claim, and pods that wait for a volume, not a node."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
from spottrain.contract import Outcome
from spottrain_operator.api.observed import Observed
from spottrain_operator.api.training_job import Status
from spottrain_operator.control.actions import Create, Plan
from spottrain_operator.control.plan import plan
from spottrain_operator.errors import ApiError
from spottrain_operator.io.cluster import Cluster
from spottrain_operator.names import CLAIMS, Cause, Condition

from tests.builders import (
    after,
    condition,
    make_job,
    make_node,
    make_observed,
    make_pod,
    notice,
    raw_spec,
    started,
    word,
)
from tests.unit.controller.fake_cluster import World
from tests.unit.controller.test_trainer_pod import Json

CLAIM = {"claimRef": {"name": "datasets"}}
SHARED = ("ReadWriteMany",)
ONE_NODE = ("ReadWriteOnce",)


# --- the claim ----------------------------------------------------------------------------------------
def _observed(
    *pods: Any, cache: Json | None, modes: tuple[str, ...], name: str = "datasets", **more: Any
) -> Observed:
    """The claim of the cache, or of that name, has these access modes."""
    spec = raw_spec(**({"dataCache": cache} if cache else {}), **more.pop("spec", {}))
    job = make_job(spec, status=more.pop("status", Status()))
    return replace(make_observed(*pods, job=job, **more), claims={name: modes})


# --- during a notice ----------------------------------------------------------------------------------
def _under_notice(*, cache: Json | None, modes: tuple[str, ...], spec: Json) -> Plan:
    pod = make_pod(notice=notice(100), deleted=after(98), deletion_grace=98)
    nodes = (make_node(notice=notice(100)),)
    return plan(
        _observed(
            pod,
            cache=cache,
            modes=modes,
            name="datasets" if cache else "disk",
            spec=spec,
            status=started(),
            nodes=nodes,
        )
    )


VOLUME = {"name": "d", "persistentVolumeClaim": {"claimName": "disk"}}
TEMPLATE = {"template": {"spec": {"containers": [{"name": "trainer"}], "volumes": [VOLUME]}}}
NOTICES: list[tuple[Json | None, tuple[str, ...], Json, bool]] = [
    (CLAIM, SHARED, {}, True),
    (CLAIM, ONE_NODE, {}, False),
    (CLAIM, ("ReadWriteOncePod",), {}, False),
    (None, ONE_NODE, TEMPLATE, False),
    (None, SHARED, TEMPLATE, True),
]


@pytest.mark.parametrize(("cache", "modes", "spec", "early"), NOTICES)
def test_a_replacement_is_made_during_the_notice_only_where_two_nodes_can_have_the_volumes(
    cache: Json | None, modes: tuple[str, ...], spec: Json, early: bool
) -> None:
    made = _under_notice(cache=cache, modes=modes, spec=spec)
    assert any(isinstance(a, Create) for a in made.after) is early
    assert made.status is None or (made.status.attempt == 2) is early


# --- pods that wait for a volume, and claims that go or cannot be read ----------------------------------
POOLS = [{"name": "spot", "platform": "AWS"}, {"name": "od", "platform": "AWS", "type": "OnDemand"}]
SPOT_FIRST = {"type": "SpotFirst", "pools": POOLS}
IMMEDIATE = "0/2 nodes are available: pod has unbound immediate PersistentVolumeClaims."
NO_NODES = "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."
SELECTED = {"volume.kubernetes.io/selected-node": "node-a"}
FORBIDDEN = ApiError(403, 'persistentvolumeclaims "disk" is forbidden: cannot get resource')


def _template(*sources: Any) -> Json:
    volumes = [{"name": f"v{i}", "persistentVolumeClaim": source} for i, source in enumerate(sources)]
    return {"spec": {"containers": [{"name": "trainer", "image": "i"}], "volumes": volumes}}


def _says(w: World, message: str) -> None:
    """The scheduler, of the pod of the first attempt."""
    pod = w.cluster.pods[w.pod(1)]
    conditions = [{"type": "PodScheduled", "status": "False", "message": message}]
    pod["status"] = {"phase": "Pending", "conditions": conditions if message else []}
    w.cluster._bump(pod)


def _claim(w: World, name: str = "datasets") -> Json:
    return w.cluster.others[f"{CLAIMS}/{name}"]


def _add_claim(w: World, name: str = "datasets", **status: Any) -> None:
    claim = {"metadata": {"name": name}, "spec": {"accessModes": list(SHARED)}, "status": status}
    w.cluster.others[f"{CLAIMS}/{name}"] = claim


def _given_up(w: World) -> bool:
    record = w.status.record(1)
    assert record is not None
    return Cause.SCHEDULING_TIMEOUT in (record.stopping, record.cause)


def _unscheduled(w: World) -> tuple[str, str]:
    found = condition(w.status, Condition.SCHEDULED)
    assert found.status == "False"
    return found.reason, found.message


async def _waiting(spec: Json | None = None) -> World:
    w = World({"dataCache": CLAIM, "capacity": SPOT_FIRST} | (spec or {}))
    _add_claim(w)
    await w.settle()
    return w


async def test_no_pool_is_given_up_while_a_pod_waits_for_a_claim() -> None:
    w = await _waiting()
    _says(w, IMMEDIATE)
    await w.after(3600)
    assert not _given_up(w) and IMMEDIATE in _unscheduled(w)[1]
    _says(w, NO_NODES)
    await w.settle()
    assert _given_up(w)


# --- what a template may name -------------------------------------------------------------------------
@pytest.mark.parametrize(
    "source", ["datasets", None, {"claimName": 5}, {"claimName": ".."}, {"claimName": "../../pods"}]
)
async def test_what_is_no_claim_in_a_template_is_not_asked_for_and_stops_nothing(source: Any) -> None:
    w = World({"template": _template(source)})
    asked = _count_gets(w)
    await w.settle()
    _says(w, NO_NODES)
    await w.settle()
    assert w.cluster.posted == [w.pod(1)] and asked == []


async def test_a_claims_name_is_one_part_of_the_path() -> None:
    class Recorder(Cluster):
        def __init__(self) -> None:
            self.paths: list[str] = []

        async def _get(self, path: str, seconds: float = 0) -> Json | None:
            self.paths.append(path)
            return None

    cluster = Recorder()
    await cluster.get(CLAIMS, "../../pods?x#y", "ns")
    assert cluster.paths == [f"/api/v1/namespaces/ns/{CLAIMS}/..%2F..%2Fpods%3Fx%23y"]


def _count_gets(w: World) -> list[str]:
    return w.refuse("get_persistentvolumeclaim", FORBIDDEN, "a claim that nobody asks for")


# --- claims that cannot be read -----------------------------------------------------------------------
async def test_under_a_notice_a_claim_that_cannot_be_read_is_one_that_a_single_node_has(
    caplog: pytest.LogCaptureFixture,
) -> None:
    w = World({"template": _template({"claimName": "disk"})})
    await w.settle()
    w.cluster.bind(w.pod(1), "node-a")
    w.refuse("get_persistentvolumeclaim", FORBIDDEN)
    await w.settle()
    w.cluster.give_notice("node-a", 100)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            await w.after(2)
    meta = w.cluster.pods[w.pod(1)]["metadata"]
    assert "spottrain.io/termination-deadline" in meta["annotations"] and "deletionTimestamp" in meta
    assert w.status.attempt == 1
    told = [r.getMessage() for r in caplog.records if "cannot be read" in r.getMessage()]
    assert told and "disk" in told[0] and "forbidden" in told[0]
    await w.ends(w.pod(1), 75, word(Outcome.INTERRUPTED, step=9, durableStep=9))
    assert w.status.attempt == 2 and w.pod(2) in w.cluster.pods


# --- claims that go -----------------------------------------------------------------------------------
async def test_a_claim_that_goes_while_a_pod_waits_costs_no_pool() -> None:
    w = await _waiting()
    _says(w, 'persistentvolumeclaim "datasets" is being deleted')
    _claim(w)["metadata"]["deletionTimestamp"] = "2026-03-01T12:00:00Z"
    await w.after(3600)
    assert "is being deleted" in _unscheduled(w)[1] and not _given_up(w)


def test_half_a_gang_lets_go_of_the_claim_that_the_other_half_cannot_get() -> None:
    """Else the claim never goes, because pods have it, and the others never get a node, because of that."""
    going = 'persistentvolumeclaim "datasets" is being deleted'
    old = after(-1000)
    pods = (
        make_pod(rank=0, created=old),
        make_pod(rank=1, node="", phase="Pending", unschedulable=going, created=old),
    )
    job = make_job(raw_spec(workers=2, dataCache=CLAIM), status=started())
    made = plan(make_observed(*pods, job=job, nodes=(make_node(),)))
    assert made.status is not None and made.status.attempts[0].stopping == Cause.SCHEDULING_TIMEOUT
    assert "datasets" in made.status.attempts[0].evidence

"""Pods that wait for a volume and not for a node, and claims that go, cannot be read, or cannot be."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
from spottrain.contract import Outcome
from spottrain_operator.api.observed import ClaimView, Provide
from spottrain_operator.api.training_job import Status
from spottrain_operator.api.views import claim_view
from spottrain_operator.control.plan import plan
from spottrain_operator.errors import ApiError
from spottrain_operator.io.cluster import KubeCluster
from spottrain_operator.names import CLAIMS, Cause, Condition, Phase, Reason, cache_claim_name

from tests.builders import (
    KEY,
    condition,
    make_job,
    make_node,
    make_observed,
    make_pod,
    raw_spec,
    started,
    word,
)
from tests.unit.controller.fake_cluster import World

Json = dict[str, Any]
OWN = cache_claim_name(KEY.name, KEY.uid)
SIZE = {"size": "200Gi", "storageClassName": "efs"}
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


def _claim(w: World, name: str = OWN) -> Json:
    return w.cluster.others[f"{CLAIMS}/{name}"]


def _given_up(w: World) -> bool:
    record = w.status.record(1)
    assert record is not None
    return Cause.SCHEDULING_TIMEOUT in (record.stopping, record.cause)


def _scheduled(w: World) -> tuple[str, str]:
    found = condition(w.status, Condition.SCHEDULED)
    assert found.status == "False"
    return found.reason, found.message


async def _later(w: World, seconds: float) -> None:
    w.pass_time(seconds)
    await w.settle()


async def _waiting(spec: Json | None = None) -> World:
    w = World({"dataCache": SIZE, "capacity": SPOT_FIRST} | (spec or {}))
    await w.settle()
    return w


# --- patience is for nodes ----------------------------------------------------------------------------
@pytest.mark.parametrize("restarted", [False, True], ids=["watched", "restarted"])
async def test_patience_for_a_node_begins_when_the_volume_is_there(restarted: bool) -> None:
    w = await _waiting()
    _says(w, IMMEDIATE)
    await w.settle()
    w.pass_time(3600)  # nobody looks meanwhile: the wait may have lasted until now
    if restarted:
        w._start()
    _claim(w)["status"] = {"phase": "Bound"}
    _says(w, NO_NODES)
    await w.settle()
    assert not _given_up(w)
    await _later(w, 590)
    assert not _given_up(w)
    await _later(w, 11)
    assert _given_up(w)


async def test_without_a_volume_to_wait_for_a_restart_gives_no_more_patience() -> None:
    w = await _waiting({"dataCache": None})
    _says(w, NO_NODES)
    await w.settle()
    w.pass_time(601)
    w._start()
    await w.settle()
    assert _given_up(w)


DELAYED = 'running PreBind plugin "VolumeBinding": binding volumes: context deadline exceeded'


@pytest.mark.parametrize("words", ["", DELAYED], ids=["silent", "deadline"])
@pytest.mark.parametrize("own", [True, False], ids=["data cache", "template"])
async def test_a_class_that_makes_no_volume_for_the_chosen_node_costs_no_pool_and_is_named(
    words: str, own: bool
) -> None:
    name = OWN if own else "disk"
    spec: dict[str, object] = {"template": _template({"claimName": "disk"}), "capacity": SPOT_FIRST}
    w = World(spec | _cache(own))
    w.cluster.others[f"{CLAIMS}/disk"] = {"metadata": {"name": "disk"}, "status": {"phase": "Bound"}}
    await w.settle()
    _claim(w, name)["metadata"]["annotations"] = SELECTED
    _claim(w, name)["status"] = {"phase": "Pending"}
    _says(w, words)
    await _later(w, 3600)
    assert not _given_up(w)
    assert f"no volume yet for {name}: kubectl describe" in _scheduled(w)[1]
    _claim(w, name)["status"] = {"phase": "Bound"}
    await _later(w, 30)
    assert not _given_up(w) and "no volume" not in _scheduled(w)[1]
    await _later(w, 601)
    assert _given_up(w)


def _cache(own: bool) -> Json:
    return {"dataCache": SIZE} if own else {}


def test_a_claim_whose_volume_is_to_come_is_looked_at_while_a_pod_has_no_node() -> None:
    pod, job = make_pod(node="", phase="Pending"), make_job(raw_spec(dataCache=SIZE), status=started())
    o = make_observed(pod, job=job)
    mine = ClaimView(name=OWN, owner_uid=KEY.uid)
    made = plan(replace(o, claims={OWN: mine}))
    assert made.recheck_after is not None and made.recheck_after.total_seconds() < 31
    assert plan(replace(o, claims={OWN: replace(mine, bound=True)})).recheck_after is None


def test_of_a_claim_it_is_known_whether_it_goes_and_whether_a_node_was_chosen_for_it() -> None:
    raw: Json = {"metadata": {"name": "c", "annotations": SELECTED}, "status": {"phase": "Pending"}}
    assert claim_view(raw).selected and not claim_view(raw).going
    assert not claim_view(raw | {"status": {"phase": "Bound"}}).selected
    assert claim_view({"metadata": {"name": "c", "deletionTimestamp": "2026-03-01T12:00:00Z"}}).going


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


async def test_claims_are_asked_for_once_the_pod_is_accepted() -> None:
    w = World({"template": _template({"claimName": "disk"}), "dataCache": {"claimRef": {"name": "datasets"}}})
    asked = _count_gets(w)
    await w.look()
    assert asked == []
    await w.settle()
    assert set(asked) == {"datasets"}, "the template's own matter when a pod waits, or has a notice"


async def test_a_claims_name_is_one_part_of_the_path() -> None:
    class Recorder(KubeCluster):
        def __init__(self) -> None:
            self.paths: list[str] = []

        async def _get(self, path: str) -> Json | None:
            self.paths.append(path)
            return None

    cluster = Recorder()
    await cluster.get_claim("ns", "../../pods?x#y")
    assert cluster.paths == [f"/api/v1/namespaces/ns/{CLAIMS}/..%2F..%2Fpods%3Fx%23y"]


def _count_gets(w: World) -> list[str]:
    return w.refuse("get_claim", FORBIDDEN, "a claim that nobody asks for")


# --- claims that cannot be read -----------------------------------------------------------------------
async def test_under_a_notice_a_claim_that_cannot_be_read_is_one_that_a_single_node_has(
    caplog: pytest.LogCaptureFixture,
) -> None:
    w = World({"template": _template({"claimName": "disk"})})
    await w.settle()
    w.cluster.bind(w.pod(1), "node-a")
    w.refuse("get_claim", FORBIDDEN)
    await w.settle()
    w.cluster.give_notice("node-a", 100)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            await _later(w, 2)
    meta = w.cluster.pods[w.pod(1)]["metadata"]
    assert "spottrain.io/termination-deadline" in meta["annotations"] and "deletionTimestamp" in meta
    assert w.status.attempt == 1
    told = [r.getMessage() for r in caplog.records if "cannot be read" in r.getMessage()]
    assert len(told) == 1 and "disk" in told[0] and "forbidden" in told[0]
    w.cluster.end(w.pod(1), 75, word(Outcome.INTERRUPTED, step=9, durableStep=9))
    await w.settle()
    assert w.status.attempt == 2 and w.pod(2) in w.cluster.pods


@pytest.mark.parametrize("exists", [False, True])
async def test_a_data_cache_that_cannot_be_read_is_said_and_no_claim_is_made_over_and_over(
    exists: bool,
) -> None:
    w = World({"dataCache": SIZE})
    if exists:
        w.cluster.others[f"{CLAIMS}/{OWN}"] = {"metadata": {"name": OWN}}
    asked = w.refuse("get_claim", FORBIDDEN)
    await w.settle()
    reason, message = _scheduled(w)
    assert reason == Reason.WAITING_FOR_CLAIM and OWN in message and "is forbidden" in message
    assert not w.cluster.posted and len(asked) < 4 and (f"{CLAIMS}/{OWN}" in w.cluster.others) is exists
    assert 9 < (await w.look()).total_seconds() < 11  # type: ignore[attr-defined]


async def test_it_goes_on_when_the_data_cache_can_be_read_again() -> None:
    w = World({"dataCache": SIZE})
    w.refuse("get_claim", FORBIDDEN)
    await w.settle()
    del w.cluster.get_claim
    await _later(w, 10)
    assert w.cluster.posted == [w.pod(1)] and OWN in _claim(w)["metadata"]["name"]


# --- claims that go -----------------------------------------------------------------------------------
async def test_a_claim_that_goes_while_a_pod_waits_is_made_again_and_costs_no_pool() -> None:
    w = await _waiting()
    _says(w, f'persistentvolumeclaim "{OWN}" is being deleted')
    _claim(w)["metadata"]["deletionTimestamp"] = "2026-03-01T12:00:00Z"
    await _later(w, 3600)
    assert "is created again afterwards" in _scheduled(w)[1] and not _given_up(w)
    del w.cluster.others[f"{CLAIMS}/{OWN}"]
    _says(w, f'persistentvolumeclaim "{OWN}" not found')
    await _later(w, 10)
    assert "deletionTimestamp" not in _claim(w)["metadata"] and w.cluster.posted == [w.pod(1)]
    assert not _given_up(w)
    _says(w, NO_NODES)
    await _later(w, 590)
    assert not _given_up(w)
    await _later(w, 11)
    assert _given_up(w)


async def test_a_claim_that_may_not_be_made_again_yet_is_tried_again_in_its_time() -> None:
    w = await _waiting()
    create, tried = w.cluster.create, []

    async def full(kind: str, manifest: Json, *, group: str = "") -> Json:
        tried.append(kind)
        raise ApiError(403, "exceeded quota: storage")

    w.cluster.create = full  # type: ignore[method-assign]
    del w.cluster.others[f"{CLAIMS}/{OWN}"]
    _says(w, f'persistentvolumeclaim "{OWN}" not found')
    await w.settle()
    assert tried == [CLAIMS] and "does not exist any more: exceeded quota" in _scheduled(w)[1]
    w.cluster.create = create  # type: ignore[method-assign]
    await _later(w, 21)
    assert _claim(w) and "does not exist" not in _scheduled(w)[1]


def test_no_pod_is_made_for_a_claim_that_is_being_deleted() -> None:
    for cache, name in ((SIZE, OWN), ({"claimRef": {"name": "datasets"}}, "datasets")):
        claim = ClaimView(name=name, owner_uid=KEY.uid, access_modes=("ReadWriteMany",), going=True)
        o = make_observed(job=make_job(raw_spec(dataCache=cache), status=Status()))
        made = plan(replace(o, claims={name: claim}))
        assert made.after == () and made.status is not None and made.status.phase == Phase.WAITING
        found = made.status.condition(Condition.SCHEDULED)
        assert found is not None and f"{name}" in found.message and "is being deleted" in found.message


def test_half_a_gang_lets_go_of_the_claim_that_the_other_half_cannot_get() -> None:
    """Else the claim never goes, because pods have it, and the others never get a node, because of that."""
    pods = (make_pod(rank=0), make_pod(rank=1, node="", phase="Pending"))
    job = make_job(raw_spec(workers=2, dataCache=SIZE), status=started())
    claim = ClaimView(name=OWN, owner_uid=KEY.uid, access_modes=("ReadWriteMany",), bound=True)
    o = make_observed(*pods, job=job, nodes=(make_node(),))
    made = plan(replace(o, claims={OWN: replace(claim, going=True)}))
    assert made.status is not None and made.status.attempts[0].stopping == Cause.REPLACED
    assert OWN in made.status.attempts[0].evidence and not [a for a in made.after if isinstance(a, Provide)]
    calm = plan(replace(o, claims={OWN: claim})).status
    assert calm is None or not calm.attempts[0].stopping

"""Volumes: what spec.dataCache makes of job, pod and claim, and pods that wait for a volume, not a node."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
from spottrain.contract import Outcome
from spottrain_operator.api.observed import ClaimView, Create, Observed, Plan, Provide
from spottrain_operator.api.training_job import Status
from spottrain_operator.api.views import claim_view
from spottrain_operator.control.plan import plan
from spottrain_operator.errors import ApiError
from spottrain_operator.io.cluster import KubeCluster
from spottrain_operator.names import CLAIMS, Cause, Condition, Reason, cache_claim_name
from spottrain_operator.policies import claims

from tests.builders import (
    KEY,
    NOW,
    after,
    condition,
    ended_pod,
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
from tests.unit.controller.stories import follows
from tests.unit.controller.test_trainer_pod import Json

OWN = cache_claim_name(KEY.name, KEY.uid)
SIZE = {"size": "200Gi", "storageClassName": "efs"}
DISK = {"size": "200Gi", "accessMode": "ReadWriteOnce"}
CLAIM = {"claimRef": {"name": "datasets"}}
SHARED = ("ReadWriteMany",)
ONE_NODE = ("ReadWriteOnce",)


# --- the claim ----------------------------------------------------------------------------------------
def _observed(
    *pods: Any, cache: Json | None, claim: ClaimView | None = None, name: str = "", **more: Any
) -> Observed:
    """The claim of the cache (or of that name) is looked for, and found or not."""
    spec = raw_spec(**({"dataCache": cache} if cache else {}), **more.pop("spec", {}))
    job = make_job(spec, status=more.pop("status", Status()))
    name = name or (cache or {}).get("claimRef", {}).get("name") or OWN
    return replace(make_observed(*pods, job=job, **more), claims={name: claim})


def _scheduled(made: Plan) -> tuple[str, str]:
    assert made.status is not None
    found = condition(made, Condition.SCHEDULED)
    assert found.status == "False"
    return found.reason, found.message


def _kinds(made: Plan) -> list[str]:
    return [a.kind if isinstance(a, Provide) else type(a).__name__ for a in made.after]


def test_the_claim_comes_before_the_first_pod_and_belongs_to_the_job() -> None:
    made = plan(_observed(cache=SIZE))
    assert _kinds(made) == [CLAIMS, "Create"]
    claim = next(a for a in made.after if isinstance(a, Provide)).manifest
    assert claim["metadata"]["name"] == OWN and claim["metadata"]["ownerReferences"][0]["uid"] == KEY.uid
    assert claim["spec"] == {
        "accessModes": ["ReadWriteMany"],
        "storageClassName": "efs",
        "resources": {"requests": {"storage": "200Gi"}},
    }
    claim = next(a for a in plan(_observed(cache=DISK)).after if isinstance(a, Provide)).manifest
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce"] and "storageClassName" not in claim["spec"]


MINE = ClaimView(name=OWN, owner_uid=KEY.uid, access_modes=SHARED)


def test_the_next_attempt_finds_the_claim_of_the_first() -> None:
    made = follows("attempt=2", _observed(ended_pod(1, 1), cache=SIZE, claim=MINE, status=started()))
    later = follows("creates=0", _observed(cache=SIZE, claim=MINE, status=made.status, now=after(60)))
    assert _kinds(later) == ["Create"]


DATASETS = ClaimView(name="datasets", access_modes=ONE_NODE)
WAITS = f"Scheduled=False/{Reason.WAITING_FOR_CLAIM} !creates !provides phase=Waiting"


@pytest.mark.parametrize(
    "observed",
    [
        _observed(cache=SIZE, claim=ClaimView(name=OWN, owner_uid="other")),
        _observed(cache=CLAIM),
        _observed(cache=CLAIM, claim=DATASETS, spec={"workers": 2}),
        _observed(cache=SIZE, claim=replace(MINE, going=True)),
        _observed(cache=CLAIM, claim=replace(DATASETS, going=True)),
    ],
    ids=["a stranger's", "none", "for one node, and a gang", "being deleted", "being deleted by others"],
)
def test_no_pod_is_made_while_the_claim_cannot_be_used(observed: Observed) -> None:
    follows(WAITS, observed)


def test_a_claim_that_comes_late_or_is_shared_is_used_and_never_made() -> None:
    made = follows("again=10", _observed(cache=CLAIM))
    for o in (
        _observed(cache=CLAIM, claim=ClaimView(name="datasets"), status=made.status),
        _observed(
            cache=CLAIM, claim=replace(DATASETS, access_modes=(*ONE_NODE, *SHARED)), spec={"workers": 2}
        ),
    ):
        assert CLAIMS not in _kinds(follows("creates", o))


def test_the_claim_that_the_scheduler_waits_for_is_named() -> None:
    words = "0/2 nodes are available: pod has unbound immediate PersistentVolumeClaims."
    pod = make_pod(node="", phase="Pending", unschedulable=words)
    mine = ClaimView(name=OWN, owner_uid=KEY.uid)
    made = plan(_observed(pod, cache=SIZE, claim=mine, status=started()))
    assert OWN in _scheduled(made)[1]
    bound = plan(_observed(pod, cache=SIZE, claim=replace(mine, bound=True), status=started()))
    assert _scheduled(bound)[1] == words


def test_claims_are_asked_for_only_while_pods_are_to_be_made() -> None:
    job = make_job(raw_spec(dataCache=CLAIM), status=started())
    assert claims.wanted(make_observed(make_pod(), job=job)) == ()
    for pods, nodes in (
        ((), (make_node(),)),
        ((ended_pod(1, 1),), (make_node(),)),
        ((make_pod(node="", phase="Pending"),), (make_node(),)),
        ((make_pod(),), (make_node(notice=notice()),)),
        ((make_pod(),), ()),
    ):
        assert claims.wanted(make_observed(*pods, job=job, nodes=nodes)) == ("datasets",)
    assert claims.wanted(make_observed(job=make_job())) == ()
    suspended = make_job(raw_spec(dataCache=CLAIM, suspend=True), status=started())
    assert claims.wanted(make_observed(job=suspended)) == ()


# --- during a notice ----------------------------------------------------------------------------------
def _under_notice(*, cache: Json | None, claim: ClaimView, spec: Json | None = None) -> Plan:
    pod = make_pod(notice=notice(100))
    nodes = (make_node(notice=notice(100)),)
    o = _observed(
        pod, cache=cache, claim=claim, name=claim.name, spec=spec or {}, status=started(), nodes=nodes
    )
    return plan(replace(o, annotated_at={pod.uid: after(-2)}))


VOLUME = {"name": "d", "persistentVolumeClaim": {"claimName": "disk"}}
TEMPLATE = {"template": {"spec": {"containers": [{"name": "trainer"}], "volumes": [VOLUME]}}}
NOTICES: list[tuple[Json | None, ClaimView, Json, bool]] = [
    (SIZE, ClaimView(name=OWN, owner_uid=KEY.uid, access_modes=SHARED), {}, True),
    (DISK, ClaimView(name=OWN, owner_uid=KEY.uid, access_modes=ONE_NODE), {}, False),
    (CLAIM, ClaimView(name="datasets", access_modes=SHARED), {}, True),
    (CLAIM, ClaimView(name="datasets", access_modes=ONE_NODE), {}, False),
    (CLAIM, ClaimView(name="datasets", access_modes=("ReadWriteOncePod",)), {}, False),
    (None, ClaimView(name="disk", access_modes=ONE_NODE), TEMPLATE, False),
    (None, ClaimView(name="disk", access_modes=SHARED), TEMPLATE, True),
]


@pytest.mark.parametrize(("cache", "claim", "spec", "early"), NOTICES)
def test_a_replacement_is_made_during_the_notice_only_where_two_nodes_can_have_the_volumes(
    cache: Json | None, claim: ClaimView, spec: Json, early: bool
) -> None:
    made = _under_notice(cache=cache, claim=claim, spec=spec)
    assert any(isinstance(a, Create) for a in made.after) is early
    assert made.status is None or (made.status.attempt == 2) is early


# --- told as a story ----------------------------------------------------------------------------------
def _claims_of(w: World) -> list[str]:
    return [name for name in w.cluster.others if name.startswith(CLAIMS)]


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_claim_over_the_quota_is_waited_for_and_then_the_pods_come(workers: int) -> None:
    """Made when there is room: what was refused before must not keep the pods away."""
    w = World({"dataCache": SIZE, "workers": workers})
    w.refuse("create", ApiError(403, f'"{OWN}" is forbidden: exceeded quota: storage'), CLAIMS)
    await w.settle()
    found = condition(w.status, Condition.SCHEDULED)
    assert found.reason == Reason.QUOTA_EXCEEDED and "storage" in found.message
    assert not w.cluster.pods and (w.status.attempt, w.status.failures, w.status.interruptions) == (1, 0, 0)
    del w.cluster.create
    await w.after(21)
    assert _claims_of(w) and len(w.cluster.pods) == workers and w.cluster.now > NOW


async def test_a_claim_that_the_server_calls_invalid_is_said_of_the_data_cache() -> None:
    w = World({"dataCache": SIZE})
    w.refuse("create", ApiError(422, "spec.storageClassName: Invalid value"))
    await w.settle()
    found = condition(w.status, Condition.ACCEPTED)
    assert found.message == "spec.dataCache: spec.storageClassName: Invalid value"
    assert not w.cluster.pods


async def test_a_claim_that_comes_between_look_and_write_is_looked_at_again() -> None:
    w = World({"dataCache": SIZE})
    await w.look()
    create = w.cluster.create

    async def late(kind: str, manifest: Json, *, group: str = "") -> Json:
        w.cluster.create = create  # type: ignore[method-assign]
        stranger = {"metadata": {"name": OWN, "ownerReferences": [{"controller": True, "uid": "other"}]}}
        w.cluster.others[f"{CLAIMS}/{OWN}"] = stranger
        return await create(kind, manifest, group=group)

    w.cluster.create = late  # type: ignore[method-assign]
    await w.settle()
    found = condition(w.status, Condition.SCHEDULED)
    assert found.reason == Reason.WAITING_FOR_CLAIM and not w.cluster.pods


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


def _claim(w: World, name: str = OWN) -> Json:
    return w.cluster.others[f"{CLAIMS}/{name}"]


def _given_up(w: World) -> bool:
    record = w.status.record(1)
    assert record is not None
    return Cause.SCHEDULING_TIMEOUT in (record.stopping, record.cause)


def _unscheduled(w: World) -> tuple[str, str]:
    found = condition(w.status, Condition.SCHEDULED)
    assert found.status == "False"
    return found.reason, found.message


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
    await w.after(590)
    assert not _given_up(w)
    await w.after(11)
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
    await w.after(3600)
    assert not _given_up(w) and "no volume yet" in _unscheduled(w)[1]
    _claim(w, name)["status"] = {"phase": "Bound"}
    await w.after(30)
    assert not _given_up(w) and "no volume" not in _unscheduled(w)[1]
    await w.after(601)
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
            await w.after(2)
    meta = w.cluster.pods[w.pod(1)]["metadata"]
    assert "spottrain.io/termination-deadline" in meta["annotations"] and "deletionTimestamp" in meta
    assert w.status.attempt == 1
    told = [r.getMessage() for r in caplog.records if "cannot be read" in r.getMessage()]
    assert len(told) == 1 and "disk" in told[0] and "forbidden" in told[0]
    await w.ends(w.pod(1), 75, word(Outcome.INTERRUPTED, step=9, durableStep=9))
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
    reason, message = _unscheduled(w)
    assert reason == Reason.WAITING_FOR_CLAIM and OWN in message and "is forbidden" in message
    assert not w.cluster.posted and len(asked) < 4 and (f"{CLAIMS}/{OWN}" in w.cluster.others) is exists
    assert 9 < (await w.look()).total_seconds() < 11  # type: ignore[attr-defined]
    del w.cluster.get_claim
    w.cluster.others.pop(f"{CLAIMS}/{OWN}", None)
    await w.after(10)
    assert w.cluster.posted == [w.pod(1)] and OWN in _claim(w)["metadata"]["name"], "it can be read again"


# --- claims that go -----------------------------------------------------------------------------------
async def test_a_claim_that_goes_while_a_pod_waits_is_made_again_and_costs_no_pool() -> None:
    w = await _waiting()
    _says(w, f'persistentvolumeclaim "{OWN}" is being deleted')
    _claim(w)["metadata"]["deletionTimestamp"] = "2026-03-01T12:00:00Z"
    await w.after(3600)
    assert "is created again" in _unscheduled(w)[1] and not _given_up(w)
    del w.cluster.others[f"{CLAIMS}/{OWN}"]
    _says(w, f'persistentvolumeclaim "{OWN}" not found')
    await w.after(10)
    assert "deletionTimestamp" not in _claim(w)["metadata"] and w.cluster.posted == [w.pod(1)]
    assert not _given_up(w)
    _says(w, NO_NODES)
    await w.after(590)
    assert not _given_up(w)
    await w.after(11)
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
    assert tried == [CLAIMS] and "does not exist any more: exceeded quota" in _unscheduled(w)[1]
    w.cluster.create = create  # type: ignore[method-assign]
    await w.after(21)
    assert _claim(w) and "does not exist" not in _unscheduled(w)[1]


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


GOING = ClaimView(name=OWN, owner_uid=KEY.uid, access_modes=SHARED, going=True)
TOLD = (
    _observed(cache=SIZE, claim=ClaimView(name=OWN, owner_uid="other")),
    _observed(cache=CLAIM),
    _observed(cache=CLAIM, claim=ClaimView(name="datasets", access_modes=ONE_NODE), spec={"workers": 2}),
    _observed(cache=SIZE, claim=GOING),
    _observed(cache=CLAIM, claim=replace(GOING, name="datasets")),
    _observed(cache=SIZE, claim=ClaimView(name=OWN, unread="forbidden")),
    *(
        _observed(
            make_pod(node="", phase="Pending", unschedulable=words), cache=SIZE, claim=claim, status=started()
        )
        for words, claim in (
            (IMMEDIATE, ClaimView(name=OWN, owner_uid=KEY.uid)),
            (f'persistentvolumeclaim "{OWN}" is being deleted', GOING),
            (f'persistentvolumeclaim "{OWN}" not found', None),
            ("", ClaimView(name=OWN, owner_uid=KEY.uid, selected=True)),
        )
    ),
)
"""Scenes whose sentences are in tests/unit/sentences.txt."""

"""What spec.dataCache makes of job, pod and claim, and when a claim keeps pods apart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from spottrain.contract import Env
from spottrain_operator.api.observed import ClaimView, Create, Observed, Plan, Provide
from spottrain_operator.api.training_job import Status
from spottrain_operator.control.plan import plan
from spottrain_operator.errors import ApiError
from spottrain_operator.names import CLAIMS, Condition, Phase, Reason, cache_claim_name
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
)
from tests.unit.controller.fake_cluster import World
from tests.unit.controller.test_trainer_pod import Json, rendered, trainer_of

OWN = cache_claim_name(KEY.name, KEY.uid)
SIZE = {"size": "200Gi", "storageClassName": "efs"}
DISK = {"size": "200Gi", "accessMode": "ReadWriteOnce"}
CLAIM = {"claimRef": {"name": "datasets"}}
SHARED = ("ReadWriteMany",)


def _values(manifest: Json) -> dict[str, str]:
    return {e["name"]: e.get("value", "") for e in trainer_of(manifest)["env"]}


def _mounted(manifest: Json) -> tuple[str, str]:
    """Path and claim."""
    volume = next(v for v in manifest["spec"]["volumes"] if v["name"] == "spottrain-data-cache")
    mount = next(m for m in trainer_of(manifest)["volumeMounts"] if m["name"] == volume["name"])
    return mount["mountPath"], volume["persistentVolumeClaim"]["claimName"]


# --- the pod ------------------------------------------------------------------------------------------
def test_a_claim_is_mounted_into_the_trainer_and_told_to_runtime_and_libraries() -> None:
    manifest = rendered(dataCache=CLAIM)
    assert _mounted(manifest) == ("/var/cache/spottrain", "datasets")
    values = _values(manifest)
    assert values[Env.DATA_CACHE] == "/var/cache/spottrain"
    assert values["HF_HOME"] == "/var/cache/spottrain/huggingface"
    assert values["TORCH_HOME"] == "/var/cache/spottrain/torch"


def test_the_claim_of_a_size_is_the_same_for_all_attempts() -> None:
    assert _mounted(rendered(dataCache=SIZE | {"mountPath": "/datasets/"})) == ("/datasets", OWN)


def test_the_templates_own_homes_of_libraries_stand() -> None:
    values = _values(rendered(trainer={"env": [{"name": "HF_HOME", "value": "/own"}]}, dataCache=CLAIM))
    assert values["HF_HOME"] == "/own" and values["TORCH_HOME"] == "/var/cache/spottrain/torch"


def test_names_that_an_env_from_may_hold_are_left_to_it() -> None:
    envFrom = [{"configMapRef": {"name": "settings"}}]
    values = _values(rendered(trainer={"envFrom": envFrom}, dataCache=CLAIM))
    assert "HF_HOME" not in values and values[Env.DATA_CACHE] == "/var/cache/spottrain"


def test_without_a_data_cache_nothing_is_told_of_one() -> None:
    assert not {Env.DATA_CACHE, "HF_HOME", "TORCH_HOME"} & _values(rendered()).keys()


def test_a_long_job_name_gives_a_claim_name_that_is_allowed_and_its_own() -> None:
    names = {cache_claim_name("a.b-" + "x" * 240 + end, f"uid-{end}") for end in "12"}
    assert len(names) == 2 and all(len(n) <= 63 for n in names)


MOUNT = {"name": "a", "mountPath": "/var/cache/spottrain/"}
IN_THE_WAY: list[tuple[Json, Json, Json, str]] = [
    ({"volumeMounts": [MOUNT]}, {}, {}, "containers[0].volumeMounts must not have /var/cache/spottrain"),
    (
        {"volumeMounts": [MOUNT | {"mountPath": "/var/cache/spottrain/x"}]},
        {},
        {},
        "must not have /var/cache/spottrain/x",
    ),
    ({}, {"volumes": [{"name": "spottrain-data-cache"}]}, {}, "spec.template.spec.volumes must not have"),
    ({"env": [{"name": "SPOTTRAIN_DATA_CACHE", "value": "/x"}]}, {}, {}, "env must not have SPOTTRAIN_DATA"),
    ({}, {}, {"mountPath": "/tmp"}, "mountPath /tmp is a folder that the operator mounts itself"),
    ({}, {}, {"mountPath": "/cache/"}, "is a folder that the operator mounts itself"),
    ({}, {}, {"mountPath": "//"}, "must be a folder below /"),
    ({}, {}, {"mountPath": "/a/../tmp"}, "without .. in its path"),
]


@pytest.mark.parametrize(("trainer", "pod", "cache", "words"), IN_THE_WAY)
def test_what_is_in_the_way_of_the_data_cache_is_refused_by_its_path(
    trainer: Json, pod: Json, cache: Json, words: str
) -> None:
    template = {"spec": {"containers": [{"name": "trainer"} | trainer]} | pod}
    job = make_job(raw_spec(template=template, dataCache=CLAIM | cache))
    assert job.spec is None and words in job.invalid and "dataCache" in job.invalid
    assert make_job(raw_spec(template=template)).spec is not None, "without dataCache it may have that"


@pytest.mark.parametrize("kind", ["Spot", "OnDemand"])
def test_checkpoints_in_the_data_cache_are_refused(kind: str) -> None:
    checkpoint = {"uri": "file:///var/cache/spottrain/run"}
    job = make_job(raw_spec(dataCache=SIZE, checkpoint=checkpoint, capacity={"type": kind}))
    assert "is in the data cache" in job.invalid


def test_a_template_that_mounts_beside_the_data_cache_is_as_it_was() -> None:
    mounts = [{"name": "a", "mountPath": "/var/cache/spottrain-other"}]
    assert _mounted(rendered(trainer={"volumeMounts": mounts}, dataCache=CLAIM))[1] == "datasets"


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


def test_without_a_class_it_is_the_clusters_default_one() -> None:
    made = plan(_observed(cache=DISK))
    claim = next(a for a in made.after if isinstance(a, Provide)).manifest
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce"] and "storageClassName" not in claim["spec"]


def test_the_next_attempt_finds_the_claim_of_the_first() -> None:
    mine = ClaimView(name=OWN, owner_uid=KEY.uid, access_modes=SHARED)
    made = plan(_observed(ended_pod(1, 1), cache=SIZE, claim=mine, status=started()))
    assert made.status is not None and made.status.attempt == 2
    later = plan(_observed(cache=SIZE, claim=mine, status=made.status, now=after(60)))
    assert _kinds(later) == ["Create"]


def test_a_strangers_claim_of_that_name_is_said_and_not_used() -> None:
    made = plan(_observed(cache=SIZE, claim=ClaimView(name=OWN, owner_uid="other")))
    reason, message = _scheduled(made)
    assert reason == Reason.WAITING_FOR_CLAIM and OWN in message and "not this job's" in message
    assert _kinds(made) == []


def test_a_claim_that_does_not_exist_is_named_and_waited_for_without_a_pod() -> None:
    made = plan(_observed(cache=CLAIM))
    reason, message = _scheduled(made)
    assert (
        reason == Reason.WAITING_FOR_CLAIM and "no PersistentVolumeClaim datasets in namespace ns" in message
    )
    assert _kinds(made) == [] and made.status is not None and made.status.phase == Phase.WAITING
    assert made.recheck_after is not None and made.recheck_after.total_seconds() < 11
    made = plan(_observed(cache=CLAIM, claim=ClaimView(name="datasets"), status=made.status))
    assert _kinds(made) == ["Create"], "and it is never made for it"


def test_a_claim_that_one_node_has_at_a_time_is_none_for_a_gang() -> None:
    disk = ClaimView(name="datasets", access_modes=("ReadWriteOnce",))
    made = plan(_observed(cache=CLAIM, claim=disk, spec={"workers": 2}))
    assert (
        "is ReadWriteOnce, so one node at a time can mount it" in _scheduled(made)[1] and _kinds(made) == []
    )
    shared = replace(disk, access_modes=("ReadWriteOnce", "ReadWriteMany"))
    assert "Create" in _kinds(plan(_observed(cache=CLAIM, claim=shared, spec={"workers": 2})))


def test_the_claim_that_the_scheduler_waits_for_is_named() -> None:
    words = "0/2 nodes are available: pod has unbound immediate PersistentVolumeClaims."
    pod = make_pod(node="", phase="Pending", unschedulable=words)
    mine = ClaimView(name=OWN, owner_uid=KEY.uid)
    made = plan(_observed(pod, cache=SIZE, claim=mine, status=started()))
    assert f"{words} (no volume yet for {OWN}" in _scheduled(made)[1]
    bound = plan(_observed(pod, cache=SIZE, claim=replace(mine, bound=True), status=started()))
    assert _scheduled(bound)[1] == words


def test_no_pool_is_given_up_while_a_claim_has_no_volume() -> None:
    pools = [{"name": "spot", "platform": "AWS"}, {"name": "od", "platform": "AWS", "type": "OnDemand"}]
    capacity = {"type": "SpotFirst", "pools": pools}
    record = replace(started().attempts[0], pool="spot", ranks=())
    status = started(attempts=(record,))
    for why, given_up in (
        ("0/2 nodes are available: 2 Insufficient nvidia.com/gpu.", True),
        ("0/2 nodes are available: pod has unbound immediate PersistentVolumeClaims.", False),
    ):
        pod = make_pod(node="", phase="Pending", unschedulable=why, created=after(-3600))
        mine, spec = ClaimView(name=OWN, owner_uid=KEY.uid), {"capacity": capacity}
        made = plan(_observed(pod, cache=SIZE, claim=mine, status=status, spec=spec))
        assert made.status is not None
        assert (made.status.attempts[0].stopping == "SchedulingTimeout") is given_up


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


ONE_NODE = ("ReadWriteOnce",)
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
    w.pass_time(21)
    await w.settle()
    assert _claims_of(w) and len(w.cluster.pods) == workers and w.cluster.now > NOW


async def test_pods_of_a_gang_over_the_quota_come_when_there_is_room() -> None:
    w = World({"workers": 2})
    w.refuse("create_pod", ApiError(403, "exceeded quota: gpus"))
    await w.settle()
    assert not w.cluster.pods
    del w.cluster.create_pod
    w.pass_time(21)
    await w.settle()
    assert len(w.cluster.pods) == 2


async def test_a_claim_that_the_server_calls_invalid_is_said_of_the_data_cache() -> None:
    w = World({"dataCache": SIZE})
    w.refuse("create", ApiError(422, "spec.storageClassName: Invalid value"))
    await w.settle()
    found = condition(w.status, Condition.ACCEPTED)
    assert found.message == "spec.dataCache: spec.storageClassName: Invalid value"
    assert not w.cluster.pods


async def test_a_claim_that_comes_between_look_and_write_is_looked_at_anew() -> None:
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

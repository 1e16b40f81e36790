"""Where a spec is silent, the namespace's ConfigMap says it, then the chart; at acceptance, once."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from spottrain_operator.api.job_defaults import NO_DEFAULTS, JobDefaults, applied, of_config_map
from spottrain_operator.api.node_pools import CapacityType, Pool
from spottrain_operator.api.observed import Observed
from spottrain_operator.api.training_job import AppliedDefaults, CheckpointDefaults, Job, Status
from spottrain_operator.api.validation import parse_job
from spottrain_operator.api.volumes import ObjectRef
from spottrain_operator.control.follow import DEFAULTS_RECHECK
from spottrain_operator.errors import ApiError, InvalidSpec
from spottrain_operator.names import Condition, Platform, Reason
from spottrain_operator.policies import capacity, cleanup
from spottrain_operator.rendering import objects

from tests.builders import (
    KEY,
    condition,
    ended_pod,
    make_job,
    make_observed,
    make_pod,
    raw_job,
    raw_spec,
    started,
)
from tests.unit.controller.fake_cluster import World, begun
from tests.unit.controller.stories import Story

Json = dict[str, Any]
CHART = JobDefaults(
    checkpoint_prefix="s3://team/runs/",
    checkpoint_endpoint="https://minio:9000",
    credentials_secret="s3",
    service_account_name="trainer",
)
A100 = Pool(name="a100", platform=Platform.AWS)
DEMAND = Pool(name="demand", platform=Platform.AWS, type=CapacityType.ON_DEMAND)


def silent(**more: Any) -> Json:
    """A spec that says nothing about checkpoints."""
    return raw_spec(checkpoint={}, **more)


def place(job: Job, namespace: JobDefaults = NO_DEFAULTS, chart: JobDefaults = CHART) -> Any:
    return applied(job, namespace, chart).checkpoint


# --- which level counts -----------------------------------------------------------------------------------
def test_the_uri_is_the_prefix_with_namespace_and_name() -> None:
    assert applied(make_job(silent()), NO_DEFAULTS, CHART) == AppliedDefaults(
        checkpoint=CheckpointDefaults(
            uri="s3://team/runs/ns/job",
            endpoint="https://minio:9000",
            credentials_secret_ref=ObjectRef(name="s3"),
        ),
        service_account_name="trainer",
    )


def test_a_namespace_with_a_prefix_of_its_own_has_nothing_of_the_charts_store() -> None:
    found = place(make_job(silent()), JobDefaults(checkpoint_prefix="s3://own"))
    assert found == CheckpointDefaults(uri="s3://own/ns/job")


def test_a_namespace_may_change_the_credentials_of_the_charts_store_alone() -> None:
    found = place(make_job(silent()), JobDefaults(credentials_secret="mine"))
    assert (found.uri, found.endpoint) == ("s3://team/runs/ns/job", "https://minio:9000")
    assert found.credentials_secret_ref == ObjectRef(name="mine")


@pytest.mark.parametrize("checkpoint", [{"uri": "gs://own/run"}, {"mode": "Self"}])
def test_a_job_with_a_place_of_its_own_gets_no_endpoint_and_no_credentials(checkpoint: Json) -> None:
    assert place(make_job(raw_spec(checkpoint=checkpoint))) is None


def test_what_the_spec_says_beside_the_uri_comes_first() -> None:
    own = {"endpoint": "https://other", "credentialsSecretRef": {"name": "own"}}
    job = make_job(raw_spec(checkpoint=own))
    assert job.spec is not None
    checkpoint = job.spec.with_defaults(applied(job, NO_DEFAULTS, CHART)).checkpoint
    assert (checkpoint.uri, checkpoint.endpoint) == ("s3://team/runs/ns/job", "https://other")
    assert checkpoint.credentials_secret_ref == ObjectRef(name="own")


@pytest.mark.parametrize("field", ["serviceAccountName", "serviceAccount"])
def test_the_service_account_of_the_template_comes_first(field: str) -> None:
    spec = silent()
    spec["template"]["spec"][field] = "own"
    assert applied(make_job(spec), JobDefaults(service_account_name="ns"), CHART).service_account_name == ""


def test_the_service_account_of_the_namespace_comes_before_the_charts() -> None:
    found = applied(make_job(raw_spec()), JobDefaults(service_account_name="ns"), CHART)
    assert found.service_account_name == "ns"


def test_two_namespaces_never_get_the_same_uri() -> None:
    """Not even where the prefix of one ends with the namespace of the other."""
    levels = [JobDefaults(checkpoint_prefix=p) for p in ("s3://b", "s3://b/a", "s3://b/a/a", "s3://b/a/b")]
    jobs = [replace(KEY, namespace=ns, name=name) for ns in ("a", "b", "a-b") for name in ("a", "b", "a.b")]
    uris = [
        (place(replace(make_job(silent()), key=key), level).uri, key.namespace)
        for level in levels
        for key in jobs
    ]
    by_uri: dict[str, set[str]] = {}
    for uri, namespace in uris:
        by_uri.setdefault(uri, set()).add(namespace)
    assert all(len(namespaces) == 1 for namespaces in by_uri.values())


# --- the ConfigMap ----------------------------------------------------------------------------------------
def config_map(**data: str) -> Json:
    return {"metadata": {"name": "spottrain-defaults"}, "data": data}


def test_a_config_map_is_read_with_the_names_of_the_chart() -> None:
    raw = config_map(
        checkpointPrefix="s3://own/x\n",
        credentialsSecret="s3",
        pools="a100, demand,",
        serviceAccountName="me",
    )
    assert of_config_map(raw, "ns", ["a100", "demand"]) == JobDefaults(
        checkpoint_prefix="s3://own/x",
        credentials_secret="s3",
        service_account_name="me",
        pools=("a100", "demand"),
    )


@pytest.mark.parametrize("raw", [None, {}, {"data": None}])
def test_no_config_map_or_an_empty_one_says_nothing(raw: Json | None) -> None:
    assert of_config_map(raw, "ns", []) == NO_DEFAULTS


PREFIXES = (
    "team/runs", "file:////", "s3://b", "s3://bucket/a?b", "s3://bucket//runs", "gs://bucket/a//b",
    "s3://bucket/runs//", "file:///mnt//runs", "s3://bucket/" + "x" * 700,
    "abfss://c@acc.dfs.core.windows.net/runs",
)  # fmt: skip
UNUSABLE: tuple[dict[str, str], ...] = (
    {"checkpointprefix": "s3://b"},
    *({"checkpointPrefix": prefix} for prefix in PREFIXES),
    *({"checkpointEndpoint": url} for url in ("https://acc.blob.core.windows.net", "minio:9000")),
    *({"credentialsSecret": name} for name in ("../other", "other/s3")),
    *({"pools": names} for names in ("h100", ",".join(["a100"] * 17))),
)


@pytest.mark.parametrize("data", UNUSABLE)
def test_a_config_map_that_cannot_be_used_is_refused_by_the_name_of_its_key(data: dict[str, str]) -> None:
    (key,) = data
    with pytest.raises(InvalidSpec, match=f"ConfigMap ns/spottrain-defaults.*{key}"):
        of_config_map(config_map(**data), "ns", ["a100"])


# --- pools ------------------------------------------------------------------------------------------------
def observed(job: Job, *pools: Pool, names: tuple[str, ...] = ("a100", "demand")) -> Observed:
    base = make_observed(job=job, nodes=())
    return replace(base, pools={p.name: p for p in pools}, applied=AppliedDefaults(pools=names))


def spot(kind: str, **more: Any) -> Job:
    return make_job(raw_spec(capacity={"type": kind} | more), status=Status())


@pytest.mark.parametrize(
    ("kind", "names"),
    [("Spot", ["a100"]), ("OnDemand", ["demand"]), ("Cheapest", ["a100", "demand"]), ("Reserved", ["a100"])],
)
def test_of_the_default_pools_those_of_the_jobs_type_are_used(kind: str, names: list[str]) -> None:
    o = observed(spot(kind), A100, DEMAND)
    assert capacity.problem(o) == "" and [p.name for p in capacity.pools_of(o)] == names
    assert all(p.type == kind for p in capacity.pools_of(o)) or kind == "Cheapest"


def test_a_job_with_pools_of_its_own_gets_no_default_pool() -> None:
    o = observed(spot("Spot", pools=[{"name": "mine", "platform": "GKE"}]), A100, DEMAND)
    assert [p.name for p in capacity.pools_of(o)] == ["mine"]
    assert applied(o.job, JobDefaults(pools=("a100",)), CHART).pools == ()


def test_default_pools_of_which_none_fits_are_a_sentence() -> None:
    problem = capacity.problem(observed(spot("Spot"), DEMAND, names=("demand",)))
    assert "none of the default pools (demand) is of type Spot" in problem


def test_a_default_pool_that_the_chart_lost_since_is_a_sentence() -> None:
    problem = capacity.problem(observed(spot("Spot"), DEMAND))
    assert (
        "the default pools: the operator knows no pool a100; the chart's value pools names: demand" in problem
    )


# --- a job's life -----------------------------------------------------------------------------------------
def env_of(world: World, attempt: int = 1) -> dict[str, str]:
    container = world.cluster.pods[world.pod(attempt)]["spec"]["containers"][0]
    return {e["name"]: e.get("value", "") for e in container["env"]}


async def test_at_acceptance_the_defaults_are_in_the_status_and_in_the_pod() -> None:
    world = World({"checkpoint": {}}, defaults=CHART)
    await world.settle()
    pod = world.cluster.pods[world.pod(1)]["spec"]
    assert env_of(world)["SPOTTRAIN_CHECKPOINT_URI"] == "s3://team/runs/ns/job"
    assert env_of(world)["SPOTTRAIN_CHECKPOINT_ENDPOINT"] == "https://minio:9000"
    assert {"secretRef": {"name": "s3"}} in pod["containers"][0]["envFrom"]
    assert pod["serviceAccountName"] == "trainer"
    defaults = world.status.defaults
    assert defaults is not None and defaults.checkpoint is not None
    assert defaults.checkpoint.uri == "s3://team/runs/ns/job" and defaults.service_account_name == "trainer"


async def failed_once(world: World) -> World:
    """Its second attempt has a pod, made by an operator with what it was given by then."""
    world._start()
    await world.ends(world.pod(1), 1)
    await world.after(60)
    return world


async def test_no_later_value_of_chart_or_namespace_moves_an_accepted_job() -> None:
    world = await begun({"checkpoint": {}}, defaults=CHART)
    accepted, read = world.status.defaults, world.cluster.config_maps_read
    world.defaults = JobDefaults(checkpoint_prefix="s3://elsewhere")
    world.cluster.others["configmaps/spottrain-defaults"] = config_map(checkpointPrefix="s3://own")
    assert env_of(await failed_once(world), 2)["SPOTTRAIN_CHECKPOINT_URI"] == "s3://team/runs/ns/job"
    assert world.status.defaults == accepted and world.cluster.config_maps_read == read


async def test_the_namespaces_config_map_is_read_once_for_a_job() -> None:
    world = World({"checkpoint": {}}, defaults=CHART)
    world.cluster.others["configmaps/spottrain-defaults"] = config_map(checkpointPrefix="s3://own")
    await world.begin()
    assert env_of(world)["SPOTTRAIN_CHECKPOINT_URI"] == "s3://own/ns/job"
    assert world.cluster.config_maps_read == 1


@pytest.mark.parametrize("crash_after_effect", [False, True])
@pytest.mark.parametrize("write", [1, 2, 3])
async def test_a_crash_at_any_write_of_a_start_makes_one_pod_and_one_uri(
    write: int, crash_after_effect: bool
) -> None:
    world = World({"checkpoint": {}, "deletionPolicy": "Delete"}, defaults=CHART)
    world.cluster.crash_at, world.cluster.crash_after_effect = write, crash_after_effect
    await world.settle()
    assert world.cluster.posted == [world.pod(1)]
    assert env_of(world)["SPOTTRAIN_CHECKPOINT_URI"] == "s3://team/runs/ns/job"


async def test_a_complete_spec_asks_for_no_config_map() -> None:
    spec = raw_spec(capacity={"pools": [{"name": "mine", "platform": "AWS"}]})
    spec["template"]["spec"]["serviceAccountName"] = "own"
    world = await begun(spec)
    assert world.cluster.config_maps_read == 0 and world.status.defaults is None


async def refused(world: World) -> str:
    """Why the job is not accepted; it has no pod."""
    await world.settle()
    accepted = condition(world.status, Condition.ACCEPTED)
    assert (accepted.status, accepted.reason) == ("False", Reason.INVALID_SPEC)
    assert world.cluster.posted == [] and world.status.phase == "Invalid"
    return accepted.message


async def test_spot_without_any_uri_is_not_accepted_and_says_what_to_set() -> None:
    said = await refused(World({"checkpoint": {}}))
    for words in ("spot capacity needs checkpoint.uri", "checkpointPrefix", "ConfigMap spottrain-defaults"):
        assert words in said


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ({}, "spot capacity needs checkpoint.uri"),
        ({"capacity": {"type": "OnDemand"}, "deletionPolicy": "Delete"}, "deletionPolicy Delete needs"),
    ],
)
@pytest.mark.parametrize(
    "status", [Status(defaults=AppliedDefaults(service_account_name="me")), Status(attempt=1)]
)
def test_a_job_whose_defaults_are_settled_without_a_uri_is_to_be_created_again(
    spec: Json, problem: str, status: Status
) -> None:
    job = replace(make_job(silent(**spec)), status=status)
    said = capacity.problem(replace(make_observed(), job=job))
    assert problem in said and "create the job again with checkpoint.uri" in said
    assert "set it" not in said and "checkpointPrefix" not in said


async def test_a_refused_job_is_looked_at_again_only_after_minutes_and_starts_once_there_is_a_prefix() -> (
    None
):
    world = World({"checkpoint": {}})
    await world.settle()
    writes = world.cluster.writes
    again = await world.look()
    assert isinstance(again, timedelta) and again >= DEFAULTS_RECHECK
    assert world.cluster.writes == writes
    world.cluster.others["configmaps/spottrain-defaults"] = config_map(checkpointPrefix="s3://own")
    await world.settle()
    assert env_of(world)["SPOTTRAIN_CHECKPOINT_URI"] == "s3://own/ns/job"


@pytest.mark.parametrize(
    ("spec", "prefix", "words"),
    [
        ({"deletionPolicy": "Delete", "capacity": {"type": "OnDemand"}}, "", "deletionPolicy Delete needs"),
        ({"checkpoint": {"pathStyle": True}}, "gs://bucket", "apply to s3:// URIs only"),
        ({}, "file:///data", "is on no volume"),
    ],
)
async def test_a_default_place_that_does_not_fit_is_a_sentence(spec: Json, prefix: str, words: str) -> None:
    world = World({"checkpoint": {}, **spec}, defaults=JobDefaults(checkpoint_prefix=prefix))
    assert words in await refused(world)


async def test_a_config_map_that_may_not_be_read_is_a_sentence() -> None:
    world = World({"checkpoint": {}})
    world.refuse("get_configmap", ApiError(403, "configmaps is forbidden"))
    assert "cannot be read: configmaps is forbidden" in await refused(world)


async def test_on_demand_trains_without_a_prefix_and_a_later_one_is_not_for_it() -> None:
    world = await begun({"checkpoint": {}, "capacity": {"type": "OnDemand"}})
    assert "SPOTTRAIN_CHECKPOINT_URI" not in env_of(world) and world.status.defaults is None
    world.defaults = CHART
    assert "SPOTTRAIN_CHECKPOINT_URI" not in env_of(await failed_once(world), 2)


def test_the_checkpoints_at_a_default_place_are_deleted_with_the_job() -> None:
    status = Status(defaults=AppliedDefaults(checkpoint=CheckpointDefaults(uri="s3://team/runs/ns/job")))
    job = parse_job(raw_job(silent(deletionPolicy="Delete"), status=status))
    assert job.spec is not None and job.spec.checkpoint.uri == "s3://team/runs/ns/job"
    assert cleanup.wanted(make_observed(job=job))
    unreadable = replace(job, spec=None, invalid="spec.workers must be an integer")
    assert "checkpoints at s3://team/runs/ns/job are left" in cleanup.gives_up(make_observed(job=unreadable))


def test_the_pod_that_deletes_them_has_the_default_place_credentials_and_identity() -> None:
    defaults = applied(make_job(silent(deletionPolicy="Delete")), NO_DEFAULTS, CHART)
    raw = raw_job(silent(deletionPolicy="Delete"), status=Status(defaults=defaults))
    pod = objects.cleanup(parse_job(raw), Pool(name="default", platform=Platform.AWS))["spec"]
    command, source = pod["containers"][0]["command"], pod["containers"][0]["envFrom"]
    assert command[3] == "s3://team/runs/ns/job" and command[-2:] == ["--endpoint", "https://minio:9000"]
    assert source == [{"secretRef": {"name": "s3"}}] and pod["serviceAccountName"] == "trainer"


@pytest.mark.parametrize("change", [{"capacity": {"type": "Spot"}}, {"deletionPolicy": "Delete"}])
def test_a_job_that_started_without_checkpoints_starts_no_attempt_that_would_need_them(change: Any) -> None:
    job = Story(started(), checkpoint={}, capacity={"type": "OnDemand"})
    job.look("!Accepted=False", make_pod())
    made = job.look("Accepted=False !deletes", make_pod(), spec=change)
    assert "this job was accepted without one" in condition(made, Condition.ACCEPTED).message
    job.look("cause1=Failed attempt=1 !creates", ended_pod(code=1), at=60)

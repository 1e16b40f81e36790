"""The chart's admission policies for the operator on the real API server: its own writes pass, others do not.

The tests that share an operator process play whole jobs under the same policies (conftest.py).
"""

from __future__ import annotations

import asyncio
import http.client
import itertools
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes.aio import client, config
from spottrain_operator import names
from spottrain_operator.errors import ApiError
from spottrain_operator.io.cluster import APPLY, Cluster, release_pod, set_finalizer

from tests.api import chart
from tests.api.kube import MERGE, Json, Kube, Refused, jobs, wait_for
from tests.api.scene import job_body
from tests.support.helm import NAMESPACE

_count = itertools.count(1)
SPACE = "operators-rights"
FOREIGN = "foreign"
AS_THE_OPERATOR = {"Impersonate-User": chart.OPERATOR, "Impersonate-Group": "system:serviceaccounts"}
DEADLINE = {names.DEADLINE_ANNOTATION: "2026-01-01T00:00:00Z", names.SOURCE_ANNOTATION: "test"}
ADVICE = {names.SAVE_ADVISED_ANNOTATION: "2026-01-01T00:00:00Z"}


def owned(name: str, job: Json, **body: Any) -> Json:
    owner = {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "controller": True,
        "blockOwnerDeletion": True,
    }
    owner |= {"name": job["metadata"]["name"], "uid": job["metadata"]["uid"]}
    labels = {names.MANAGED_BY_LABEL: names.MANAGED_BY, names.ROLE_LABEL: names.ROLE_TRAINER}
    return {
        "metadata": {"name": name, "namespace": SPACE, "labels": labels, "ownerReferences": [owner]}
    } | body


def pod(name: str, job: Json) -> Json:
    container = {"name": "trainer", "image": "x:1"}
    made = owned(name, job, apiVersion="v1", kind="Pod", spec={"containers": [container]})
    made["metadata"]["annotations"] = {"theirs.io/a": "1"}
    made["metadata"]["labels"]["theirs.io/l"] = "1"
    made["metadata"]["finalizers"] = [names.OUTCOME_FINALIZER]
    return made


def bare(name: str) -> Json:
    """A pod of somebody else, in the same namespace."""
    return {
        "metadata": {"name": name, "namespace": SPACE},
        "spec": {"containers": [{"name": "c", "image": "x"}]},
    }


PODS = f"/api/v1/namespaces/{SPACE}/pods"


@pytest.fixture(scope="module")
def guarded(kube: Kube, operators_kubeconfig: Path) -> Kube:
    """A namespace with somebody else's pod, and the policies in force."""
    kube.make_namespace(SPACE)
    kube.call("POST", PODS, bare(FOREIGN))

    def refused() -> bool:
        try:
            kube.call("POST", f"{PODS}?dryRun=All", bare("probe"), headers=AS_THE_OPERATOR)
        except Refused as no:
            return "owns" in str(no)
        return False

    wait_for("the policies to be in force", refused)
    return kube


@pytest.fixture(scope="module")
def job(guarded: Kube) -> Json:
    made = guarded.create_job(SPACE, job_body("mine"))
    labels = {"metadata": {"labels": {"theirs.io/l": "1"}}}
    return guarded.call("PATCH", jobs(SPACE, made["metadata"]["name"]), labels, kind=MERGE)


@pytest.fixture
def trainer(guarded: Kube, job: Json) -> Iterator[Json]:
    """A pod of the job, which the operator has made."""
    name = f"trainer-{next(_count)}"
    made = guarded.call("POST", PODS, pod(name, job), headers=AS_THE_OPERATOR)
    yield made
    gone = {"metadata": {"finalizers": None}}
    if guarded.get(f"{PODS}/{name}") is not None:
        guarded.call("PATCH", f"{PODS}/{name}", gone, kind=MERGE)


def annotating(words: Json) -> Json:
    return {"metadata": {"annotations": words}}


def run(account: Path, work: Callable[[Cluster], Awaitable[Any]]) -> Any:
    """Runs calls of the operator's own client, with its own account."""

    async def connected() -> Any:
        loaded = client.Configuration()
        await config.load_kube_config(  # type: ignore[no-untyped-call]
            config_file=str(account), client_configuration=loaded
        )
        cluster = Cluster(client.ApiClient(loaded))
        try:
            return await work(cluster)
        finally:
            await cluster.close()

    return asyncio.run(connected())


# --- what the operator writes ---------------------------------------------------------------------------
def test_each_write_of_the_operator_to_a_pod_passes(
    guarded: Kube, job: Json, operators_kubeconfig: Path
) -> None:
    async def life(cluster: Cluster) -> None:
        await cluster.create("pods", pod("life", job), dry_run=True)
        made = await cluster.create("pods", pod("life", job))
        uid = made["metadata"]["uid"]
        for words in (DEADLINE, ADVICE):
            marked = await cluster.patch("pods", "life", SPACE, annotating(words), uid=uid)
            assert marked["metadata"]["annotations"].items() >= words.items()
        await cluster.delete("pods", "life", SPACE, uid=uid, grace=0)
        await release_pod(cluster, "life", SPACE, uid=uid)

    run(operators_kubeconfig, life)
    assert guarded.get(f"{PODS}/life") is None


def test_each_write_of_the_operator_to_a_job_passes(guarded: Kube, operators_kubeconfig: Path) -> None:
    made = guarded.create_job(SPACE, job_body("brief", ttlSecondsAfterFinished=1))
    uid, version = made["metadata"]["uid"], int(made["metadata"]["resourceVersion"])
    ended = {"type": "Succeeded", "status": "True", "reason": "Completed", "message": "done"}
    status = {"conditions": [ended | {"lastTransitionTime": "2026-01-01T00:00:00Z"}]}

    async def life(cluster: Cluster) -> None:
        change = {"status": status}
        await cluster.patch(
            names.PLURAL, "brief", SPACE, change, uid=uid, version=version, subresource="status"
        )
        held = await set_finalizer(cluster, "brief", SPACE, uid=uid, on=True)
        assert held["metadata"]["finalizers"] == [names.CHECKPOINTS_FINALIZER]
        await set_finalizer(cluster, "brief", SPACE, uid=uid, on=False)
        await cluster.delete(names.PLURAL, "brief", SPACE, uid=uid)

    run(operators_kubeconfig, life)
    assert guarded.get(jobs(SPACE, "brief")) is None


def test_the_operator_makes_what_a_job_needs_beside_its_pods(job: Json, operators_kubeconfig: Path) -> None:
    ports = [{"name": "rendezvous", "port": names.RENDEZVOUS_PORT}]
    service = owned("gang-mine", job, spec={"clusterIP": "None", "ports": ports})
    about = {"kind": names.KIND, "namespace": SPACE, "name": "mine"}
    event = {
        "metadata": {"generateName": "mine.", "namespace": SPACE},
        "involvedObject": about,
        "type": "Normal",
        "reason": "Test",
    }

    books = {"apiVersion": "v1", "kind": "ConfigMap"} | owned("mine-books", job, data={"a": "1"})

    async def make(cluster: Cluster) -> None:
        await cluster.create("services", service)
        await cluster.create("events", event)
        for data in ({"a": "1"}, {"a": "2"}):
            change = books | {"data": data}
            await cluster.patch("configmaps", "mine-books", SPACE, change, form=APPLY)
        assert (await cluster.get("configmaps", "mine-books", SPACE) or {})["data"] == {"a": "2"}

    run(operators_kubeconfig, make)


def test_renewals_of_the_lease_are_served_by_a_flow_of_their_own(guarded: Kube) -> None:
    flow = guarded.call("GET", f"{chart.CLUSTER['FlowSchema']}/spottrain-operator-leader")["metadata"]["uid"]

    def flow_of(path: str) -> str | None:
        connection = http.client.HTTPSConnection(guarded.host, context=guarded.context, timeout=10)
        try:
            connection.request("GET", path, headers=AS_THE_OPERATOR)
            return connection.getresponse().headers["X-Kubernetes-PF-FlowSchema-UID"]
        finally:
            connection.close()

    leases = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/spottrain-operator"
    wait_for("the FlowSchema to be in force", lambda: flow_of(leases) == flow)
    assert flow_of(PODS) not in (flow, None)


# --- what it may not -------------------------------------------------------------------------------------
def without(body: Json, *path: str) -> Json:
    *way, last = path
    part = body
    for name in way:
        part = part[name]
    del part[last]
    return body


@pytest.mark.parametrize(
    ("plural", "make", "says"),
    [
        ("pods", lambda job: bare("loose"), "only what a TrainingJob owns"),
        ("pods", lambda job: without(pod("p", job), "metadata", "labels"), "without the label"),
        (
            "pods",
            lambda job: {**pod("p", job), "metadata": {**pod("p", job)["metadata"], "ownerReferences": []}},
            "only what a TrainingJob owns",
        ),
        ("services", lambda job: owned("s", job, spec={"ports": [{"port": 80}]}), "headless"),
        (
            "services",
            lambda job: owned("s", job, spec={"type": "LoadBalancer", "ports": [{"port": 80}]}),
            "headless",
        ),
        (
            "services",
            lambda job: owned(
                "s", job, spec={"clusterIP": "None", "externalIPs": ["10.0.0.1"], "ports": [{"port": 80}]}
            ),
            "headless",
        ),
        (
            "services",
            lambda job: {"metadata": {"name": "s"}, "spec": {"clusterIP": "None"}},
            "TrainingJob owns",
        ),
    ],
    ids=["bare", "no label", "no owner", "cluster IP", "load balancer", "external IPs", "service of nobody"],
)
def test_the_operator_may_create_nothing_else(
    guarded: Kube, job: Json, plural: str, make: Callable[[Json], Json], says: str
) -> None:
    with pytest.raises(Refused, match=says) as refused:
        guarded.call("POST", f"/api/v1/namespaces/{SPACE}/{plural}", make(job), headers=AS_THE_OPERATOR)
    assert refused.value.status == 403


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"metadata": {"annotations": {"theirs.io/a": "2"}}}, "no annotation but its own"),
        ({"metadata": {"annotations": {"theirs.io/a": None}}}, "no annotation but its own"),
        ({"metadata": {"annotations": {names.TRAINER_ANNOTATION: "sidecar"}}}, "no annotation but its own"),
        ({"metadata": {"labels": {"theirs.io/l": "2"}}}, "no label or owner"),
        ({"metadata": {"labels": {"theirs.io/l": None}}}, "no label or owner"),
        ({"metadata": {"labels": {names.JOB_LABEL: "another"}}}, "no label or owner"),
        ({"metadata": {"labels": {names.ROLE_LABEL: None}}}, "no label or owner"),
        ({"metadata": {"ownerReferences": None}}, "no label or owner"),
        ({"metadata": {"finalizers": ["theirs.io/x"]}}, "no finalizer but its own"),
        ({"spec": {"activeDeadlineSeconds": 1}}, "may not change the spec"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_the_operator_may_change_nothing_else_of_a_jobs_pod(
    guarded: Kube, trainer: Json, body: Json, says: str
) -> None:
    path = f"{PODS}/{trainer['metadata']['name']}"
    with pytest.raises(Refused, match=says) as refused:
        guarded.call("PATCH", path, body, kind=MERGE, headers=AS_THE_OPERATOR)
    assert refused.value.status == 403


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"spec": {"suspend": True}}, "may not change the spec"),
        ({"metadata": {"annotations": {names.DEADLINE_ANNOTATION: "x"}}}, "no annotation but its own"),
        ({"metadata": {"labels": {names.TEAM_LABEL: "another"}}}, "no label or owner"),
        ({"metadata": {"labels": {"theirs.io/l": "2"}}}, "no label or owner"),
        ({"metadata": {"finalizers": ["theirs.io/x"]}}, "no finalizer but its own"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_the_operator_may_change_nothing_else_of_a_job(
    guarded: Kube, job: Json, body: Json, says: str
) -> None:
    with pytest.raises(Refused, match=says) as refused:
        guarded.call("PATCH", jobs(SPACE, "mine"), body, kind=MERGE, headers=AS_THE_OPERATOR)
    assert refused.value.status == 403


def test_what_a_webhook_adds_to_a_write_of_the_operator_is_no_reason_to_refuse_it(
    guarded: Kube, job: Json, trainer: Json
) -> None:
    """Policies see the object after mutating webhooks; who added what they cannot tell."""
    added = {"metadata": {"annotations": {"mesh.io/a": "1"}, "labels": {"mesh.io/l": "1"}}}
    for path in (f"{PODS}/{trainer['metadata']['name']}", jobs(SPACE, "mine")):
        seen = guarded.call("PATCH", f"{path}?dryRun=All", added, kind=MERGE, headers=AS_THE_OPERATOR)
        assert {seen["metadata"][part]["mesh.io/" + part[0]] for part in ("annotations", "labels")} == {"1"}


def test_somebody_elses_pod_is_neither_marked_nor_deleted(guarded: Kube, operators_kubeconfig: Path) -> None:
    theirs = guarded.call("GET", f"{PODS}/{FOREIGN}")
    uid = theirs["metadata"]["uid"]
    calls: dict[str, Callable[[Cluster], Awaitable[Any]]] = {
        "change only TrainingJobs and their pods": lambda cluster: cluster.patch(
            "pods", FOREIGN, SPACE, annotating(DEADLINE), uid=uid
        ),
        "delete only pods of a TrainingJob": lambda cluster: cluster.delete(
            "pods", FOREIGN, SPACE, uid=uid, grace=0
        ),
    }
    for says, call in calls.items():
        with pytest.raises(ApiError, match=says):
            run(operators_kubeconfig, call)
    assert guarded.call("GET", f"{PODS}/{FOREIGN}")["metadata"]["uid"] == uid


@pytest.mark.parametrize("held", [True, False], ids=["with our finalizer", "without"])
def test_of_a_pod_without_an_owner_only_our_finalizer_goes(
    guarded: Kube, job: Json, operators_kubeconfig: Path, held: bool
) -> None:
    """A job that is deleted with --cascade=orphan leaves such a pod."""
    name = f"orphan-{held}".lower()
    orphan = without(pod(name, job), "metadata", "ownerReferences")
    orphan["metadata"]["finalizers"] = ["theirs.io/x", *([names.OUTCOME_FINALIZER] if held else [])]
    uid = guarded.call("POST", PODS, orphan)["metadata"]["uid"]
    for body in ({"metadata": {"finalizers": None}}, {"spec": {"activeDeadlineSeconds": 1}}):
        with pytest.raises(Refused, match="no finalizer but its own|spec" if held else "and their pods"):
            guarded.call("PATCH", f"{PODS}/{name}", body, kind=MERGE, headers=AS_THE_OPERATOR)
    if held:
        run(operators_kubeconfig, lambda cluster: release_pod(cluster, name, SPACE, uid=uid))
    ours = {"metadata": {"finalizers": ["theirs.io/x", names.OUTCOME_FINALIZER]}}
    with pytest.raises(Refused, match="change only TrainingJobs and their pods"):
        guarded.call("PATCH", f"{PODS}/{name}", ours, kind=MERGE, headers=AS_THE_OPERATOR)
    assert guarded.call("GET", f"{PODS}/{name}")["metadata"]["finalizers"] == ["theirs.io/x"]
    guarded.call("PATCH", f"{PODS}/{name}", {"metadata": {"finalizers": None}}, kind=MERGE)


@pytest.mark.parametrize("spec", [{}, {"ttlSecondsAfterFinished": 1}], ids=["no ttl", "has not ended"])
def test_a_job_is_deleted_only_when_it_has_ended_and_asks_for_it(
    guarded: Kube, operators_kubeconfig: Path, spec: Json
) -> None:
    name = "kept-ttl" if spec else "kept"
    uid = guarded.create_job(SPACE, job_body(name, **spec))["metadata"]["uid"]
    with pytest.raises(ApiError, match="only once it has ended"):
        run(operators_kubeconfig, lambda cluster: cluster.delete(names.PLURAL, name, SPACE, uid=uid))


def test_others_are_not_held_by_the_operators_policies(guarded: Kube) -> None:
    guarded.call("POST", PODS, bare("of-a-team"))
    guarded.call("PATCH", f"{PODS}/of-a-team", {"metadata": {"labels": {"x": "1"}}}, kind=MERGE)
    guarded.call("DELETE", f"{PODS}/of-a-team", {"gracePeriodSeconds": 0})

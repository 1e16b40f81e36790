"""Defaults of a team on a real API server: the namespace's ConfigMap, the chart's value, what stays."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import pytest
from localcluster.apiserver import ApiServer
from spottrain.checkpoint.head.state import Claiming, Identity, Lease, Releasing
from spottrain.contract import Outcome
from spottrain.contract import Reason as ContractReason
from spottrain.errors import ConfigurationError
from spottrain_operator.api.validation import parse_job

from tests.api.kube import MERGE, Json, Kube, Refused, jobs, wait_for
from tests.api.scene import OperatorProcess, Scene, job_body
from tests.builders import word

CHART = '{"checkpointPrefix": "s3://team/runs", "credentialsSecret": "team-s3"}'
QUIET_SECONDS = 1.5
"""How long nothing must be written; a loop of retries writes many times in it."""
_count = itertools.count(1)


def env_of(pod: Json) -> dict[str, str]:
    return {e["name"]: e.get("value", "") for e in pod["spec"]["containers"][0]["env"]}


def uri_of(pod: Json) -> str:
    return env_of(pod).get("SPOTTRAIN_CHECKPOINT_URI", "")


def uid_of(pod: Json) -> str:
    return env_of(pod)["SPOTTRAIN_JOB_UID"]


def what_the_runtime_says(before: Json, after: Json) -> str:
    """Its own error, where the job of one pod has left a finished HEAD and the next one's claims it."""
    head = None
    for pod in (before, after):
        env = env_of(pod)
        who = Identity(job_uid=env["SPOTTRAIN_JOB_UID"], job=env["SPOTTRAIN_JOB_NAME"], attempt=1)
        try:
            head = Claiming(who=who).decide(head, "nonce")
        except ConfigurationError as error:
            return str(error)
        assert head is not None
        head = Releasing(lease=Lease(who=who, term=head.term), done=True).decide(head, "other")
    raise AssertionError("the second claim was not refused")


def silent(name: str, **spec: object) -> Json:
    body = job_body(name, **spec)
    del body["spec"]["checkpoint"]
    body["spec"] |= spec
    return body


@pytest.fixture
def world(kube: Kube, server: ApiServer) -> Iterator[Scene]:
    """A namespace without defaults, and a job's name in it."""
    namespace = f"defaults-{next(_count)}"
    kube.make_namespace(namespace)
    yield Scene(kube=kube, namespace=namespace, job="gpt")


def operator(server: ApiServer, scene: Scene, **settings: str) -> OperatorProcess:
    return OperatorProcess(kubeconfig=server.kubeconfig, namespace=scene.namespace, **settings)


def give_defaults(scene: Scene, **data: str) -> None:
    path = f"/api/v1/namespaces/{scene.namespace}/configmaps"
    meta = {"name": "spottrain-defaults"}
    if scene.kube.get(f"{path}/spottrain-defaults") is None:
        scene.kube.call("POST", path, {"metadata": meta, "data": data})
    else:
        scene.kube.call("PATCH", f"{path}/spottrain-defaults", {"data": data}, kind=MERGE)


def test_the_charts_prefix_and_then_the_namespaces_and_neither_moves_what_was_accepted(
    world: Scene, server: ApiServer
) -> None:
    with operator(server, world, job_defaults=CHART) as first:
        first.wait_ready()
        world.kube.create_job(world.namespace, silent("gpt"))
        pod = world.wait_attempt(1)
        place = f"s3://team/runs/{world.namespace}/gpt"
        assert uri_of(pod) == place
        assert {"secretRef": {"name": "team-s3"}} in pod["spec"]["containers"][0]["envFrom"]
        assert world.status()["defaults"] == {
            "checkpoint": {"uri": place, "credentialsSecretRef": {"name": "team-s3"}}
        }
        world.bind(pod)
    give_defaults(world, checkpointPrefix="s3://own/x", checkpointEndpoint="https://minio:9000")
    with operator(server, world, job_defaults='{"checkpointPrefix": "s3://changed"}') as second:
        second.wait_ready()
        world.see_runtime()
        world.delete(pod)
        world.end(pod, 75)
        assert uri_of(world.wait_attempt(2)) == place, "the chart and the namespace have changed since"
        later = Scene(kube=world.kube, namespace=world.namespace, job="later")
        world.kube.create_job(world.namespace, silent("later"))
        env = env_of(later.wait_attempt(1))
        assert env["SPOTTRAIN_CHECKPOINT_URI"] == f"s3://own/x/{world.namespace}/later"
        assert env["SPOTTRAIN_CHECKPOINT_ENDPOINT"] == "https://minio:9000"
        assert "credentialsSecretRef" not in later.status()["defaults"]["checkpoint"]


def test_spot_without_any_uri_is_refused_by_a_condition_without_a_loop_and_a_uri_can_be_added(
    world: Scene, server: ApiServer
) -> None:
    with operator(server, world) as process:
        process.wait_ready()
        world.kube.create_job(world.namespace, silent("gpt"))
        refused = world.wait_condition("Accepted", "False", "InvalidSpec")
        for words in ("spot capacity needs checkpoint.uri", "checkpointPrefix", "spottrain-defaults"):
            assert words in refused["message"]
        before = world.raw()["metadata"]["resourceVersion"]
        time.sleep(QUIET_SECONDS)
        assert world.raw()["metadata"]["resourceVersion"] == before and world.pods() == []
        world.change(checkpoint={"uri": "s3://bucket/added"})
        assert uri_of(world.wait_attempt(1)) == "s3://bucket/added"
        with pytest.raises(Refused, match=r"checkpoint.uri is immutable"):
            world.change(checkpoint={"uri": None})


def test_a_mistake_in_the_namespaces_defaults_is_a_sentence_on_the_job(
    world: Scene, server: ApiServer
) -> None:
    give_defaults(world, checkpointprefix="s3://own/x")
    with operator(server, world) as process:
        process.wait_ready()
        world.create()
        refused = world.wait_condition("Accepted", "False", "InvalidSpec")
        assert "has the unknown key checkpointprefix; it may have: checkpointEndpoint" in refused["message"]
        give_defaults(world, checkpointprefix=None, serviceAccountName="default")  # type: ignore[arg-type]
        world.change(activeDeadlineSeconds=3600)  # any edit is a look
        assert world.wait_attempt(1)["spec"]["serviceAccountName"] == "default"
        assert world.status()["defaults"] == {"serviceAccountName": "default"}


def test_a_job_that_is_applied_again_meets_its_predecessor_and_shows_the_runtimes_question(
    world: Scene, server: ApiServer
) -> None:
    with operator(server, world, job_defaults=CHART) as process:
        process.wait_ready()
        world.kube.create_job(world.namespace, silent("gpt"))
        pod = world.wait_attempt(1)
        world.bind(pod)
        world.end(pod, 0, word(Outcome.DONE, step=10, durableStep=10))
        world.wait_condition("Succeeded", "True")
        world.kube.call("DELETE", jobs(world.namespace, "gpt"))
        wait_for("the job to go", lambda: world.kube.get(jobs(world.namespace, "gpt")) is None)
        wait_for(
            "its pod to be released",
            lambda: not (world.pod(1) or {"metadata": {}})["metadata"].get("finalizers"),
        )
        world.delete(pod, 0)
        raw = world.kube.create_job(world.namespace, silent("gpt"))
        again = world.wait_attempt(1)
        assert uri_of(again) == uri_of(pod)
        world.bind(again)
        said = what_the_runtime_says(pod, again)
        message = word(Outcome.BAD_CONFIGURATION, reason=ContractReason.URI_IN_USE, message=said)
        world.end(again, 64, message)
        failed = world.wait_condition("Failed", "True")
        assert f"job gpt (UID {uid_of(pod)}" in failed["message"]
        assert "should this job resume from there, or start fresh?" in failed["message"]
        assert (
            "Set checkpoint.onExisting (spottrain run --on-existing) to Resume or to Fresh"
            in failed["message"]
        )
        job = parse_job(world.raw())
        assert job.key.uid == raw["metadata"]["uid"] and job.spec is not None
        assert job.spec.checkpoint.uri == uri_of(pod)


def test_what_was_filled_in_cannot_be_changed_or_removed_in_the_status(kube: Kube, namespace: str) -> None:
    raw = kube.create_job(namespace, silent("job"))
    path = f"{jobs(namespace, 'job')}/status"
    defaults = {"checkpoint": {"uri": "s3://team/runs/x/job"}}
    raw = kube.call("PUT", path, raw | {"status": {"attempt": 1, "defaults": defaults}})
    for other in ({"attempt": 2}, {"attempt": 2, "defaults": {"checkpoint": {"uri": "s3://elsewhere/job"}}}):
        with pytest.raises(Refused, match="defaults stay as they were when the job was accepted"):
            kube.call("PUT", path, raw | {"status": other})
    with pytest.raises(Refused, match=r"checkpoint.uri is immutable"):
        kube.call("PATCH", jobs(namespace, "job"), {"spec": {"checkpoint": {"uri": "s3://b/c"}}}, kind=MERGE)

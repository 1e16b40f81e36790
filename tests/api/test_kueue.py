"""A job with a Kueue queue, against a real API server; the test plays Kueue, scheduler and kubelet.

The operator has its chart's own rights and policies (kueue.enabled), and no more.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from spottrain.contract import Outcome
from spottrain_operator.names import QUEUE_LABEL

from tests.api import chart, kueue
from tests.api.kube import MERGE, Json, Kube, Refused, jobs, wait_for
from tests.api.kueue import Queues
from tests.api.scene import OperatorProcess, Scene, job_body
from tests.builders import word

SAVED = word(Outcome.INTERRUPTED, step=9, durableStep=9, startStep=0)
TAINT = {"key": "spot", "operator": "Exists"}
_count = itertools.count(1)


@pytest.fixture(scope="module")
def operator(kube: Kube, operators_kubeconfig: Path) -> Iterator[OperatorProcess]:
    name = "queued"
    kube.make_namespace(name)
    chart.install(kube, "operator", "kueue.enabled=true")
    try:
        with OperatorProcess(
            kubeconfig=operators_kubeconfig, namespace=name, kueue="true", resync_seconds="2"
        ) as process:
            process.wait_ready()
            yield process
    finally:
        chart.install(kube, "operator")


@pytest.fixture
def scene(kube: Kube, operator: OperatorProcess) -> Scene:
    return Scene(kube=kube, namespace=operator.namespace, job=f"queued-{next(_count)}")


@pytest.fixture(scope="module")
def queues(kube: Kube, operator: OperatorProcess) -> Iterator[Queues]:
    kueue.install(kube)
    made = Queues(kube=kube, namespace=operator.namespace)
    made.make_flavor("spot", {"capacity": "spot"}, [TAINT])
    made.make_flavor("on-demand", {"capacity": "on-demand"}, [])
    yield made
    kueue.remove(kube)


def create(scene: Scene, **spec: object) -> None:
    body = job_body(scene.job, **spec)
    body["metadata"]["labels"] = {QUEUE_LABEL: "team"}
    scene.kube.create_job(scene.namespace, body)


def begun(scene: Scene, queues: Queues, **spec: object) -> Json:
    create(scene, **spec)
    queues.wait(scene.job)
    queues.admit(scene.job, "spot")
    pod = scene.wait_attempt(1)
    scene.bind(pod)
    scene.wait_condition("Running", "True")
    return pod


def going(scene: Scene, pod: Json) -> bool:
    live = scene.kube.get(scene.path(pod))
    return live is None or "deletionTimestamp" in live["metadata"]


def test_a_job_waits_for_kueue_with_a_sentence_and_asks_once_it_is_installed(
    scene: Scene, kube: Kube, request: pytest.FixtureRequest
) -> None:
    create(scene)
    waiting = scene.wait_condition("Admitted", "False", "WaitingForQueue")
    assert "this cluster does not serve kueue.x-k8s.io" in waiting["message"]
    queues: Queues = request.getfixturevalue("queues")
    queues.wait(scene.job)
    assert not scene.pods()


def test_a_job_asks_its_queue_and_starts_with_the_flavor_when_it_is_admitted(
    scene: Scene, queues: Queues
) -> None:
    create(scene, workers=2, capacity={"sameZone": False}, gpusPerWorker=1)
    workload = queues.wait(scene.job)
    (pod_set,) = workload["spec"]["podSets"]
    assert workload["spec"]["queueName"] == "team" and pod_set["count"] == 2
    resources = pod_set["template"]["spec"]["containers"][0]["resources"]
    assert resources["requests"] == {"nvidia.com/gpu": "1"}
    queues.keep_waiting(scene.job, "insufficient unused quota for nvidia.com/gpu")
    sentence = (
        "waiting for the Kueue queue team to admit the job: insufficient unused quota for nvidia.com/gpu"
    )
    wait_for("Kueue's words", lambda: scene.condition("Admitted").get("message") == sentence)
    assert scene.status()["phase"] == "Waiting" and not scene.pods()

    queues.admit(scene.job, "spot")
    pods = scene.wait_gang(1, 2)
    for pod in pods:
        assert pod["spec"]["nodeSelector"]["capacity"] == "spot"
        assert TAINT in pod["spec"]["tolerations"]
        assert QUEUE_LABEL not in pod["metadata"]["labels"], "Kueue does not admit the pods as well"
        scene.bind(pod)
    scene.wait_condition("Admitted", "True")
    wait_for(
        "Kueue to hear that they run", lambda: queues.conditions(scene.job).get("PodsReady") == "True Started"
    )


def test_a_preempted_job_saves_gives_its_quota_back_and_goes_on_when_it_is_admitted_again(
    scene: Scene, queues: Queues
) -> None:
    pod = begun(scene, queues)
    queues.evict(scene.job, "to make room for a more important one")
    wait_for("the pod to be told to save", lambda: going(scene, pod))
    evicted = scene.wait_condition("Admitted", "False", "Evicted")
    assert "to make room for a more important one" in evicted["message"]
    assert queues.conditions(scene.job)["QuotaReserved"] == "True QuotaReserved", "its pod still runs"
    scene.end(pod, 75, SAVED)
    wait_for(
        "the quota to be given back", lambda: queues.conditions(scene.job)["QuotaReserved"] == "False Pending"
    )
    told = queues.conditions(scene.job)
    assert (told["Requeued"], told["Admitted"]) == ("True Preempted", "False NoReservation")
    workload = queues.wait(scene.job)
    assert "admission" not in workload["status"]
    wait_for("the job to wait", lambda: scene.status()["phase"] == "Waiting")
    assert not scene.pods() and scene.counters() == (1, 0, 0)

    queues.admit(scene.job, "on-demand")
    again = scene.wait_attempt(2)
    assert again["spec"]["nodeSelector"]["capacity"] == "on-demand"
    scene.bind(again)
    scene.end(again, 0, word(Outcome.DONE, step=20, durableStep=20, startStep=9))
    scene.wait_condition("Succeeded", "True")
    wait_for(
        "Kueue to hear of the end", lambda: queues.conditions(scene.job).get("Finished") == "True Succeeded"
    )
    assert queues.wait(scene.job)["metadata"]["uid"] == workload["metadata"]["uid"]


def test_a_reclaimed_node_costs_the_job_no_admission(scene: Scene, queues: Queues) -> None:
    pod = begun(scene, queues)
    before = queues.wait(scene.job)
    node = (scene.kube.get(scene.path(pod)) or {})["spec"]["nodeName"]
    scene.give_notice(node)
    wait_for("the pod to be told to save", lambda: going(scene, pod))
    scene.end(pod, 75, SAVED)
    scene.bind(scene.wait_attempt(2))
    wait_for("Kueue to hear that it runs again", lambda: _recovered(scene, queues))
    assert queues.wait(scene.job)["metadata"]["uid"] == before["metadata"]["uid"]
    assert queues.conditions(scene.job)["Admitted"] == "True Admitted"
    assert scene.counters() == (2, 0, 1)


def _recovered(scene: Scene, queues: Queues) -> bool:
    return queues.conditions(scene.job).get("PodsReady", "").startswith("True")


def test_a_suspended_job_has_no_workload_and_asks_for_its_new_size_when_it_is_resumed(
    scene: Scene, queues: Queues
) -> None:
    pod = begun(scene, queues, capacity={"sameZone": False})
    scene.change(suspend=True)
    wait_for("the pod to be told to save", lambda: going(scene, pod))
    assert queues.of(scene.job) is not None, "its pod still runs"
    scene.end(pod, 75, SAVED)
    wait_for("the quota to be given back", lambda: queues.of(scene.job) is None)
    scene.wait_condition("Suspended", "True")
    scene.change(workers=3)
    scene.change(suspend=False)
    assert queues.wait(scene.job)["spec"]["podSets"][0]["count"] == 3
    assert not [p for p in scene.pods() if p["metadata"]["labels"]["spottrain.io/attempt"] == "2"]
    queues.admit(scene.job, "spot")
    scene.wait_gang(2, 3)


def test_a_workload_that_is_deleted_by_hand_ends_the_attempt_and_is_made_again(
    scene: Scene, queues: Queues
) -> None:
    pod = begun(scene, queues)
    workload = queues.wait(scene.job)["metadata"]
    path = f"{kueue.ROOT}/namespaces/{scene.namespace}/workloads/{workload['name']}"
    scene.kube.call("DELETE", path)
    wait_for("the pod to be told to save", lambda: going(scene, pod))
    scene.end(pod, 75, SAVED)
    assert queues.wait(scene.job)["metadata"]["uid"] != workload["uid"]
    queues.admit(scene.job, "spot")
    scene.wait_attempt(2)


def test_the_operator_survives_a_kill_while_its_job_is_evicted(
    kube: Kube, operators_kubeconfig: Path, scene: Scene, queues: Queues, operator: OperatorProcess
) -> None:
    pod = begun(scene, queues)
    operator.kill()
    queues.evict(scene.job, "while nobody looks")
    operator.start()
    wait_for("the pod to be told to save", lambda: going(scene, pod))
    scene.end(pod, 75, SAVED)
    wait_for(
        "the quota to be given back", lambda: queues.conditions(scene.job)["QuotaReserved"] == "False Pending"
    )
    assert scene.counters() == (1, 0, 0)


def test_the_operator_may_change_the_workloads_of_training_jobs_only(kube: Kube, queues: Queues) -> None:
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "j", "uid": "u", "controller": True}
    meta = {"name": "of-another", "ownerReferences": [owner]}
    body = {"apiVersion": f"{kueue.GROUP}/{kueue.VERSION}", "kind": "Workload", "metadata": meta}
    folder = f"{kueue.ROOT}/namespaces/{queues.namespace}/workloads"
    kube.call("POST", folder, body)
    as_operator = {"Impersonate-User": chart.OPERATOR}
    for method, path, change in (
        ("PATCH", f"{folder}/of-another/status", {"status": {"admission": None, "conditions": []}}),
        ("DELETE", f"{folder}/of-another", None),
    ):
        with pytest.raises(Refused, match="only the ConfigMaps and Workloads of TrainingJobs"):
            kube.call(method, path, change, kind=MERGE if change else "application/json", headers=as_operator)
    kube.call("DELETE", f"{folder}/of-another")


def test_pods_that_ask_a_queue_themselves_are_refused(scene: Scene, operator: OperatorProcess) -> None:
    container = {"name": "trainer", "image": "example.com/train:1"}
    asks = {"labels": {QUEUE_LABEL: "other"}}
    create(scene, template={"metadata": asks, "spec": {"containers": [container]}})
    refused = scene.wait_condition("Accepted", "False", "InvalidSpec")
    assert "set that label on the TrainingJob" in refused["message"]
    scene.kube.call("DELETE", jobs(scene.namespace, scene.job))

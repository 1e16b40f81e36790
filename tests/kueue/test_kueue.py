"""What the real Kueue does with jobs of the real operator: admission, preemption, deactivation, the end."""

from __future__ import annotations

from collections.abc import Iterator

from spottrain.contract import Outcome
from spottrain_operator.names import QUEUE_LABEL

from tests.api.kube import Json, wait_for
from tests.api.scene import Scene
from tests.builders import word
from tests.kueue.queues import TOLERATION, Queues

SAVED = word(Outcome.INTERRUPTED, step=9, durableStep=9, startStep=0)
DONE = word(Outcome.DONE, step=20, durableStep=20, startStep=9)


def start(scene: Scene, attempt: int, size: int = 1) -> list[Json]:
    """The attempt's pods, which run."""
    pods = scene.wait_gang(attempt, size)
    for pod in pods:
        scene.bind(pod)
    scene.wait_condition("Running", "True")
    return pods


def wait_told(scene: Scene, pod: Json) -> None:
    def told() -> bool:
        live = scene.kube.get(scene.path(pod))
        return live is None or "deletionTimestamp" in live["metadata"]

    wait_for(f"{pod['metadata']['name']} to be told to save", told)


def test_a_job_gets_its_quota_runs_on_its_flavor_and_gives_the_quota_to_the_next(
    queues: Queues, scenes: Iterator[Scene]
) -> None:
    queues.make(spot=4)
    first, second = next(scenes), next(scenes)
    queues.create(first, workers=2, cpus=2)
    pods = start(first, 1, 2)
    for pod in pods:
        assert pod["spec"]["nodeSelector"]["capacity"] == "spot"
        assert TOLERATION in pod["spec"]["tolerations"]
        assert not pod["spec"].get("schedulingGates"), "Kueue does not hold the pods as well"
        assert QUEUE_LABEL not in pod["metadata"]["labels"]
    queues.wait_used(spot="4")
    assert first.condition("Admitted")["status"] == "True"
    queues.wait_said(first.job, "PodsReady", "True")

    queues.create(second, cpus=4)
    waiting = wait_for("Kueue's sentence", lambda: _sentence(second, "insufficient"))
    assert waiting.startswith(f"waiting for the Kueue queue {queues.name} to admit the job: ")
    assert not second.pods() and second.status()["phase"] == "Waiting"
    for pod in pods:
        first.end(pod, 0, DONE)
    first.wait_condition("Succeeded", "True")
    queues.wait_said(first.job, "Finished", "True Succeeded")
    start(second, 1)
    queues.wait_used(spot="4")


def _sentence(scene: Scene, words: str) -> str:
    message: str = scene.condition("Admitted").get("message", "")
    return message if words in message else ""


def test_kueue_holds_pods_without_a_queue_back_and_not_those_of_an_admitted_job(
    queues: Queues, scenes: Iterator[Scene]
) -> None:
    """It is configured so, and knows the TrainingJob as an external framework."""
    queues.make(spot=4)
    scene = next(scenes)
    queues.create(scene, cpus=4)
    pod = scene.wait_attempt(1)
    assert not pod["spec"].get("schedulingGates")
    plain: Json = {"metadata": {"name": "plain"}, "spec": {"containers": pod["spec"]["containers"][:1]}}
    for key in ("volumeMounts", "env", "securityContext"):
        plain["spec"]["containers"][0].pop(key, None)
    made = scene.kube.call("POST", f"/api/v1/namespaces/{scene.namespace}/pods", plain)
    assert {"name": "kueue.x-k8s.io/admission"} in made["spec"]["schedulingGates"]


def test_a_more_important_job_preempts_one_that_saves_first_and_goes_on_afterwards(
    queues: Queues, scenes: Iterator[Scene]
) -> None:
    queues.make(spot=4)
    low, high = queues.make_class("low", 1), queues.make_class("high", 1000)
    poor, rich = next(scenes), next(scenes)
    queues.create(poor, cpus=4, priority=low)
    (pod,) = start(poor, 1)
    queues.wait_used(spot="4")

    queues.create(rich, cpus=3, priority=high)
    wait_told(poor, pod)
    queues.wait_said(poor.job, "Evicted", "True Preempted")
    assert poor.wait_condition("Admitted", "False", "Evicted")
    assert queues.used() == {"spot": "4"} and not rich.pods(), "its pod still runs, and saves"
    poor.end(pod, 75, SAVED)
    (other,) = start(rich, 1)
    queues.wait_used(spot="3")
    wait_for("the preempted job to wait", lambda: poor.status()["phase"] == "Waiting")
    assert poor.counters() == (1, 0, 0), "nothing is charged"
    record = poor.status()["attempts"][0]
    assert record["cause"] == "Suspended" and "Preempted" in record["evidence"]

    rich.end(other, 0, DONE)
    (again,) = start(poor, 2)
    queues.wait_used(spot="4")
    poor.end(again, 0, DONE)
    poor.wait_condition("Succeeded", "True")
    queues.wait_said(poor.job, "Finished", "True Succeeded")
    queues.wait_used(spot="0")
    assert poor.counters() == (2, 0, 0)


def test_a_reclaimed_node_costs_no_quota_and_the_next_attempt_has_the_same_admission(
    queues: Queues, scenes: Iterator[Scene]
) -> None:
    queues.make(spot=4)
    scene, other = next(scenes), next(scenes)
    queues.create(scene, cpus=4)
    (pod,) = start(scene, 1)
    before = queues.wait(scene.job)
    queues.create(other, cpus=4)
    live = scene.kube.get(scene.path(pod)) or {}
    scene.give_notice(live["spec"]["nodeName"])
    wait_told(scene, pod)
    scene.end(pod, 75, SAVED)
    start(scene, 2)
    queues.wait_said(scene.job, "PodsReady", "True Recovered")
    after = queues.wait(scene.job)
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert after["status"]["admission"] == before["status"]["admission"]
    assert queues.used() == {"spot": "4"} and not other.pods()
    assert scene.counters() == (2, 0, 1)


def test_a_workload_that_an_administrator_deactivates_ends_the_attempt_until_it_is_active_again(
    queues: Queues, scenes: Iterator[Scene]
) -> None:
    queues.make(spot=4)
    scene = next(scenes)
    queues.create(scene, workers=2, cpus=2)
    pods = start(scene, 1, 2)
    queues.set_active(scene.job, False)
    for pod in pods:
        wait_told(scene, pod)
    scene.end(pods[1], 75, SAVED)
    assert queues.says(scene.job, "QuotaReserved").startswith("True"), "the other pod still saves"
    scene.end(pods[0], 75, SAVED)
    queues.wait_used(spot="0")
    wait_for("the reason in the job", lambda: _sentence(scene, "spec.active of its Workload"))
    queues.set_active(scene.job, True)
    start(scene, 2, 2)
    assert scene.counters() == (2, 0, 0)


def test_a_suspended_job_holds_no_quota_and_is_admitted_with_its_new_size(
    queues: Queues, scenes: Iterator[Scene]
) -> None:
    queues.make(spot=2, plain=4)
    scene = next(scenes)
    queues.create(scene, cpus=2)
    (pod,) = start(scene, 1)
    queues.wait_used(spot="2", plain="0")
    scene.change(suspend=True)
    wait_told(scene, pod)
    scene.end(pod, 75, SAVED)
    queues.wait_used(spot="0", plain="0")
    scene.change(workers=2)
    scene.change(suspend=False)
    for pod in start(scene, 2, 2):
        assert pod["spec"]["nodeSelector"]["capacity"] == "plain", "two need more than spot has"
        assert TOLERATION not in pod["spec"]["tolerations"]
    queues.wait_used(spot="0", plain="4")

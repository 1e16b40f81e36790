"""Ask first on a real API server: an attempt on demand ends when the next one's pod has its spot node."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pytest
from localcluster.apiserver import ApiServer
from spottrain.contract import Outcome

from tests.api.kube import Json, Kube, jobs, wait_for
from tests.api.scene import OperatorProcess, Scene
from tests.builders import word

LABEL: Final = "node.kubernetes.io/instance-type"
CAPACITY: Final[dict[str, Any]] = {
    "type": "SpotFirst",
    "spotFirst": {"pendingSeconds": 30, "returnAfterSeconds": 60},
    "pools": [
        {"name": "spot", "platform": "AWS", "nodeSelector": {LABEL: "spot"}},
        {"name": "sure", "platform": "AWS", "type": "OnDemand", "nodeSelector": {LABEL: "sure"}},
    ],
}
JSON_PATCH: Final = "application/json-patch+json"


def going(scene: Scene, attempt: int) -> bool:
    """Whether the attempt's pod is being deleted, or gone."""
    pod = scene.pod(attempt)
    return pod is None or "deletionTimestamp" in pod["metadata"]


@pytest.fixture
def operator(server: ApiServer, namespace: str) -> Iterator[OperatorProcess]:
    with OperatorProcess(kubeconfig=server.kubeconfig, namespace=namespace) as process:
        process.wait_ready()
        yield process


def later(operator: OperatorProcess, seconds: int) -> None:
    """The operator is killed; the next one's clock is ahead."""
    operator.kill()
    operator.start(ahead=seconds)
    operator.wait_ready()


def has_saved(scene: Scene, step: int) -> None:
    """As if the trainer had answered the operator's poll: nothing serves progress in these pods."""
    scene.see_runtime()
    path = f"{jobs(scene.namespace, scene.job)}/status"
    number = len(scene.status()["attempts"]) - 1
    steps = [
        {"op": "add", "path": "/status/knownDurableStep", "value": step},
        {"op": "add", "path": f"/status/attempts/{number}/durableStep", "value": step},
    ]
    scene.kube.call("PATCH", path, steps, kind=JSON_PATCH)


def trains_on_demand(
    kube: Kube, namespace: str, operator: OperatorProcess, **spec: Any
) -> tuple[Scene, Json]:
    """No spot node came in 30 s: the second attempt has trained and saved on demand."""
    scene = Scene(kube=kube, namespace=namespace, job="returns")
    scene.create(capacity=CAPACITY, **spec)
    scene.wait_attempt(1)
    later(operator, 40)
    pod = scene.wait_attempt(2)
    assert pod["spec"]["nodeSelector"] == {LABEL: "sure"}
    scene.bind(pod)
    scene.wait_condition("Scheduled", "True")
    has_saved(scene, 9)
    return scene, pod


def test_a_job_on_demand_is_stopped_when_its_spot_node_is_there_though_the_operator_is_killed(
    kube: Kube, namespace: str, operator: OperatorProcess
) -> None:
    scene, old = trains_on_demand(kube, namespace, operator)
    later(operator, 140)
    asks = scene.wait_attempt(3)
    assert asks["spec"]["nodeSelector"] == {LABEL: "spot"}
    assert scene.status()["attempt"] == 2 and not going(scene, 2)
    operator.kill()
    scene.bind(asks)
    operator.start(ahead=165)
    wait_for("the handover", lambda: scene.status()["attempt"] == 3)
    operator.kill()
    operator.start(ahead=166)
    wait_for("the DELETE of the old pod", lambda: going(scene, 2))
    assert not going(scene, 3)
    scene.end(old, 75, word(Outcome.INTERRUPTED, startStep=0, step=20, durableStep=20))
    wait_for("the old pod to go", lambda: scene.pod(2) is None)
    scene.end(asks, 0, word(Outcome.DONE, step=30, durableStep=30, startStep=20))
    scene.wait_condition("Succeeded", "True")
    assert scene.counters() == (3, 0, 0)
    assert [(r["capacityType"], r["cause"]) for r in scene.status()["attempts"]] == [
        ("Spot", "SchedulingTimeout"),
        ("OnDemand", "Moved"),
        ("Spot", "Done"),
    ]


def test_a_request_in_vain_leaves_the_training_alone_and_a_suspended_job_takes_it_back(
    kube: Kube, namespace: str, operator: OperatorProcess
) -> None:
    scene, _ = trains_on_demand(kube, namespace, operator)
    later(operator, 140)
    scene.wait_attempt(3)
    later(operator, 175)
    wait_for("the request to be given up", lambda: scene.pod(3) is None)
    assert scene.status()["attempt"] == 2 and not going(scene, 2)
    later(operator, 300)
    scene.wait_attempt(4)
    scene.change(suspend=True)
    wait_for("the request to go", lambda: scene.pod(4) is None)
    wait_for("the training to stop", lambda: going(scene, 2))
    assert scene.counters() == (2, 0, 0)

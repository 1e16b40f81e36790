"""spec.runtime.inject on a real API server: a restricted namespace accepts the pod; others are refused."""

from __future__ import annotations

import pytest
from spottrain_operator.api.injected import LAUNCHER
from spottrain_operator.names import INJECT_CONTAINER

from tests.api.kube import MERGE, Json
from tests.api.scene import OperatorProcess, Scene


@pytest.fixture(autouse=True)
def restricted(scene: Scene, operator: OperatorProcess) -> None:
    """Pods that break the restricted Pod Security Standard are refused."""
    label = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
    scene.kube.call("PATCH", f"/api/v1/namespaces/{operator.namespace}", label, kind=MERGE)


def create(scene: Scene, *command: str, pod: Json | None = None, **container: object) -> None:
    trainer = {"name": "trainer", "image": "example.com/torch:1", "command": list(command)} | container
    body = {"containers": [trainer]} | ({"securityContext": {"runAsNonRoot": True}} if pod is None else pod)
    scene.create(runtime={"inject": True}, template={"spec": body})


def test_a_restricted_namespace_takes_the_pod_of_a_template_that_says_run_as_non_root(scene: Scene) -> None:
    create(scene, "python", "train.py", args=["--lr", "1"])
    spec = scene.wait_attempt(1)["spec"]
    assert spec["initContainers"][0]["name"] == INJECT_CONTAINER
    assert spec["containers"][0]["command"] == ["python", LAUNCHER, "train.py", "--lr", "1"]
    assert "args" not in spec["containers"][0]
    scene.wait_condition("Accepted", "True")


def test_so_it_does_where_the_container_alone_says_it(scene: Scene) -> None:
    context = {"runAsNonRoot": True, "runAsUser": 1234}
    create(scene, "torchrun", "train.py", pod={}, securityContext=context)
    init = scene.wait_attempt(1)["spec"]["initContainers"][0]
    assert init["securityContext"]["runAsUser"] == 1234


def test_a_command_that_is_not_understood_makes_no_pod(scene: Scene) -> None:
    create(scene, "sh", "-c", "python train.py")
    refused = scene.wait_condition("Accepted", "False", "InvalidSpec")
    told = "command is 'sh -c python train.py': no script is found; runtime.inject takes"
    assert told in refused["message"]
    assert scene.pods() == []


@pytest.mark.parametrize(
    "own",
    [
        {"initContainers": [{"name": INJECT_CONTAINER, "image": "x"}]},
        {"volumes": [{"name": INJECT_CONTAINER}]},
    ],
)
def test_a_name_of_ours_in_a_template_is_refused_in_the_api_servers_words(scene: Scene, own: Json) -> None:
    create(scene, "python", "train.py", pod={"securityContext": {"runAsNonRoot": True}} | own)
    refused = scene.wait_condition("Accepted", "False", "InvalidTemplate")
    assert f'Duplicate value: "{INJECT_CONTAINER}"' in refused["message"] and scene.pods() == []


def test_while_a_job_is_suspended_its_command_can_change(scene: Scene) -> None:
    create(scene, "sh", "-c", "python train.py")
    scene.wait_condition("Accepted", "False", "InvalidSpec")
    trainer = {"name": "trainer", "image": "example.com/torch:1", "command": ["python", "train.py"]}
    template = {"spec": {"containers": [trainer], "securityContext": {"runAsNonRoot": True}}}
    for change in ({"suspend": True}, {"template": template}, {"suspend": False}):
        scene.change(**change)
    assert scene.wait_attempt(1)["spec"]["containers"][0]["command"][1] == LAUNCHER

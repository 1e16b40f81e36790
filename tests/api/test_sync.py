"""checkpoint.mode Sync on a real API server: the pod is accepted; script and sidecar decide on its end."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from spottrain.contract import Outcome
from spottrain_operator.names import SYNC_CONTAINER, Condition, Reason

from tests.api.kube import MERGE, Json, wait_for
from tests.api.scene import OperatorProcess, Scene
from tests.builders import word

SYNC: Json = {"mode": "Sync", "syncPath": "/checkpoints", "uri": "s3://bucket/run"}
RUNS: Json = {"running": {"startedAt": "2026-03-01T12:00:00Z"}}
WAITS: Json = {"waiting": {"reason": "PodInitializing"}}


@pytest.fixture(autouse=True)
def restricted(scene: Scene, operator: OperatorProcess) -> None:
    """Pods that break the restricted Pod Security Standard are refused."""
    label = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
    scene.kube.call("PATCH", f"/api/v1/namespaces/{operator.namespace}", label, kind=MERGE)


def create(scene: Scene, checkpoint: Json | None = None, *, mount: Json | None = None) -> Json:
    """Creates a job with any image; its first pod."""
    submit(scene, checkpoint, mount=mount)
    return scene.wait_attempt(1)


def submit(scene: Scene, checkpoint: Json | None = None, *, mount: Json | None = None) -> None:
    """Creates a job. `mount`: of a volume `scratch`, by a variable `RUN`."""
    container: Json = {"name": "trainer", "image": "example.com/any:1"}
    pod: Json = {"containers": [container], "securityContext": {"runAsNonRoot": True, "runAsUser": 1234}}
    if mount is not None:
        container["env"] = [{"name": "RUN", "value": "run-1"}]
        container["volumeMounts"] = [{"name": "scratch"} | mount]
        pod["volumes"] = [{"name": "scratch", "emptyDir": {}}]
    scene.create(checkpoint=SYNC | (checkpoint or {}), template={"spec": pod})


def bind(scene: Scene, pod: Json) -> None:
    node = scene.add_node()
    target = {"kind": "Node", "name": node}
    body = {"metadata": {"name": pod["metadata"]["name"]}, "target": target}
    scene.kube.call("POST", f"{scene.path(pod)}/binding", body)


def gone(code: int, message: str = "") -> Json:
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"terminated": {"exitCode": code, "message": message, "startedAt": now, "finishedAt": now}}


def report(
    scene: Scene, pod: Json, trainer: Json, sidecar: Json, *, phase: str, last: Json | None = None
) -> None:
    """The kubelet's report of both containers."""

    def status(name: str, state: Json, before: Json) -> Json:
        known = {"image": "x", "imageID": "", "ready": "running" in state, "restartCount": len(before)}
        return {"name": name, "state": state, "lastState": before} | known

    containers = [status("trainer", trainer, {})]
    inits = [status(SYNC_CONTAINER, sidecar, last or {})]
    body = {"status": {"phase": phase, "containerStatuses": containers, "initContainerStatuses": inits}}
    scene.kube.call("PATCH", f"{scene.path(pod)}/status", body, kind=MERGE)


def test_the_api_server_takes_the_sidecar_as_one_in_a_restricted_namespace(scene: Scene) -> None:
    pod = create(scene)
    sidecar = pod["spec"]["initContainers"][0]
    assert sidecar["name"] == SYNC_CONTAINER and sidecar["restartPolicy"] == "Always"
    assert sidecar["securityContext"]["runAsUser"] == 1234
    assert pod["spec"]["terminationGracePeriodSeconds"] == 600
    scene.wait_condition("Accepted", "True")


def test_quiet_seconds_reach_the_sidecar_as_the_api_server_stores_them(scene: Scene) -> None:
    pod = create(scene, {"syncWhen": {"quietSeconds": 90}})
    env = {e["name"]: e.get("value", "") for e in pod["spec"]["initContainers"][0]["env"]}
    assert env["SPOTTRAIN_SYNC_WHEN"] == '{"quietSeconds": 90.0}'


def test_a_mount_above_the_folder_is_the_sidecars_with_the_variable_that_it_names(scene: Scene) -> None:
    pod = create(
        scene, {"syncPath": "/data/ckpt"}, mount={"mountPath": "/data", "subPathExpr": "$(RUN)/part"}
    )
    sidecar = pod["spec"]["initContainers"][0]
    assert ("/data", "$(RUN)/part") in [
        (m["mountPath"], m.get("subPathExpr")) for m in sidecar["volumeMounts"]
    ]
    assert {"name": "RUN", "value": "run-1"} in sidecar["env"]


def test_a_mount_that_the_sidecar_has_already_is_refused_in_the_servers_words(scene: Scene) -> None:
    submit(scene, {"syncPath": "/tmp/ckpt"}, mount={"mountPath": "/tmp"})
    refused = scene.wait_condition("Accepted", "False", "InvalidTemplate")
    assert "must be unique" in refused["message"]


def test_a_user_that_is_not_named_is_refused_with_a_sentence(scene: Scene) -> None:
    context = {"runAsNonRoot": True}
    container = {"name": "trainer", "image": "example.com/any:1"}
    scene.create(checkpoint=SYNC, template={"spec": {"containers": [container], "securityContext": context}})
    refused = scene.wait_condition("Accepted", "False", "InvalidSpec")
    assert "runAsUser must be set beside runAsNonRoot" in refused["message"]


def test_success_is_exit_0_with_the_last_checkpoint_in_the_store(scene: Scene) -> None:
    pod = create(scene)
    bind(scene, pod)
    report(scene, pod, WAITS, RUNS, phase="Pending")
    scene.wait_condition("Running", "False", Reason.RESTORING)
    report(scene, pod, RUNS, RUNS, phase="Running")
    scene.wait_condition("Running", "True", Reason.TRAINING)
    report(scene, pod, gone(0), RUNS, phase="Running")
    uploading = scene.wait_condition("Running", "True", Reason.UPLOADING)
    assert "ended with exit code 0" in uploading["message"]
    assert scene.condition("Succeeded").get("status") != "True"
    report(scene, pod, gone(0), gone(0, word(Outcome.DONE, step=3, durableStep=3)), phase="Succeeded")
    scene.wait_condition("Succeeded", "True")
    assert scene.status()["knownDurableStep"] == 3 and scene.counters() == (1, 0, 0)


def test_a_sidecar_that_was_killed_before_its_last_commit_makes_an_interruption(scene: Scene) -> None:
    pod = create(scene)
    bind(scene, pod)
    report(scene, pod, RUNS, RUNS, phase="Running")
    report(scene, pod, gone(0), gone(137), phase="Succeeded")
    second = scene.wait_attempt(2)
    record = scene.status()["attempts"][0]
    assert (record["cause"], record["reason"]) == ("Interrupted", Reason.NOT_UPLOADED)
    assert scene.counters() == (2, 0, 1)
    env = {e["name"]: e.get("value", "") for e in second["spec"]["initContainers"][0]["env"]}
    assert env["SPOTTRAIN_SYNC_LAST_EXIT"] == "1:0"  # exit code 0 of attempt 1


def test_a_script_that_runs_into_the_kill_at_a_notice_is_an_interruption(scene: Scene) -> None:
    pod = create(scene)
    bind(scene, pod)
    report(scene, pod, RUNS, RUNS, phase="Running")
    scene.wait_condition("Running", "True")
    node = scene.pods()[0]["spec"]["nodeName"]
    scene.give_notice(node, 60)
    wait_for("its pod to be told to end", lambda: "deletionTimestamp" in scene.pods()[0]["metadata"])
    live = scene.pods()[0]["metadata"]
    assert live["deletionGracePeriodSeconds"] < 60, "the notice's time, not that of the last upload"
    assert scene.counters() == (1, 0, 0), "no attempt beside one that uploads"
    report(scene, pod, gone(137), gone(0, word(Outcome.INTERRUPTED, durableStep=5)), phase="Failed")
    scene.delete(pod, 0)
    scene.wait_attempt(2)
    assert scene.status()["attempts"][0]["cause"] == "SpotNotice" and scene.counters() == (2, 0, 1)
    env = {e["name"]: e.get("value", "") for e in scene.pod(2)["spec"]["containers"][0]["env"]}  # type: ignore[index]
    assert env["SPOTTRAIN_RESUMED"] == "true"


def test_a_uri_of_another_job_ends_the_job_with_the_sidecars_sentence(scene: Scene) -> None:
    pod = create(scene)
    bind(scene, pod)
    said = word(
        Outcome.BAD_CONFIGURATION, reason="CheckpointURIInUse", message="job other owns s3://bucket/run"
    )
    backs_off = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}}
    report(scene, pod, WAITS, backs_off, phase="Pending", last=gone(64, said))
    wait_for("its pod to be deleted", lambda: "deletionTimestamp" in scene.pods()[0]["metadata"])
    report(scene, pod, WAITS, gone(64, said), phase="Failed")
    scene.delete(pod, 0)
    failed = scene.wait_condition(Condition.FAILED, "True", "CheckpointURIInUse")
    assert "job other owns s3://bucket/run" in failed["message"]

"""What a job becomes on this machine: all that is not here is left out or replaced, and named."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from spottrain_cli.errors import UsageError
from spottrain_cli.rehearsal.manifest import CODE_FOLDER, Adapted, Here, adapted, named, the_job, with_steps

Json = dict[str, Any]
URI = "s3://local/rehearsals/1"


def here(*files: str, python: str = "") -> Here:
    """A machine on which these files lie beside the manifest."""
    return Here(
        name="job.yaml", uri=URI, endpoint="http://127.0.0.1:1", secret="keys", python=python,
        beside=lambda path: path in files, on_machine=lambda path: path == "/data", seed=7,
    )  # fmt: skip


def job(container: Json | None = None, pod: Json | None = None, **spec: Any) -> Json:
    made = {
        "name": "trainer",
        "image": "example.com/spottrain-runtime:1",
        "args": ["/opt/spottrain/examples/a.py"],
    }
    template = {"spec": {"containers": [made | (container or {})]} | (pod or {})}
    whole = {"template": template, "checkpoint": {"uri": "s3://team/run"}} | spec
    return {"kind": "TrainingJob", "metadata": {"name": "gpt"}, "spec": whole}


def on_this_machine(given: Json, *others: Json, files: Sequence[str] = (), python: str = "") -> Adapted:
    return adapted(given, others, here(*files, python=python))


def trainer(made: Adapted) -> Json:
    found: Json = made.job["spec"]["template"]["spec"]["containers"][0]
    return found


def changes(made: Adapted) -> str:
    return "\n".join(made.changes)


def test_nodes_store_and_size_are_those_of_this_machine() -> None:
    pools = [{"name": "a", "platform": "AWS"}, {"name": "b", "platform": "GKE"}]
    made = on_this_machine(
        job(
            workers=64,
            gpusPerWorker=8,
            capacity={"type": "Cheapest", "pools": pools},
            ttlSecondsAfterFinished=9,
        )
    )
    spec = made.job["spec"]
    assert (spec["workers"], spec["gpusPerWorker"], spec["capacity"]) == (8, 0, {"type": "Spot"})
    assert made.notice_seconds == 15, "the shortest warning of its pools"
    assert spec["checkpoint"] == {"endpoint": "http://127.0.0.1:1", "credentialsSecretRef": {"name": "keys"}}
    assert named(made.job, "reclaimed", URI)["spec"]["checkpoint"]["uri"] == f"{URI}/reclaimed"
    assert "ttlSecondsAfterFinished" not in spec
    for said in ("workers: 8 of 64", "gpusPerWorker: 0 in place of 8", "ttlSecondsAfterFinished: left out"):
        assert said in changes(made)


def test_two_runs_of_it_can_be_compared_and_its_own_seed_stays() -> None:
    training = {"compile": True, "precision": "bf16", "seed": 3, "trackers": ["wandb"], "maxSteps": 5000}
    made = on_this_machine(job(training=training))
    told = {"compile": False, "precision": "fp32", "deterministic": True, "seed": 3, "maxSteps": 5000}
    assert made.job["spec"]["training"] == told
    assert "training.seed" not in changes(made)


def test_fewer_steps_have_a_shorter_warm_up() -> None:
    made = with_steps(job(training={"warmupFraction": 0.5}), 40)
    assert made["spec"]["training"] == {"maxSteps": 40, "warmupSteps": 4}


def test_a_job_whose_steps_nobody_sees_gets_no_settings_for_a_loop() -> None:
    made = on_this_machine(job(checkpoint={"mode": "Sync", "syncPath": "/ckpt", "uri": "s3://team/run"}))
    assert "training" not in made.job["spec"]
    assert made.job["spec"]["checkpoint"]["syncPath"] == "/ckpt"


def test_what_belongs_to_a_cluster_of_containers_is_named_and_left_out() -> None:
    made = on_this_machine(
        job(
            container={"resources": {"limits": {"nvidia.com/gpu": 8}}, "imagePullPolicy": "Always"},
            pod={"nodeSelector": {"a": "b"}, "serviceAccountName": "team"},
        )
    )
    assert "template.spec: left out: nodeSelector, serviceAccountName" in changes(made)
    assert "container trainer: left out: resources" in changes(made)
    assert not {"resources", "imagePullPolicy"} & set(trainer(made))


def test_secrets_and_volumes_that_are_not_here_are_named_and_those_of_the_file_stay() -> None:
    key = {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}
    mine = {"name": "MODE", "valueFrom": {"configMapKeyRef": {"name": "mine", "key": "mode"}}}
    volumes = [
        {"name": "data", "persistentVolumeClaim": {"claimName": "big"}},
        {"name": "here", "hostPath": {"path": "/data"}},
        {"name": "scripts", "configMap": {"name": "mine"}},
    ]
    given = job(
        container={"env": [key, mine], "envFrom": [{"secretRef": {"name": "all"}}]}, pod={"volumes": volumes}
    )
    made = on_this_machine(given, {"kind": "ConfigMap", "metadata": {"name": "mine", "namespace": "team"}})
    assert [each["name"] for each in trainer(made)["env"]] == ["MODE", "CUDA_VISIBLE_DEVICES"]
    assert trainer(made)["envFrom"] == []
    kept = made.job["spec"]["template"]["spec"]["volumes"]
    assert [next(key for key in each if key != "name") for each in kept] == [
        "emptyDir",
        "hostPath",
        "configMap",
    ]
    assert made.others == ({"kind": "ConfigMap", "metadata": {"name": "mine", "labels": {}}},)
    for said in ("TOKEN (of Secret hub)", "without Secret all", "volume data: empty"):
        assert said in changes(made)


# --- the image and the script ---
def test_an_image_of_ones_own_needs_a_python_of_this_machine() -> None:
    own = job(container={"image": "registry:5000/team/train:1", "command": ["python", "-c", "pass"]})
    with pytest.raises(UsageError, match="--python PATH"):
        on_this_machine(own)
    made = on_this_machine(own, python="/venv/bin/python")
    assert trainer(made)["command"] == ["python", "-c", "pass"]
    assert trainer(made)["env"][-1] == {"name": "PATH", "value": "/venv/bin:/usr/local/bin:/usr/bin:/bin"}
    without = on_this_machine(job(), python="/venv/bin/python")
    assert trainer(without)["command"] == ["/venv/bin/python", "-m", "spottrain", "run"]


@pytest.mark.parametrize(
    ("words", "files", "place"),
    [
        ({"args": ["train.py"]}, ["train.py"], CODE_FOLDER),
        ({"args": ["src/train.py"], "workingDir": "/app"}, ["src/train.py"], "/app"),
        ({"args": ["/app/src/train.py", "--data", "/app/x"]}, ["src/train.py"], "/app"),
        ({"command": ["python", "-m", "team.train"]}, ["team/train.py"], CODE_FOLDER),
        ({"command": ["sh", "-c", "exec python train.py"]}, ["train.py"], CODE_FOLDER),
        ({"args": ["--code", "s3://team/code/1.tar.gz", "train.py"]}, ["train.py"], CODE_FOLDER),
        ({"command": ["python", "/spottrain/launch.py", "train.py"]}, ["train.py"], CODE_FOLDER),
    ],
)
def test_a_script_beside_the_manifest_is_where_the_container_looks_for_it(
    words: Json, files: Sequence[str], place: str
) -> None:
    made = on_this_machine(job(container=words), files=files)
    assert made.needs_source
    mounts = {each["name"]: each["mountPath"] for each in trainer(made)["volumeMounts"]}
    assert mounts == {"rehearsal-code": place}
    assert trainer(made)["workingDir"] == place
    copied = made.job["spec"]["template"]["spec"]["initContainers"][0]
    assert copied["command"][:2] == ["cp", "-R"]
    assert "--code" not in trainer(made)["args" if "args" in words else "command"]


def test_a_script_of_our_image_or_of_a_config_map_needs_no_folder() -> None:
    assert not on_this_machine(job()).needs_source
    volumes = [{"name": "scripts", "configMap": {"name": "mine"}}]
    container = {
        "args": ["/scripts/train.py"],
        "volumeMounts": [{"name": "scripts", "mountPath": "/scripts/"}],
    }
    map_ = {"kind": "ConfigMap", "metadata": {"name": "mine"}}
    assert not on_this_machine(job(container=container, pod={"volumes": volumes}), map_).needs_source


@pytest.mark.parametrize("script", ["train.py", "/app/train.py"])
def test_a_script_that_is_nowhere_is_refused(script: str) -> None:
    with pytest.raises(UsageError, match=r"train\.py"):
        on_this_machine(job(container={"args": [script]}))


@pytest.mark.parametrize(
    ("documents", "said"),
    [
        ([], "holds 0"),
        ([{"kind": "Job"}], "kinds: Job"),
        ([job(), job()], "holds 2"),
        ([{"kind": "TrainingJob", "spec": {"template": {"spec": {"containers": []}}}}], "containers"),
    ],
)
def test_a_file_without_one_training_job_is_refused(documents: list[Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        the_job(documents, "job.yaml")

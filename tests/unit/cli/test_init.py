"""`spottrain init`: what becomes of a Job, a PyTorchJob and a TrainJob."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from spottrain_cli import app, manifests
from spottrain_cli.errors import UsageError
from spottrain_cli.migrate import text
from spottrain_cli.migrate.convert import Converted, Wishes, convert
from spottrain_cli.migrate.pod import GPUS, OTHER_DEVICES
from spottrain_operator.api import gpus

from bench import migrate

CONTAINER: dict[str, Any] = {"name": "main", "image": "train:1", "command": ["python", "train.py"]}
JOB: dict[str, Any] = {
    "apiVersion": "batch/v1",
    "kind": "Job",
    "metadata": {"name": "mnist"},
    "spec": {"template": {"spec": {"containers": [CONTAINER], "restartPolicy": "Never"}}},
}


def converted(document: Any, **wishes: Any) -> Converted:
    return convert([document], Wishes(**wishes))


def job(**spec: Any) -> dict[str, Any]:
    return JOB | {"spec": JOB["spec"] | spec}


@pytest.mark.parametrize("shape", migrate.files(), ids=lambda file: file.stem)
def test_no_value_of_an_upstream_shape_is_lost_in_silence(shape: Path) -> None:
    documents = manifests.read(str(shape))
    assert migrate.silent(documents, Wishes()) == []
    made = convert(documents, Wishes())
    assert migrate.accepted(made) == ""
    (again, *_) = yaml.safe_load_all(text.manifest(made))
    assert again == made.manifest, "what is written is what was converted"


@pytest.mark.parametrize("shape", ["job-08-sidecar", "pytorchjob-10-run-policy", "trainjob-04-volcano"])
def test_a_field_that_no_rule_knows_is_named_wherever_it_stands(shape: str) -> None:
    documents = manifests.read(str(migrate.SHAPES / f"{shape}.yaml"))
    for at, document in enumerate(documents):
        for path in _mappings(document, ()):
            changed = copy.deepcopy(documents)
            inside: Any = changed[at]
            for word in path:
                inside = inside[word]
            inside["brandNew"] = "value"
            assert "brandNew" in repr(convert(changed, Wishes())), path


def _mappings(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, dict):
        yield path
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        if key != "labels":  # those of a runtime tell it from others
            yield from _mappings(inner, (*path, key))


def test_a_job_of_one_pod_is_a_training_job_of_one_worker_without_a_gpu() -> None:
    made = converted(job(backoffLimit=2, ttlSecondsAfterFinished=60))
    assert made.manifest["spec"] == {
        "gpusPerWorker": 0,
        "checkpoint": {"mode": "Self"},
        "capacity": {"type": "Spot"},
        "failurePolicy": {"maxFailures": 2},
        "ttlSecondsAfterFinished": 60,
        "template": {"spec": {"containers": [CONTAINER]}},
    }
    assert not made.losses


def test_ranks_of_an_indexed_job_find_rank_0_and_their_number() -> None:
    container = CONTAINER | {"args": ["--host=mnist-0.ranks.ml.svc", "--rank=$(JOB_COMPLETION_INDEX)"]}
    pod = {"containers": [container], "subdomain": "ranks"}
    made = converted(job(completionMode="Indexed", completions=2, parallelism=2, template={"spec": pod}))
    (trainer,) = made.manifest["spec"]["template"]["spec"]["containers"]
    assert made.manifest["spec"]["workers"] == 2 and not made.losses
    assert trainer["args"] == ["--host=$(MASTER_ADDR)", "--rank=$(JOB_COMPLETION_INDEX)"]
    assert trainer["env"][0]["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.labels['spottrain.io/rank']"


def test_the_host_name_of_another_rank_is_a_loss() -> None:
    pod = {"containers": [CONTAINER | {"args": ["--hosts=mnist-1.ranks"]}], "subdomain": "ranks"}
    made = converted(job(completionMode="Indexed", completions=2, parallelism=2, template={"spec": pod}))
    (loss,) = made.losses
    assert str(loss).startswith("spec.template.spec: mnist-1.ranks: pods have other names here; rank 0 is")


@pytest.mark.parametrize(
    ("labels", "capacity"),
    [
        ({"karpenter.sh/capacity-type": "on-demand"}, "OnDemand"),
        ({"cloud.google.com/gke-spot": "true"}, "Spot"),
        ({"eks.amazonaws.com/capacityType": "CAPACITY_BLOCK"}, "Reserved"),
    ],
)
def test_the_node_selector_says_which_nodes(labels: dict[str, str], capacity: str) -> None:
    document = job(template={"spec": {"containers": [CONTAINER], "nodeSelector": labels}})
    assert converted(document).manifest["spec"]["capacity"] == {"type": capacity}
    other = "Spot" if capacity != "Spot" else "OnDemand"
    with pytest.raises(UsageError, match=f"asks for {capacity} nodes"):
        converted(document, capacity=other)


def test_with_a_bucket_the_runtime_saves_and_with_a_folder_a_sidecar_does() -> None:
    spec = converted(JOB, checkpoints="s3://bucket/runs/").manifest["spec"]
    assert spec["checkpoint"] == {"uri": "s3://bucket/runs/mnist"} and spec["runtime"] == {"inject": True}
    spec = converted(JOB, checkpoints="s3://bucket", sync_path="/out").manifest["spec"]
    assert spec["checkpoint"] == {"mode": "Sync", "uri": "s3://bucket/mnist", "syncPath": "/out"}
    with pytest.raises(UsageError, match="--sync-path is for one worker, and this job has 2"):
        gang = job(completionMode="Indexed", completions=2, parallelism=2)
        converted(gang, checkpoints="s3://bucket", sync_path="/out")


def test_gpus_are_told_from_other_devices_as_the_operator_does() -> None:
    assert (GPUS.pattern, OTHER_DEVICES.pattern) == (gpus.GPUS.pattern, gpus.OTHER_DEVICES.pattern)


# --- the command ------------------------------------------------------------------------------------------
def test_losses_are_named_and_nothing_is_written_unless_they_are_accepted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, made = tmp_path / "job.yaml", tmp_path / "made.yaml"
    file.write_text(yaml.safe_dump(job(successPolicy={"rules": []}, maxFailedIndexes=1)))
    assert app.main(["init", str(file), "-o", str(made)]) == 1
    said = capsys.readouterr().err
    assert (
        "lost: spec.maxFailedIndexes: 1: " in said
        and "--accept-losses writes it" in said
        and not made.exists()
    )
    assert app.main(["init", str(file), "-o", str(made), "--accept-losses"]) == 0
    assert "# Not carried:\n#   spec.maxFailedIndexes: 1:" in made.read_text()
    assert yaml.safe_load(made.read_text())["kind"] == "TrainingJob"
    assert app.main(["init", str(file), "-o", str(made), "--accept-losses"]) == 2, "a file is not overwritten"


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("kind: [", "line 1 is not YAML"),
        ("- a\n", "must hold Kubernetes objects, with apiVersion and kind"),
        ("", "the file has nothing; init reads a Job (batch/v1)"),
        ("apiVersion: v1\nkind: Pod\n", "the file has Pod (v1); init reads"),
        (
            yaml.safe_dump_all([JOB, JOB]),
            "the file has 2 jobs (Job mnist, Job mnist); give init one at a time",
        ),
        (yaml.safe_dump(JOB | {"spec": 3}), "spec is '3' and must be a mapping"),
        (yaml.safe_dump(JOB | {"metadata": {}}), "metadata.name is absent; give --name"),
        (
            yaml.safe_dump(job(parallelism="$NODES")),
            "spec.parallelism is '$NODES', not a whole number of at least 0; if the file is a template",
        ),
    ],
)
def test_a_file_that_cannot_be_used_gets_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, sentence: str
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(content)
    assert app.main(["init", str(file)]) == 2
    said = capsys.readouterr().err
    assert sentence in said and said.count("\n") == 1

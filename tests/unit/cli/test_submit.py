"""`spottrain submit`: the manifest of a script, what survives of it, and what is said before it is sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from spottrain_cli import app
from spottrain_cli.errors import UsageError
from spottrain_cli.submit import outline, survival
from spottrain_cli.submit.journey import price_of
from spottrain_cli.submit.script import Script, manifest, name_of
from spottrain_cli.submit.survival import Keeper
from spottrain_operator.api.validation import parse_spec

CODE = "s3://bucket/runs/code/" + "0" * 64 + ".tar.gz"


def spec_of(**given: Any) -> dict[str, Any]:
    options: Any = {"path": "train.py", "image": "team/train:1", "gpus": 0} | given
    made: dict[str, Any] = manifest(Script(**options))["spec"]
    parse_spec(made)  # what the operator accepts
    return made


# --- the manifest of a script -----------------------------------------------------------------------------
def test_any_image_gets_the_runtime_and_the_packed_folder_from_the_launcher() -> None:
    made = spec_of(code=CODE, bucket="s3://bucket/runs/", args=("--lr", "3e-4"), workers=2, gpus=8)
    (trainer,) = made["template"]["spec"]["containers"]
    assert trainer["command"] == [
        "python",
        "/spottrain/launch.py",
        "--code",
        CODE,
        "train.py",
        "--lr",
        "3e-4",
    ]
    assert made["runtime"] == {"inject": True} and made["workers"] == 2 and made["gpusPerWorker"] == 8
    assert made["checkpoint"] == {"uri": "s3://bucket/runs/train"}


def test_our_own_image_runs_the_script_by_its_entry_point() -> None:
    made = spec_of(
        code=CODE, bucket="s3://bucket/runs", image="registry:5000/spottrain-runtime:0.3.0@sha256:1"
    )
    assert made["template"]["spec"]["containers"][0]["args"] == ["--code", CODE, "train.py"]
    assert "runtime" not in made


def test_a_script_in_the_image_is_started_as_it_is() -> None:
    made = spec_of(
        path="/app/train.py", bucket="s3://bucket/runs", env=(("A", "b=c"),), cpu="4", memory="8Gi"
    )
    (trainer,) = made["template"]["spec"]["containers"]
    assert trainer["command"] == ["python", "/app/train.py"] and trainer["env"] == [
        {"name": "A", "value": "b=c"}
    ]
    assert trainer["resources"] == {"requests": {"cpu": "4", "memory": "8Gi"}}


def test_the_options_of_where_and_how_long_are_fields_of_the_manifest() -> None:
    made = spec_of(
        bucket="s3://b-b/p",
        namespace="ml",
        secret="keys",
        endpoint="http://minio:9000",
        service_account="trainer",
        deadline="2026-12-01T00:00:00Z",
        max_cost="35.50",
    )
    assert made["checkpoint"] == {
        "uri": "s3://b-b/p/ml/train",
        "endpoint": "http://minio:9000",
        "credentialsSecretRef": {"name": "keys"},
    }
    assert made["capacity"] == {
        "type": "Cheapest",
        "cheapest": {"deadline": "2026-12-01T00:00:00Z"},
        "maxCostUSD": "35.50",
    }
    assert made["template"]["spec"]["serviceAccountName"] == "trainer"
    assert spec_of(spot=False)["capacity"] == {"type": "OnDemand"}


def test_a_folder_of_the_script_s_own_checkpoints_is_kept_by_a_sidecar() -> None:
    made = spec_of(path="/app/train.py", bucket="s3://bucket", sync_path="/out")
    assert made["checkpoint"] == {"mode": "Sync", "syncPath": "/out", "uri": "s3://bucket/train"}
    for more, sentence in (
        ({"code": CODE}, "--sync-path is for a script in the image"),
        ({"workers": 2}, "--sync-path is for one worker"),
        ({"deadline": "2026-12-01T00:00:00Z", "spot": False}, "leave --on-demand out"),
        ({"image": ""}, "--image is needed"),
        ({"name": "My_Job"}, "--name 'My_Job' must have lower-case letters"),
    ):
        with pytest.raises(UsageError, match=sentence):
            spec_of(path="/app/train.py", bucket="s3://bucket", sync_path="/out", **more)


@pytest.mark.parametrize(
    ("path", "name"),
    [("src/Train_GPT-2.py", "train-gpt-2"), ("___.py", "train"), ("a" * 80 + ".py", "a" * 50)],
)
def test_a_job_is_named_after_its_script(path: str, name: str) -> None:
    assert name_of(path) == name


# --- what survives ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "keeper", "evidence"),
    [
        ("from transformers import Trainer", Keeper.LIBRARY, "train.py:1 uses Trainer of transformers"),
        ("import transformers as t\nt.Trainer()", Keeper.LIBRARY, "train.py:2 uses Trainer of transformers"),
        ("from trl import SFTTrainer as T", Keeper.LIBRARY, "train.py:1 uses SFTTrainer of trl"),
        ("import lightning.pytorch as pl\npl.Trainer()", Keeper.LIBRARY, "Trainer of lightning"),
        ("from lightning import pytorch as pl\npl.Trainer()", Keeper.LIBRARY, "Trainer of lightning"),
        ("import spottrain\nrun = spottrain.Run()", Keeper.OWN, "train.py:2 uses spottrain.Run"),
        (
            "from transformers import Trainer\nfrom spottrain.integrations.transformers import X",
            Keeper.OWN,
            "train.py:2 uses spottrain.integrations.transformers",
        ),
        ("from transformers import AutoModel, TrainingArguments", Keeper.NOBODY, "train.py has no Trainer"),
        ("import torch\n# transformers.Trainer", Keeper.NOBODY, "train.py has no Trainer"),
        ("def broken(:", Keeper.NOBODY, "train.py has no Trainer"),
    ],
)
def test_who_saves_is_seen_in_what_the_script_uses(text: str, keeper: Keeper, evidence: str) -> None:
    found = survival.of("train.py", {"train.py": text})
    assert found.keeper is keeper and evidence in str(found)


def test_modules_beside_the_script_count_where_it_imports_them() -> None:
    texts = {
        "src/train.py": "from lib.loop import fit",
        "src/lib/loop.py": "import lightning as L\nL.Trainer()",
        "src/other.py": "import spottrain\nspottrain.Run()",
    }
    assert survival.of("src/train.py", texts).evidence.startswith(
        "src/lib/loop.py:2 uses Trainer of lightning"
    )


# --- what is said -----------------------------------------------------------------------------------------
def said(made: dict[str, Any], keeper: Keeper = Keeper.OWN) -> str:
    found = survival.Survival(keeper=keeper, evidence="seen")
    body = {"metadata": {"name": "train", "namespace": "ml"}, "spec": made}
    return "\n".join(outline.lines(body, found, None, price_of(made)))


def test_it_says_nodes_price_checkpoints_reclaim_and_limits() -> None:
    made = spec_of(bucket="s3://bucket", workers=2, gpus=8, max_cost="35")
    made["template"]["spec"]["nodeSelector"] = {"node.kubernetes.io/instance-type": "p4d.24xlarge"}
    words = said(made)
    assert words.startswith(
        "train in namespace ml\n  nodes        2 workers with 8 GPUs each, on spot nodes\n"
    )
    assert " on demand an hour (p4d.24xlarge, list prices of 20" in words
    assert "checkpoints  s3://bucket/train, every 10m" in words
    assert "After a reclaim the training goes on with the next step (seen)" in words
    assert "suspended at $35" in words


def test_an_unknown_price_and_a_script_that_saves_nothing_are_said() -> None:
    words = said(spec_of(), Keeper.NOBODY)
    assert "price        not known before the nodes are there" in words
    assert "Nothing survives a reclaim, and the job fails at its end" in words
    assert "1 worker with no GPU" in words and "below the default prefix" in words


# --- the command ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nothing.py", "--image", "x"], "there is no file nothing.py here"),
        (["nothing.yaml"], "nothing.yaml cannot be read: No such file or directory"),
        (["train.py", "--image", "x"], "--bucket is needed, such as s3://my-bucket/runs"),
        (["train.py", "--bucket", "./b"], "--image is needed"),
        (["train.py", "--image", "x", "--env", "A"], "--env 'A' must be NAME=VALUE"),
        (["job.yaml", "--gpus", "2"], "--gpus is for scripts; write it into job.yaml"),
        (["job.yaml", "--", "--lr", "1"], "job.yaml is a manifest, which has the script's arguments itself"),
        (["job.yaml"], "job.yaml holds a Job; `spottrain init job.yaml` makes a TrainingJob of it"),
        (["none.yaml"], "none.yaml holds an object without kind, and submit takes one TrainingJob"),
        (["bare.yaml"], "bare.yaml needs metadata, and spec.template.spec.containers with a container"),
    ],
)
def test_a_mistake_is_one_sentence_before_any_cluster_is_asked(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")
    Path("train.py").write_text("import torch")
    Path("job.yaml").write_text("apiVersion: batch/v1\nkind: Job\nmetadata: {name: a}\n")
    Path("bare.yaml").write_text("kind: TrainingJob\nspec: {}\n")
    Path("none.yaml").write_text("spec: {}\n")
    assert app.main(["submit", *words]) == 2
    err = capsys.readouterr().err
    assert sentence in err and err.count("\n") == 1

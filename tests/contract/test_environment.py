"""What the operator puts into a pod is what the runtime reads: names, types and the training's fields."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from spottrain.contract import (
    DEADLINE_NAME,
    DEFAULTS,
    LIBRARY_HOMES,
    PODINFO_DIR,
    PROGRESS_PORT,
    SAVE_ADVISED_NAME,
    Env,
    SyncEnv,
    SyncWhen,
    library_homes,
)
from spottrain.core.run_config import InitFrom, RunConfig, data_cache_folder
from spottrain.core.training_settings import (
    PATHS,
    PRECISIONS,
    ActivationCheckpointing,
    EarlyStoppingSpec,
    LearningRateScaling,
    Optimizer,
    Profile,
    read_manifest,
)
from spottrain.lifecycle.topology import Gang
from spottrain_operator.api.observed import Placement
from spottrain_operator.api.training_job import Status
from spottrain_operator.api.validation import parse_job
from spottrain_operator.names import object_name, pod_name
from spottrain_operator.rendering import trainer_pod, variables

from tests.builders import POOL, after, raw_job, raw_spec

ROOT = Path(__file__).resolve().parents[2]
TRAINING: dict[str, Any] = {
    "precision": "bf16",
    "microBatchSize": 8,
    "globalBatchSize": 64,
    "compile": True,
    "compileMode": "max-autotune",
    "activationCheckpointing": {"policy": "every", "every": 2},
    "optimizer": {"name": "sgd", "learningRate": 0.1, "weightDecay": 0.01, "momentum": 0.9},
    "learningRateScaling": {"rule": "linear", "baseBatchSize": 32},
    "schedule": "constant",
    "warmupSteps": 5,
    "clipGradNorm": 1.0,
    "emaDecay": 0.999,
    "earlyStopping": {
        "metric": "accuracy",
        "mode": "max",
        "patience": 3,
        "minDelta": 0.01,
        "target": 0.9,
        "minSteps": 10,
        "stopOnNaN": False,
    },
    "data": {"numWorkers": "auto", "prefetchFactor": 4, "pinMemory": True, "dropLast": True},
    "profile": {"wait": 1, "warmup": 1, "active": 2},
    "trackers": {
        "tensorboard": {"folder": "/data/tb"},
        "wandb": {"project": "p", "entity": "e", "mode": "offline", "folder": "/data/wandb"},
        "mlflow": {"experiment": "e", "trackingURI": "http://mlflow:5000"},
    },
    "maxSteps": 100,
    "seed": 7,
    "deterministic": False,
}
"""All of it, but the two other ways to give the warm-up."""
OTHER_WARM_UPS = {"warmupEpochs": 0.5, "warmupFraction": 0.1}
IMAGE = "registry.example.com:5000/train:1@sha256:" + "a" * 64
CHECKPOINT = {
    "uri": "s3://bucket/run",
    "interval": "90s",
    "keep": 5,
    "keepBest": False,
    "pathStyle": True,
    "encryption": {"kmsKey": "alias/checkpoints"},
    "compileCache": "None",
    "logs": "None",
    "onExisting": "Resume",
    "initFrom": {"uri": "s3://bucket/base", "ignore": ["head.*", "norm.bias"]},
    "endpoint": "http://minio:9000",
}


@pytest.fixture
def environment() -> dict[str, str]:
    template = {"spec": {"containers": [{"name": "trainer", "image": IMAGE}]}}
    policy = {"hangTimeoutSeconds": 90, "storeOutageSeconds": 60}
    spec = raw_spec(
        template=template,
        training=TRAINING,
        checkpoint=CHECKPOINT,
        failurePolicy=policy,
        workers=2,
        dataCache={"claimRef": {"name": "datasets"}, "mountPath": "/datasets/"},
    )
    status = Status(attempt=2, gate_until=after(100.2), known_durable_step=9)
    pod = trainer_pod.pod(parse_job(raw_job(spec)), status, POOL, Placement(rank=1))
    return {e["name"]: e.get("value", "") for e in pod["spec"]["containers"][0]["env"]}


def test_every_name_of_the_contract_is_set_and_no_other(environment: dict[str, str]) -> None:
    ours = {name for name in environment if name.startswith("SPOTTRAIN_")}
    assert ours == set(map(str, Env)) - {Env.AUTO_ATTACH}, "which is the template's alone"


def test_an_absent_variable_means_its_default_in_a_jobs_pod() -> None:
    env: dict[str, str] = {Env.JOB_UID: "uid-1", Env.CHECKPOINT_URI: "s3://bucket/run"}
    assert RunConfig.from_env(env, script="x") == RunConfig.from_env({**DEFAULTS, **env}, script="x")
    assert SyncWhen.from_json(DEFAULTS[SyncEnv.WHEN]) == SyncWhen()


def test_no_variable_is_set_to_its_default() -> None:
    job = parse_job(raw_job())
    assert not DEFAULTS.keys() & variables.of_trainer(job, Status(attempt=1), 110).keys()


def test_choices_are_told_in_the_contracts_words(environment: dict[str, str]) -> None:
    told = {name: environment[name] for name in (Env.CHECKPOINT_KEEP_BEST, Env.CHECKPOINT_PATH_STYLE)}
    assert list(told.values()) == ["false", "true"]
    assert environment[Env.CHECKPOINT_KMS_KEY] == "alias/checkpoints"
    assert environment[Env.COMPILE_CACHE] == "off"
    assert environment[Env.IMAGE_DIGEST] == "sha256:" + "a" * 64


def test_the_runtime_reads_what_the_operator_writes(environment: dict[str, str]) -> None:
    run = RunConfig.from_env(environment, script="train.py")
    assert run.job == "job" and run.attempt == 2
    assert run.training == read_manifest(json.dumps(TRAINING)) and run.training["optimizer"]
    assert run.keep == 5 and run.interval.seconds == 90 and run.endpoint == "http://minio:9000"
    assert (run.keep_best, run.path_style, run.kms_key) == (False, True, "alias/checkpoints")
    assert run.init_from == InitFrom(source="s3://bucket/base", ignore=("head.*", "norm.bias"))
    assert (run.compile_cache, run.image_digest) == ("off", "sha256:" + "a" * 64)


def test_the_data_cache_is_mounted_where_the_runtime_looks_for_it(environment: dict[str, str]) -> None:
    assert data_cache_folder(environment) == Path("/datasets")
    assert {k: environment[k] for k in LIBRARY_HOMES} == library_homes("/datasets")


def test_the_runtime_reads_what_a_job_without_checkpoints_of_ours_is_told() -> None:
    job = parse_job(raw_job(raw_spec(checkpoint={"mode": "Self"})))
    run = RunConfig.from_env(variables.of_trainer(job, Status(attempt=2), 110), script="train.py")
    assert run.checkpoint_uri is None and run.attempt == 2 and run.gate_until == 0


def _trainings_schema() -> dict[str, Any]:
    crd = yaml.safe_load((ROOT / "crds" / "trainingjobs.yaml").read_text())
    spec = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    found: dict[str, Any] = spec["properties"]["training"]["properties"]
    return found


def test_the_training_fields_of_crd_and_runtime_are_the_same() -> None:
    schema = _trainings_schema()
    names = {name for name in schema if name != "data"} | {
        f"data.{name}" for name in schema["data"]["properties"]
    }
    assert names == set(PATHS.values()) and set(schema) == set(TRAINING) | set(OTHER_WARM_UPS)
    assert set(schema["precision"]["enum"]) == set(PRECISIONS)
    for part in (ActivationCheckpointing, Optimizer, LearningRateScaling, EarlyStoppingSpec, Profile):
        name = part.__name__[0].lower() + part.__name__[1:].removesuffix("Spec")
        ours = {f.name: f.default for f in fields(part)}
        assert set(schema[name]["properties"]) == set(ours), name
        defaults = {
            field: rule["default"] for field, rule in schema[name]["properties"].items() if "default" in rule
        }
        assert defaults == {field: ours[field] for field in defaults}, (
            f"{name}: a laptop has the same defaults"
        )


@pytest.mark.parametrize("field", OTHER_WARM_UPS)
def test_a_warm_up_may_be_given_in_other_units(field: str) -> None:
    assert list(read_manifest(json.dumps({field: OTHER_WARM_UPS[field]})).values()) == [OTHER_WARM_UPS[field]]


def test_what_is_not_known_is_not_set() -> None:
    job = parse_job(raw_job(raw_spec(checkpoint={}, capacity={"type": "OnDemand"})))
    told = variables.of_trainer(job, replace(Status(), attempt=1), 110)
    assert Env.KNOWN_DURABLE_STEP not in told and Env.CHECKPOINT_URI not in told
    assert not {Env.CHECKPOINT_PATH_STYLE, Env.CHECKPOINT_KMS_KEY, Env.IMAGE_DIGEST} & set(told)
    assert not {Env.DATA_CACHE, *LIBRARY_HOMES} & set(told)


def test_a_gang_finds_itself_by_our_launcher_and_by_torchrun(environment: dict[str, str]) -> None:
    gang = Gang.from_env(environment, "2", lambda: 1)
    first = f"{pod_name('job', 'uid-1', 2)}.{object_name('job', 'uid-1', prefix='gang-')}.ns.svc"
    assert (gang.workers, gang.index, gang.size, gang.host) == (2, 1, 4, first)
    assert environment["PET_NNODES"] == "2" and environment["PET_NODE_RANK"] == "1"
    assert environment["PET_MASTER_ADDR"] == environment["MASTER_ADDR"] == first
    assert int(environment["PET_MASTER_PORT"]) == gang.port


def test_torchruns_flags_are_left_out_where_spottrain_run_starts_the_ranks() -> None:
    def flags(*command: str) -> set[str]:
        container = {"name": "trainer", "command": ["spottrain"], "args": list(command)}
        job = parse_job(raw_job(raw_spec(template={"spec": {"containers": [container]}}, workers=2)))
        env = trainer_pod.pod(job, Status(attempt=1), POOL)["spec"]["containers"][0]["env"]
        return {e["name"] for e in env if e["name"].startswith("PET_")}

    assert not flags("run", "train.py")
    assert len(flags("run", "train.py", "$(PET_NNODES)")) == len(flags("sync", "--", "torchrun")) == 5


def test_the_pod_has_the_file_and_the_port_that_it_names(environment: dict[str, str]) -> None:
    job = parse_job(raw_job())
    pod = trainer_pod.pod(job, Status(attempt=1), POOL)
    trainer, volumes = pod["spec"]["containers"][0], pod["spec"]["volumes"]
    mount = next(m for m in trainer["volumeMounts"] if m["mountPath"] == PODINFO_DIR)
    volume = next(v for v in volumes if v["name"] == mount["name"])
    assert [item["path"] for item in volume["downwardAPI"]["items"]] == [DEADLINE_NAME, SAVE_ADVISED_NAME]
    assert environment[Env.SAVE_ADVISED_FILE] == f"{PODINFO_DIR}/{SAVE_ADVISED_NAME}"
    assert environment[Env.DEADLINE_FILE] == f"{PODINFO_DIR}/{DEADLINE_NAME}"
    assert {p["containerPort"] for p in trainer["ports"]} == {PROGRESS_PORT}

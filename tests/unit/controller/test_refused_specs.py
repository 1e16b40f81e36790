"""Specs that are refused, each by the path of the field that has to be changed.

The sentences are in tests/unit/sentences.txt.
"""

from __future__ import annotations

from decimal import Decimal, InvalidOperation
from typing import Any

import pytest
from spottrain_operator.api.training_job import Status
from spottrain_operator.rendering import variables

from tests.builders import make_job, raw_spec

Json = dict[str, Any]
SYNC: Json = {"mode": "Sync", "syncPath": "/ckpt", "uri": "s3://bucket/run"}
CA = {"uri": "s3://b/p", "caBundle": {"configMapKeyRef": {"name": "authority", "key": "ca.pem"}}}
CACHE: Json = {"dataCache": {"claimRef": {"name": "datasets"}}}
DEMAND: Json = {"capacity": {"type": "OnDemand"}}
NVIDIA, CAPACITY = "nvidia.com/gpu", "karpenter.sh/capacity-type"
CLAIM: Json = {"persistentVolumeClaim": {"claimName": "data"}}
GPU: Json = {"resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "two-h100"}]}


def pod(trainer: Json | None = None, *, metadata: Json | None = None, **fields: Any) -> Json:
    """A template, as a part of a spec."""
    container = {"name": "trainer", "image": "x", "command": ["python", "train.py"]} | (trainer or {})
    body: Json = {"spec": {"containers": [container]} | fields}
    return {"template": body | ({"metadata": metadata} if metadata else {})}


def env(name: str, value: str = "x") -> Json:
    return pod({"env": [{"name": name, "value": value}]})


def mount(path: str, **more: Any) -> Json:
    return {"volumeMounts": [{"name": "v", "mountPath": path} | more]}


def sync(**checkpoint: Any) -> Json:
    return {"checkpoint": SYNC | checkpoint}


def limits(**asked: Any) -> Json:
    return pod({"resources": {kind: {NVIDIA: count} for kind, count in asked.items()}})


def inject(words: str, args: tuple[str, ...] = ()) -> Json:
    return {"runtime": {"inject": True}} | pod({"command": words.split(), "args": list(args)})


def folder(uri: str, volume: Json | None, *, at: str = "/data", mounts: Any = (), volumes: Any = ()) -> Json:
    """Checkpoints in a folder of the pod, with a volume there."""
    mounted = [{"name": "data", "mountPath": at}] if volume is not None else []
    named = [{"name": "data"} | volume] if volume is not None else []
    template = pod({"volumeMounts": [*mounted, *mounts]}, volumes=[*named, *volumes])
    return template | {"checkpoint": {"uri": uri}}


FAST: Json = {
    "mounts": [{"name": "fast", "mountPath": "/data/fast"}], "volumes": [{"name": "fast", "emptyDir": {}}]
}  # fmt: skip
LASTING: tuple[Json, ...] = (CLAIM, {"nfs": {}}, {"cephfs": {}}, {"azureFile": {}}, {"iscsi": {}})
"""Volumes that outlive a node."""
METADATA = "spec.template.metadata"
TEMPLATE = "spec.template.spec"
TRAINER = f"{TEMPLATE}.containers[0]"
SYNC_PATH, URI = "spec.checkpoint.syncPath", "spec.checkpoint.uri"
REFUSED: list[tuple[str, Json]] = [
    # --- what is no value ---
    ("spec.gpusPerWorker", {"gpusPerWorker": "two"}),
    ("spec.capacity.type", {"capacity": {"type": "cheap"}}),
    ("spec.dataCache.claimRef", {"dataCache": {"mountPath": "/datasets"}}),
    ("spec.capacity.pools[0].name", {"capacity": {"pools": [{"platform": "AWS"}]}}),
    (TEMPLATE, {"template": {"spec": None}}),
    *(("spec.capacity.maxCostUSD", {"capacity": {"maxCostUSD": bad}}) for bad in ("a lot", "NaN", True)),
    ("spec.capacity.maxCostUSD", {"capacity": {"maxCostUSD": {}}}),
    ("spec.capacity.cheapest.deadline", {"capacity": {"type": "Cheapest", "cheapest": {"deadline": "soon"}}}),
    ("spec.capacity.maxCostUSD", {"capacity": {"maxCost": "1e200000000"}}),
    ("spec.queueName", {"queueName": "team"}),
    # --- what the operator sets itself ---
    (f"{TEMPLATE}.restartPolicy", pod(restartPolicy="OnFailure")),
    (f"{TEMPLATE}.nodeName", pod(nodeName="node-a")),
    (f"{TEMPLATE}.containers", pod(containers=[{"name": "a"}, {"name": "b"}])),
    (f"{TRAINER}.lifecycle.preStop", pod({"lifecycle": {"preStop": {"sleep": {}}}})),
    (f"{METADATA}.annotations", pod(metadata={"annotations": {"spottrain.io/avoids": "n"}})),
    (f"{METADATA}.annotations", pod(metadata={"annotations": {"spottrain.io/termination-deadline": "x"}})),
    (f"{METADATA}.labels", pod(metadata={"labels": {"spottrain.io/attempt": "7"}})),
    (f"{METADATA}.labels", pod(metadata={"labels": {"kueue.x-k8s.io/queue-name": "a"}})),
    *((f"{TRAINER}.env", env(name)) for name in ("SPOTTRAIN_ATTEMPT", "SPOTTRAIN_CHECKPOINT_URI")),
    *((f"{TRAINER}.env", env(name) | {"workers": 2}) for name in ("MASTER_ADDR", "PET_NNODES")),
    (f"{TEMPLATE}.nodeSelector", pod(nodeSelector={CAPACITY: "on-demand"}) | {"capacity": {"type": "Spot"}}),
    (
        f"{TEMPLATE}.nodeSelector",
        pod(nodeSelector={CAPACITY: "on-demand"}) | {"capacity": {"type": "SpotFirst"}},
    ),
    # --- GPUs: both values and both paths ---
    ("spec.gpusPerWorker", limits(limits=8) | {"gpusPerWorker": 1}),
    ("spec.gpusPerWorker", limits(limits=8) | {"gpusPerWorker": 0}),
    ("spec.gpusPerWorker", pod({"resources": {"limits": {"amd.com/gpu": 2}}}) | {"gpusPerWorker": 4}),
    (f"{TRAINER}.resources.requests", limits(requests=8)),
    # --- spec.checkpoint.caBundle ---
    (f"{TRAINER}.env", env("AWS_CA_BUNDLE") | {"checkpoint": CA}),
    # --- a folder for checkpoints on spot ---
    *(
        (URI, folder("file:///data/run", {kind: {}} if kind else {}))
        for kind in ("emptyDir", "", "hostPath", "ephemeral", "csi", "configMap")
    ),
    (URI, folder("file:///data/run", None)),
    (URI, folder("file:///database/run", CLAIM)),
    (URI, folder("file:///data/../var/run", CLAIM)),
    (URI, folder("file:///my%20data/run", CLAIM, at="/my%20data")),
    (URI, folder("file:///data/fast/run", CLAIM, **FAST)),
    (URI, folder("file:///dev/shm/run", CLAIM, at="/dev")),
    (URI, folder("file:///cache/run", None)),
    (URI, folder("file:///data/x/run", CLAIM, mounts=[{"name": "other", "mountPath": "/data/x"}])),
    # --- spec.dataCache ---
    (f"{TRAINER}.env", CACHE | env("SPOTTRAIN_DATA_CACHE")),
    # --- checkpoint.mode Sync ---
    *(
        (SYNC_PATH, sync(syncPath=path))
        for path in ("/etc", "/etc/spottrain/x", "/opt")
    ),
    (f"{TEMPLATE}.securityContext.runAsUser", sync() | pod(securityContext={"runAsNonRoot": True})),
    (f"{TRAINER}.volumeMounts", sync() | pod(mount("/ckpt/in"))),
    (f"{TRAINER}.volumeMounts", sync() | pod(mount("/ckpt", readOnly=True))),
    (SYNC_PATH, sync() | {"dataCache": {"claimRef": {"name": "c"}, "mountPath": "/ckpt/cache"}}),
    (URI, sync(uri="file:///ckpt/store")),
    (URI, sync(uri="file:///store") | DEMAND),
    (f"{TRAINER}.command", sync(resumeArgs=["--resume"]) | pod({"command": None})),
    *(
        (f"{TRAINER}.{kind}", sync(resumeArgs=["--resume"]) | pod({"command": None, kind: words}))
        for kind in ("command", "args")
        for words in (["sh", "-c", "python train.py"], ["/bin/bash", "-eo", "pipefail", "-c", "a \"$@\""])
    ),
    (f"{TRAINER}.env", sync() | env("SPOTTRAIN_RESUMED")),
    (f"{TEMPLATE}.containers", sync() | pod(containers=[{"name": "trainer"}, {"name": "beside"}])),
    # --- spec.runtime.inject ---
    (f"{TRAINER}.command", inject("", ("train.py",))),
    *(
        (f"{TRAINER}.command", inject(words))
        for words in (
            "sh -c python train.py", "env A=1 python train.py", "deepspeed train.py", "accelerate test",
            "spottrain run train.py", "./train.py", "python", "python -u", "python -c code", "python -m",
            "python -O train.py", "python -m torch.distributed.launch train.py",
            "torchrun --nproc-per-node 2 train", "torchrun --standalone", "torchrun --no-python ./train.sh",
            "torchrun -m --nnodes 2 package.train",
            "torchrun --unknown-switch --nnodes 2 package.train",
        )
    ),
]  # fmt: skip
ALLOWED: list[Json] = [
    {"checkpoint": {"mode": "Self"}},
    env("MASTER_ADDR"),
    env("SPOTTRAIN_AUTO_ATTACH"),
    env("SPOTTRAIN_CHECKPOINT_URI") | {"checkpoint": {"mode": "Self"}},
    env("PET_RDZV_BACKEND") | {"workers": 2},
    env("AWS_CA_BUNDLE"),
    pod(mount("/etc/spottrain-ca/x")),
    pod(mount("/var/cache/spottrain/x")),
    CACHE | pod(mount("/var/cache/spottrain-other"), volumes=[{"name": "v", "emptyDir": {}}]),
    pod(volumes=[{"name": "spottrain-ca"}, {"name": "spottrain-data-cache"}]),
    pod({"command": ["sh", "-c", "x"]} | mount("/spottrain"), volumes=[{"name": "v", "emptyDir": {}}]),
    pod(metadata={"annotations": {"notspottrain.io/x": "y"}}),
    pod(nodeSelector={CAPACITY: "on-demand"}) | DEMAND,
    *(folder("file:///data/run", {kind: {}}) | DEMAND for kind in ("emptyDir", "hostPath", "csi")),
    *(folder("file:///data/run", volume) for volume in LASTING),
    *(
        folder(uri, CLAIM, at=at)
        for uri in ("file:///data", "file:///data/a%20b/run", "file:////data//run", "file:///data/")
        for at in ("/data", "/data/", "/")
    ),
    folder("file:///my%20data/run", CLAIM, at="/my data"),
    folder("file:///data/run", CLAIM, **FAST),
    folder("file:///cache/run", CLAIM, at="/cache"),
]


@pytest.mark.parametrize(("path", "raw"), REFUSED)
def test_a_spec_is_refused_by_the_path_of_its_field(path: str, raw: Json) -> None:
    job = make_job(raw_spec(**raw))
    assert job.spec is None
    assert job.invalid.startswith((f"{path} ", f"{path}, ")) and len(job.invalid) < 1000


@pytest.mark.parametrize("raw", ALLOWED)
def test_what_is_not_ours_or_outlives_its_node_is_allowed(raw: Json) -> None:
    job = make_job(raw_spec(**raw))
    assert job.spec is not None, job.invalid


def test_every_variable_that_a_gang_is_told_is_refused_in_a_template() -> None:
    told = variables.of_trainer(make_job(raw_spec(workers=2)), Status(attempt=1), 110)
    for name in told:
        assert make_job(raw_spec(workers=2, **env(name))).spec is None, name


@pytest.mark.parametrize("error", [MemoryError, OverflowError, InvalidOperation])
def test_a_spec_whose_figures_cannot_be_handled_is_invalid_and_the_operator_lives(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def fails(raw: Any) -> None:
        raise error("out of range")

    monkeypatch.setattr("spottrain_operator.api.validation.parse_spec", fails)
    assert "spec cannot be read" in make_job(raw_spec()).invalid


def test_what_0_3_has_stored_is_read_by_its_new_names() -> None:
    old = {"type": "Cheapest", "maxCost": 35.5, "deadline": "2027-01-01T00:00:00Z"}
    pools = [{"name": "a", "preset": "EKS"}, {"name": "b", "platform": "Auto", "preset": "GKE"}]
    spec = make_job(raw_spec(capacity=old | {"pools": pools})).spec
    assert spec is not None and spec.capacity.max_cost_usd == Decimal("35.5")
    assert str(spec.capacity.cheapest.deadline) == "2027-01-01 00:00:00+00:00"
    assert [pool.platform for pool in spec.capacity.pools] == ["EKS", "GKE"]

"""What each part of a spec adds to the trainer's pod, all of it in one file: tests/unit/manifests.txt.

A line there is a field that differs from the plainest pod (of Sync: from the plainest of Sync). A change of
it is to be read as a diff: `python -m tests.unit.controller.test_manifests` writes the file anew.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spottrain_operator.api.node_pools import NOTHING, Pool, chosen
from spottrain_operator.api.training_job import AttemptRecord, Job, Status
from spottrain_operator.api.validation import pools_of
from spottrain_operator.names import Platform
from spottrain_operator.rendering import objects, trainer_pod

from tests.builders import POOL, make_job, raw_spec
from tests.unit.controller.test_refused_specs import CA, GPU, env, inject, limits, mount, pod, sync

Json = dict[str, Any]
PAGE = Path(__file__).parents[1] / "manifests.txt"
IMAGE = "example.com/sync:1"
SECRET: Json = {"credentialsSecretRef": {"name": "s3"}}
INIT: Json = {"initContainers": [{"name": "first", "image": "z"}]}
NON_ROOT: Json = {"securityContext": {"runAsNonRoot": True}}
USER: Json = {"securityContext": {"runAsUser": 1234, "runAsGroup": 5, "runAsNonRoot": True}}
DISK: Json = {"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "disk"}}]}
BY_NAME: Json = {"valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
VARIABLES = [
    {"name": "MY_POD"} | BY_NAME,
    {"name": "RUN", "value": "run-$(MY_POD)"},
    {"name": "HOST", "value": "s3.example"},
    {"name": "AWS_ENDPOINT_URL", "value": "https://$(HOST)"},
    {"name": "OTHER", "value": "$(RUN)"},
    {"name": "AWS_PROFILE", "value": "$$(ESCAPED)"},
]
GCS: Json = {"uri": "gs://my_bucket/run", "interval": "auto"}
SPECS: dict[str, Json] = {
    "credentials come from their secret": {"checkpoint": {"uri": "s3://b/p"} | SECRET},
    "a CA bundle is mounted read-only and named to the store client": {"checkpoint": CA},
    "a CA bundle from a secret": {"checkpoint": CA | {"caBundle": {"secretKeyRef": {"name": "authority"}}}},
    "an own CA bundle": env("AWS_CA_BUNDLE", "/own.pem"),
    "a bucket of Google Cloud Storage": {"checkpoint": GCS},
    "checkpoints of its own": {"checkpoint": {"mode": "Self"} | SECRET},
    "a claim for data": {"dataCache": {"claimRef": {"name": "datasets"}}},
    "a data cache at a folder": {"dataCache": {"claimRef": {"name": "datasets"}, "mountPath": "/datasets/"}},
    "the template's own home of a library stands": env("HF_HOME", "/own")
    | {"dataCache": {"claimRef": {"name": "datasets"}}},
    "names that an envFrom may hold are left to it": pod({"envFrom": [{"configMapRef": {"name": "c"}}]})
    | {"dataCache": {"claimRef": {"name": "datasets"}}},
    "a root file system that is read-only": pod({"securityContext": {"readOnlyRootFilesystem": True}}),
    "an own volume for the cache": pod(
        {"volumeMounts": [{"name": "v", "mountPath": "/cache/"}]}, volumes=[{"name": "v", "emptyDir": {}}]
    ),
    "an own home": env("HOME", "/data"),
    "an image that is not said to run as another than root": pod(**INIT),
    "a template that says runAsNonRoot is restricted": pod(**INIT, **NON_ROOT),
    "a trainer that says runAsNonRoot": pod(NON_ROOT, **INIT),
    "a template that asks for more gets it": pod(
        {"securityContext": {"privileged": True, "runAsUser": 0, "runAsNonRoot": False}},
        automountServiceAccountToken=True,
        **NON_ROOT,
    ),
    "own capabilities": pod({"securityContext": {"capabilities": {"add": ["NET_BIND_SERVICE"]}}}, **NON_ROOT),
    "a group may write to disks": pod(**DISK),
    "and to ephemeral ones": pod(volumes=[{"name": "v", "ephemeral": {}}]),
    "the modes of other files stay": pod(volumes=[{"name": "v", "secret": {"secretName": "ssh"}}]),
    "a policy of messages of its own": pod(
        initContainers=[{"name": "b", "image": "x", "terminationMessagePolicy": "File"}]
    ),
    "an own port for metrics": pod({"ports": [{"name": "metrics", "containerPort": 9477}]}),
    "an image that is pinned": pod({"image": "r.example.com:5000/a/b:1@sha256:" + "0" * 64}),
    "three workers": {"workers": 3},
    "eight GPUs": limits(limits=8),
    "GPUs of a claim": pod({"resources": {"claims": [{"name": "gpu"}]}}, **GPU) | {"workers": 2},
    "the runtime is injected": inject("python3", ("train.py", "--lr", "$(LR)")),
    "the runtime is injected for a user": {"runtime": {"inject": True}}
    | pod(
        {"securityContext": {"runAsUser": 7, "runAsGroup": 8, "runAsNonRoot": True, "privileged": False}}
        | {"env": [{"name": "PYTHONPATH", "value": "/theirs"}]},
        **INIT,
    ),
    "Sync": sync() | pod(**INIT),
    "Sync with all settings": sync(
        keep=5, endpoint="https://s3.example", syncWhen={"marker": "latest"}, onExisting="Resume"
    ),
    "Sync with access to a store": sync(**SECRET, caBundle={"configMapKeyRef": {"name": "ca"}})
    | env("AWS_REGION", "eu-west-1"),
    "Sync with a volume of the template": sync(syncPath="/data/ckpt")
    | pod(mount("/data", subPath="a"), **DISK),
    "Sync with variables in mounts and in other variables": sync()
    | pod(mount("/ckpt", subPathExpr="$(RUN)/$(SPOTTRAIN_JOB_NAME)") | {"env": VARIABLES}, **DISK),
    "Sync as another user": sync() | pod(**USER),
    "Sync as the trainer's user": sync() | pod(USER),
    "Sync with a grace of its own": sync() | pod(terminationGracePeriodSeconds=3600),
}


def job_of(raw: Json) -> Job:
    job = make_job(raw_spec(**(pod() | raw)))
    assert job.spec is not None, job.invalid
    return job


def rendered(raw: Json, status: Status | None = None) -> Json:
    job = job_of(raw)
    assert job.spec is not None
    template = copy.deepcopy(job.spec.template)
    where = chosen(pools_of(job.spec, POOL, {})[0], NOTHING)
    made = trainer_pod.pod(job, status or Status(attempt=1), where, sync_image=IMAGE)
    assert job.spec.template == template, "the template was changed"
    return {"metadata": made["metadata"], "spec": made["spec"]}


def cleanup_of(raw: Json) -> Json:
    """The pod that deletes the checkpoints."""
    where = Pool(name="p", platform=Platform.AWS)
    return {"spec": objects.cleanup(job_of(raw), where, sync_image=IMAGE)["spec"]}


def lines(value: Any, path: str = "") -> Iterator[str]:
    """Each field as `path: value`; items of a list are told by their names, else by their places."""
    if isinstance(value, dict) and value:
        if value.keys() <= {"name", "value"} and ".env[" in path:
            yield f"{path}: {value['value']}"
            return
        for key in sorted(value.keys() - ({"name", "mountPath"} if path.endswith("]") else set())):
            yield from lines(value[key], f"{path}.{key}".lstrip("."))
        if "mountPath" in value:
            yield f"{path}: {value['name']}"
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for number, item in enumerate(value):
            name = item.get("mountPath") or item.get("name")
            place = f"{number} {name}" if path.endswith("initContainers") else name or number
            yield from lines(item, f"{path}[{place}]")
    else:
        yield f"{path}: {value!r}"


def difference(made: Json, plain: Json) -> Iterator[str]:
    ours, theirs = list(lines(made)), list(lines(plain))
    yield from (f"- {line}" for line in theirs if line not in ours)
    yield from (f"+ {line}" for line in ours if line not in theirs)


LATER = Status(attempt=2, known_durable_step=4, attempts=(AttemptRecord(number=1, exit_code=137),))


def page() -> str:
    plain, of_sync, clean = rendered(pod()), rendered(sync()), cleanup_of(pod())
    parts = {"the plainest pod": lines(plain)}
    for name, raw in SPECS.items():
        parts[name] = difference(rendered(raw), of_sync if name.startswith("Sync ") else plain)
    parts["a later attempt"] = difference(rendered(pod(), LATER), plain)
    parts["a later attempt of Sync"] = difference(rendered(sync(), LATER), of_sync)
    parts["the pod that deletes checkpoints"] = lines(clean)
    for name in ("Sync with access to a store", "the runtime is injected for a user"):
        parts[f"the pod that deletes checkpoints: {name}"] = difference(cleanup_of(SPECS[name]), clean)
    return "\n".join(f"# {name}\n" + "".join(f"{line}\n" for line in part) for name, part in parts.items())


def test_the_pods_are_those_that_a_person_has_read() -> None:
    written = PAGE.read_text().splitlines()
    assert page().splitlines() == written, "run: python -m tests.unit.controller.test_manifests"


if __name__ == "__main__":
    PAGE.write_text(page())

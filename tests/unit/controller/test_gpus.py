"""GPUs: by the template, of any kind; by spec.gpusPerWorker where it is silent; one where both are."""

from __future__ import annotations

from typing import Any

import pytest
from spottrain.contract import Env
from spottrain.lifecycle.topology import Gang
from spottrain_operator.api.training_job import Job, Status
from spottrain_operator.rendering import trainer_pod

from tests.builders import POOL, make_job, raw_spec

Json = dict[str, Any]
NVIDIA = "nvidia.com/gpu"
CLAIM: Json = {"name": "gpu", "resourceClaimTemplateName": "two-h100"}


def job(
    resources: Json | None = None, *, pod: Json | None = None, env: Json | None = None, **spec: Any
) -> Job:
    trainer: Json = {"name": "trainer", "image": "x"}
    trainer |= {"resources": resources} if resources is not None else {}
    trainer |= {"env": [{"name": k, "value": v} for k, v in env.items()]} if env else {}
    return make_job(raw_spec(template={"spec": {"containers": [trainer]} | (pod or {})}, **spec))


def trainer_of(made: Job) -> Json:
    assert made.spec is not None, made.invalid
    trainer: Json = trainer_pod.pod(made, Status(attempt=1), POOL)["spec"]["containers"][0]
    return trainer


def told(made: Job) -> dict[str, str]:
    return {e["name"]: e.get("value", "") for e in trainer_of(made)["env"]}


ASKED: list[tuple[Json, int | None]] = [
    ({NVIDIA: 8}, 8),
    ({NVIDIA: "8"}, 8),
    ({NVIDIA: 0}, 0),
    ({"nvidia.com/gpu.shared": 2}, 2),
    ({"nvidia.com/mig-1g.10gb": 1, "nvidia.com/mig-3g.40gb": 2}, 3),
    ({"amd.com/gpu": 4}, 4),
    ({"gpu.intel.com/i915": 2, "gpu.intel.com/monitoring": 1}, 2),
    ({"habana.ai/gaudi": 8}, 8),
    ({"example.com/accelerator": 2}, None),
    ({NVIDIA: 1, "nvidia.com/gpumem": 3000, "nvidia.com/gpucores": 30}, 1),
    ({"volcano.sh/vgpu-number": 2, "volcano.sh/vgpu-memory": "10k"}, None),
    ({"aliyun.com/gpu-mem": 3}, None),
    ({"aws.amazon.com/neuroncore": 4}, 4),
    ({NVIDIA: 2, "example.com/card": 1, "rdma/hca_shared": 1}, 2),
]


@pytest.mark.parametrize(("limits", "count"), ASKED, ids=[",".join(limits) for limits, _ in ASKED])
def test_what_the_template_asks_for_is_what_it_gets_and_what_launchers_are_told(
    limits: Json, count: int | None
) -> None:
    """None: a device of another name, of which the container says how many GPUs it is."""
    asked = job({"limits": {"memory": "1Gi"} | limits})
    assert trainer_of(asked)["resources"] == {"limits": {"memory": "1Gi"} | limits}
    assert told(asked).get(Env.GPUS) == (None if count is None else str(count))
    assert told(asked)["PET_NPROC_PER_NODE"] == ("auto" if count is None else str(max(count, 1)))


@pytest.mark.parametrize(
    "quiet", [None, {}, {"limits": {"cpu": 2}}, {"limits": {"vpc.amazonaws.com/efa": 1}}]
)
@pytest.mark.parametrize(("per_worker", "count"), [(None, 1), (0, 0), (4, 4)])
def test_where_the_template_is_silent_gpus_per_worker_counts_and_one_where_both_are(
    quiet: Json | None, per_worker: int | None, count: int
) -> None:
    said: Json = {} if per_worker is None else {"gpusPerWorker": per_worker}
    made = job(quiet, **said)
    resources = trainer_of(made).get("resources") or {}
    asked = {kind: (resources.get(kind) or {}).get(NVIDIA) for kind in ("requests", "limits")}
    assert asked == dict.fromkeys(asked, str(count) if count else None)
    assert told(made)[Env.GPUS] == str(count)


def test_a_claim_gives_the_gpus_and_torchrun_counts_them() -> None:
    claims = {"claims": [{"name": "gpu"}]}
    made = job(claims, pod={"resourceClaims": [CLAIM]}, workers=2)
    assert trainer_of(made)["resources"] == claims
    assert Env.GPUS not in told(made) and told(made)["PET_NPROC_PER_NODE"] == "auto"
    said = job(claims, pod={"resourceClaims": [CLAIM]}, workers=2, gpusPerWorker=2)
    assert trainer_of(said)["resources"] == claims
    assert told(said)[Env.GPUS] == told(said)["PET_NPROC_PER_NODE"] == "2"


def test_a_device_that_is_not_known_is_no_gpu_where_the_job_trains_on_the_cpu() -> None:
    made = job({"limits": {"example.com/card": 2}}, gpusPerWorker=0)
    assert told(made)[Env.GPUS] == "0" and NVIDIA not in trainer_of(made)["resources"]["limits"]


def test_processes_that_the_template_sets_for_torchrun_stay() -> None:
    assert told(job(env={"PET_NPROC_PER_NODE": "2"}, workers=2))["PET_NPROC_PER_NODE"] == "2"


def test_spottrain_run_starts_as_many_processes_as_gpus_were_asked_for() -> None:
    """A container may see GPUs that are not its own: images of CUDA ask for all of a node."""

    def nproc(**env: str) -> int:
        return Gang.from_env(env, "auto", lambda: 8).nproc

    assert nproc() == 8
    assert nproc(**{Env.GPUS: "0"}) == 1 and nproc(**{Env.GPUS: "4"}) == 4

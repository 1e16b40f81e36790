"""spec.runtime.inject: what is put into the pod, how a command gets the launcher, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from spottrain.contract import Env
from spottrain_operator.api import kueue
from spottrain_operator.api.injected import LAUNCHER, launched
from spottrain_operator.api.observed import Placement
from spottrain_operator.api.training_job import Job, Status
from spottrain_operator.rendering import trainer_pod

from tests.builders import POOL, make_job, raw_spec

Json = dict[str, Any]
IMAGE = "example.com/sync:1"


def spec(trainer: Json | None = None, *, pod: Json | None = None, inject: bool = True, **more: Any) -> Json:
    container = {"name": "trainer", "image": "example.com/torch:1", "command": ["python", "train.py"]}
    template = {"spec": {"containers": [container | (trainer or {})]} | (pod or {})}
    return raw_spec(template=template, runtime={"inject": inject}, **more)


def job_of(raw: Json) -> Job:
    job = make_job(raw)
    assert job.spec is not None, job.invalid
    return job


def rendered(raw: Json | None = None, place: Placement | None = None) -> Json:
    place = place or Placement()
    body: Json = trainer_pod.pod(job_of(raw or spec()), Status(attempt=1), POOL, place, sync_image=IMAGE)[
        "spec"
    ]
    return body


# --- the pod ------------------------------------------------------------------------------------------


def test_a_guaranteed_pod_remains_guaranteed_and_kueue_counts_the_init_container() -> None:
    body = rendered()
    resources = body["initContainers"][0]["resources"]
    assert resources["requests"] == resources["limits"] and {"cpu", "memory"} == resources["limits"].keys()
    assert kueue.parts(body)["initContainers"][0]["resources"] == resources


def test_all_ranks_of_a_gang_are_started_by_it() -> None:
    job = job_of(spec(workers=3))
    places = [Placement(rank=rank) for rank in range(3)]
    pods = [trainer_pod.pod(job, Status(attempt=1), POOL, place, sync_image=IMAGE) for place in places]
    bodies = [pod["spec"] for pod in pods]
    assert [b["containers"][0]["command"][1] for b in bodies] == [LAUNCHER] * 3
    assert [b["initContainers"][0]["image"] for b in bodies] == [IMAGE] * 3
    env = [{e["name"]: e.get("value") for e in b["containers"][0]["env"]} for b in bodies]
    assert [e[Env.WORKER_INDEX] for e in env] == ["0", "1", "2"]


# --- the command --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("words", "result"),
    [
        ("python train.py --lr 1", f"python {LAUNCHER} train.py --lr 1"),
        (
            "/opt/conda/bin/python3.11 -u train.py -m x",
            f"/opt/conda/bin/python3.11 -u {LAUNCHER} train.py -m x",
        ),
        ("python -m package.train --lr 1", f"python {LAUNCHER} -m package.train --lr 1"),
        ("python -u -m package.train", f"python -u {LAUNCHER} -m package.train"),
        ("python -m spottrain run --nproc 2 train.py", f"python {LAUNCHER} --nproc 2 train.py"),
        ("torchrun train.py -m x", f"torchrun {LAUNCHER} train.py -m x"),
        (
            "torchrun --standalone --nproc-per-node 2 --rdzv_backend=c10d train.py --x 1",
            f"torchrun --standalone --nproc-per-node 2 --rdzv_backend=c10d {LAUNCHER} train.py --x 1",
        ),
        (
            "torchrun --nnodes 2 -m package.train --lr 1",
            f"torchrun --nnodes 2 {LAUNCHER} -m package.train --lr 1",
        ),
        (
            "python -m torch.distributed.run --standalone train.py",
            f"python -m torch.distributed.run --standalone {LAUNCHER} train.py",
        ),
        (
            "accelerate launch --multi_gpu --num_processes 2 --config_file a.yaml train.py --cpu",
            f"accelerate launch --multi_gpu --num_processes 2 --config_file a.yaml {LAUNCHER} --nproc 1 "
            "train.py --cpu",
        ),
        (
            "accelerate launch --use-fsdp --module package.train",
            f"accelerate launch --use-fsdp {LAUNCHER} --nproc 1 -m package.train",
        ),
        (
            "python -m accelerate.commands.launch -q train.py",
            f"python -m accelerate.commands.launch -q {LAUNCHER} --nproc 1 train.py",
        ),
    ],
)
def test_the_launcher_comes_before_the_script(words: str, result: str) -> None:
    assert launched(words.split()) == result.split()
    assert launched(result.split()) == result.split(), "it is put there once"


def test_a_command_that_names_the_launcher_is_left_as_it_is() -> None:
    words = ["bash", "-c", f"pip install x && exec python {LAUNCHER} train.py"]
    assert launched(words) == words

"""A silent node, a hang, a stopped process, pods that cannot start, a store that is cut off.

All of it happens in one namespace at once, for most of it is waiting. What a status said for a while is kept,
so that a test may ask for it later.
"""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from demo.kubectl import Kubectl, Watch
from demo.target import local_pool
from localcluster import layout
from localcluster.api import Cluster

from tests.support.faultproxy import Fault, FaultProxy, Treatment, plain
from tests.support.lab import TRAIN, Lab, Raw, drawn_to, new_lab
from tests.support.ports import free_port

SECONDS = 300
"""For each wait: some ten trainers start at once."""
STARTS = {"startTimeoutSeconds": 30, "backoffSeconds": 1}
MISSING = ("environment", "volume", "init-container")
NOWHERE = 'configmap "nowhere" not found'
HANGS_ONCE = TRAIN.replace(
    "    x, y = batch\n",
    "    x, y = batch\n    if first and trainer.step >= 15: wait_for_somebody_who_never_comes()\n",
).replace("def loss(", "def wait_for_somebody_who_never_comes(): time.sleep(10_000)\n\ndef loss(")


# --- jobs ----------------------------------------------------------------------------------------------
def small(build: Callable[..., Raw], name: str, **more: Any) -> Raw:
    """A job that asks for no GPU."""
    return build(name, gpusPerWorker=0, **more)


def silent_job(lab: Lab) -> Raw:
    """It may go on on the other node."""
    return lab.slow_job("silent", gpusPerWorker=0, grace=2, checkpoint={"interval": "10steps"})


def hanging_job(lab: Lab) -> Raw:
    policy = {"backoffSeconds": 1, "hangTimeoutSeconds": 10}
    every, steps = {"interval": "10steps"}, {"maxSteps": 30}
    container = {"args": ["/scripts/hangs.py"]}
    return small(
        lab.job, "hangs", failurePolicy=policy, checkpoint=every, training=steps, container=container
    )


def stopped_job(lab: Lab) -> Raw:
    policy = {"maxFailures": 0, "backoffSeconds": 1, "hangTimeoutSeconds": 10}
    return small(lab.slow_job, "stopped", failurePolicy=policy, grace=2)


def imageless_job(lab: Lab) -> Raw:
    image = {"image": "127.0.0.1:1/no-such-image:1", "imagePullPolicy": "Always"}
    return small(lab.job, "imageless", container=image, failurePolicy=STARTS)


def job_without_configmap(lab: Lab, kind: str, configmap: str = "nowhere", **policy: int) -> Raw:
    job = small(lab.job, kind, failurePolicy=STARTS | policy, training={"maxSteps": 5})
    pod = job["spec"]["template"]["spec"]
    source = [{"configMapRef": {"name": configmap}}]
    if kind == "environment":
        pod["containers"][0]["envFrom"] = source
    elif kind == "init-container":
        pod["initContainers"] = [pod["containers"][0] | {"name": "fetch", "envFrom": source}]
    else:
        pod["volumes"].append({"name": "missing", "configMap": {"name": configmap}})
        pod["containers"][0]["volumeMounts"].append({"name": "missing", "mountPath": "/missing"})
    return job


def stored_job(lab: Lab, name: str, endpoint: str, seconds: int, **policy: int) -> Raw:
    policy = {"maxFailures": 0, "backoffSeconds": 1, "storeOutageSeconds": seconds} | policy
    store = {"endpoint": endpoint, "interval": "10steps"}
    return small(lab.slow_job, name, checkpoint=store, failurePolicy=policy, grace=20)


# --- the play ------------------------------------------------------------------------------------------
@dataclass(kw_only=True)
class Troubles:
    lab: Lab
    store: FaultProxy
    nobody: str
    """An endpoint at which nobody listens."""
    said: dict[str, list[Raw]] = field(default_factory=lambda: defaultdict(list))
    """Every status that each job has had."""

    def on_job(self, _kind: str, job: Raw) -> None:
        self.said[job["metadata"]["name"]].append(job.get("status", {}))

    def cut(self) -> None:
        self.store.plan = lambda _request: Treatment(fault=Fault.REQUEST_LOST)

    def attach(self) -> None:
        self.store.plan = plain

    def said_once(self, name: str, kind: str, reason: str) -> Raw:
        """The first condition of that kind and reason that the job had."""

        def condition(status: Raw) -> Raw | None:
            conditions = status.get("conditions", [])
            return next((c for c in conditions if (c["type"], c.get("reason")) == (kind, reason)), None)

        found = condition(self.status_with(name, f"{kind} with {reason}", condition))
        assert found is not None
        return found

    def status_with(self, name: str, what: str, has: Callable[[Raw], object]) -> Raw:
        """The first status that the job had with this."""

        def found() -> Raw | None:
            return next((status for status in list(self.said[name]) if has(status)), None)

        status: Raw = self.lab.wait(f"{what} of {name}", found, name=name, seconds=SECONDS)
        return status


@pytest.fixture(scope="module")
def troubles(cluster: Cluster, installed: Kubectl) -> Iterator[Troubles]:
    host = cluster.s3_endpoint.removeprefix("http://").partition(":")[0]
    proxy = FaultProxy(layout.S3_PORT, upstream_host=host)
    with new_lab(cluster, installed, {"hangs.py": HANGS_ONCE}) as lab, proxy.running() as store:
        troubles = Troubles(lab=lab, store=store, nobody=f"http://127.0.0.1:{free_port()}")
        watch = Watch(lab.kubectl, "trainingjobs", troubles.on_job)
        try:
            play(troubles)
            yield troubles
        finally:
            watch.stop()


def play(troubles: Troubles) -> None:
    """Begins all jobs and does to them what must be done while they run."""
    lab = troubles.lab
    silent = lab.expendable_node()
    jobs = [
        stopped_job(lab),
        stored_job(lab, "cut-off", troubles.store.endpoint(), 200, maxInterruptions=5),
        stored_job(lab, "never-stored", troubles.nobody, 10),
        hanging_job(lab),
        imageless_job(lab),
        *(job_without_configmap(lab, kind) for kind in MISSING),
        job_without_configmap(lab, "in-time", "later", startTimeoutSeconds=600),
    ]
    for job in jobs:
        job["spec"]["capacity"]["pools"] = [local_pool(next(n for n in lab.cluster.nodes if n != silent))]
    lab.apply(drawn_to(silent, silent_job(lab)), *jobs)
    lab.wait_for_step(12, name="silent", seconds=SECONDS)
    assert lab.node_of("silent") == silent
    lab.cluster.vanish(silent, delete_node=False)
    troubles.status_with("stopped", "an answer", lambda s: s.get("progress", {}).get("step"))
    for pid in processes_of(lab, "stopped"):
        os.kill(pid, signal.SIGSTOP)
    troubles.status_with("cut-off", "a durable step", lambda s: s.get("knownDurableStep"))
    troubles.cut()
    lab.kubectl.run("delete", "pod", lab.pods("cut-off")[-1]["metadata"]["name"], "--wait=false")
    troubles.said_once("in-time", "Running", "FailedMount")
    lab.kubectl.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "later"}, "data": {}})


def processes_of(lab: Lab, job: str) -> list[int]:
    """Of the job's trainers, as this machine numbers them."""
    raw = lab.kubectl.get("trainingjob", job)
    assert raw is not None
    mark = f"SPOTTRAIN_JOB_UID={raw['metadata']['uid']}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            ours = mark in (folder / "environ").read_bytes().split(b"\0")
            trains = b"train.py" in (folder / "cmdline").read_bytes()
        except OSError:  # it has ended, or is the kernel's
            continue
        found += [int(folder.name)] if ours and trains else []
    assert found, f"the processes of {job} were not found on this machine"
    return found


def warned(lab: Lab, job: str, words: str) -> Any:
    """Warning Events on the job that have these words."""
    about = f"involvedObject.kind=TrainingJob,involvedObject.name={job},type=Warning"
    return [e for e in lab.kubectl.items("events", "--field-selector", about) if words in e["message"]]


# --- a store that is cut off ------------------------------------------------------------------------------
def test_a_store_that_is_cut_off_while_an_attempt_starts_costs_nothing(troubles: Troubles) -> None:
    endpoint = troubles.store.endpoint()
    assert endpoint in troubles.said_once("cut-off", "Running", "WaitingForStore")["message"]
    troubles.attach()
    status = troubles.lab.wait_for_phase("Succeeded", name="cut-off", seconds=SECONDS)
    assert status.get("failures", 0) == 0 and status["interruptions"] == 1
    assert "storeUnreachableTime" not in status and warned(troubles.lab, "cut-off", endpoint)
    assert status["attempts"][-1]["startStep"] > 0, "it went on from what was durable"


def test_a_store_that_does_not_come_back_fails_the_job_at_its_own_bound(troubles: Troubles) -> None:
    status = troubles.lab.wait_for_phase("Failed", name="never-stored", seconds=SECONDS)
    failed = troubles.lab.condition("Failed", "never-stored")
    assert failed["reason"] == "StoreUnreachable" and "status.attempts has its errors" in failed["message"]
    assert troubles.nobody in status["attempts"][-1]["evidence"]
    assert status.get("failures", 0) == 0
    assert {a["cause"] for a in status["attempts"]} == {"StoreUnreachable"}
    assert {a["exitCode"] for a in status["attempts"]} == {69}


# --- a trainer that gets on no more -------------------------------------------------------------------------
def test_a_hang_is_ended_with_its_stacks_in_the_log_that_outlives_the_pod(troubles: Troubles) -> None:
    status = troubles.lab.wait_for_phase("Succeeded", name="hangs", seconds=SECONDS)
    first, second = status["attempts"]
    assert (first["cause"], status["failures"], status.get("interruptions", 0)) == ("Stalled", 1, 0)
    evidence = first["evidence"]
    assert "no progress for " in evidence and " since step 15 " in evidence, evidence
    assert second["startStep"] == first["durableStep"] >= 10, "what it had saved is not lost"
    printed = troubles.lab.stored_log(attempt=1, name="hangs")
    assert "wait_for_somebody_who_never_comes" in printed and "step=15/30" in printed
    assert "step=30/30" in troubles.lab.stored_log(attempt=2, name="hangs")


def test_a_trainer_that_is_stopped_is_said_to_answer_no_more(troubles: Troubles) -> None:
    troubles.lab.wait_for_phase("Failed", name="stopped", seconds=SECONDS)
    message = troubles.lab.condition("Failed", "stopped")["message"]
    assert "the trainer has not responded for " in message and "it is stopped" in message
    assert "for 0 s" not in message


# --- pods that cannot start ---------------------------------------------------------------------------------
def test_an_image_that_no_registry_gives_is_told_and_tried_again_uncharged(troubles: Troubles) -> None:
    condition = troubles.said_once("imageless", "Running", "ImagePullBackOff")
    assert condition["status"] == "False" and "no-such-image" in condition["message"]
    status = troubles.status_with("imageless", "a second attempt", lambda s: s.get("attempt", 0) >= 2)
    first = status["attempts"][0]
    assert first["cause"] == "StartFailed" and "no-such-image" in first["evidence"]
    assert (status.get("failures", 0), status.get("interruptions", 0)) == (0, 0)
    assert warned(troubles.lab, "imageless", "no-such-image")


@pytest.mark.parametrize("kind", MISSING)
def test_a_configmap_that_is_not_there_is_told_and_then_fails_the_job(troubles: Troubles, kind: str) -> None:
    reason = "FailedMount" if kind == "volume" else "CreateContainerConfigError"
    assert NOWHERE in troubles.said_once(kind, "Running", reason)["message"]
    status = troubles.lab.wait_for_phase("Failed", name=kind, seconds=SECONDS)
    failed = troubles.lab.condition("Failed", kind)
    assert failed["reason"] == reason and NOWHERE in failed["message"]
    assert status["attempt"] == 1
    assert warned(troubles.lab, kind, NOWHERE)


def test_a_configmap_that_comes_in_time_is_enough(troubles: Troubles) -> None:
    status = troubles.lab.wait_for_phase("Succeeded", name="in-time", seconds=SECONDS)
    assert "startErrorTime" not in status["attempts"][0]


# --- a node that is silent ----------------------------------------------------------------------------------
def test_a_node_that_is_silent_is_told_at_once_and_its_attempt_ends_as_a_lost_node(
    troubles: Troubles,
) -> None:
    assert troubles.said_once("silent", "Running", "NodeNotReady")["status"] == "False"
    assert any(
        status.get("readyWorkers") == 0
        and status["attempt"] == 1
        and running_reason(status) == "NodeNotReady"
        for status in list(troubles.said["silent"])
    )
    status = troubles.status_with("silent", "a second attempt", lambda s: s.get("attempt") == 2)
    assert status["attempts"][0]["cause"] == "NodeLost", status["attempts"][0]
    assert (status["interruptions"], status.get("failures", 0)) == (1, 0)


def running_reason(status: Raw) -> str:
    return next((c.get("reason", "") for c in status.get("conditions", []) if c["type"] == "Running"), "")

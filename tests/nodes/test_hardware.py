"""A silent node, a failing probe and a stopped process, on real nodes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.support.lab import Lab


def processes_of(lab: Lab) -> list[int]:
    """Of the trainers in this test's namespace, as the machine numbers them."""
    mark, found = f"SPOTTRAIN_JOB_NAMESPACE={lab.kubectl.namespace}\0".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            ours = mark in (folder / "environ").read_bytes()
            trains = b"train.py" in (folder / "cmdline").read_bytes()
        except OSError:  # it has ended, or is the kernel's
            continue
        found += [int(folder.name)] if ours and trains else []
    return found


def test_a_node_that_is_silent_is_told_at_once_and_its_attempt_ends_as_a_lost_node(lab: Lab) -> None:
    lab.apply(lab.slow_job(grace=10))
    lab.wait_for_step(40)
    lab.cluster.vanish(lab.node_of(), delete_node=False)
    condition = lab.wait(
        "the condition",
        lambda: (c := lab.condition("Running")).get("reason") == "NodeNotReady" and c,
        seconds=120,
    )
    assert condition["status"] == "False" and lab.status()["ready"] == "0/1"
    status = lab.wait("a second attempt", lambda: (s := lab.status()).get("attempt") == 2 and s, seconds=400)
    assert status["attempts"][0]["cause"] == "NodeLost", status["attempts"][0]
    assert (status["interruptions"], status.get("failures", 0)) == (1, 0)


def test_a_failing_liveness_probe_is_named_and_charged(lab: Lab) -> None:
    probe = {
        "exec": {"command": ["false"]},
        "initialDelaySeconds": 8,
        "periodSeconds": 1,
        "failureThreshold": 1,
    }
    policy = {"maxFailures": 0}
    lab.apply(lab.slow_job(container={"livenessProbe": probe}, failurePolicy=policy))
    status = lab.wait_for_phase("Failed", seconds=150)
    assert (status["failures"], status.get("interruptions", 0)) == (1, 0)
    assert status["attempts"][0]["reason"] == "ProbeFailed"
    assert "failed liveness probe" in lab.condition("Failed")["message"]


def test_a_trainer_that_is_stopped_is_said_to_answer_no_more(lab: Lab) -> None:
    policy = {"maxFailures": 0, "backoffSeconds": 1, "hangTimeoutSeconds": 20}
    lab.apply(lab.slow_job(failurePolicy=policy, grace=10))
    lab.wait_for_step(40)
    lab.wait("an answer of the trainer", lambda: lab.status().get("progress", {}).get("step"), seconds=120)
    stopped = processes_of(lab)
    assert stopped, "the trainer's processes were not found on this machine"
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    lab.wait_for_phase("Failed", seconds=300)
    message = lab.condition("Failed")["message"]
    assert "has not responded since" in message and "SIGSTOP" in message and "for 0 s" not in message

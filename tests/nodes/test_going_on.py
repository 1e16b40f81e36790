"""Who may go on from what is in the store: a job whose node vanished, and of two jobs of one URI its owner.

Kubernetes deletes the pods of a vanished node after 40 s; the other jobs have the other node meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from demo.kubectl import Kubectl
from localcluster.api import Cluster
from spottrain.contract import INTERRUPT_ANNOTATION

from tests.support.lab import Lab, drawn_to, new_lab


@pytest.fixture(scope="module")
def lab(cluster: Cluster, installed: Kubectl) -> Iterator[Lab]:
    """With the job `lost`, whose node has vanished without a notice."""
    with new_lab(cluster, installed, {}) as lab:
        node = lab.expendable_node()
        lab.apply(drawn_to(node, lab.slow_job("lost", checkpoint={"interval": "10steps"})))
        lab.wait(
            "a durable checkpoint",
            lambda: lab.status("lost").get("progress", {}).get("durableStep"),
            name="lost",
            seconds=240,
        )
        assert lab.node_of("lost") == node
        lab.cluster.vanish(node)
        yield lab


@pytest.mark.heavy
def test_a_uri_has_one_owner_and_a_job_applied_again_says_so_or_goes_on_as_it_was_told(lab: Lab) -> None:
    uri = {"uri": f"{lab.uri}/shared", "interval": "10steps"}
    lab.apply(lab.slow_job("one", checkpoint=uri))
    lab.wait_for_step(12, name="one", seconds=240)
    lab.apply(lab.job("two", checkpoint=uri))
    lab.wait_for_phase("Failed", name="two", seconds=240)
    failed = lab.condition("Failed", "two")
    assert failed["reason"] == "CheckpointURIInUse"
    assert "one" in failed["message"], "the owner is named"
    assert (lab.status("one")["attempt"], lab.status("one")["phase"]) == (1, "Running"), "the first goes on"

    lab.kubectl.run("delete", "trainingjob", "one")
    lab.wait("the old pod gone", lambda: not lab.pods("one"), name="one")
    lab.apply(lab.job("one", checkpoint=uri))
    lab.wait_for_phase("Failed", name="one", seconds=240)
    assert "onExisting" in lab.condition("Failed", "one")["message"]

    lab.kubectl.run("delete", "trainingjob", "one")
    lab.apply(lab.job("one", training={"maxSteps": 101}, checkpoint=uri | {"onExisting": "Resume"}))
    status = lab.wait_for_phase("Succeeded", name="one", seconds=240)
    assert status["attempts"][0]["startStep"] >= 12


@pytest.mark.heavy
def test_a_fire_drill_saves_and_the_next_attempt_goes_on_where_it_was(lab: Lab) -> None:
    lab.apply(lab.slow_job("drilled"))
    lab.wait_for_step(5, name="drilled", seconds=240)
    lab.wait_for_phase("Running", name="drilled")  # the operator knows it later than the log
    lab.kubectl.run("annotate", "trainingjob", "drilled", f"{INTERRUPT_ANNOTATION}=once")
    status = lab.wait_for_phase("Succeeded", name="drilled", seconds=240)
    assert status["interrupt"] == {"request": "once", "attempt": 1}
    first, second = status["attempts"]
    assert (first["cause"], first["exitCode"], first["durableStep"]) == (
        "InterruptRequested",
        75,
        second["startStep"],
    )
    assert second["startStep"] >= 5 and f"step {second['startStep']} was saved" in first["evidence"]
    assert float(first["signalToDurableSeconds"]) > 0
    assert (status.get("interruptions", 0), status.get("failures", 0)) == (0, 0)


def test_a_node_that_vanishes_without_notice_costs_only_the_steps_since_the_last_checkpoint(lab: Lab) -> None:
    status = lab.wait_for_phase("Succeeded", name="lost", seconds=240)
    assert status["attempts"][0]["cause"] == "NodeLost"
    assert (status["interruptions"], status.get("failures", 0)) == (1, 0)
    assert status["attempts"][1]["startStep"] >= 10, "it went on from a checkpoint, not from the start"
    assert status["attempts"][0]["durableStep"] == status["attempts"][1]["startStep"], "back-filled"

"""HEAD on the real S3 server, from the cluster: one URI has one owner; a job may come back to its own."""

from __future__ import annotations

from tests.support.lab import Lab


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

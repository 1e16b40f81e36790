"""HEAD on the real S3 server, from the cluster: one URI has one owner; a job may come back to its own."""

from __future__ import annotations

from tests.support.lab import Lab


def test_a_second_job_on_the_same_uri_is_refused_and_the_first_goes_on(lab: Lab) -> None:
    uri = f"{lab.uri}/shared"
    lab.apply(lab.slow_job("one", checkpoint={"uri": uri}, training={"maxSteps": 160}))
    lab.wait_for_step(20, name="one")
    lab.apply(lab.job("two", checkpoint={"uri": uri}))
    status = lab.wait_for_phase("Failed", name="two")
    condition = next(c for c in status["conditions"] if c["type"] == "Failed")
    assert condition["reason"] == "CheckpointURIInUse"
    assert "one" in condition["message"], "the owner is named"
    assert lab.wait_for_phase("Succeeded", name="one")["attempt"] == 1


def test_a_job_deleted_and_applied_again_on_its_uri_says_so_or_goes_on_as_it_was_told(lab: Lab) -> None:
    lab.apply(lab.slow_job())
    lab.wait_for_step(40)
    lab.kubectl.run("delete", "trainingjob", "job")
    lab.wait("the old pod gone", lambda: not lab.pods())
    lab.apply(lab.job(training={"maxSteps": 400}))
    status = lab.wait_for_phase("Failed")
    assert "onExisting" in next(c for c in status["conditions"] if c["type"] == "Failed")["message"]
    lab.kubectl.run("delete", "trainingjob", "job")
    lab.apply(lab.job(training={"maxSteps": 120}, checkpoint={"onExisting": "Resume"}))
    status = lab.wait_for_phase("Succeeded")
    assert status["attempts"][0]["startStep"] >= 40

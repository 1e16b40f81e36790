"""Which user a trainer runs as."""

from __future__ import annotations

from tests.support.lab import Lab


def test_a_silent_template_trains_as_root(lab: Lab) -> None:
    """Most published images run as root."""
    job = lab.job(training={"maxSteps": 5}, container={"securityContext": {"runAsUser": 0}})
    lab.apply(job)
    lab.wait_for_phase("Succeeded")
    assert (lab.status().get("failures", 0), lab.status()["attempt"]) == (0, 1)

"""The deadline that the trainer believes in is the one that the operator and the cloud mean."""

from __future__ import annotations

import re
from datetime import datetime, timedelta

from tests.support.lab import Lab

ANNOTATION = "spottrain.io/termination-deadline"
ROUNDING = timedelta(seconds=1.5)
"""Deletion deadlines are whole seconds."""


def believed(lab: Lab, pod: str) -> datetime:
    """The deadline in the trainer's log."""
    line = lab.wait("the trainer's word of its end", lambda: re.search(r"deadline=(\S+)", lab.log(pod)))
    return datetime.fromisoformat(line.group(1))


def begin(lab: Lab) -> str:
    """A job in mid-training; the name of its pod."""
    lab.apply(lab.job(training={"maxSteps": 100_000}))
    lab.wait_for_step(10)
    return str(lab.pods()[0]["metadata"]["name"])


def test_a_notice_too_short_for_the_pods_grace_reaches_the_trainer_as_the_deadline_it_is(lab: Lab) -> None:
    pod = begin(lab)
    published = lab.cluster.reclaim(lab.node_of(), 40)
    seen = believed(lab, pod)
    assert abs(seen.timestamp() - (published + 40)) <= ROUNDING.total_seconds()
    found = lab.kubectl.get("pod", pod)
    if found and (deleted := found["metadata"].get("deletionTimestamp")):  # it may have ended already
        assert datetime.fromisoformat(deleted) <= seen + ROUNDING


def test_a_deadline_written_in_the_same_instant_as_the_operators_delete_still_reaches_the_trainer(
    lab: Lab,
) -> None:
    """Only the node is annotated, as if the agent had died in between: the operator does both at once."""
    pod = begin(lab)
    deadline = datetime.now().astimezone() + timedelta(seconds=30)
    node, source = lab.node_of(), "spottrain.io/termination-source"
    lab.kubectl.run("annotate", "node", node, f"{ANNOTATION}={deadline.isoformat()}", f"{source}=test")
    try:
        assert abs(believed(lab, pod) - deadline) <= ROUNDING
    finally:
        lab.kubectl.run("annotate", "node", node, f"{ANNOTATION}-", f"{source}-")

"""The deadline that the trainer believes in is the one that the operator means."""

from __future__ import annotations

import re
from datetime import datetime, timedelta

from tests.support.lab import Lab

ANNOTATION = "spottrain.io/termination-deadline"
ROUNDING = timedelta(seconds=1.5)
"""Deletion deadlines are whole seconds."""


def test_a_deadline_written_in_the_same_instant_as_the_operators_delete_still_reaches_the_trainer(
    lab: Lab,
) -> None:
    """Only the node is annotated, as if the agent had died in between: the operator does both at once."""
    lab.apply(lab.job(training={"maxSteps": 100_000}, failurePolicy={"maxInterruptions": 0}))
    lab.wait_for_step(3, seconds=240)
    deadline = datetime.now().astimezone() + timedelta(seconds=30)
    node, source = lab.node_of(), "spottrain.io/termination-source"
    lab.kubectl.run("annotate", "node", node, f"{ANNOTATION}={deadline.isoformat()}", f"{source}=test")
    try:
        lab.wait_for_phase("Failed")
    finally:
        lab.kubectl.run("annotate", "node", node, f"{ANNOTATION}-", f"{source}-")
    told = re.search(r"deadline=(\S+)", lab.stored_log(attempt=1))
    assert told is not None
    assert abs(datetime.fromisoformat(told[1]) - deadline) <= ROUNDING

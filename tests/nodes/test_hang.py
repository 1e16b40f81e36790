"""A trainer that gets on no more, on a real node: its stacks are told, and it goes on where it saved."""

from __future__ import annotations

from tests.support.lab import TRAIN, Lab

HANGS_ONCE = TRAIN.replace(
    "    x, y = batch\n",
    "    x, y = batch\n    if first and trainer.step >= 45: wait_for_somebody_who_never_comes()\n",
).replace("def loss(", "def wait_for_somebody_who_never_comes(): time.sleep(10_000)\n\ndef loss(")


def test_a_hang_is_ended_with_its_stacks_in_the_log_that_outlives_the_pod(lab: Lab) -> None:
    lab.scripts["train.py"] = HANGS_ONCE
    policy = {"maxFailures": 1, "backoffSeconds": 1, "hangTimeoutSeconds": 10}
    lab.apply(lab.job(failurePolicy=policy))
    status = lab.wait_for_phase("Succeeded", seconds=240)
    first, second = status["attempts"]
    assert (first["cause"], status["failures"], status.get("interruptions", 0)) == ("Stalled", 1, 0)
    assert "no progress since step 45" in first["evidence"], first["evidence"]
    assert second["startStep"] == first["durableStep"] >= 40, "what it had saved is not lost"
    printed = lab.stored_log(attempt=1)
    assert "wait_for_somebody_who_never_comes" in printed and "step=45/100" in printed
    assert "step=100/100" in lab.stored_log(attempt=2)

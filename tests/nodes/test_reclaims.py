"""A node goes: with a notice, without one, and with a trainer that behaves badly."""

from __future__ import annotations

from tests.support.lab import Lab


def test_a_reclaimed_job_ends_on_the_other_node_with_nothing_lost_and_nothing_charged(lab: Lab) -> None:
    lab.apply(lab.slow_job())
    lab.wait_for_step(40)
    first = lab.node_of()
    lab.cluster.reclaim(first, 40)
    status = lab.wait_for_phase("Succeeded", seconds=150)
    attempts = status["attempts"]
    assert [a["node"] for a in attempts] == [first, next(n for n in lab.cluster.nodes if n != first)]
    assert (status["interruptions"], status.get("failures", 0)) == (1, 0)
    assert attempts[0]["exitCode"] == 75
    assert attempts[1]["startStep"] == attempts[0]["lastStep"] == attempts[0]["durableStep"]
    assert "spot" in attempts[0]["evidence"]
    assert status["output"]["uri"].startswith(lab.uri)
    assert "event=end outcome=interrupted" in lab.stored_log(attempt=1), (
        "its last line, though its node is gone"
    )


def test_a_node_that_vanishes_without_notice_costs_only_the_steps_since_the_last_checkpoint(lab: Lab) -> None:
    lab.apply(lab.slow_job())
    lab.wait("a durable checkpoint", lambda: lab.status().get("progress", {}).get("durableStep"), seconds=120)
    first = lab.node_of()
    lab.cluster.vanish(first)
    status = lab.wait_for_phase("Succeeded", seconds=150)
    assert status["attempts"][0]["cause"] == "NodeLost"
    assert (status["interruptions"], status.get("failures", 0)) == (1, 0)
    assert status["attempts"][1]["startStep"] >= 20, "it went on from a checkpoint, not from the start"
    assert status["attempts"][0]["durableStep"] == status["attempts"][1]["startStep"], "back-filled"


def test_a_trainer_that_exits_0_on_sigterm_is_no_success(lab: Lab) -> None:
    polite = "trap 'exit 0' TERM; echo ready; while true; do sleep 0.2; done"
    lab.apply(lab.job(container={"command": ["sh", "-c", polite], "args": []}))
    lab.wait(
        "the first pod running", lambda: lab.pods() and lab.pods()[0]["status"].get("phase") == "Running"
    )
    lab.kubectl.run("delete", "pod", lab.pods()[0]["metadata"]["name"], "--wait=false")
    status = lab.wait("a second attempt", lambda: (s := lab.status()).get("attempt") == 2 and s)
    assert status["phase"] != "Succeeded"
    assert (status["interruptions"], status.get("failures", 0)) == (1, 0)

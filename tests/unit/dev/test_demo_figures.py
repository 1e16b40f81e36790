"""The demo's arithmetic: what it calls repeated, skipped and equal must be so."""

from __future__ import annotations

import json
from typing import Any, cast

from demo.figures import attempts_table, digests_equal, figures, losses_equal, repeated_and_skipped
from demo.kubectl import Kubectl
from demo.record import JobRecord
from demo.timeline import Timeline

NOBODY = Kubectl(binary="", helm_binary="", kubeconfig="", namespace="")


def record(*attempts: dict[int, str]) -> JobRecord:
    """A job whose attempts logged these losses by step."""
    made = JobRecord("gpt", "gpt", Timeline(), NOBODY)
    for number, losses in enumerate(attempts, start=1):
        pod = {"metadata": {"name": f"gpt-{number}", "labels": labels(number)}, "spec": {}, "status": {}}
        made.on_pod("ADDED", pod)
        made.attempts[number].losses |= losses
    return made


def labels(number: int) -> dict[str, str]:
    return {"spottrain.io/job": "gpt", "spottrain.io/attempt": str(number)}


def test_a_step_done_by_two_attempts_is_repeated() -> None:
    made = record({1: "a", 2: "b"}, {2: "b", 3: "c"})
    assert repeated_and_skipped(list(made.attempts.values())) == (1, 0)


def test_a_step_done_by_none_is_skipped() -> None:
    made = record({1: "a", 2: "b"}, {4: "d"})
    assert repeated_and_skipped(list(made.attempts.values())) == (0, 1)


def test_losses_are_equal_only_when_each_step_is_and_there_are_some() -> None:
    alone = record({1: "a", 2: "b", 3: "c"})
    assert losses_equal(record({1: "a"}, {2: "b", 3: "c"}), alone)
    assert not losses_equal(record({1: "a"}, {2: "b", 3: "x"}), alone)
    assert not losses_equal(record({1: "a"}, {2: "b"}), alone)
    assert not losses_equal(record({}), record({}))


def test_the_figures_come_from_log_events_and_termination_messages() -> None:
    made = record({1: "a"}, {2: "b"})
    first, last = made.attempts[1], made.attempts[2]
    first.events.append({"event": "sigterm", "at": "2026-01-01T00:00:02.500Z"})
    first.message = json.dumps({"outcome": "interrupted", "durableSeconds": 0.7})
    first.delete_at, last.running_at = 100.0, 103.25
    job: Any = {"status": {"phase": "Succeeded", "attempt": 2, "interruptions": 1}}
    found = figures(job, made, published=1767225600.0)
    assert found["notice_to_sigterm_s"] == 2.5
    assert found["sigterm_to_durable_s"] == 0.7
    assert found["delete_to_running_s"] == 3.25
    assert found["resume_to_first_step_s"] is None, "not measured is not zero"


def test_weights_are_equal_only_when_both_trainers_told_the_same_digest() -> None:
    one, two, mute = record({1: "a"}), record({1: "a"}), record({1: "a"})
    for made, digest in ((one, "ab"), (two, "ab")):
        made.attempts[1].events.append({"event": "done", "at": "", "digest": digest})
    assert digests_equal(one, two)
    assert not digests_equal(one, mute)
    assert not digests_equal(mute, mute)


def test_the_table_shows_what_the_operator_said_of_each_attempt() -> None:
    status = {
        "attempts": [{"number": 1, "node": "spot-a", "cause": "SpotNotice", "exitCode": 75, "charged": False}]
    }
    line = attempts_table(cast(Any, status)).splitlines()[-1]
    assert line.split() == ["1", "spot-a", "SpotNotice", "75", "no"]

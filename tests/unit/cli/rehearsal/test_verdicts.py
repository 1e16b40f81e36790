"""When a node is taken away, and what is said of a job that lost it."""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import Any

import pytest
from spottrain.contract import Outcome, Progress, TerminationMessage
from spottrain_cli.errors import UsageError
from spottrain_cli.rehearsal import moments
from spottrain_cli.rehearsal.local_cluster import require_idle, require_process_nodes
from spottrain_cli.rehearsal.moments import Pace
from spottrain_cli.rehearsal.record import Reclaim, Record
from spottrain_cli.rehearsal.verdict import Verdict, of_reclaimed, of_undisturbed

WEIGHTS = {"the final weights": "a"}


def pace(seconds_of_step: float, total: int) -> Pace:
    return Pace(first=1, step=11, total=total, seconds=10 * seconds_of_step)


# --- moments ---
def test_moments_are_those_of_the_seed_and_leave_the_notice_time_to_come() -> None:
    drawn = moments.steps(pace(0.5, 40), 5, random.Random(1))
    assert drawn == moments.steps(pace(0.5, 40), 5, random.Random(1))
    assert drawn == sorted(set(drawn))
    assert len(drawn) == 5
    assert max(moments.steps(pace(0.5, 40), 1, random.Random(n))[0] for n in range(300)) == 35


def test_a_long_training_is_shortened_and_one_that_is_little_longer_is_not() -> None:
    assert moments.fewer_steps(pace(0.1, 100_000), 2) == 300
    assert moments.fewer_steps(pace(30, 100_000), 2) == 12, "four steps for each attempt"
    assert moments.fewer_steps(pace(0.1, 500), 2) is None


def test_a_training_that_ends_before_its_notices_is_refused_with_the_steps_that_it_needs() -> None:
    assert "--max-steps 900" in moments.too_short(pace(0.01, 100), 2)
    assert moments.too_short(pace(0.01, 900), 2) == ""
    assert moments.too_short(pace(10, 3), 2)
    assert moments.too_short_run(5, 1)
    assert moments.too_short_run(60, 2) == ""


# --- verdicts ---
def record(name: str, *, phase: str = "Succeeded", reason: str = "", end: float = 60) -> Record:
    failed = [{"type": "Failed", "status": "True", "message": reason}] if reason else []
    made = Record(name=name, began_at=0, ended_at=end)
    made.on_job({"status": {"phase": phase, "conditions": failed, "attempts": []}})
    return made


def pod(attempt: int, state: dict[str, Any]) -> dict[str, Any]:
    labels = {"spottrain.io/attempt": str(attempt), "spottrain.io/rank": "0"}
    statuses = [{"name": "trainer", "state": state}]
    status = {"podIP": "127.0.0.1", "containerStatuses": statuses}
    return {
        "metadata": {"name": f"pod-{attempt}", "labels": labels},
        "spec": {"nodeName": "n"},
        "status": status,
    }


def trained(
    made: Record, attempt: int, first: int, last: int, *, at: float, message: TerminationMessage | None = None
) -> None:
    """An attempt from step `first` to `last`: it begins at second `at` and lasts 10 s."""
    made.on_pod(pod(attempt, {"running": {}}), at)
    made.on_progress(
        attempt, Progress(state="Training", attempt=attempt, startStep=first, step=first + 1), at + 1
    )
    seen = Progress(state="Training", attempt=attempt, startStep=first, step=last, totalSteps=20)
    made.on_progress(attempt, seen, at + 9)
    ended = {"exitCode": 75, "message": message.to_json() if message else ""}
    made.on_pod(pod(attempt, {"terminated": ended}), at + 10)


def reclaimed(*, resumed_at: int = 10, cause: str = "SpotNotice", **told: Any) -> Record:
    """Reclaimed once, at second 18 after step 10; its second attempt starts at second 30."""
    made = record("reclaimed")
    saved = TerminationMessage(outcome=Outcome.INTERRUPTED, step=10, signalledAt=18.5, durableSeconds=1.0)
    trained(made, 1, 0, 10, at=10, message=saved)
    trained(made, 2, resumed_at, 20, at=30)
    made.reclaims.append(
        Reclaim(attempt=1, node="n", step=10, state="Training", published=18, notice_seconds=30)
    )
    attempts = [{"number": 1, "cause": cause, **told}, {"number": 2, "cause": "Done"}]
    made.on_job({"status": {"phase": "Succeeded", "attempts": attempts}})
    return made


def verdict(
    made: Record, theirs: dict[str, str] = WEIGHTS, *, wanted: int = 1, noisy: Collection[str] = ()
) -> Verdict:
    return of_reclaimed(record("undisturbed"), made, wanted, 600, (WEIGHTS, theirs), frozenset(noisy))


def test_a_job_that_goes_on_where_it_was_with_the_same_weights_survives() -> None:
    found = verdict(reclaimed())
    assert found.survived
    assert found.equal
    assert found.sentence == (
        "survived 1 reclaim with 0 steps lost; the results are equal to those of the undisturbed job"
    )
    (loss,) = found.facts()["reclaims"]
    assert (loss["stepsLost"], loss["noticeToDurableSeconds"], loss["durableToFirstStepSeconds"]) == (
        0,
        1.5,
        11.5,
    )


def test_steps_that_were_done_twice_are_counted() -> None:
    found = verdict(reclaimed(resumed_at=6))
    assert found.survived
    assert found.facts()["stepsLost"] == 4


def test_a_job_that_begins_again_has_saved_nothing() -> None:
    found = verdict(reclaimed(resumed_at=0))
    assert not found.survived
    assert "nothing was saved: attempt 2 began at step 0" in found.sentence


def test_a_job_whose_steps_nobody_sees_is_found_to_begin_again_by_its_time() -> None:
    whole, again, resumed = record("undisturbed"), record("reclaimed"), record("reclaimed")
    for made, ends in ((whole, [20]), (again, [10, 20]), (resumed, [10, 12])):
        for number, seconds in enumerate(ends, 1):
            made.on_pod(pod(number, {"running": {}}), 0)
            made.on_pod(pod(number, {"terminated": {"exitCode": 0}}), seconds)
    assert "done again what took 10 s" in of_reclaimed(whole, again, 0, 600, ({}, {}), frozenset()).sentence
    assert of_reclaimed(whole, resumed, 0, 600, ({}, {}), frozenset()).survived


def test_other_weights_are_the_reclaims_fault_unless_two_undisturbed_jobs_differ_too() -> None:
    other = {"the final weights": "b"}
    assert not verdict(reclaimed(), other).survived
    assert verdict(reclaimed(), other).equal is False
    noisy = verdict(reclaimed(), other, noisy=set(WEIGHTS))
    assert (noisy.survived, noisy.equal) == (True, None)
    assert "cannot be compared" in noisy.sentence


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"charged": True, "exitCode": 1, "evidence": "KeyError"}, "failed with exit code 1 (KeyError)"),
        ({"cause": "Done"}, "only 0 of 1 reclaims"),
    ],
)
def test_a_failure_and_a_notice_that_came_too_late_are_no_survival(told: dict[str, Any], said: str) -> None:
    found = verdict(reclaimed(**told))
    assert not found.survived
    assert said in found.sentence


def test_a_job_that_fails_undisturbed_is_not_reclaimed() -> None:
    found = of_undisturbed(record("undisturbed", phase="Failed", reason="no such file"), 600)
    assert found is not None
    assert found.sentence.endswith("without any reclaim: no such file")
    assert of_undisturbed(record("undisturbed"), 600) is None


# --- whose nodes ---
def test_no_other_cluster_than_the_local_one_loses_nodes_and_none_with_jobs_of_others() -> None:
    def node(runtime: str) -> dict[str, Any]:
        info = {"containerRuntimeVersion": runtime}
        return {"metadata": {"name": "gpu-1"}, "status": {"nodeInfo": info}}

    require_process_nodes([node("process://1")])
    with pytest.raises(UsageError, match="gpu-1 runs containerd://2"):
        require_process_nodes([node("process://1"), node("containerd://2.0")])
    job = {"metadata": {"namespace": "team", "name": "gpt"}}
    require_idle([job | {"status": {"phase": "Succeeded"}}])
    with pytest.raises(UsageError, match="team/gpt"):
        require_idle([job])

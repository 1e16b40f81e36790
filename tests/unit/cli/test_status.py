"""What list, status and watch say of a job, and what a fire drill says of what it did."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from difflib import ndiff
from typing import Any

import pytest
from spottrain_cli import overview, progress_lines, steering, timeline
from spottrain_cli.errors import CommandError
from spottrain_cli.jobs import Job, jobs

from tests.support.costs import COST, ENDED, attempt, document
from tests.support.sentences import Told

NOW = datetime(2026, 11, 23, 12, 30, tzinfo=UTC)
Json = dict[str, Any]


def condition(kind: str, status: str, message: str, reason: str = "Reason") -> Json:
    return {"type": kind, "status": status, "reason": reason, "message": message}


RUNS = [
    condition("Accepted", "True", "the pod template passed a dry run"),
    condition("Scheduled", "True", "attempt 3 is on node c"),
    condition("Running", "True", "the trainer of attempt 3 runs"),
    condition("CheckpointDurable", "True", "step 2400 is in the store"),
]
PROGRESS: Json = {
    "step": 2412, "totalSteps": 5000, "loss": "2.31415", "samplesPerSecond": "1234.56",
    "etaSeconds": "4813.68", "stepSeconds": "1.86", "durableStep": 2400,
    "durableTime": "2026-11-23T12:28:00Z", "pollTime": "2026-11-23T12:29:50Z",
}  # fmt: skip
NOTICE: Json = {
    "cause": "SpotNotice", "evidence": "node a was reclaimed (AWS spot/instance-action)", "charged": False,
    "exitCode": 75, "lastStep": 800, "durableStep": 800,
}  # fmt: skip
LOST: Json = {
    "cause": "NodeLost", "evidence": "node b is gone", "charged": False, "startTime": "2026-11-23T11:05:10Z",
    "boundTime": "2026-11-23T11:06:00Z", "firstStepTime": "2026-11-23T11:08:20Z",
    "endTime": "2026-11-23T12:10:00Z", "startStep": 800, "lastStep": 2420, "durableStep": 2300, "node": "b",
}  # fmt: skip
NOW_RUNS: Json = {
    "number": 3, "node": "c", "instanceType": "p4d.24xlarge", "zone": "us-east-1c", "capacityType": "Spot",
    "workers": 2, "startTime": "2026-11-23T12:10:30Z", "boundTime": "2026-11-23T12:11:00Z",
    "firstStepTime": "2026-11-23T12:14:00Z", "startStep": 2300, "lastStep": 2412, "durableStep": 2400,
    "spent": "1.300000", "unknownSeconds": "0",
}  # fmt: skip
RUNNING: Json = {
    "phase": "Running", "attempt": 3, "interruptions": 2, "failures": 0, "knownDurableStep": 2400,
    "cost": COST, "conditions": RUNS, "progress": PROGRESS,
    "attempts": [attempt(1, **NOTICE), attempt(2, **LOST), NOW_RUNS],
}  # fmt: skip
SPEC: Json = {"checkpoint": {"mode": "Runtime", "uri": "s3://bucket/ml/gpt"}, "workers": 2}


def a_job(status: Json | None, *, name: str = "gpt", spec: Json | None = None, **metadata: Any) -> Job:
    given = document(status, name=name, spec=SPEC | (spec or {}))
    given["metadata"] |= {"creationTimestamp": "2026-11-23T10:00:00Z"} | metadata
    return jobs(given, "it")[0]


def during(**changes: Any) -> Json:
    return RUNNING | changes


def shown(**changes: Any) -> Json:
    return {"progress": PROGRESS | changes}


BACKOFF = condition(
    "Scheduled", "False", "attempt 4 starts at 2026-11-23T12:30:40Z: one failure", "WaitingForBackoff"
)
SITUATIONS: dict[str, Job] = {
    "not seen yet": a_job(None),
    "trains": a_job(RUNNING),
    "done": a_job(
        ENDED
        | {"conditions": [condition("Succeeded", "True", "training is done at step 5000")]}
        | {"knownDurableStep": 5000, "output": {"uri": "s3://bucket/ml/gpt/final"}}
        | shown(step=5000, etaSeconds="0", durableStep=5000),
        spec={"ttlSecondsAfterFinished": 86400},
    ),
    "failed": a_job(
        during(
            phase="Failed",
            failures=3,
            conditions=[*RUNS, condition("Failed", "True", "3 attempts failed: exit code 1")],
            attempts=[attempt(3, cause="Failed", evidence="exit code 1: KeyError: 'x'", charged=True)],
        )
    ),
    "refused": a_job(
        {"phase": "Invalid", "conditions": [condition("Accepted", "False", "spec.workers is wrong")]}
    ),
    "waits for nodes": a_job(
        {
            "phase": "Pending",
            "attempt": 1,
            "conditions": [
                condition("Scheduled", "False", "0/3 nodes are available: 3 Insufficient nvidia.com/gpu"),
                condition("Running", "False", "pod gpt-1-0 has no node yet; condition Scheduled says why"),
            ],
            "attempts": [{"number": 1, "startTime": "2026-11-23T12:00:00Z", "capacityType": "Spot"}],
        }
    ),
    "waits after a failure": a_job(
        during(phase="Waiting", attempt=4, nextStartTime="2026-11-23T12:30:40Z", conditions=[BACKOFF])
    ),
    "is told to stop": a_job(
        during(
            phase="Stopping",
            attempts=[NOW_RUNS | {"stopping": "SpotNotice", "evidence": "node c gets 2 minutes"}],
        )
    ),
    "stopped by a person": a_job(
        during(phase="Suspended", conditions=[*RUNS, condition("Suspended", "True", "spec.suspend is true")]),
        spec={"suspend": True},
    ),
    "stopped by its limit": a_job(
        during(phase="Suspended", conditions=[condition("Suspended", "True", "it has spent $12.70 of $12")])
    ),
    "is being deleted": a_job(RUNNING, deletionTimestamp="2026-11-23T12:29:00Z"),
    "limits": a_job(
        during(startTime="2026-11-23T10:00:00Z"),
        spec={
            "activeDeadlineSeconds": 86400,
            "capacity": {"maxCostUSD": "50", "cheapest": {"deadline": "2026-11-25T00:00:00Z"}},
        },
    ),
    "a folder of any program": a_job(
        during(progress={"state": "Training", "step": 12, "durableTime": "2026-11-23T12:28:00Z"}),
        spec={"checkpoint": {"mode": "Sync", "uri": "s3://bucket/ml/gpt"}},
    ),
    "an image that reports nothing": a_job(
        {"phase": "Running", "attempt": 1, "attempts": [{"number": 1, "node": "a"}]},
        spec={"checkpoint": {"mode": "Self"}},
    ),
    "a trainer that warns": a_job(during(**shown(warning="a save takes 100 s of a grace of 110 s"))),
    "a time that is none": a_job(during(**shown(durableTime="noon"))),
}


def test_status_says(told: Told) -> None:
    told("\n".join(timeline.status(SITUATIONS["trains"], now=NOW)))


@pytest.mark.parametrize("name", [name for name in SITUATIONS if name != "trains"])
def test_status_says_otherwise(name: str, told: Told) -> None:
    usual, lines = (timeline.status(SITUATIONS[each], now=NOW) for each in ("trains", name))
    told("\n".join(each for each in ndiff(usual, lines) if each[0] in "+-"))


@pytest.mark.parametrize(("phase", "says"), [("Running", False), ("Failed", True)])
def test_a_job_that_has_paid_for_its_start_up_alone_is_not_called_dear_before_its_end(
    phase: str, says: bool
) -> None:
    young = a_job(during(phase=phase, cost=COST | {"saving": "-4497.7%"}))
    assert ("more than on demand" in "\n".join(timeline.status(young, now=NOW))) is says


def test_list_says(told: Told) -> None:
    told("\n".join(overview.lines([*SITUATIONS.values()], where="namespace ml", now=NOW)))


def test_list_of_several_namespaces_names_them() -> None:
    both = [a_job(RUNNING), a_job(RUNNING, namespace="vision")]
    head, *rows = overview.lines(both, where="any namespace", now=NOW)
    assert head.startswith("NAMESPACE") and [row.split()[0] for row in rows] == ["ml", "vision"]


def test_a_list_of_nothing_says_where() -> None:
    assert overview.lines([], where="namespace ml", now=NOW) == ["There is no TrainingJob in namespace ml."]


@pytest.mark.parametrize("width", [60, 80, 100])
def test_list_and_status_fit_the_terminal(width: int) -> None:
    everything = [*SITUATIONS.values()]
    assert max(map(len, overview.lines(everything, where="", now=NOW, width=width))) <= width
    for name, job in SITUATIONS.items():
        assert max(map(len, timeline.status(job, now=NOW, width=width))) <= width, name


def test_a_list_in_a_narrow_terminal_keeps_name_phase_and_step() -> None:
    head = overview.lines(
        [a_job(RUNNING, name="a-name-of-30-characters-or-more")], where="", now=NOW, width=60
    )[0]
    assert head.split() == ["NAME", "PHASE", "STEP"]


def test_watch_says_in_a_line(told: Told) -> None:
    told("\n".join(f"{name}: {progress_lines.line(job, NOW)}" for name, job in SITUATIONS.items()))


def test_watch_says_of_old_figures_how_old_they_are() -> None:
    assert progress_lines.line(SITUATIONS["trains"], NOW + timedelta(minutes=10)).endswith("as of 10 min ago")


NEWS: dict[str, tuple[Json | None, Json]] = {
    "at first": (None, RUNNING),
    "nothing new": (RUNNING, during(**shown(step=2420))),
    "a notice": (
        RUNNING,
        during(phase="Stopping", attempts=[NOW_RUNS | {"stopping": "SpotNotice", "evidence": "node c goes"}]),
    ),
    "the same phase for another reason": (
        during(conditions=[condition("Running", "False", "its pod starts", "Starting")]),
        during(conditions=[condition("Running", "False", "no such image", "ImagePullBackOff")]),
    ),
    "an end and a new attempt": (
        during(attempts=[NOW_RUNS]),
        during(
            attempt=4,
            attempts=[
                NOW_RUNS | {"cause": "NodeLost", "evidence": "gone", "endTime": "2026-11-23T12:29:00Z"},
                {"number": 4},
            ],
        ),
    ),
    "it trains again": (
        during(attempts=[NOW_RUNS | {"node": "", "firstStepTime": None}]),
        during(attempts=[NOW_RUNS]),
    ),
    "done": (RUNNING, ENDED | {"conditions": [condition("Succeeded", "True", "training is done")]}),
}  # fmt: skip


@pytest.mark.parametrize("name", NEWS)
def test_watch_says_what_has_changed(name: str, told: Told) -> None:
    before, after = NEWS[name]
    told("\n".join(progress_lines.news(a_job(before) if before else None, a_job(after))))


def test_the_loss_of_an_attempt_is_its_steps_and_the_time_until_the_next_one_trained() -> None:
    found = timeline.losses(a_job(RUNNING))
    assert found[1] == timeline.Loss(steps=0, step_seconds=0.0, pause_seconds=200.0)
    assert (found[2].steps, found[2].pause_seconds) == (120, 240.0)
    assert 3 not in found and found[2].seconds == pytest.approx(240 + 120 * 1.86)


def test_an_attempt_that_is_followed_while_it_saves_pauses_nothing() -> None:
    beside = attempt(2, firstStepTime="2026-11-23T11:04:00Z")
    found = timeline.losses(a_job(ENDED | {"attempts": [attempt(1), beside]}))
    assert found[1].pause_seconds == 0.0


def test_a_program_gets_numbers_times_and_what_each_attempt_lost() -> None:
    found = timeline.facts(a_job(RUNNING))
    json.dumps(found)
    assert found["progress"]["loss"] == 2.31415 and found["attempts"][1]["lost"]["steps"] == 120
    assert found["attempts"][0]["endTime"] == "2026-11-23T11:05:00Z" and found["attempts"][2]["lost"] is None
    assert found["checkpoint"]["uri"] == "s3://bucket/ml/gpt" and found["deleted"] is None


# --- stop, delete, interrupt ------------------------------------------------------------------------------
DELETIONS: dict[str, Job] = {
    "a job that trains": a_job(RUNNING),
    "a job that has ended": a_job(ENDED),
    "its checkpoints too": a_job(ENDED, spec={"deletionPolicy": "Delete"}),
    "no checkpoints": a_job(None, spec={"checkpoint": {}}),
}


@pytest.mark.parametrize("name", DELETIONS)
def test_a_deletion_says_what_stays(name: str, told: Told) -> None:
    told(steering.deletion(DELETIONS[name]))


ASKED: Json = {
    "cause": "InterruptRequested",
    "evidence": "requested by annotation; step 2412 was saved",
    "node": "c",
}
DRILLS: dict[str, Json] = {
    "saved": ASKED | {"exitCode": 75, "durableStep": 2412, "lastStep": 2412, "signalToDurableSeconds": "3.2"},
    "saved already": ASKED | {"exitCode": 75, "durableStep": 2412, "lastStep": 2412},
    "lost": ASKED | {"exitCode": 79, "durableStep": 2400, "lastStep": 2412, "evidence": "no time was left"},
    "killed": ASKED
    | {"exitCode": 137, "durableStep": 2400, "lastStep": 2412, "evidence": "rank 0 said nothing"},
    "silent": ASKED | {"exitCode": 1, "lastStep": None, "durableStep": None},
}


@pytest.mark.parametrize("name", DRILLS)
def test_a_drill_says_whether_and_how_fast_it_saved(name: str, told: Told) -> None:
    job = a_job(during(attempts=[attempt(3, **DRILLS[name])]))
    told(steering.saved(job, job.attempts[0]))


def test_a_drill_of_a_folder_has_no_steps(told: Told) -> None:
    sync = {"checkpoint": {"mode": "Sync", "uri": "s3://bucket/ml/gpt"}}
    job = a_job(
        during(
            attempts=[
                attempt(
                    3,
                    **DRILLS["saved"],
                )
            ]
        ),
        spec=sync,
    )
    told(steering.saved(job, job.attempts[0]))


def test_a_drill_says_where_the_job_went_on(told: Told) -> None:
    later = NOW_RUNS | {"number": 4, "startStep": 2412, "firstStepTime": "2026-11-23T11:06:00Z"}
    for node in ("c", "d"):
        job = a_job(during(attempts=[attempt(3, **DRILLS["saved"]), later | {"node": node}]))
        told(steering.goes_on(job, *job.attempts))


def test_a_drill_of_a_job_that_does_not_train_is_refused_in_the_operator_s_words() -> None:
    job = a_job(during(interrupt={"request": "now", "message": "the job does not train: it is Pending"}))
    with pytest.raises(CommandError, match="it is Pending"):
        steering.answered(job.interrupt)

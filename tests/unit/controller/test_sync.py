"""checkpoint.mode Sync: the sidecar in the pod, what its end and the script's mean, what is refused."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from spottrain.contract import Env, LastExit, Outcome, Progress, SyncEnv
from spottrain.contract import Reason as TrainerReason
from spottrain_operator.api.node_pools import Pool
from spottrain_operator.api.observed import Ended, Observed, PodView, Sample, SyncView
from spottrain_operator.api.training_job import AttemptRecord, Job, Status
from spottrain_operator.api.views import pod_view
from spottrain_operator.control import follow
from spottrain_operator.control.actions import Delete
from spottrain_operator.control.caches import PodCache
from spottrain_operator.control.plan import plan
from spottrain_operator.names import SYNC_CONTAINER, Cause, Condition, Platform, Reason
from spottrain_operator.policies.cause import ending_of
from spottrain_operator.policies.pod_end import end_time
from spottrain_operator.rendering import objects, trainer_pod

from tests.builders import (
    KEY,
    NOW,
    OWNER,
    POOL,
    after,
    condition,
    deleted,
    make_job,
    make_node,
    make_observed,
    make_pod,
    notice,
    raw_spec,
    started,
    status_of,
    word,
)
from tests.unit.controller.stories import Story, follows

Json = dict[str, Any]
CHECKPOINT: Json = {"mode": "Sync", "syncPath": "/ckpt", "uri": "s3://bucket/run"}
IMAGE = "example.com/sync:1"


def spec(
    checkpoint: Json | None = None, *, pod: Json | None = None, trainer: Json | None = None, **more: Any
) -> Json:
    container = {"name": "trainer", "image": "example.com/any:1"} | (trainer or {})
    template = {"spec": {"containers": [container]} | (pod or {})}
    return raw_spec(template=template, checkpoint=CHECKPOINT | (checkpoint or {}), **more)


def job_of(raw: Json | None = None, status: Status | None = None) -> Job:
    job = make_job(raw or spec(), status=status or started())
    assert job.spec is not None, job.invalid
    return job


def rendered(raw: Json | None = None, status: Status | None = None) -> Json:
    body: Json = trainer_pod.pod(job_of(raw), status or Status(attempt=1), POOL, sync_image=IMAGE)["spec"]
    return body


def sidecar(body: Json) -> Json:
    found: Json = body["initContainers"][0]
    assert found["name"] == SYNC_CONTAINER
    return found


def env(container: Json) -> dict[str, str]:
    return {e["name"]: e.get("value", "") for e in container["env"]}


def mounts(container: Json) -> dict[str, str]:
    return {m["mountPath"]: m["name"] for m in container["volumeMounts"]}


# --- the pod ------------------------------------------------------------------------------------------
def test_the_sidecar_is_the_first_init_container_and_holds_the_others_back_until_the_folder_is_restored() -> (
    None
):
    body = rendered(spec(pod={"initContainers": [{"name": "first", "image": "z"}]}))
    assert [c["name"] for c in body["initContainers"]] == [SYNC_CONTAINER, "first"]
    container = sidecar(body)
    assert container["image"] == IMAGE and container["restartPolicy"] == "Always"
    probed = container["startupProbe"]["exec"]["command"][-1]
    assert probed == env(container)[SyncEnv.RESULT_FILE]
    assert any(probed.startswith(f"{path}/") for path in mounts(container)), (
        "it outlives a restart of the sidecar"
    )
    assert container["startupProbe"]["failureThreshold"] * container["startupProbe"]["periodSeconds"] > 10**6


def test_the_newest_exit_code_that_is_known_is_told_with_its_attempt() -> None:
    past = (AttemptRecord(number=1, exit_code=0), AttemptRecord(number=2, exit_code=None))
    told = env(sidecar(rendered(status=Status(attempt=3, attempts=past))))
    assert LastExit.parse(told[SyncEnv.LAST_EXIT]) == LastExit(attempt=1, code=0)
    assert SyncEnv.LAST_EXIT not in env(sidecar(rendered(status=Status(attempt=1))))


@pytest.mark.parametrize(
    ("existing", "status", "told"),
    [
        ("Fail", Status(attempt=1), "false"),
        ("Fresh", Status(attempt=1), "false"),
        ("Resume", Status(attempt=1), None),
        ("Fail", Status(attempt=2), None),  # the first may have committed unseen
        ("Fail", Status(attempt=2, known_durable_step=3), "true"),
        ("Resume", Status(attempt=1, known_durable_step=3), "true"),
    ],
)
def test_the_script_is_told_whether_it_resumes_where_that_is_known(
    existing: str, status: Status, told: str
) -> None:
    script = env(rendered(spec({"onExisting": existing}), status)["containers"][0])
    assert script.get(SyncEnv.RESUMED) == told


@pytest.mark.parametrize(
    ("existing", "status", "resumes"),
    [
        ("Fail", Status(attempt=1), False),
        ("Resume", Status(attempt=1), False),
        ("Fail", Status(attempt=2), False),
        ("Fail", Status(attempt=2, known_durable_step=3), True),
    ],
)
def test_the_arguments_of_a_resume_are_added_where_a_checkpoint_is_known_and_the_sidecar_is_told(
    existing: str, status: Status, resumes: bool
) -> None:
    checkpoint = {"onExisting": existing, "resumeArgs": ["--init_from=resume", "--x"]}
    given: Json = {"command": ["python", "train.py"], "args": ["--lr", "1"]}
    body = rendered(spec(checkpoint, trainer=given), status)
    script = body["containers"][0]
    assert script["args"] == ["--lr", "1"] + (["--init_from=resume", "--x"] if resumes else [])
    assert script["command"] == given["command"]
    assert env(script)[SyncEnv.RESUMED] == env(sidecar(body))[SyncEnv.RESUMED] == str(resumes).lower()
    assert SyncEnv.RESUMED not in env(sidecar(rendered(status=status)))


def test_an_attempt_whose_sidecar_finds_a_checkpoint_that_was_not_known_is_followed_by_one_that_resumes() -> (
    None
):
    job = Story(**spec({"resumeArgs": ["--resume"]}, trainer={"args": ["train.py"]}))
    reason = TrainerReason.CHECKPOINT_FOUND
    pod = given_up(Outcome.INTERRUPTED, reason=reason, message="Checkpoint 4 is in the store", durableStep=4)
    job.look("stopping1=Interrupted deletes=0", pod)
    gone = replace(pod, phase="Failed", running_since=None, **deleted(5))
    job.look("attempt=2 failures=0 durable=4 cause1=Interrupted", gone)
    script = rendered(spec({"resumeArgs": ["--resume"]}, trainer={"args": ["train.py"]}), job.status)
    assert script["containers"][0]["args"] == ["train.py", "--resume"]


def test_the_variables_that_mounts_and_other_variables_name_are_the_sidecars_too() -> None:
    by_name = {"valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
    variables = [
        {"name": "MY_POD"} | by_name,
        {"name": "RUN", "value": "run-$(MY_POD)"},
        {"name": "HOST", "value": "s3.example"},
        {"name": "AWS_ENDPOINT_URL", "value": "https://$(HOST)"},
        {"name": "OTHER", "value": "$(RUN)"},
        {"name": "ESCAPED", "value": "1"},
        {"name": "AWS_PROFILE", "value": "$$(ESCAPED)"},
    ]
    mount = {"name": "disk", "mountPath": "/ckpt", "subPathExpr": "$(RUN)/$(SPOTTRAIN_JOB_NAME)"}
    given: Json = {"env": variables, "volumeMounts": [mount]}
    container = sidecar(rendered(spec(trainer=given)))
    copied = [e["name"] for e in container["env"] if e in variables]
    assert copied == ["MY_POD", "RUN", "HOST", "AWS_ENDPOINT_URL", "AWS_PROFILE"], "in the template's order"
    assert mount in container["volumeMounts"] and Env.JOB_NAME in env(container)
    job = job_of(spec(trainer=given))
    cleanup = objects.cleanup(job, Pool(name="p", platform=Platform.AWS), sync_image=IMAGE)["spec"]
    (cleaner,) = cleanup["containers"]
    assert "HOST" in env(cleaner) and "/ckpt" not in mounts(cleaner) and "RUN" not in env(cleaner)


@pytest.mark.parametrize(("asked", "grace"), [(None, 600), (45, 45), (3600, 3600)])
def test_the_last_upload_has_600_seconds_or_what_the_template_says_on_spot_too(
    asked: int | None, grace: int
) -> None:
    raw = spec(pod={} if asked is None else {"terminationGracePeriodSeconds": asked})
    assert rendered(raw)["terminationGracePeriodSeconds"] == grace
    job = job_of(raw)
    assert job.spec is not None and not trainer_pod.grace_note(job.spec, POOL)


# --- what is refused ----------------------------------------------------------------------------------


def test_a_job_without_a_place_for_its_checkpoints_is_refused_on_any_capacity() -> None:
    raw = spec(capacity={"type": "OnDemand"})
    del raw["checkpoint"]["uri"]
    job = job_of(raw, Status())
    assert job.spec is not None


# --- the pod as it is observed ------------------------------------------------------------------------
def raw_pod(trainer: Json, container: Json, *, phase: str = "Running", last: Json | None = None) -> PodView:
    manifest = trainer_pod.pod(job_of(), Status(attempt=1), POOL, sync_image=IMAGE)
    meta = manifest["metadata"] | {
        "uid": "u",
        "resourceVersion": "1",
        "creationTimestamp": "2026-03-01T11:00:00Z",
    }
    statuses = [{"name": "trainer", "state": trainer}]
    inits = [{"name": SYNC_CONTAINER, "state": container, "lastState": last or {}}]
    status = {
        "phase": phase,
        "podIP": "10.0.0.1",
        "containerStatuses": statuses,
        "initContainerStatuses": inits,
    }
    spec_of = manifest["spec"] | {"nodeName": "node-a"}
    meta["ownerReferences"] = [OWNER]
    view = pod_view({"metadata": meta, "spec": spec_of, "status": status})
    assert view is not None
    return view


RUNS: Json = {"running": {"startedAt": "2026-03-01T11:50:00Z"}}
WAITS: Json = {"waiting": {"reason": "PodInitializing"}}
BACK_OFF: Json = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}}


def gone(code: int = 0, message: str = "", finished: str = "2026-03-01T11:55:00Z") -> Json:
    return {"terminated": {"exitCode": code, "message": message, "finishedAt": finished}}


def test_a_script_that_has_ended_while_its_sidecar_runs_has_not_ended_the_attempt() -> None:
    view = raw_pod(gone(0), RUNS)
    assert view.ended is None and view.uploading is not None and view.uploading.exit_code == 0
    view = raw_pod(gone(0), gone(0, word(Outcome.DONE)))
    assert view.ended is not None and view.uploading is None
    assert view.sync is not None and view.sync.ended is not None


def test_a_pod_that_is_over_has_ended_whatever_is_said_of_its_sidecar() -> None:
    view = raw_pod(gone(0), BACK_OFF, phase="Succeeded")
    assert view.ended is not None and view.uploading is None


def test_the_sidecar_is_asked_for_progress_before_the_script_starts_and_after_it_has_ended() -> None:
    cache = PodCache()
    view = raw_pod(WAITS, RUNS)
    cache.put(view)
    assert cache.trainers() == [view]
    cache.put(uploads := replace(raw_pod(gone(0), RUNS), resource_version=2))
    assert cache.trainers() == [uploads]
    cache.put(replace(raw_pod(gone(0), gone(0), phase="Succeeded"), resource_version=3))
    assert cache.trainers() == []


def test_of_a_sidecar_that_the_kubelet_restarts_its_last_words_are_told() -> None:
    view = raw_pod(WAITS, BACK_OFF, last=gone(1, "Traceback: no such bucket"))
    assert view.waiting is not None and view.waiting.container == SYNC_CONTAINER
    assert "it ended last with: Traceback: no such bucket" in view.waiting.message


# --- ends ---------------------------------------------------------------------------------------------
DONE = word(Outcome.DONE, durableStep=6, step=7)
"""Commit 7 holds what was there at the end, which is whole only if the script ended with 0."""


def over(
    code: int = 0, message: str = DONE, sidecar_code: int = 0, *, seconds: float = 30, **more: Any
) -> PodView:
    """A pod whose script has ended two minutes ago, and its sidecar some seconds after that."""
    end = Ended(exit_code=code, message="last line", finished=NOW - timedelta(seconds=120))
    finished = NOW - timedelta(seconds=120 - seconds)
    last = Ended(exit_code=sidecar_code, reason="Error", message=message, finished=finished)
    fields: Json = {"phase": "Succeeded" if code == 0 else "Failed", "ended": end, "grace": 600}
    return make_pod(**(fields | {"sync": SyncView(ended=last)} | more))


def ended(*given: Any, **more: Any) -> Observed:
    return make_observed(over(*given, **more), job=job_of())


KILLED = ["", word(Outcome.INTERRUPTED), word(Outcome.INTERRUPTED_LOST)]
NO_ROOM = word(Outcome.FAILED, message="no room")
EMPTY = started(no_progress=10, interruptions=11, known_durable_step=3, interrupted_at_step=3)
ENDS: dict[str, tuple[Observed, str]] = {
    "all of the folder is in the store": (ended(), "Succeeded=True durable=7 cause1=Done"),
    "what a script that failed left at its end is no progress": (ended(143), "durable=6"),
    **{
        f"the sidecar ended before its last commit: {message}": (
            ended(message=message, sidecar_code=137),
            f"cause1=Interrupted reason1={Reason.NOT_UPLOADED} failures=0 interruptions=1 attempt=2",
        )
        for message in KILLED
    },
    "an end that is never uploaded": (
        make_observed(over(message=""), job=job_of(status=EMPTY)),
        f"Failed=True/{Reason.NO_PROGRESS}",
    ),
    "a failed last upload is a failure": (ended(message=NO_ROOM), "cause1=Failed charged1"),
    **{f"exit code {code}": (ended(code), "cause1=Failed charged1") for code in (1, 2, 134)},
}


@pytest.mark.parametrize("name", ENDS)
def test_script_and_sidecar_together_say_how_an_attempt_ended(name: str) -> None:
    observed, expected = ENDS[name]
    follows(expected, observed)


EARLY = replace(notice(seconds=-20), seen=NOW - timedelta(seconds=140))
LATE = replace(notice(seconds=60), seen=NOW - timedelta(seconds=100))
ASKED: list[tuple[str, Json, Cause]] = [
    ("a notice before its end", {"notice": EARLY}, Cause.SPOT_NOTICE),
    ("a deletion before its end", deleted(seconds_ago=130, grace=120), Cause.POD_DELETED),
    (
        "a drain",
        {"disruption": "EvictionByEvictionAPI: x", "disrupted": NOW - timedelta(seconds=130)},
        Cause.DISRUPTED,
    ),
    ("a shutdown of its node", {"reason": "Terminated", "phase": "Failed"}, Cause.NODE_SHUTDOWN),
]


@pytest.mark.parametrize(("more", "cause"), [a[1:] for a in ASKED], ids=[a[0] for a in ASKED])
@pytest.mark.parametrize("code", [0, 143, 137])
def test_an_end_after_somebody_asked_for_it_is_no_success_and_no_failure(
    more: Json, cause: Cause, code: int
) -> None:
    ending = ending_of(over(code, **more), make_observed(job=job_of()))
    assert (ending.cause, ending.charged) == (cause, False)


def test_a_notice_during_the_last_upload_takes_no_success_away() -> None:
    asked: Json = {"notice": LATE} | deleted(seconds_ago=90, grace=60)
    assert ending_of(over(seconds=60, **asked), make_observed(job=job_of())).cause is Cause.DONE
    cut_off = over(message=word(Outcome.INTERRUPTED), seconds=60, **asked)
    assert ending_of(cut_off, make_observed(job=job_of())).cause is Cause.SPOT_NOTICE


def test_the_node_is_paid_until_the_upload_is_over() -> None:
    pod = over(seconds=30)
    assert end_time(pod, make_observed(pod, job=job_of())) == NOW - timedelta(seconds=90)


# --- a sidecar that gives up --------------------------------------------------------------------------
def given_up(outcome: Outcome, *, runs: bool = False, **more: Any) -> PodView:
    last = Ended(exit_code=64, message=word(outcome, **more), finished=NOW)
    pod = make_pod(sync=SyncView(ended=last))
    return pod if runs else replace(pod, running_since=None, phase="Pending")


@pytest.mark.parametrize(
    ("outcome", "runs", "stopping", "then"),
    [
        (Outcome.BAD_CONFIGURATION, True, "BadConfiguration", "Failed=True/ItsReason"),
        (Outcome.BAD_CONFIGURATION, False, "BadConfiguration", "Failed=True/ItsReason"),
        (
            Outcome.STORE_UNREACHABLE,
            False,
            "StoreUnreachable",
            "attempt=2 failures=0 interruptions=0 outage",
        ),
        (Outcome.FAILED, False, "Failed charged1", "failures=1 cause1=Failed"),
    ],
)
def test_a_sidecar_that_gives_up_before_the_script_starts_ends_the_attempt_with_its_sentence(
    outcome: Outcome, runs: bool, stopping: str, then: str
) -> None:
    job = Story(**spec())
    pod = given_up(outcome, runs=runs, reason="ItsReason", message="so it is")
    job.look(f"stopping1={stopping} deletes=0", pod)
    assert "so it is" in job.status.attempts[0].evidence
    job.look(then, replace(pod, phase="Failed", running_since=None, **deleted(5)))


@pytest.mark.parametrize(
    "pod",
    [
        *(given_up(outcome, runs=True) for outcome in (Outcome.STORE_UNREACHABLE, Outcome.FAILED)),
        replace(given_up(Outcome.BAD_CONFIGURATION, runs=True), sync=SyncView(running=True)),
    ],
    ids=["no store later", "a failure later", "it runs again"],
)
def test_what_the_sidecar_cannot_do_later_does_not_end_the_script(pod: PodView) -> None:
    follows("!deletes !creates", make_observed(pod, job=job_of()))


UNKNOWN_SIDECAR = make_pod(
    phase="Failed",
    reason="InitContainerRestartPolicyForbidden",
    message="x",
    sync=SyncView(),
    running_since=None,
)


def test_a_kubelet_that_knows_no_sidecars_is_named() -> None:
    follows("cause1=PodRejected", make_observed(UNKNOWN_SIDECAR, job=job_of()))


# --- stops, conditions --------------------------------------------------------------------------------
def test_a_stop_by_the_operator_does_not_wait_for_the_grace_of_the_last_upload() -> None:
    pod = make_pod(grace=600, sync=SyncView(running=True))
    made = plan(make_observed(pod, job=make_job(spec(suspend=True), status=started())))
    assert [a.grace for a in made.after if isinstance(a, Delete)] == [follow.SYNC_STOP]
    uploads = replace(pod, running_since=None, uploading=Ended(exit_code=0))
    assert follow.removal(make_observed(job=job_of()), uploads).grace is None
    restores = replace(pod, running_since=None, phase="Pending")
    assert follow.removal(make_observed(job=job_of()), restores).grace == follow.SYNC_STOP


def test_no_attempt_starts_beside_one_that_is_still_stopping() -> None:
    pod = make_pod(grace=600, sync=SyncView(running=True), **deleted(2, 90), notice=notice())
    follows("!creates", make_observed(pod, job=job_of(), nodes=(make_node(notice=notice()),)))
    assert job_of().spec is not None and not job_of().spec.replaces_during_notice  # type: ignore[union-attr]


def running(pod: PodView, sample: Sample | None = None) -> tuple[str, str, str]:
    found = condition(plan(make_observed(pod, job=job_of(), sample=sample)), Condition.RUNNING)
    return found.status, found.reason, found.message


def progress(**more: Any) -> Sample:
    values: Json = {"state": "Training", "attempt": 1, "jobUID": KEY.uid} | more
    return Sample(progress=Progress(**values), at=NOW)


UPLOADS = make_pod(running_since=None, uploading=Ended(exit_code=0), sync=SyncView(running=True), grace=600)


def test_the_condition_running_tells_restore_work_and_last_upload() -> None:
    restores = make_pod(running_since=None, phase="Pending", sync=SyncView(running=True))
    assert running(restores)[:2] == ("False", Reason.RESTORING)
    waits = running(restores, progress(state="WaitingForStore", waitingFor="https://s3 since 11:00"))
    assert waits[1] == Reason.WAITING_FOR_STORE and "https://s3 since 11:00" in waits[2]
    assert running(make_pod(sync=SyncView(running=True)))[:2] == ("True", Reason.TRAINING)
    assert running(UPLOADS)[:2] == ("True", Reason.UPLOADING)
    assert running(replace(UPLOADS, **deleted(1, 60)))[:2] == ("False", Reason.STOPPING)


def test_a_marker_that_does_not_come_is_in_the_condition_and_goes_with_the_warning() -> None:
    pod = make_pod(sync=SyncView(running=True))
    warned = plan(make_observed(pod, job=job_of(), sample=progress(warning="no file latest after 1800 s")))
    found = condition(warned, Condition.CHECKPOINT_DURABLE)
    assert found.status == "False" and "no file latest after 1800 s" in found.message
    assert any(e.warning and "no file latest" in e.message for e in warned.events)
    later = replace(progress(step=1, durableStep=1), at=after(90))
    mended = make_observed(pod, job=job_of(status=status_of(warned)), sample=later, now=after(90))
    follows("CheckpointDurable=True/Durable", mended)


def test_a_commit_is_no_step_by_which_a_start_is_timed() -> None:
    pod = make_pod(sync=SyncView(running=True), bound=NOW - timedelta(minutes=9))
    record = status_of(
        plan(make_observed(pod, job=job_of(), sample=progress(step=3, durableStep=3)))
    ).attempts[0]
    assert record.last_step == 3 and record.stepped is None


TOLD = (
    *(observed for observed, _ in ENDS.values()),
    make_observed(UPLOADS, job=job_of()),
    make_observed(make_pod(sync=SyncView(running=True)), job=job_of(), sample=progress(warning="no latest")),
    make_observed(make_pod(), job=job_of(), sample=progress(step=1, durableStep=1)),
    make_observed(UNKNOWN_SIDECAR, job=job_of()),
    make_observed(job=job_of(spec(capacity={"type": "OnDemand"}, checkpoint={"uri": ""}), Status())),
)
"""Scenes whose sentences are in tests/unit/sentences.txt."""

"""What a person asks of a job: suspend, resume, deadlines, the end of its object and of its checkpoints."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from spottrain.contract import Env, Outcome
from spottrain_operator.api.node_pools import Pool
from spottrain_operator.api.observed import Ended, Observed, PodView, Waiting
from spottrain_operator.api.training_job import AttemptRecord, Status
from spottrain_operator.api.views import cleanup_trouble
from spottrain_operator.api.wire import rfc3339
from spottrain_operator.control.actions import Plan, Provide
from spottrain_operator.names import Cause, Condition, Platform
from spottrain_operator.policies import cleanup
from spottrain_operator.policies.hang import LEAST_START
from spottrain_operator.rendering import objects
from spottrain_operator.status.changes import with_progress

from tests.builders import (
    after,
    condition,
    deleted,
    ended_pod,
    make_job,
    make_node,
    make_observed,
    make_pod,
    notice,
    raw_spec,
    sample,
    started,
    told,
)
from tests.unit.controller.stories import Story, follows

SAVED = told(Outcome.INTERRUPTED, step=40, durableStep=40, pod=deleted())
DONE = told(Outcome.DONE, step=100)


def running(**spec: Any) -> Story:
    """A job that is active since ten minutes."""
    return Story(replace(started(), active_since=after(-600)), **spec)


def between_attempts(**more: Any) -> Status:
    """The second attempt has its record, and no pod yet."""
    first, second = started(2).attempts
    unseen = replace(second, started=None, created_workers=0, node="")
    return replace(started(2), attempts=(first, unseen), active_since=after(-600), **more)


POOL = Pool(name="p", platform=Platform.AWS)


# --- a template that is changed -------------------------------------------------------------------------
OTHER = {"template": {"spec": {"containers": [{"name": "trainer", "image": "example.com/train:2"}]}}}


@pytest.mark.parametrize("change", [OTHER, {"training": {"seed": 3}}, {"workers": 2}, {"gpusPerWorker": 2}])
def test_a_template_changed_under_an_attempt_is_said_and_starts_no_other(change: dict[str, Any]) -> None:
    job = Story(Status(), workers=1, gpusPerWorker=1)
    job.look("attempt=1 creates=0")
    before = {name: job.spec.get(name, raw_spec().get(name)) for name in change}
    job.look("Accepted=False/InvalidSpec !deletes", make_pod(), at=60, spec=change)
    job.look("cause1=Failed attempt=1 !creates", ended_pod(code=1), at=120)
    job.look("attempt=2 Accepted=True", at=300, spec=before)


def test_a_template_changed_while_the_job_is_suspended_holds_from_its_next_attempt() -> None:
    job = Story(Status())
    job.look("attempt=1 creates=0")
    job.look(
        "stopping1=Suspended deletes=0 !Accepted=False", make_pod(), at=60, spec=OTHER | {"suspend": True}
    )
    job.look("Suspended=True cause1=Suspended", SAVED, at=70)
    job.look("unwritten", at=80)
    job.look("attempt=2 creates=0 Accepted=True", at=90, spec={"suspend": False})


def test_a_template_changed_while_the_job_was_suspended_unseen_is_said() -> None:
    job = Story(Status())
    job.look("attempt=1 creates=0")
    job.look("Accepted=False !deletes", make_pod(), at=60, spec=OTHER)
    job.look("deletes=0", make_pod(), at=61, spec={"suspend": True})
    job.look("cause1=Suspended attempt=1 !creates Accepted=False", SAVED, at=70, spec={"suspend": False})
    job.look("Suspended=True", at=80, spec={"suspend": True})
    job.look("attempt=2 creates=0", at=90, spec={"suspend": False})


def test_a_running_job_of_0_3_has_its_template_recorded() -> None:
    job = running()
    job.look("!Accepted=False", make_pod())
    assert job.status.template_hash == make_job().template_hash
    job.look("Accepted=False", make_pod(), spec=OTHER)


# --- suspend --------------------------------------------------------------------------------------------
def test_a_suspended_job_saves_ends_and_goes_on_when_it_is_resumed_with_all_of_its_time() -> None:
    job = running(suspend=True)
    job.look("deletes=0 phase=Stopping stopping1=Suspended", make_pod())
    over = "phase=Suspended !creates attempt=1 failures=0 interruptions=0 cause1=Suspended !interrupted"
    job.look(f"{over} tells=Suspended !warns", SAVED)
    assert job.status.known_durable_step == 40
    job.look("unwritten", at=1)
    job.look("!Failed unwritten", at=9000, spec={"activeDeadlineSeconds": 1})
    job.look("attempt=2 creates=0 Suspended=False !warns", at=9001, spec={"suspend": False})
    assert job.status.active_since == after(9001)
    trains = replace(sample(41, 2, startStep=40), at=after(9002))
    job.look("!interrupted", make_pod(2), at=9002, sample=trains, spec={"activeDeadlineSeconds": 9000})


def test_a_job_made_suspended_has_no_pod_until_it_is_resumed() -> None:
    job = Story(Status(), suspend=True)
    job.look("phase=Suspended !creates")
    job.look("creates=0", spec={"suspend": False})


def test_suspended_during_an_interruption_it_ends_by_that_and_no_other_attempt_is_made() -> None:
    job, doomed = running(suspend=True), (make_node(notice=notice(60)),)
    going: dict[str, Any] = {"notice": notice(60), **deleted()}
    job.look("!creates", make_pod(**going), nodes=doomed)
    end = told(Outcome.INTERRUPTED, pod=going)
    job.look("cause1=SpotNotice !creates phase=Suspended interruptions=1", end, nodes=doomed)


def test_a_job_that_was_done_before_it_heard_of_the_suspension_is_done() -> None:
    job = running(suspend=True)
    job.look("deletes=0", make_pod())
    job.look("phase=Succeeded", DONE)


def test_a_job_suspended_while_it_waited_for_its_next_start_has_all_its_time_when_it_is_resumed() -> None:
    job = Story(between_attempts(), suspend=True, activeDeadlineSeconds=700)
    job.look("!creates")
    job.look("!Failed", at=10**5, spec={"suspend": False})
    assert job.status.active_since == after(10**5)


# --- activeDeadlineSeconds ------------------------------------------------------------------------------
def test_past_its_deadline_the_job_saves_ends_and_has_failed() -> None:
    running(activeDeadlineSeconds=601).look("!deletes again=1", make_pod())
    job = running(activeDeadlineSeconds=600)
    job.look("deletes=0", make_pod())
    job.look("Failed=True/DeadlineExceeded failures=0", SAVED)


def test_a_deadline_that_passes_between_two_attempts_counts_too() -> None:
    job = Story(between_attempts(next_start=after(100)), activeDeadlineSeconds=600)
    job.look("phase=Failed !creates")


@pytest.mark.parametrize("seconds", [10**12, 2**63 - 1])
def test_never_is_not_beyond_all_dates(seconds: int) -> None:
    running(activeDeadlineSeconds=seconds).look("!deletes", make_pod())
    done = running(ttlSecondsAfterFinished=seconds)
    done.look("phase=Succeeded", DONE)
    done.look("!ends")


# --- ttlSecondsAfterFinished ----------------------------------------------------------------------------
def test_a_finished_jobs_object_is_deleted_when_its_time_is_over_and_not_before() -> None:
    running(ttlSecondsAfterFinished=0).look("again=1", DONE)
    job = running(ttlSecondsAfterFinished=60)
    job.look("phase=Succeeded", DONE)
    job.look("!ends again=1", at=59)
    job.look("ends !creates", at=61)
    job.spec.clear()
    job.look("!ends", at=10**6)


@pytest.mark.parametrize(
    "pods", [(), (make_pod(2),), (make_pod(),), (ended_pod(code=1),), (make_pod(notice=notice()),)]
)
def test_a_finished_job_never_starts_again_whatever_is_around_it(pods: tuple[PodView, ...]) -> None:
    for spec in ({}, {"suspend": True}, {"activeDeadlineSeconds": 1}):
        job = running(**spec)
        job.look("phase=Succeeded", DONE)
        rest = "phase=Succeeded attempt=1 failures=0 interruptions=0"
        job.look(f"!creates {rest}", *pods, at=5000, nodes=())


# --- hangs ----------------------------------------------------------------------------------------------
def idle(seconds: float, limit: float | None) -> dict[str, Any]:
    return {"sample": sample(7, idleSeconds=seconds, hangSeconds=limit)}


def test_an_attempt_without_progress_for_too_long_is_stopped_and_charged() -> None:
    job = running()
    job.look("!deletes", make_pod(), **idle(599, 600))
    job.look("!deletes", make_pod(), **idle(10**6, None))
    job.look("deletes=0 stopping1=Stalled", make_pod(), **idle(601, 600))
    job.look("cause1=Stalled failures=1 interruptions=0", SAVED)


def test_silence_alone_is_no_hang_unless_a_person_has_set_the_time() -> None:
    running().look("!deletes", make_pod(), at=10**5, **idle(0, 600))
    set_by_person = running(failurePolicy={"hangTimeoutSeconds": 600})
    set_by_person.look("!deletes again=600", make_pod(), **idle(0, 600))
    set_by_person.look("deletes=0", make_pod(), at=601, **idle(0, 600))


def test_ranks_that_wait_for_the_rest_of_their_gang_do_not_hang() -> None:
    pods = (make_pod(), make_pod(rank=1, node="", phase="Pending"))
    job = running(workers=2, failurePolicy={"hangTimeoutSeconds": 60})
    job.look("!deletes", *pods, at=200, watched_since=after(-9999))


def test_a_trainer_that_never_answers_hangs_where_a_person_has_set_the_time() -> None:
    """Not before this process has waited so long; and imports from a cold disk take their time."""
    job = running(failurePolicy={"hangTimeoutSeconds": 60})
    for at, expected in ((0, "!deletes"), (61, "!deletes"), (LEAST_START - 29, "deletes=0")):
        job.look(expected, make_pod(), at=at, watched_since=after(-30))
    own = running(failurePolicy={"hangTimeoutSeconds": 60}, checkpoint={"mode": "Self"})
    own.look("!deletes", make_pod(), watched_since=after(-9999))


@pytest.mark.parametrize("cause", [Cause.STALLED, Cause.DEADLINE_EXCEEDED, Cause.MOVED])
def test_a_notice_while_the_operator_stops_an_attempt_changes_no_verdict(cause: Cause) -> None:
    stopping: dict[str, Any] = {"stopping": str(cause), "evidence": "x", "charged": cause is Cause.STALLED}
    job = Story(replace(started(), attempts=(replace(started().attempts[0], **stopping),)))
    going: dict[str, Any] = {"notice": notice(60), **deleted()}
    doomed = (make_node(notice=notice(60)),)
    job.look("!creates !cause1", make_pod(**going), nodes=doomed)
    job.look(f"cause1={cause} interruptions=0", told(Outcome.INTERRUPTED, pod=going), nodes=doomed)


# --- deletionPolicy Delete ------------------------------------------------------------------------------
FINALIZER = ["spottrain.io/checkpoints"]
LATE = -16 * 60
"""When its object was deleted, where an outage has lasted too long."""


def going(
    *pods: PodView, gone: float | None = -5, holds: bool = True, policy: str = "Delete", **more: Any
) -> Observed:
    """A job whose object was deleted so many seconds ago."""
    meta: dict[str, Any] = {"finalizers": FINALIZER if holds else []}
    if gone is not None:
        meta["deletionTimestamp"] = rfc3339(after(gone))
    job = make_job(raw_spec(deletionPolicy=policy), status=more.pop("status", started()), **meta)
    cleaning = more.pop("cleaning", more.get("cleanup") is not None)
    return replace(make_observed(*pods, job=job), cleaning=cleaning, **more)


def cleanup_pods(made: Plan) -> list[dict[str, Any]]:
    return [a.manifest for a in made.after if isinstance(a, Provide)]


NO_IMAGE = Waiting(reason="ImagePullBackOff", message='Back-off pulling image "typo"', container="trainer")
NEVER_BEGAN = make_pod(phase="Pending", running_since=None, waiting=NO_IMAGE)
GONE = Ended(exit_code=137, reason="ContainerStatusUnknown", finished=after(-1))
RAN = Ended(exit_code=137, reason="Error", started=after(-60), finished=after(-1))
UNSEEN = Status(attempt=1, attempts=(AttemptRecord(number=1),))
"""Its pod was never seen."""
BOUND = replace(UNSEEN, attempts=(AttemptRecord(number=1, node="node-a"),))
"""As an operator wrote it that did not know whether a container ran."""


def ran(value: bool, status: Status = BOUND) -> Status:
    return replace(status, attempts=tuple(replace(r, ran=value) for r in status.attempts))


STUCK = make_pod(**deleted(seconds_ago=3600))
FAILED = Ended(exit_code=1, message="spottrain: the store does not answer")
CLEANUPS: dict[str, tuple[Observed, str]] = {
    "the finalizer is there before anything is saved": (going(gone=None, holds=False), "holds=True !creates"),
    "it goes when a person thinks better of it": (
        going(make_pod(), gone=None, policy="Retain"),
        "holds=False",
    ),
    "it stays while the job runs": (going(make_pod(), gone=None), "!holds"),
    "without our finalizer nothing is done": (
        going(make_pod(), holds=False, policy="Retain"),
        "!provides !holds",
    ),
    "a trainer that saves would leave something": (going(make_pod()), "deletes=0 !provides !holds"),
    "then its checkpoints are deleted": (going(SAVED), "provides=pods releases=0 !holds !creates"),
    "when they are gone the job goes": (going(cleanup=Ended(exit_code=0)), "holds=False !warns"),
    "a cleanup that failed is waited for": (going(cleanup=FAILED), "!holds !provides again"),
    "after its time what is left is said": (
        going(cleanup=FAILED, gone=LATE),
        "holds=False warns=CheckpointsLeft",
    ),
    "the end of the namespace is not held up": (
        going(cleanup_refused="forbidden: the namespace is being terminated"),
        "holds=False !provides warns=CheckpointsLeft",
    ),
    "a pod that never ends is waited for": (going(STUCK), "!holds"),
    "no longer than an outage": (going(STUCK, gone=LATE), "holds=False"),
    "a job made suspended has nothing to delete": (going(status=Status()), "holds=False !provides !warns"),
    "nor has one without any pod": (going(status=UNSEEN), "holds=False !provides !warns"),
    "nor one whose image does not exist": (
        going(ended_pod(ended=GONE, **deleted()), status=ran(False)),
        "holds=False !provides !warns",
    ),
    "nor one whose command does not": (
        going(ended_pod(ended=replace(GONE, exit_code=128, reason="StartError")), status=ran(False)),
        "holds=False !provides !warns",
    ),
    "its pod must end before that": (
        going(NEVER_BEGAN, status=BOUND),
        "deletes=0 !holds !provides phase=Stopping Running=False/BeingDeleted",
    ),
    "of a pod that ended otherwise it may have": (
        going(ended_pod(ended=RAN), status=ran(False)),
        "provides=pods !holds",
    ),
    "so it may on a node that is gone": (
        replace(going(make_pod(running_since=None, **deleted()), status=ran(False)), nodes={}),
        "provides=pods !holds",
    ),
    "so it may by a record of an older operator": (going(status=BOUND), "provides=pods !holds"),
    "so it may in an attempt that is not kept any more": (
        going(status=replace(ran(False), attempt=2)),
        "provides=pods !holds",
    ),
    "while it is cleaned the job says so": (
        going(cleaning=True),
        "phase=Stopping Running=False/DeletingCheckpoints !holds !warns",
    ),
    "what keeps it from that is said with the way out": (
        going(cleaning=True, cleanup_trouble='CreateContainerConfigError: secret "s3" not found'),
        "phase=Stopping Running=False/CannotDeleteCheckpoints warns=CannotDeleteCheckpoints !holds again=10",
    ),
    "so is a rejection": (
        going(cleanup_trouble="the API server rejects the cleanup pod: exceeded quota"),
        "Running=False/CannotDeleteCheckpoints warns=CannotDeleteCheckpoints provides=pods",
    ),
    "with the way out taken it goes": (
        going(policy="Retain", cleaning=True, cleanup_trouble="exit code 1"),
        "holds=False !warns",
    ),
    "without our finalizer it says that it goes": (
        going(make_pod(), holds=False, policy="Retain"),
        "phase=Stopping Running=False/BeingDeleted",
    ),
}


@pytest.mark.parametrize("name", CLEANUPS)
def test_checkpoints_are_deleted_with_their_job(name: str) -> None:
    observed, expected = CLEANUPS[name]
    follows(expected, observed)


def test_whether_a_container_ran_is_in_the_record_before_its_pod_is_released() -> None:
    made = follows("releases=0", going(ended_pod(ended=GONE), status=ran(False)))
    assert made.status is None, "the job is gone at once"
    job = Story(BOUND)
    job.look("", NEVER_BEGAN)
    assert job.status.attempts[0].ran is False
    job.look("", make_pod())
    assert job.status.attempts[0].ran is True
    job.look("", NEVER_BEGAN)
    assert job.status.attempts[0].ran is True


def test_a_pod_that_vanished_unseen_may_have_run() -> None:
    """Such as one that somebody took its finalizer off while no operator was there."""
    (record,) = ran(False).attempts
    job = Story(replace(BOUND, attempts=(replace(record, created_workers=1),)))
    job.look("attempt=2")
    assert job.status.attempts[0].ran is True


def test_the_sentence_says_why_until_when_and_what_lets_the_job_go() -> None:
    o = going(cleaning=True, cleanup_trouble='CreateContainerConfigError: secret "s3" not found')
    said = condition(follows("", o), Condition.RUNNING).message
    assert said.startswith("its checkpoints at s3://bucket/run cannot be deleted")
    assert rfc3339(after(-5 + 900), timespec="seconds") in said and "deletionPolicy Retain" in said
    assert said.endswith('CreateContainerConfigError: secret "s3" not found')


def test_the_pod_that_deletes_the_checkpoints_has_our_image_and_the_jobs_identity() -> None:
    (pod,) = cleanup_pods(follows("", replace(going(SAVED), sync_image="registry/spottrain-sync:1")))
    container = pod["spec"]["containers"][0]
    assert container["image"] == "registry/spottrain-sync:1"
    assert container["command"][:4] == ["spottrain", "checkpoints", "delete", "s3://bucket/run"]
    assert {"--job-uid", "uid-1"} <= set(container["command"])
    assert "spottrain.io/attempt" not in pod["metadata"]["labels"], "it is no attempt"
    assert pod["spec"]["restartPolicy"] == "OnFailure"


@pytest.mark.parametrize("why", ["unreadable", "refused", "failed"])
def test_the_event_names_what_is_left_and_the_command_before_a_long_error(why: str) -> None:
    error = "x" * 5000
    if why == "unreadable":
        status = with_progress(started(), going(), sample())
        assert status.progress is not None
        status = replace(status, progress=replace(status.progress, checkpoint_uri="s3://bucket/run"))
        o = replace(going(), job=replace(going().job, spec=None, invalid=error, status=status))
    elif why == "refused":
        o = going(cleanup_refused=error)
    else:
        o = going(cleanup=Ended(exit_code=1, message=error), gone=LATE)
    said = cleanup.gives_up(o)
    assert "spottrain checkpoints delete s3://bucket/run --job-uid uid-1" in said
    assert said.endswith("x" * cleanup.CUT) and len(said) < 1000


def test_of_the_template_that_pod_has_access_to_the_store_and_nothing_that_may_be_missing() -> None:
    """Such as a Secret that was deleted with the job, or a volume with data."""
    key = {"name": "keys", "secret": {"secretName": "keys"}}
    trainer = {
        "name": "trainer",
        "image": "typo",
        "env": [
            {"name": "GOOGLE_APPLICATION_CREDENTIALS", "value": "/keys/a.json"},
            {"name": "WANDB", "value": "x"},
        ],
        "envFrom": [{"secretRef": {"name": "wandb"}}],
        "volumeMounts": [{"name": "keys", "mountPath": "/keys"}, {"name": "data", "mountPath": "/data"}],
    }
    volumes = [key, {"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]
    pod = {"containers": [trainer], "volumes": volumes, "serviceAccountName": "ml"}
    where = {"uri": "gs://bucket/run", "credentialsSecretRef": {"name": "s3"}}
    job = make_job(raw_spec(template={"spec": pod}, checkpoint=where))
    made = objects.cleanup(job, POOL, sync_image="ours")["spec"]
    (cleaner,) = made["containers"]
    assert made["serviceAccountName"] == "ml" and key in made["volumes"]
    assert "data" not in {v["name"] for v in made["volumes"]}
    assert {"name": "keys", "mountPath": "/keys"} in cleaner["volumeMounts"]
    assert [e["name"] for e in cleaner["env"]] == ["GOOGLE_APPLICATION_CREDENTIALS"]
    optional, needed = cleaner["envFrom"]
    assert optional == {"secretRef": {"name": "wandb", "optional": True}} and needed == {
        "secretRef": {"name": "s3"}
    }
    assert trainer["envFrom"] == [{"secretRef": {"name": "wandb"}}], "the job itself is left as it is"


def test_that_pod_writes_as_the_bucket_demands_it() -> None:
    where = {"uri": "s3://bucket/run", "encryption": {"kmsKey": "AES256"}, "pathStyle": False}
    (cleaner,) = objects.cleanup(make_job(raw_spec(checkpoint=where)), POOL)["spec"]["containers"]
    found = {each["name"]: each["value"] for each in cleaner["env"]}
    assert found == {Env.CHECKPOINT_KMS_KEY: "AES256", Env.CHECKPOINT_PATH_STYLE: "false"}


@pytest.mark.parametrize(
    ("uri", "given", "user"),
    [
        ("s3://bucket/run", {}, None),
        ("s3://bucket/run", {"runAsUser": 1234}, 1234),
        ("s3://bucket/run", {"runAsUser": 0}, 1000),
        ("file:///ckpt/run", {}, 0),
        ("file:///ckpt/run", {"runAsUser": 1234}, 1234),
    ],
)
def test_that_pod_is_root_only_where_it_deletes_files_of_an_unknown_user(
    uri: str, given: dict[str, Any], user: int | None
) -> None:
    trainer = {"name": "trainer", "image": "x", "volumeMounts": [{"name": "d", "mountPath": "/ckpt"}]}
    volumes = [{"name": "d", "persistentVolumeClaim": {"claimName": "d"}}]
    pod = {"containers": [trainer], "volumes": volumes, "securityContext": given}
    job = make_job(raw_spec(template={"spec": pod}, checkpoint={"uri": uri}))
    (cleaner,) = objects.cleanup(job, POOL, sync_image="ours")["spec"]["containers"]
    context = cleaner["securityContext"]
    assert (context.get("runAsUser"), context["runAsNonRoot"]) == (user, user != 0)


WAITS: dict[str, Any] = {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling image"}}
FAILS: dict[str, Any] = {"terminated": {"exitCode": 1, "message": "spottrain: AccessDenied"}}
TROUBLES = {
    "nothing": ({"running": {}}, {}, "Running", ""),
    "starts": ({"waiting": {"reason": "ContainerCreating"}}, {}, "Pending", ""),
    "image": (WAITS, {}, "Pending", "ImagePullBackOff: Back-off pulling image"),
    "failed": (FAILS, {}, "Running", "spottrain: AccessDenied"),
    "failed before": ({"running": {}}, FAILS, "Running", "spottrain: AccessDenied"),
    "backs off": ({"waiting": {"reason": "CrashLoopBackOff"}}, FAILS, "Running", "spottrain: AccessDenied"),
    "done": ({"terminated": {"exitCode": 0}}, {}, "Succeeded", ""),
}


@pytest.mark.parametrize("name", TROUBLES)
def test_what_keeps_the_checkpoints_from_being_deleted_is_read_from_its_pod(name: str) -> None:
    state, last, phase, expected = TROUBLES[name]
    container = {"name": "cleanup", "state": state, "lastState": last}
    raw = {"status": {"phase": phase, "containerStatuses": [container]}}
    assert cleanup_trouble(raw) == expected


def test_a_cleanup_pod_without_a_node_says_that() -> None:
    unbound = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}
    assert cleanup_trouble({"status": {"conditions": [unbound]}}) == "0/3 nodes are available"


def of_a_person(*pods: PodView, **spec: Any) -> Observed:
    status = replace(started(), active_since=after(-600))
    return make_observed(*pods, job=make_job(raw_spec(**spec), status=status))


TOLD = (
    *(observed for observed, _ in CLEANUPS.values()),
    of_a_person(make_pod(), suspend=True),
    make_observed(job=make_job(raw_spec(suspend=True), status=Status())),
    of_a_person(make_pod(), activeDeadlineSeconds=600),
    make_observed(job=make_job(raw_spec(activeDeadlineSeconds=600), status=between_attempts())),
)
"""Scenes whose sentences are in tests/unit/sentences.txt."""

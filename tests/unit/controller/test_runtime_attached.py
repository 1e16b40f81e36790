"""Whether our runtime trains in a job's image: what is said of it, and what follows where it does not."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from spottrain.contract import Outcome, Reason
from spottrain_operator.api.observed import Ended, Limits, Observed, PodView, Silence
from spottrain_operator.api.training_job import ProgressStatus, Status
from spottrain_operator.names import NO_RUNTIME_STATE

from tests.builders import (
    NOW,
    after,
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
    status_of,
    told,
)
from tests.unit.controller.fake_cluster import World
from tests.unit.controller.stories import Story, follows

UNSEEN = started(trained=False)
"""The status of a job of which nothing but its pods was seen."""
REFUSED = Silence(pod_uid=make_pod().uid, refused=True)
UNREACHABLE = replace(REFUSED, refused=False)
SELF: dict[str, Any] = {"checkpoint": {"mode": "Self"}}


def since(seconds: float, attempt: int = 1, **more: Any) -> PodView:
    """A pod whose container runs for so long."""
    return make_pod(attempt, running_since=NOW - timedelta(seconds=seconds), **more)


def ended(ran: float, code: int = 143, **more: Any) -> PodView:
    """A pod that was deleted, and whose container had run for so long."""
    end = Ended(exit_code=code, started=after(-1 - ran), finished=after(-1), message="Terminated")
    return make_pod(phase="Failed", ended=end, **(deleted() | more))


def unseen(
    *pods: PodView, status: Status = UNSEEN, spec: dict[str, Any] | None = None, **more: Any
) -> Observed:
    shown = {name: more.pop(name) for name in ("sample", "nodes") if name in more}
    return replace(
        make_observed(*pods, job=make_job(raw_spec(**(spec or {})), status=status), **shown), **more
    )


def missed(silence: Silence = REFUSED) -> Story:
    """A job that did not answer for five minutes."""
    job = Story(UNSEEN)
    job.look("", since(300), silence=silence)
    return job


HAS_TRAINED = status_of(
    follows("attempt=2", unseen(told(Outcome.INTERRUPTED, step=3, startStep=0, pod=deleted())))
)
UNTRAINED = told(Outcome.UNTRAINED, reason=Reason.NOT_TRAINED, message="The script ended by itself.")
STARTING = sample(state="Starting", step=0)
SCENES: dict[str, tuple[Observed, str]] = {
    "exit 0 without our runtime fails for good": (
        unseen(ended_pod(code=0)),
        "phase=Failed Failed=True/NoRuntime attempt=1 warns=NoRuntime",
    ),
    "exit 0 where the runtime was seen": (unseen(ended_pod(code=0), status=started()), "Failed=True/NotDone"),
    "an untrained end under spottrain run": (unseen(UNTRAINED), "Failed=True/NotTrained"),
    "exit 0 where the image saves by itself": (unseen(ended_pod(code=0), spec=SELF), "phase=Succeeded"),
    "an untrained end where the image saves by itself": (unseen(UNTRAINED, spec=SELF), "phase=Succeeded"),
    "the message done is success whatever the exit code": (
        unseen(replace(told(Outcome.DONE), ended=replace(told(Outcome.DONE).ended, exit_code=1))),  # type: ignore[type-var]
        "phase=Succeeded",
    ),
    "an early end has its reason": (
        unseen(told(Outcome.DONE, reason=Reason.EARLY_STOPPED, message="no better for 3 evaluations")),
        "phase=Succeeded Succeeded=True/EarlyStopped",
    ),
    "a log that ends with the message done is not believed": (
        unseen(ended_pod(code=1, message='step 9\n{"outcome": "done"}')),
        "failures=1 !Succeeded !Failed",
    ),
    "a pod that runs": (unseen(since(5)), "Running=True/WaitingForRuntime again=295 phase=Starting"),
    "after a minute": (unseen(since(61), silence=REFUSED), "again=239 phase=Starting"),
    "after five minutes": (unseen(since(301), silence=REFUSED), "phase=Starting"),
    "a runtime that has not begun": (
        unseen(since(5), sample=STARTING),
        "Running=True/WaitingForTraining phase=Starting",
    ),
    "a runtime that trains": (
        unseen(since(5), sample=sample()),
        "Running=True/Training phase=Running state=Training !warns",
    ),
    "each attempt answers again": (
        unseen(since(5, 2), status=started(2)),
        "Running=True/WaitingForRuntime",
    ),
    "an image that saves by itself is waited for by nobody": (
        unseen(since(900), spec=SELF, silence=REFUSED),
        "Running=True/Training state=Unknown !warns",
    ),
    "five minutes of silence are not over": (
        unseen(since(299), silence=REFUSED),
        "Running=True/WaitingForRuntime !warns",
    ),
    "a refused connection for five minutes": (
        unseen(since(300), silence=REFUSED),
        "Running=True/NoRuntime state=NoRuntime warns=NoRuntime",
    ),
    "no connection for five minutes": (
        unseen(since(300), silence=UNREACHABLE),
        "Running=True/RuntimeUnreachable warns=RuntimeUnreachable",
    ),
    "a longer patience": (
        unseen(since(400), silence=REFUSED, limits=Limits(runtime_patience=timedelta(minutes=20))),
        "Running=True/WaitingForRuntime",
    ),
    "before this process has asked": (unseen(since(900)), "Running=True/WaitingForRuntime again=10"),
    "the silence of another pod": (
        unseen(since(900), silence=replace(REFUSED, pod_uid="another")),
        "Running=True/WaitingForRuntime",
    ),
    "fields that are not applied": (
        unseen(make_pod(), sample=sample(ignoredSettings="emaDecay,data.numWorkers")),
        "warns=FieldsIgnored",
    ),
    "fields that are not applied, by the last message": (
        unseen(told(Outcome.DONE, step=3, ignoredSettings="emaDecay")),
        "warns=FieldsIgnored",
    ),
    "interrupted after its runtime was missed": (
        unseen(ended(400), status=replace(UNSEEN, progress=ProgressStatus(state=NO_RUNTIME_STATE))),
        "Failed=True/NoRuntime",
    ),
    "interrupted before a runtime could have been imported": (unseen(ended(200)), "attempt=2"),
    "killed, so that no message could be written": (unseen(ended(900, code=137)), "attempt=2"),
    "interrupted before its runtime has saved": (unseen(ended(900), status=started()), "attempt=2"),
    "a termination message shows the runtime to the next attempt": (
        unseen(since(900, 2), status=HAS_TRAINED, silence=REFUSED),
        "Running=True/WaitingForRuntime !warns",
    ),
    "interrupted with a message": (
        unseen(told(Outcome.INTERRUPTED, message="before it began", pod=deleted())),
        "attempt=2",
    ),
    "interrupted before its container ran": (
        unseen(make_pod(phase="Pending", node="", running_since=None, **deleted())),
        "attempt=2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("scene", SCENES)
def test_the_runtime_is_told_by_what_it_does(scene: str) -> None:
    observed, expected = SCENES[scene]
    follows(expected, observed)


def test_another_rank_of_a_gang_may_exit_0_without_a_message() -> None:
    record = replace(UNSEEN.attempts[0], workers=2)
    job, other = Story(replace(UNSEEN, attempts=(record,)), workers=2), ended_pod(code=0, rank=1)
    job.look("!Failed !Succeeded !stopping", make_pod(rank=0), other)
    job.look("Failed=True/NoRuntime", ended_pod(code=0), other)


# --- a missing runtime ----------------------------------------------------------------------------------
def test_a_missing_runtime_is_warned_of_once_and_taken_back_when_it_comes_late() -> None:
    job = missed()
    job.look("Running=True/NoRuntime !warns", since(900), silence=REFUSED)
    job.look("Running=True/NoRuntime !warns", since(900))  # another process has not asked yet
    job.look("Running=True/Training", since(320), sample=sample())
    job.look("Running=True/Training !warns", since(900), silence=REFUSED)


def test_a_script_that_uses_nothing_of_ours_under_spottrain_run_is_missed_too() -> None:
    job = Story(UNSEEN)
    job.look("Running=True/WaitingForTraining", since(299), sample=STARTING)
    job.look("Running=True/NotTraining warns=NotTraining", since(300), sample=STARTING)


# --- spec.training --------------------------------------------------------------------------------------
def test_ignored_fields_are_said_once_and_taken_back_when_all_are_applied() -> None:
    job = Story(UNSEEN)

    def shown() -> str:
        return job.status.progress.ignored_settings if job.status.progress is not None else ""

    job.look("warns=FieldsIgnored", make_pod(), sample=sample(ignoredSettings="emaDecay"))
    job.look("!warns", make_pod(), sample=sample(9, ignoredSettings="emaDecay"))
    job.look("!warns", make_pod(), sample=sample(state="Restoring"))
    assert shown() == "emaDecay"
    job.look("", make_pod(), sample=sample())
    assert shown() == ""


# --- interruptions --------------------------------------------------------------------------------------
def test_no_attempt_is_made_beside_one_whose_runtime_was_never_seen() -> None:
    pod, nodes = since(30, notice=notice(100), **deleted()), (make_node(notice=notice(100)),)
    follows("attempt=1 !creates", unseen(pod, nodes=nodes))
    follows("attempt=2", unseen(pod, nodes=nodes, status=started()))


def test_the_first_interruption_ends_a_job_without_our_runtime() -> None:
    expected = "Failed=True/NoRuntime attempt=1 interruptions=1 cause1=PodDeleted !charged warns=NoRuntime"
    missed().look(expected, ended(400, code=137))
    missed().look("Failed=True/NoRuntime cause1=NodeLost", since(400), nodes=())
    missed(UNREACHABLE).look("attempt=2", since(400), nodes=())  # a network policy may be why
    missed().look("attempt=2 failures=1", ended_pod(code=1))


def test_a_suspension_is_no_interruption() -> None:
    job = missed()
    stopping: dict[str, Any] = {"stopping": "Suspended", "evidence": "spec.suspend is true", "charged": False}
    job.status = replace(job.status, attempts=(replace(job.status.attempts[0], **stopping),))
    job.look("!Failed", ended(400), spec={"suspend": True})


async def test_a_plain_script_under_a_notice_runs_once_and_alone() -> None:
    w = World()
    w.runtime_answers = False
    await w.begin()
    w.pass_time(400)
    pod = w.caches.pods.of(next(iter(w.caches.jobs.keys())))[0]
    w.memory.of(pod.job).silence = Silence(pod_uid=pod.uid, refused=True)
    await w.settle()
    w._start()  # another operator process, which remembers nothing
    await w.noticed("node-a", 100)
    await w.after(5)
    assert w.cluster.posted == [w.pod(1)]
    await w.ends(w.pod(1), 143)
    assert w.status.phase == "Failed" and w.cluster.posted == [w.pod(1)]

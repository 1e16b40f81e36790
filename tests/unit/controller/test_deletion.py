"""A deleted job with deletionPolicy Delete: its pods end, its checkpoints go, then it goes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from spottrain.contract import Outcome
from spottrain_operator.api.observed import (
    Create,
    Delete,
    Ended,
    Hold,
    Observed,
    Plan,
    PodView,
    Provide,
    Release,
)
from spottrain_operator.api.wire import rfc3339
from spottrain_operator.control.plan import plan
from spottrain_operator.policies import cleanup
from spottrain_operator.status.changes import with_progress

from tests.builders import after, deleted, make_job, make_observed, make_pod, raw_spec, sample, started, told

FINALIZER = ["spottrain.io/checkpoints"]


def job(*, gone: float | None = -5, holds: bool = True, policy: str = "Delete", **more: Any) -> Any:
    meta: dict[str, Any] = {"finalizers": FINALIZER if holds else []}
    if gone is not None:
        meta["deletionTimestamp"] = rfc3339(after(gone))
    return make_job(raw_spec(deletionPolicy=policy), status=started(), **meta | more)


def observed(*pods: PodView, cleanup: Ended | None = None, **more: Any) -> Observed:
    return replace(make_observed(*pods, job=job(**more)), cleaning=cleanup is not None, cleanup=cleanup)


def holds(made: Plan) -> list[bool]:
    return [a.on for a in made.before if isinstance(a, Hold)]


def provided(made: Plan) -> list[dict[str, Any]]:
    return [a.manifest for a in made.after if isinstance(a, Provide)]


def test_the_finalizer_is_there_before_anything_is_saved_and_goes_when_a_person_thinks_better() -> None:
    fresh = plan(observed(gone=None, holds=False))
    assert holds(fresh) == [True] and not [a for a in fresh.after if isinstance(a, Create)]
    assert holds(plan(observed(make_pod(), gone=None, policy="Retain"))) == [False]
    assert holds(plan(observed(make_pod(), gone=None))) == []


def test_first_the_trainers_end_for_one_that_saves_would_leave_something() -> None:
    made = plan(observed(make_pod()))
    assert [a for a in made.after if isinstance(a, Delete)] and not provided(made) and not holds(made)


def test_then_a_pod_of_the_jobs_own_image_and_identity_deletes_the_checkpoints() -> None:
    made = plan(observed(told(Outcome.INTERRUPTED, pod=deleted())))
    assert [type(a) for a in made.after if not isinstance(a, Provide)] in ([Release], [Delete, Release])
    (pod,) = provided(made)
    container = pod["spec"]["containers"][0]
    assert container["image"] == "example.com/train:1" and container["command"][:4] == [
        "spottrain", "checkpoints", "delete", "s3://bucket/run",
    ]  # fmt: skip
    assert {"--job-uid", "uid-1"} <= set(container["command"])
    assert "spottrain.io/attempt" not in pod["metadata"]["labels"], "it is no attempt"
    assert pod["spec"]["restartPolicy"] == "OnFailure" and not holds(made)


def test_when_they_are_gone_the_job_goes() -> None:
    assert holds(plan(observed(cleanup=Ended(exit_code=0)))) == [False]


def test_one_that_failed_is_waited_for_and_after_its_time_an_event_says_what_is_left() -> None:
    failed = Ended(exit_code=1, message="spottrain: the store does not answer")
    early = plan(observed(cleanup=failed))
    assert not holds(early) and not provided(early) and early.recheck_after is not None
    late = plan(observed(cleanup=failed, gone=-16 * 60))
    assert holds(late) == [False]
    (event,) = late.events
    assert (
        event.warning and "s3://bucket/run are left" in event.message and "does not answer" in event.message
    )


def test_where_no_pod_can_be_made_the_namespace_is_not_held_up() -> None:
    o = replace(observed(), cleanup_refused="forbidden: the namespace is being terminated")
    made = plan(o)
    assert holds(made) == [False] and not provided(made) and "terminated" in made.events[0].message


@pytest.mark.parametrize("why", ["unreadable", "refused", "failed"])
def test_the_event_names_what_is_left_and_the_command_before_a_long_error(why: str) -> None:
    error = "x" * 5000
    if why == "unreadable":
        status = with_progress(started(), observed(), sample())
        assert status.progress is not None
        status = replace(status, progress=replace(status.progress, checkpoint_uri="s3://bucket/run"))
        o = observed()
        o = replace(o, job=replace(o.job, spec=None, invalid=error, status=status))
    elif why == "refused":
        o = replace(observed(), cleanup_refused=error)
    else:
        o = observed(cleanup=Ended(exit_code=1, message=error), gone=-16 * 60)
    said = cleanup.gives_up(o)
    command = "spottrain checkpoints delete s3://bucket/run --job-uid uid-1"
    assert "at s3://bucket/run are left" in said and command in said
    assert said.endswith("x" * cleanup.CUT) and len(said) < 1000


def test_without_our_finalizer_nothing_is_done() -> None:
    made = plan(observed(make_pod(), holds=False, policy="Retain"))
    assert not provided(made) and not holds(made)


def test_a_pod_that_never_ends_holds_the_job_up_no_longer_than_an_outage() -> None:
    stuck = make_pod(**deleted(seconds_ago=3600))
    assert not holds(plan(observed(stuck)))
    assert holds(plan(observed(stuck, gone=-16 * 60))) == [False]

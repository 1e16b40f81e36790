"""Jobs whose image has no runtime of ours: their ends, their order, and what is shown of them."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from spottrain_operator.api.observed import Ended, NodeView, Observed, PodView
from spottrain_operator.api.training_job import AttemptRecord, Job, ProgressStatus, Status
from spottrain_operator.names import Cause

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
)
from tests.unit.controller.stories import Story, follows

OWN: dict[str, Any] = {"checkpoint": {"mode": "Self"}}
NOTICED = make_node(notice=notice())


def _job(status: Status | None = None) -> Job:
    return make_job(raw_spec(**OWN), status=status or started())


# --- why it ended -------------------------------------------------------------------------------------
def _past(code: int, **more: Any) -> PodView:
    end = Ended(exit_code=code, finished=NOW - timedelta(seconds=60))
    return make_pod(phase="Failed", ended=end, **more)


DRAINED: dict[str, Any] = {"disruption": "EvictionByEvictionAPI: evicting"}
UNCHARGED: list[tuple[str, PodView, NodeView, Cause]] = [
    (f"exit {code} {name}", replace(ended_pod(code=code), **more), node, cause)
    for code in (0, 143, 137, 1)
    for name, more, node, cause in (
        ("under a notice", {}, NOTICED, Cause.SPOT_NOTICE),
        ("under a notice of its own", {"notice": notice()}, make_node(), Cause.SPOT_NOTICE),
        ("after a deletion", deleted(), make_node(), Cause.POD_DELETED),
        ("in a drain", DRAINED, make_node(), Cause.DISRUPTED),
        (
            "at node shutdown",
            {"reason": "Terminated", "message": "shutdown"},
            make_node(),
            Cause.NODE_SHUTDOWN,
        ),
    )
]


@pytest.mark.parametrize(("pod", "node", "cause"), [c[1:] for c in UNCHARGED], ids=[c[0] for c in UNCHARGED])
def test_an_end_that_was_asked_for_is_an_interruption(pod: PodView, node: NodeView, cause: Cause) -> None:
    expected = f"attempt=2 failures=0 interruptions=1 cause1={cause} !Succeeded"
    follows(expected, make_observed(pod, job=_job(), nodes=(node,)))


CHARGED = {
    "143 unasked": ended_pod(code=143),
    "137 unasked": ended_pod(code=137),
    "137 for memory": ended_pod(code=137, reason="OOMKilled", memory_limit="2Gi"),
    "143 before the deletion": _past(143, **deleted(10)),
    "76 is no word of ours": ended_pod(code=76, message="bad protocol"),
    "a crash": ended_pod(code=1, message="boom"),
}


def seen(pod: PodView) -> Observed:
    return make_observed(pod, job=_job())


@pytest.mark.parametrize("name", CHARGED)
def test_an_end_that_nobody_asked_for_is_a_failure(name: str) -> None:
    follows("attempt=2 failures=1 interruptions=0", seen(CHARGED[name]))


def test_exit_0_that_nobody_asked_for_is_success() -> None:
    follows("phase=Succeeded Succeeded=True", make_observed(ended_pod(code=0), job=_job()))


# --- one after the other ------------------------------------------------------------------------------
def test_it_is_told_of_its_end_and_no_early_replacement_is_made_because_no_gate_would_hold_it() -> None:
    follows("annotates=0 !deletes", make_observed(make_pod(), job=_job(), nodes=(NOTICED,)))
    pod = make_pod(notice=notice(100))
    told = make_observed(pod, job=_job(), nodes=(NOTICED,), annotated_at=after(-2))
    follows("deletes=0 !creates attempt=1", told)


# --- what is shown ------------------------------------------------------------------------------------
def test_its_progress_is_unknown_while_it_runs_and_a_person_sees_so() -> None:
    job = Story(**OWN)
    job.look("Running=True phase=Running", make_pod())
    assert job.status.progress is not None and job.status.progress.state == "Unknown"
    job.look("unwritten", make_pod(), at=300)
    waits = Story(replace(started(), attempts=(AttemptRecord(number=1),)), **OWN)
    waits.look("", make_pod(phase="Pending", running_since=None, node=""))
    assert waits.status.progress is None
    second = Story(replace(started(2), progress=ProgressStatus(state="", poll_time=NOW)), **OWN)
    second.look("", make_pod(2))
    assert second.status.progress is not None and second.status.progress.state == "Unknown"


def test_an_image_that_answers_all_the_same_is_believed() -> None:
    job = Story(replace(started(), progress=ProgressStatus(state="Unknown", poll_time=NOW)), **OWN)
    job.look("", make_pod(), sample=sample(7))
    assert job.status.progress is not None
    assert (job.status.progress.state, job.status.progress.step) == ("Training", 7)

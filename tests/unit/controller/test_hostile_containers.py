"""Nothing that a container says stops a job's plans: whatever it reports, its pod is told of a notice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from spottrain.contract import Outcome, Progress, TerminationMessage, TimeSplit
from spottrain_operator.api.observed import Observed, PodView, Sample
from spottrain_operator.api.reports import MOST_SECONDS, bounded
from spottrain_operator.control import plan as rules
from spottrain_operator.control.actions import Delete, Plan, Release
from spottrain_operator.control.plan import plan
from spottrain_operator.control.reconcile import planned
from spottrain_operator.names import Condition, Reason
from spottrain_operator.policies import hang

from tests.builders import (
    KEY,
    NOW,
    condition,
    deleted,
    ended_pod,
    make_job,
    make_observed,
    make_pod,
    notice,
    raw_spec,
    started,
)

CRD = yaml.safe_load((Path(__file__).resolve().parents[3] / "crds" / "trainingjobs.yaml").read_text())
STATUS = CRD["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]
SERVED = Draft202012Validator(STATUS)
ODD: list[Any] = [
    *(0, 1, -1, 2**31, 2**53 - 1, 2**53, 2**63, 10**18, 10**400),
    *(0.5, -0.5, -1e18, 1e9, 1e15, 1e18, 1e300, 1e308, 5e-324, -5e-324),
    *(True, None, "", "x" * 5000, "\udcff\x00", [], {}, [[]], "NaN", "1e18"),
]
NUMBERS = st.sampled_from(ODD) | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, width=64)
WORDS = st.sampled_from(["Training", "Done", "Saving", "Starting", "WaitingForStore"]) | st.text(max_size=9)
SPLITS = st.dictionaries(st.sampled_from([f.name for f in fields(TimeSplit)]), NUMBERS, max_size=4)
SPECS: list[dict[str, Any]] = [
    {},
    {"failurePolicy": {"hangTimeoutSeconds": 600}},
    {"checkpoint": {"uri": "s3://b/r", "mode": "Sync", "syncPath": "/x"}},
    {"checkpoint": {"mode": "Self"}},
    {
        "capacity": {
            "type": "Cheapest",
            "cheapest": {"deadline": "2026-03-02T12:00:00Z"},
            "maxCostUSD": 100,
            "pools": [{"name": "a", "platform": "AWS"}, {"name": "b", "platform": "AWS", "type": "OnDemand"}],
        }
    },
]
RECORD = replace(started().attempts[0], workers=1)
JOBS = [make_job(raw_spec(**spec), status=started(attempts=(RECORD,))) for spec in SPECS]


def _reports(cls: Any, known: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Raw reports: those of a healthy trainer, with any of their fields replaced by anything."""
    names = [f.name for f in fields(cls) if f.name not in ("timeSplit", "attempt", "jobUID", "worker")]
    odd = st.dictionaries(st.sampled_from(names), NUMBERS | WORDS, max_size=5)
    split = st.fixed_dictionaries({}, optional={"timeSplit": SPLITS | NUMBERS})
    return st.builds(lambda odd, split: known | odd | split, odd, split)


PROGRESS = _reports(
    Progress,
    {"state": "Training", "attempt": 1, "step": 20, "totalSteps": 100, "hangSeconds": 9, "idleSeconds": 1},
)
MESSAGES = _reports(TerminationMessage, {"outcome": "interrupted", "step": 20, "durableStep": 20})


@settings(max_examples=150, deadline=None)
@given(raw=PROGRESS, job=st.sampled_from(JOBS))
def test_whatever_progress_a_trainer_reports_its_pod_is_deleted_at_a_notice(raw: Any, job: Any) -> None:
    try:
        progress = bounded(Progress.from_json(json.dumps(raw)))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):  # no answer, for the poller
        progress = None
    sample = Sample(progress=progress, at=NOW) if progress is not None else None
    made = plan(make_observed(make_pod(), job=job, sample=sample))
    _assert_served(made)
    made = plan(_told(make_pod(notice=notice()), job=job, sample=sample))
    _assert_served(made)
    assert any(isinstance(a, Delete) for a in made.before)


@settings(max_examples=150, deadline=None)
@given(raw=MESSAGES, job=st.sampled_from(JOBS), code=st.sampled_from((0, 1, 64, 75, 137)))
def test_whatever_message_a_trainer_leaves_its_end_is_counted(raw: Any, job: Any, code: int) -> None:
    pod = ended_pod(code=code, message=json.dumps(raw))
    made = plan(make_observed(pod, job=job))
    _assert_served(made)
    assert made.status is not None and made.status.attempts[0].cause


def _told(*pods: PodView, **more: Any) -> Observed:
    """A pod has its deadline annotation for long enough."""
    return make_observed(*pods, annotated_at=NOW - timedelta(seconds=5), **more)


def _assert_served(made: Plan) -> None:
    """The API server would accept the status."""
    if made.status is not None:
        text = json.dumps(made.status.to_json(), allow_nan=False)
        assert not list(_wrong(json.loads(text)))


def _wrong(status: Any) -> Iterator[str]:
    yield from (error.message for error in SERVED.iter_errors(status))


@pytest.mark.parametrize("value", [-1e18, -1.0, 1e18, 1e300, 2**53 - 1])
def test_seconds_are_those_of_a_clock(value: float) -> None:
    split = TimeSplit(productive=abs(value))
    found = bounded(Progress(state="Training", attempt=1, hangSeconds=value, loss=value, timeSplit=split))
    assert found is not None and found.hangSeconds in (0.0, MOST_SECONDS)
    assert found.timeSplit == TimeSplit(productive=min(abs(value), MOST_SECONDS))
    assert found.loss == value


# --- a plan that raises --------------------------------------------------------------------------------
@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each plan that reads a word of a container raises."""

    def word(pod: PodView) -> None:
        if pod.ended is not None and pod.ended.message:
            raise OverflowError("boom")

    def due(o: Observed) -> None:
        if o.sample is not None:
            raise OverflowError("boom")

    monkeypatch.setattr(hang, "due", due)
    monkeypatch.setattr(rules, "termination_message_of", word)


SAMPLE = Sample(progress=Progress(state="Training", attempt=1, jobUID=KEY.uid, step=7), at=NOW)


@pytest.mark.usefixtures("broken")
def test_where_a_plan_raises_the_pod_is_told_of_its_notice_all_the_same() -> None:
    made = planned(_told(make_pod(notice=notice()), sample=SAMPLE))
    assert any(isinstance(a, Delete) for a in made.before)
    accepted = condition(made, Condition.ACCEPTED)
    assert (accepted.status, accepted.reason) == ("False", Reason.INVALID_SPEC)
    assert "OverflowError: boom" in accepted.message


@pytest.mark.usefixtures("broken")
def test_where_a_plan_raises_no_end_is_judged() -> None:
    said = TerminationMessage(outcome=Outcome.DONE, step=3).to_json()
    made = planned(make_observed(ended_pod(code=0, message=said)))
    assert made.status is not None and not made.status.terminal and not made.status.attempts[0].cause
    assert not any(isinstance(a, Release) for a in made.after)


@pytest.mark.usefixtures("broken")
def test_where_a_plan_raises_the_pods_of_a_deleted_job_are_released() -> None:
    job = make_job(status=started(), deletionTimestamp="2026-03-01T11:59:00Z")
    made = planned(make_observed(make_pod(**deleted()), job=job, sample=SAMPLE))
    assert any(isinstance(a, Release) for a in made.after)

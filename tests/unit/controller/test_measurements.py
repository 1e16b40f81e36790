"""What the operator measures of jobs for its metrics, through whole stories: each figure once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from spottrain.contract import Outcome, Progress, TimeSplit
from spottrain_operator.api.bookkeeping import NO_BOOKS
from spottrain_operator.api.observed import Ended, NodeView, Notice, PodView, Sample
from spottrain_operator.api.training_job import Status
from spottrain_operator.api.validation import parse_job
from spottrain_operator.control.plan import plan
from spottrain_operator.io import metrics
from spottrain_operator.io.metrics import Measurement

from tests.builders import NOW, make_node, make_observed, make_pod, raw_job, raw_spec, started, word

SOURCE = "AWS spot/instance-action"


def at(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


class Story:
    """One job, reconciled with the pods, nodes and answers that the test gives."""

    def __init__(self, status: Status | None = None, *, gpus: int = 4, **spec: Any) -> None:
        self.status = status or started()
        self.spec = raw_spec(gpusPerWorker=gpus, **spec)
        self.measured: list[Measurement] = []
        self.books = NO_BOOKS

    def look(
        self,
        when: float,
        *pods: PodView,
        nodes: Sequence[NodeView] = (make_node(), make_node("node-b")),
        sample: Sample | None = None,
    ) -> None:
        raw = raw_job(self.spec) | {"status": json.loads(json.dumps(self.status.to_json()))}
        job = parse_job(raw)
        o = make_observed(*pods, job=job, nodes=tuple(nodes), now=at(when), sample=sample, books=self.books)
        made = plan(o)
        self.status, self.books = made.status or self.status, made.books or self.books
        self.measured += made.measurements if made.status is not None else ()

    def all(self, metric: object) -> list[float]:
        return [m.value for m in self.measured if m.metric is metric]


def noticed(seen: float, deadline: float) -> NodeView:
    return make_node(notice=Notice(deadline=at(deadline), source=SOURCE, seen=at(seen)))


def ended(when: float, code: int = 75, attempt: int = 1, message: str = "", **more: Any) -> PodView:
    end = Ended(exit_code=code, message=message, started=at(-500), finished=at(when))
    return make_pod(attempt, phase="Failed" if code else "Succeeded", ended=end, **more)


def trains(attempt: int, when: float, step: int) -> Sample:
    return Sample(progress=Progress(state="Training", attempt=attempt, step=step, startStep=40), at=at(when))


def reclaimed() -> Story:
    """A notice at second 10 is known at 10.7 and durable 3 s later; the next attempt trains at second 95."""
    story = Story(started(trained=False))
    going: dict[str, Any] = {"deleted": at(118), "deletion_grace": 106}
    said = word(
        Outcome.INTERRUPTED, step=40, durableStep=40, signalledAt=at(10.7).timestamp(), durableSeconds=3
    )
    story.look(5, make_pod())
    story.look(12, make_pod(**going), nodes=[noticed(10, 120), make_node("node-b")])
    for second in (14, 15):  # a reconcile more changes nothing
        story.look(second, ended(14, message=said, **going), nodes=[noticed(10, 120), make_node("node-b")])
    pending = make_pod(2, node="", phase="Pending", created=at(16))
    story.look(16, pending)
    bound = replace(pending, node="node-b", bound=at(60))
    story.look(61, bound)
    runs = replace(bound, phase="Running", running_since=at(80))
    story.look(80, runs)
    for second, step in ((95, 41), (96, 45), (200, 60)):
        story.look(second, runs, sample=trains(2, second, step))
    return story


def test_a_reclaim_is_measured_from_the_notice_to_the_next_step() -> None:
    story = reclaimed()
    assert story.all(metrics.NOTICE_TO_SIGNAL) == [pytest.approx(0.7)]
    assert story.all(metrics.SIGNAL_TO_DURABLE) == [3]
    assert story.all(metrics.INTERRUPTION_TO_RUNNING) == [80 - 14]
    assert story.all(metrics.INTERRUPTION_TO_TRAINING) == [95 - 14]
    assert story.all(metrics.START_TO_STEP) == [95 - 60]


def test_an_interruption_is_counted_once_with_its_source_and_capacity_type() -> None:
    counted = [m for m in reclaimed().measured if m.metric in (metrics.INTERRUPTIONS, metrics.ATTEMPTS_ENDED)]
    assert counted == [
        Measurement(metrics.ATTEMPTS_ENDED, 1, ("SpotNotice",)),
        Measurement(metrics.INTERRUPTIONS, 1, ("SpotNotice", SOURCE, "Spot")),
    ]


def test_a_failure_is_no_interruption_and_has_no_recovery() -> None:
    story = Story()
    story.look(10, ended(9, code=1))
    story.look(30, make_pod(2))
    assert {m.metric for m in story.measured} == {metrics.ATTEMPTS_ENDED}


def test_a_stop_before_the_notice_was_not_caused_by_it() -> None:
    story = Story()
    said = word(Outcome.INTERRUPTED, step=40, durableStep=40, signalledAt=at(5).timestamp(), durableSeconds=1)
    story.look(12, ended(11, message=said), nodes=[noticed(10, 120)])
    assert story.all(metrics.NOTICE_TO_SIGNAL) == []
    assert story.all(metrics.SIGNAL_TO_DURABLE) == [1]


def test_a_container_cannot_put_more_seconds_into_the_metrics_than_have_passed() -> None:
    story = Story()
    said = word(Outcome.INTERRUPTED, step=40, durableStep=40, signalledAt=1e300, durableSeconds=1e300)
    pod = ended(11, message=said)
    story.look(12, pod, nodes=[noticed(10, 120)])
    assert story.all(metrics.NOTICE_TO_SIGNAL) == []
    assert story.all(metrics.SIGNAL_TO_DURABLE) == [(at(12) - pod.created).total_seconds()]


@pytest.mark.parametrize(("gpus", "lost"), [(4, [4 * 30.0]), (0, [])], ids=["four GPUs", "no GPU"])
def test_lost_steps_count_for_each_gpu(gpus: int, lost: list[float]) -> None:
    story = Story(gpus=gpus)
    pod = make_pod(bound=at(0))
    split = TimeSplit(startup=5, productive=50, unsaved=30)
    reported = Progress(state="Training", attempt=1, step=9, timeSplit=split)
    story.look(1, pod)
    story.look(60, pod, sample=Sample(progress=reported, at=at(60)))
    said = word(Outcome.INTERRUPTED_LOST, step=9, durableStep=4, timeSplit=split)
    for second in (61, 62):
        story.look(second, ended(60, code=79, message=said, bound=at(0)))
    assert story.all(metrics.LOST_GPU_SECONDS) == lost

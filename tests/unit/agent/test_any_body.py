"""Whatever a metadata service sends: the parsers answer, and what they answer can be published."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from functools import partial
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from spottrain_operator.agent import plan
from spottrain_operator.agent.findings import Findings, Unreadable, rfc3339
from spottrain_operator.agent.plan import View
from spottrain_operator.agent.sources import aws, azure, gcp

from tests.support.azuremetadata import VM, event
from tests.unit.agent.fakes import SEEN
from tests.unit.agent.test_aws import EVENT

ACTION = {"action": "terminate", "time": "2026-11-21T10:02:00Z"}
PARSERS: dict[str, Callable[[str], Findings]] = {
    "instance-action": aws.parse_instance_action,
    "rebalance": aws.parse_rebalance,
    "scheduled": aws.parse_maintenance,
    "preempted": partial(gcp.parse_preempted, notice_seconds=30.0),
    "maintenance-event": gcp.parse_maintenance,
    "scheduledevents": partial(azure.parse_events, name=VM),
}
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.datetimes().map(str),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def spoilt(record: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """A real record, some of whose fields hold anything."""
    return st.dictionaries(st.sampled_from(sorted(record)), anything, max_size=3).map(
        lambda bad: record | bad
    )


azures = st.lists(spoilt(event("Reboot", "Sat, 21 Nov 2026 10:02:00 GMT")), max_size=3)
bodies = st.one_of(
    st.text(),
    anything.map(json.dumps),
    spoilt(ACTION).map(json.dumps),
    spoilt({"noticeTime": "2026-11-21T10:02:00Z"}).map(json.dumps),
    st.lists(spoilt(EVENT), max_size=3).map(json.dumps),
    azures.map(lambda events: json.dumps({"DocumentIncarnation": 1, "Events": events})),
)


@pytest.mark.parametrize("parser", PARSERS)
@given(body=bodies, age=st.timedeltas(min_value=plan.ADVICE_LIFE * 0, max_value=plan.ADVICE_LIFE * 2))
@example(body=json.dumps(ACTION | {"time": "0001-01-01T00:00:00Z"}), age=plan.ADVICE_LIFE)
@example(body=json.dumps(ACTION | {"time": "9999-12-31T23:59:59Z"}), age=plan.ADVICE_LIFE)
@example(body=json.dumps([EVENT | {"NotBefore": "9999-12-31T23:59:59Z"}]), age=plan.ADVICE_LIFE)
@example(body=json.dumps([EVENT | {"NotBefore": "0001-01-01T00:00:00Z"}]), age=plan.ADVICE_LIFE)
@settings(max_examples=40, deadline=None)
def test_no_body_trips_the_agent(parser: str, body: str, age: Any) -> None:
    try:
        findings = PARSERS[parser](body)
    except Unreadable as error:
        assert len(str(error)) < 1500
        return
    marks = plan.marks(plan.advance(View(), parser, findings, SEEN), SEEN + age)
    patch = plan.node_patch(marks, {"metadata": {"resourceVersion": "7"}, "spec": {}})
    assert (patch is None) is (marks == plan.Marks())
    json.dumps(patch)
    if marks.notice:
        assert datetime.fromisoformat(rfc3339(marks.notice.deadline)) >= SEEN
        assert plan.pod_patch(marks.notice, {"metadata": {"uid": "u"}, "status": {}}) is not None

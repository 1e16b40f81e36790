"""The agent from Compute Engine's metadata to API server, both real HTTP servers on loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

import pytest
from spottrain_operator import names
from spottrain_operator.agent.loop import Agent
from spottrain_operator.agent.sources.gcp import Gcp

from tests.support.gcpmetadata import MAINTENANCE, PREEMPTED, FakeGcp, fake_gcp
from tests.unit.agent.fakes import SEEN, FakeApi, events, running, until

BOTH = {PREEMPTED, MAINTENANCE}
ADVISED = names.SAVE_ADVISED_ANNOTATION
PREEMPTED_MARKS = {
    names.DEADLINE_ANNOTATION: "2026-11-21T10:00:25.250000Z",
    names.SOURCE_ANNOTATION: "GCP instance/preempted",
}
TAINT = {"key": names.TERMINATING_TAINT, "value": str(int(SEEN.timestamp()) + 25), "effect": "NoSchedule"}


@pytest.fixture
async def gcp() -> AsyncIterator[FakeGcp]:
    async with fake_gcp() as server:
        yield server


def on_gcp(
    gcp: FakeGcp, api: FakeApi, wait_seconds: float = 30.0, **options: Any
) -> AbstractAsyncContextManager[Agent]:
    return running(partial(Gcp, wait_seconds=wait_seconds), gcp.url, api, **options)


async def both_awaited(gcp: FakeGcp) -> None:
    await until(lambda: gcp.is_awaited(PREEMPTED) and gcp.is_awaited(MAINTENANCE), "both are awaited")


async def test_a_preemption_that_comes_during_the_wait_reaches_pods_and_node(
    gcp: FakeGcp, api: FakeApi
) -> None:
    api.add_pod("a")
    async with on_gcp(gcp, api):
        await both_awaited(gcp)
        assert not api.taints()
        gcp.preempt()
        await until(lambda: api.taints() == [TAINT], "the node was tainted")
    assert api.annotations("a") == PREEMPTED_MARKS
    assert api.annotations().items() >= PREEMPTED_MARKS.items()


async def test_waits_that_are_cut_again_and_again_lose_nothing_and_alarm_nobody(
    gcp: FakeGcp, api: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    async with on_gcp(gcp, api):
        for _ in range(5):
            await both_awaited(gcp)
            gcp.asked.clear()
            gcp.cut()
            await until(lambda: {k.partition("?")[0] for k in gcp.asked} >= BOTH, "both are asked again")
        await both_awaited(gcp)
        gcp.preempt()
        await until(lambda: bool(api.taints()), "the node was tainted")
    assert "metadataUnreadable" not in [e["event"] for e in events(capsys)]


async def test_a_server_that_answers_each_wait_at_once_is_not_asked_without_pause(
    gcp: FakeGcp, api: FakeApi
) -> None:
    """No more than one question in an interval, whatever it does; here 100 in a second for each value."""
    gcp.etags = False
    async with on_gcp(gcp, api) as agent:
        await until(lambda: agent.ready, "the agent was ready")
        gcp.asked.clear()
        await until(lambda: len(gcp.asked) >= 20, "it was asked many times")
        assert abs(gcp.asked.count(PREEMPTED) - gcp.asked.count(MAINTENANCE)) <= 2

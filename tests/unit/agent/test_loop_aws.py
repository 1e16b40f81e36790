"""The agent and the three questions that it asks on AWS; both ends are real HTTP servers on loopback."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest
from spottrain_operator import names

from tests.support.imds import MAINTENANCE, FakeImds
from tests.unit.agent.fakes import SEEN, TAINT, FakeApi, announced, events, on_aws, until

ADVISED = names.SAVE_ADVISED_ANNOTATION


async def test_a_notice_is_told_though_another_question_is_not_answered(
    imds: FakeImds, api: FakeApi, token: Path
) -> None:
    imds.broken[MAINTENANCE] = 500
    announced(imds)
    async with on_aws(imds, api, token) as agent:
        await until(lambda: TAINT in api.taints(), "the node was tainted")
        ready, why = agent.readiness()
        imds.withdraw()
        await until(lambda: not api.taints(), "the taint was taken away")
    assert not ready
    assert "AWS events/maintenance/scheduled: GET /latest/meta-data/events/maintenance/scheduled was" in why


async def test_stale_marks_stay_until_every_question_is_answered(
    imds: FakeImds, api: FakeApi, token: Path
) -> None:
    """They may be of a notice that only the unanswered one would show."""
    imds.broken[MAINTENANCE] = 503
    api.node["spec"]["taints"] = [TAINT]
    async with on_aws(imds, api, token):
        await until(lambda: imds.gets > 20, "the other questions were answered")
        assert api.requests == []
        imds.broken.clear()
        await until(lambda: not api.taints(), "the taint was taken away")


async def test_a_rebalance_recommendation_is_advice_on_the_node_and_no_notice(
    imds: FakeImds, api: FakeApi, token: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    api.add_pod("a")
    imds.recommend("2026-11-21T09:58:00Z")
    async with on_aws(imds, api, token):
        await until(lambda: ADVISED in api.annotations(), "the node was annotated")
        imds.recommend("2026-11-21T09:59:00Z")
        await until(
            lambda: api.annotations()[ADVISED] == "2026-11-21T09:59:00.000000Z", "the newer one replaced it"
        )
    assert api.annotations("a") == {}
    assert api.annotations() == {"theirs": "1", ADVISED: "2026-11-21T09:59:00.000000Z"}
    assert not api.taints()
    said = [e for e in events(capsys) if e["event"] == "saveAdvised"]
    assert [e["at"] for e in said] == ["2026-11-21T09:58:00.000000Z", "2026-11-21T09:59:00.000000Z"]
    assert {(e["action"], e["source"]) for e in said} == {
        ("rebalance", "AWS events/recommendations/rebalance")
    }


async def test_advice_is_taken_off_when_it_is_an_hour_old_though_it_is_still_given(
    imds: FakeImds, api: FakeApi, token: Path
) -> None:
    clock = [SEEN]
    imds.recommend("2026-11-21T09:59:00Z")
    async with on_aws(imds, api, token, now=lambda: clock[0]):
        await until(lambda: ADVISED in api.annotations(), "the node was annotated")
        clock[0] = datetime.fromisoformat("2026-11-21T10:59:01Z")
        await until(lambda: ADVISED not in api.annotations(), "the annotation was taken off")
        writes = len(api.patched())
        asked = imds.gets
        await until(lambda: imds.gets > asked + 20, "the service was asked again")
    assert len(api.patched()) == writes
    assert api.annotations() == {"theirs": "1"}


async def test_advice_that_the_agent_before_left_and_nobody_gives_now_goes_at_the_start(
    imds: FakeImds, api: FakeApi, token: Path
) -> None:
    api.node["metadata"]["annotations"][ADVISED] = "2026-11-21T08:00:00.000000Z"
    async with on_aws(imds, api, token):
        await until(lambda: ADVISED not in api.annotations(), "the annotation was taken off")


async def test_a_reboot_next_week_is_advice_until_its_two_minutes_have_come(
    imds: FakeImds, api: FakeApi, token: Path
) -> None:
    clock = [SEEN]
    api.add_pod("a")
    imds.schedule("system-reboot", "28 Nov 2026 10:02:00 GMT")
    async with on_aws(imds, api, token, now=lambda: clock[0]):
        await until(lambda: ADVISED in api.annotations(), "the node was annotated")
        assert not api.taints()
        clock[0] = datetime.fromisoformat("2026-11-28T10:00:00Z")
        await until(lambda: bool(api.taints()), "the node was tainted")
        imds.schedule("system-reboot", "28 Nov 2026 10:02:00 GMT", state="canceled")
        await until(lambda: not api.taints(), "the taint was taken away")
    assert api.annotations("a") == {
        names.DEADLINE_ANNOTATION: "2026-11-28T10:02:00.000000Z",
        names.SOURCE_ANNOTATION: "AWS events/maintenance/scheduled",
    }


async def test_the_earliest_of_two_ends_is_the_deadline(imds: FakeImds, api: FakeApi, token: Path) -> None:
    imds.schedule("instance-stop", "21 Nov 2026 10:01:00 GMT")
    announced(imds)
    async with on_aws(imds, api, token):
        first = "2026-11-21T10:01:00.000000Z"
        await until(lambda: api.annotations().get(names.DEADLINE_ANNOTATION) == first, "the first is told")
        del imds.bodies[MAINTENANCE]
        await until(lambda: TAINT in api.taints(), "the other one is told")


@pytest.mark.parametrize("fault", ["hang", "reset", "truncate", "seconds"])
async def test_whatever_goes_wrong_a_notice_is_told_afterwards(
    imds: FakeImds, api: FakeApi, token: Path, fault: str
) -> None:
    async with on_aws(imds, api, token) as agent:
        await until(lambda: agent.readiness()[0], "the agent was ready")
        setattr(imds.faults, fault, 5.0 if fault == "seconds" else True)
        await until(lambda: not agent.readiness()[0], "the fault was seen")
        announced(imds)
        imds.faults.clear()
        await until(lambda: TAINT in api.taints(), "the node was tainted")
        await until(lambda: agent.readiness()[0], "the agent was ready again")


async def test_readiness_names_what_is_watched(imds: FakeImds, api: FakeApi, token: Path) -> None:
    async with on_aws(imds, api, token) as agent:
        assert agent.readiness() == (
            False,
            "the metadata services of AWS, GCP and Azure are being asked which of them is here",
        )
        await until(lambda: agent.readiness()[0], "the agent was ready")
        assert agent.readiness()[1] == (
            "watching AWS spot/instance-action, AWS events/recommendations/rebalance, "
            "AWS events/maintenance/scheduled"
        )


async def test_the_less_urgent_questions_are_asked_less_often(
    imds: FakeImds, api: FakeApi, token: Path
) -> None:
    async with on_aws(imds, api, token):
        await until(lambda: imds.gets > 60, "the service was asked many times")
    assert 0 < imds.asked.count(MAINTENANCE) < imds.gets / 4

"""The agent from AWS metadata to API server, both real HTTP servers on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import datetime

import aiohttp
import pytest
from spottrain_operator import names
from spottrain_operator.agent import loop
from spottrain_operator.agent.api import Api
from spottrain_operator.agent.findings import Findings
from spottrain_operator.agent.loop import Agent
from spottrain_operator.agent.sources.client import Source, Watch
from spottrain_operator.environment import Endpoint
from spottrain_operator.names import Platform

from tests.support.imds import ACTION, MAINTENANCE, FakeImds
from tests.unit.agent.fakes import (
    DEADLINE_TEXT,
    FOREIGN_TAINT,
    SEEN,
    TAINT,
    FakeApi,
    announced,
    events,
    on_aws,
    until,
)

STALE = {names.DEADLINE_ANNOTATION: "2020-09-13T12:26:40.000000Z", names.NOTICE_SEEN_ANNOTATION: "2020"}


async def test_a_notice_reaches_the_pods_first_and_then_the_node(imds: FakeImds, api: FakeApi) -> None:
    api.add_pod("a")
    api.add_pod("b")
    api.add_pod("over", phase="Succeeded")
    api.node["spec"]["taints"] = [FOREIGN_TAINT]
    async with on_aws(imds, api):
        announced(imds)
        await until(lambda: TAINT in api.taints(), "the node was tainted")
    pods = {f"/api/v1/namespaces/ml/pods/{name}" for name in "ab"}
    assert set(api.patched()[:2]) == pods
    assert api.patched()[2:] == ["/api/v1/nodes/n1"]
    assert api.annotations("a")[names.DEADLINE_ANNOTATION] == DEADLINE_TEXT
    assert api.annotations("over") == {}
    assert api.taints() == [FOREIGN_TAINT, TAINT]
    assert api.annotations()["theirs"] == "1"
    assert api.annotations()[names.DEADLINE_ANNOTATION] == DEADLINE_TEXT


async def test_a_pod_that_lands_during_the_notice_gets_it_too(imds: FakeImds, api: FakeApi) -> None:
    announced(imds)
    async with on_aws(imds, api):
        await until(lambda: bool(api.taints()), "the node was tainted")
        api.add_pod("late")
        await until(lambda: names.DEADLINE_ANNOTATION in api.annotations("late"), "the late pod was told")


async def test_a_notice_that_goes_takes_the_marks_with_it(imds: FakeImds, api: FakeApi) -> None:
    announced(imds)
    async with on_aws(imds, api):
        await until(lambda: bool(api.taints()), "the node was tainted")
        imds.broken[ACTION] = 500
        asked = imds.gets
        await until(lambda: imds.gets > asked + 5, "the service failed several times")
        assert api.taints(), "an error is never the end of a notice"
        imds.broken.clear()
        imds.withdraw()
        await until(lambda: not api.taints(), "the taint was taken away")
    assert api.annotations() == {"theirs": "1"}


async def test_stale_marks_go_at_the_start(imds: FakeImds, api: FakeApi) -> None:
    api.node["spec"]["taints"] = [{**TAINT, "value": "1600000000"}, FOREIGN_TAINT]
    api.node["metadata"]["annotations"].update(STALE)
    async with on_aws(imds, api):
        await until(lambda: api.taints() == [FOREIGN_TAINT], "the stale taint was taken away")
    assert api.annotations() == {"theirs": "1"}


async def test_with_no_notice_the_api_server_is_asked_once_and_left_alone(
    imds: FakeImds, api: FakeApi
) -> None:
    async with on_aws(imds, api):
        await until(lambda: imds.gets > 10, "the service was asked many times")
    assert api.requests == ["GET /api/v1/nodes/n1"]


async def test_api_errors_are_tried_again_until_all_is_told(imds: FakeImds, api: FakeApi) -> None:
    api.add_pod("a")
    api.faults = [500, 409, 403, 503, 500, 429, 500]
    announced(imds)
    async with on_aws(imds, api):
        await until(lambda: TAINT in api.taints(), "the node was tainted")
        await until(lambda: names.DEADLINE_ANNOTATION in api.annotations("a"), "the pod was told")


@pytest.mark.parametrize("path", ["/api/v1/pods", "/api/v1/nodes"])
async def test_an_answer_that_is_not_of_an_api_server_is_tried_again(
    imds: FakeImds, api: FakeApi, path: str
) -> None:
    api.foreign = f"GET {path}"
    announced(imds)
    async with on_aws(imds, api):
        await until(lambda: sum(path in r for r in api.requests) > 3, "it was asked again")
        api.add_pod("a")
        api.foreign = ""
        await until(lambda: TAINT in api.taints(), "the node was tainted")
        await until(lambda: names.DEADLINE_ANNOTATION in api.annotations("a"), "the pod was told")


async def test_an_api_server_that_refuses_never_delays_the_polling(imds: FakeImds, api: FakeApi) -> None:
    api.faults = [500] * 1000
    async with on_aws(imds, api):
        await until(lambda: imds.gets > 20, "the polling went on")
    assert not api.taints()


async def test_a_pod_that_is_gone_by_now_is_no_error(
    imds: FakeImds, api: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    api.add_pod("gone", metadata={"name": "other-name"})
    api.add_pod("a")
    announced(imds)
    async with on_aws(imds, api):
        await until(lambda: bool(api.taints()), "the node was tainted")
    said = [e["event"] for e in events(capsys)]
    assert "apiError" not in said
    assert said.count("podMarked") == 1


async def test_a_pod_that_has_taken_the_name_of_another_is_told_as_itself(
    imds: FakeImds, api: FakeApi
) -> None:
    api.add_pod("a")
    api.stale_lists = 1
    announced(imds)
    async with on_aws(imds, api):
        await until(lambda: names.DEADLINE_ANNOTATION in api.annotations("a"), "the pod was told")
    assert api.patched().count("/api/v1/namespaces/ml/pods/a") == 2


async def test_only_the_named_namespaces_are_listed(imds: FakeImds, api: FakeApi) -> None:
    api.add_pod("a")
    api.add_pod("other", metadata={"namespace": "elsewhere"})
    announced(imds)
    async with on_aws(imds, api, namespaces=("ml", "research")):
        await until(lambda: bool(api.taints()), "the node was tainted")
    assert "GET /api/v1/pods" not in api.requests
    assert names.DEADLINE_ANNOTATION in api.annotations("a")
    assert api.annotations("other") == {}


async def test_the_token_is_read_again_for_each_call(imds: FakeImds, api: FakeApi) -> None:
    announced(imds)
    async with on_aws(imds, api):
        await until(lambda: bool(api.taints()), "the node was tainted")
        api.token.write_text("second")
        await until(lambda: "Bearer second" in api.authorizations, "the new token was used")
    assert api.authorizations == {"Bearer first", "Bearer second"}


async def test_a_token_that_cannot_be_read_is_tried_again(imds: FakeImds, api: FakeApi) -> None:
    api.token.unlink()
    announced(imds)
    async with on_aws(imds, api):
        asked = imds.gets
        await until(lambda: imds.gets > asked + 3, "the polling went on")
        api.token.write_text("first")
        await until(lambda: bool(api.taints()), "the node was tainted")


async def test_events_tell_when_the_notice_was_seen_and_repeat_nothing(
    imds: FakeImds, api: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    api.add_pod("a")
    async with on_aws(imds, api):
        await until(lambda: imds.gets > 1, "the service was asked")
        imds.broken[ACTION] = 500
        asked = imds.gets
        await until(lambda: imds.gets > asked + 3, "the service failed several times")
        imds.broken.clear()
        announced(imds)
        await until(lambda: bool(api.taints()), "the node was tainted")
        imds.withdraw()
        said = events(capsys)
        async with asyncio.timeout(10):
            while said[-1]["event"] != "nodeCleared":
                await asyncio.sleep(0.01)
                said += events(capsys)
    assert [e["event"] for e in said] == [
        "source",
        "metadataUnreadable",
        "metadataReadable",
        "noticeSeen",
        "podMarked",
        "nodeMarked",
        "noticeGone",
        "nodeCleared",
    ]
    assert said[0]["platform"] == "AWS"
    assert said[1]["why"] == "GET /latest/meta-data/spot/instance-action returned 500"
    assert (said[3]["action"], said[3]["source"]) == ("terminate", "AWS spot/instance-action")
    times = {"deadline": DEADLINE_TEXT, "noticeSeen": "2026-11-21T10:00:00.250000Z"}
    assert all(times.items() <= e.items() for e in said[3:7])
    assert said[4]["namespace"] == "ml" and said[4]["pod"] == "a"


# --- mistakes of our own --------------------------------------------------------------------------------
def agent_of(source: Source, api: FakeApi, session: aiohttp.ClientSession) -> Agent:
    async def find() -> Source:
        return source

    kubernetes = Api(session, Endpoint(url=api.url, token_file=api.token), node="n1")
    return Agent(find, kubernetes, poll_seconds=0.01)


class Broken(Source):
    """A source with a mistake in it."""

    platform = Platform.AWS

    def __init__(self, mistake: Callable[[], Awaitable[Findings]]) -> None:
        self.watches = (Watch(name="broken", read=mistake),)


async def _raises() -> Findings:
    raise KeyError("time")


async def _is_cancelled() -> Findings:
    raise asyncio.CancelledError


async def _never_ends() -> Findings:
    await asyncio.Event().wait()
    raise AssertionError


@pytest.mark.parametrize("mistake", [_raises, _is_cancelled, _never_ends])
async def test_a_part_that_ends_or_waits_for_too_long_ends_the_agent(
    api: FakeApi, mistake: Callable[[], Awaitable[Findings]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kubelet starts it again; an agent that no longer asks would look well and tell nothing."""
    monkeypatch.setattr(loop, "LONGEST_READ", 0.1)
    async with aiohttp.ClientSession() as session:
        agent = agent_of(Broken(mistake), api, session)
        with pytest.raises(RuntimeError, match="the agent's part 'broken' has ended"):
            await asyncio.wait_for(agent.run(), 10)


# --- several questions ----------------------------------------------------------------------------------
ADVISED = names.SAVE_ADVISED_ANNOTATION


async def test_a_notice_is_told_though_another_question_is_not_answered(
    imds: FakeImds, api: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    imds.broken[MAINTENANCE] = 500
    announced(imds)
    async with on_aws(imds, api) as agent:
        await until(lambda: TAINT in api.taints(), "the node was tainted")
        ready = agent.ready
        imds.withdraw()
        await until(lambda: not api.taints(), "the taint was taken away")
    assert not ready
    (said,) = (e for e in events(capsys) if e["event"] == "metadataUnreadable")
    assert said["watch"] == "AWS events/maintenance/scheduled"
    assert said["why"].startswith("GET /latest/meta-data/events/maintenance/scheduled returned")


async def test_stale_marks_stay_until_every_question_is_answered(imds: FakeImds, api: FakeApi) -> None:
    """They may be of a notice that only the unanswered one would show."""
    imds.broken[MAINTENANCE] = 503
    api.node["spec"]["taints"] = [TAINT]
    async with on_aws(imds, api):
        await until(lambda: imds.gets > 20, "the other questions were answered")
        assert api.requests == []
        imds.broken.clear()
        await until(lambda: not api.taints(), "the taint was taken away")


async def test_a_rebalance_recommendation_is_advice_on_the_node_and_no_notice(
    imds: FakeImds, api: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    api.add_pod("a")
    imds.recommend("2026-11-21T09:58:00Z")
    async with on_aws(imds, api):
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
    imds: FakeImds, api: FakeApi
) -> None:
    clock = [SEEN]
    imds.recommend("2026-11-21T09:59:00Z")
    async with on_aws(imds, api, now=lambda: clock[0]):
        await until(lambda: ADVISED in api.annotations(), "the node was annotated")
        clock[0] = datetime.fromisoformat("2026-11-21T10:59:01Z")
        await until(lambda: ADVISED not in api.annotations(), "the annotation was taken off")
        writes = len(api.patched())
        asked = imds.gets
        await until(lambda: imds.gets > asked + 20, "the service was asked again")
    assert len(api.patched()) == writes
    assert api.annotations() == {"theirs": "1"}


async def test_a_reboot_next_week_is_advice_until_its_two_minutes_have_come(
    imds: FakeImds, api: FakeApi
) -> None:
    clock = [SEEN]
    api.add_pod("a")
    imds.schedule("system-reboot", "28 Nov 2026 10:02:00 GMT")
    async with on_aws(imds, api, now=lambda: clock[0]):
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


@pytest.mark.parametrize("fault", ["hang", "reset", "truncate", "seconds"])
async def test_whatever_goes_wrong_a_notice_is_told_afterwards(
    imds: FakeImds, api: FakeApi, fault: str
) -> None:
    async with on_aws(imds, api) as agent:
        await until(lambda: agent.ready, "the agent was ready")
        setattr(imds.faults, fault, 5.0 if fault == "seconds" else True)
        await until(lambda: not agent.ready, "the fault was seen")
        announced(imds)
        imds.faults.clear()
        await until(lambda: TAINT in api.taints(), "the node was tainted")
        await until(lambda: agent.ready, "the agent was ready again")


async def test_it_is_ready_once_each_question_is_answered_and_names_what_is_watched(
    imds: FakeImds, api: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    async with on_aws(imds, api) as agent:
        assert not agent.ready
        await until(lambda: agent.ready, "the agent was ready")
    (said,) = (e for e in events(capsys) if e["event"] == "source")
    names = ("spot/instance-action", "events/recommendations/rebalance", "events/maintenance/scheduled")
    assert said["watches"] == [f"AWS {name}" for name in names]


async def test_the_less_urgent_questions_are_asked_less_often(imds: FakeImds, api: FakeApi) -> None:
    async with on_aws(imds, api):
        await until(lambda: imds.gets > 60, "the service was asked many times")
    assert 0 < imds.asked.count(MAINTENANCE) < imds.gets / 4

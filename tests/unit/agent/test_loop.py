"""The agent from metadata to API server, both real HTTP servers on loopback."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from spottrain_operator import names
from spottrain_operator.agent.api import Api, Endpoint
from spottrain_operator.agent.loop import Agent
from spottrain_operator.agent.metadata import Metadata

from tests.support.imds import FakeImds, fake_imds
from tests.unit.agent.fakes import DEADLINE_TEXT, FOREIGN_TAINT, SEEN, TAINT, FakeApi, fake_api, until

STALE = {names.DEADLINE_ANNOTATION: "2020-09-13T12:26:40.000000Z", names.NOTICE_SEEN_ANNOTATION: "2020"}


@pytest.fixture
async def imds() -> AsyncIterator[FakeImds]:
    async with fake_imds() as server:
        yield server


@pytest.fixture
async def api() -> AsyncIterator[FakeApi]:
    async with fake_api() as server:
        yield server


@pytest.fixture
def token(tmp_path: Path) -> Path:
    (tmp_path / "token").write_text("first\n")
    return tmp_path / "token"


@asynccontextmanager
async def running(
    imds: FakeImds, api: FakeApi, token: Path, namespaces: tuple[str, ...] = ()
) -> AsyncIterator[None]:
    """An agent that polls fast, for the length of the block."""
    async with aiohttp.ClientSession() as session:
        agent = Agent(
            Metadata(session, endpoint=imds.url, timeout=0.2),
            Api(session, Endpoint(url=api.url, token_file=token), node="n1", namespaces=namespaces),
            poll_seconds=0.01,
            backoff=(0.01, 0.02),
            now=lambda: SEEN,
        )
        work = asyncio.create_task(agent.run())
        try:
            yield
            assert not work.done(), "the agent has ended"
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)


def announced(imds: FakeImds) -> None:
    imds.announce("terminate", "2026-11-21T10:02:00Z")


def events(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


async def test_a_notice_reaches_the_pods_first_and_then_the_node(
    imds: FakeImds, api: FakeApi, token: Path
) -> None:
    api.add_pod("a")
    api.add_pod("b")
    api.add_pod("over", phase="Succeeded")
    api.node["spec"]["taints"] = [FOREIGN_TAINT]
    async with running(imds, api, token):
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


async def test_a_pod_that_lands_during_the_notice_gets_it_too(
    imds: FakeImds, api: FakeApi, token: Path
) -> None:
    announced(imds)
    async with running(imds, api, token):
        await until(lambda: bool(api.taints()), "the node was tainted")
        api.add_pod("late")
        await until(lambda: names.DEADLINE_ANNOTATION in api.annotations("late"), "the late pod was told")


async def test_a_notice_that_goes_takes_the_marks_with_it(imds: FakeImds, api: FakeApi, token: Path) -> None:
    announced(imds)
    async with running(imds, api, token):
        await until(lambda: bool(api.taints()), "the node was tainted")
        imds.action = None
        await until(lambda: not api.taints(), "the taint was taken away")
    assert api.annotations() == {"theirs": "1"}


async def test_stale_marks_go_at_the_start(imds: FakeImds, api: FakeApi, token: Path) -> None:
    api.node["spec"]["taints"] = [{**TAINT, "value": "1600000000"}, FOREIGN_TAINT]
    api.node["metadata"]["annotations"].update(STALE)
    async with running(imds, api, token):
        await until(lambda: api.taints() == [FOREIGN_TAINT], "the stale taint was taken away")
    assert api.annotations() == {"theirs": "1"}


@pytest.mark.parametrize("fault", ["500", "hang", "no token"])
async def test_stale_marks_stay_while_the_metadata_service_says_nothing(
    imds: FakeImds, api: FakeApi, token: Path, fault: str
) -> None:
    imds.status = 500 if fault == "500" else None
    imds.hang = fault == "hang"
    imds.token_status = 403 if fault == "no token" else 200
    api.node["spec"]["taints"] = [TAINT]
    async with running(imds, api, token):
        await asyncio.sleep(0.3)
        assert api.requests == []
        imds.status, imds.hang, imds.token_status = None, False, 200
        await until(lambda: not api.taints(), "the taint was taken away")


async def test_an_error_during_a_notice_keeps_it_pending(imds: FakeImds, api: FakeApi, token: Path) -> None:
    announced(imds)
    async with running(imds, api, token):
        await until(lambda: bool(api.taints()), "the node was tainted")
        imds.status = 500
        asked = imds.gets
        await until(lambda: imds.gets > asked + 3, "the service was asked again")
        assert api.taints() == [TAINT]


async def test_with_no_notice_the_api_server_is_asked_once_and_left_alone(
    imds: FakeImds, api: FakeApi, token: Path
) -> None:
    async with running(imds, api, token):
        await until(lambda: imds.gets > 10, "the service was asked many times")
    assert api.requests == ["GET /api/v1/nodes/n1"]


async def test_api_errors_are_tried_again_until_all_is_told(
    imds: FakeImds, api: FakeApi, token: Path
) -> None:
    api.add_pod("a")
    api.faults = [500, 409, 403, 503, 500, 429, 500]
    announced(imds)
    async with running(imds, api, token):
        await until(lambda: TAINT in api.taints(), "the node was tainted")
        await until(lambda: names.DEADLINE_ANNOTATION in api.annotations("a"), "the pod was told")


async def test_an_api_server_that_refuses_never_delays_the_polling(
    imds: FakeImds, api: FakeApi, token: Path
) -> None:
    api.faults = [500] * 1000
    async with running(imds, api, token):
        await until(lambda: imds.gets > 20, "the polling went on")
    assert not api.taints()


async def test_a_stale_marks_removal_is_tried_again(imds: FakeImds, api: FakeApi, token: Path) -> None:
    api.node["spec"]["taints"] = [TAINT]
    api.faults = [500, 500]
    async with running(imds, api, token):
        await until(lambda: not api.taints(), "the taint was taken away")


async def test_a_pod_that_is_gone_by_now_is_no_error(
    imds: FakeImds, api: FakeApi, token: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    api.add_pod("gone", metadata={"name": "other-name"})
    api.add_pod("a")
    announced(imds)
    async with running(imds, api, token):
        await until(lambda: bool(api.taints()), "the node was tainted")
    said = [e["event"] for e in events(capsys)]
    assert "apiError" not in said
    assert said.count("podMarked") == 1


async def test_a_pod_that_has_taken_the_name_of_another_is_told_as_itself(
    imds: FakeImds, api: FakeApi, token: Path
) -> None:
    api.add_pod("a")
    api.stale_lists = 1
    announced(imds)
    async with running(imds, api, token):
        await until(lambda: names.DEADLINE_ANNOTATION in api.annotations("a"), "the pod was told")
    assert api.patched().count("/api/v1/namespaces/ml/pods/a") == 2


async def test_only_the_named_namespaces_are_listed(imds: FakeImds, api: FakeApi, token: Path) -> None:
    api.add_pod("a")
    api.add_pod("other", metadata={"namespace": "elsewhere"})
    announced(imds)
    async with running(imds, api, token, namespaces=("ml", "research")):
        await until(lambda: bool(api.taints()), "the node was tainted")
    assert "GET /api/v1/pods" not in api.requests
    assert names.DEADLINE_ANNOTATION in api.annotations("a")
    assert api.annotations("other") == {}


async def test_the_token_is_read_anew_for_each_call(imds: FakeImds, api: FakeApi, token: Path) -> None:
    announced(imds)
    async with running(imds, api, token):
        await until(lambda: bool(api.taints()), "the node was tainted")
        token.write_text("second")
        await until(lambda: "Bearer second" in api.authorizations, "the new token was used")
    assert api.authorizations == {"Bearer first", "Bearer second"}


async def test_a_token_that_cannot_be_read_is_tried_again(imds: FakeImds, api: FakeApi, token: Path) -> None:
    token.unlink()
    announced(imds)
    async with running(imds, api, token):
        asked = imds.gets
        await until(lambda: imds.gets > asked + 3, "the polling went on")
        token.write_text("first")
        await until(lambda: bool(api.taints()), "the node was tainted")


async def test_events_tell_when_the_notice_was_seen_and_repeat_nothing(
    imds: FakeImds, api: FakeApi, token: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    api.add_pod("a")
    async with running(imds, api, token):
        await until(lambda: imds.gets > 1, "the service was asked")
        imds.status = 500
        asked = imds.gets
        await until(lambda: imds.gets > asked + 3, "the service failed several times")
        imds.status = None
        announced(imds)
        await until(lambda: bool(api.taints()), "the node was tainted")
        imds.action = None
        await until(lambda: not api.taints(), "the taint was taken away")
    said = events(capsys)
    assert [e["event"] for e in said] == [
        "metadataUnreadable",
        "metadataReadable",
        "noticeSeen",
        "podMarked",
        "nodeMarked",
        "noticeGone",
        "nodeCleared",
    ]
    times = {"deadline": DEADLINE_TEXT, "noticeSeen": "2026-11-21T10:00:00.250000Z"}
    assert all(times.items() <= e.items() for e in said[2:6])
    assert said[3]["namespace"] == "ml" and said[3]["pod"] == "a"

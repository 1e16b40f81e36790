"""Values for the agent's tests, a running agent, and what it needs of an API server: a node and its pods."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from spottrain_operator import names
from spottrain_operator.agent.api import Api
from spottrain_operator.agent.findings import Findings, Unreadable
from spottrain_operator.agent.loop import Agent
from spottrain_operator.agent.sources.aws import Aws
from spottrain_operator.agent.sources.client import Client, Source
from spottrain_operator.environment import Endpoint

from tests.support.imds import FakeImds

SEEN = datetime(2026, 11, 21, 10, 0, 0, 250_000, tzinfo=UTC)
DEADLINE = datetime(2026, 11, 21, 10, 2, 0, tzinfo=UTC)
DEADLINE_TEXT = "2026-11-21T10:02:00.000000Z"
TAINT = {"key": names.TERMINATING_TAINT, "value": str(int(DEADLINE.timestamp())), "effect": "NoSchedule"}
FOREIGN_TAINT = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
SECOND = timedelta(seconds=1)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class FakeApi:
    """State of the server. `faults` are statuses with which the next requests fail."""

    node: dict[str, Any]
    pods: dict[str, dict[str, Any]] = field(default_factory=dict)
    faults: list[int] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    authorizations: set[str] = field(default_factory=set)
    stale_lists: int = 0
    """How many cached lists still show each pod's predecessor: the same name, another UID."""
    refused: str = ""
    """Requests that begin with it (`PATCH /api/v1/nodes`) are forbidden."""
    foreign: str = ""
    """Requests that begin with it are answered with JSON of somebody else."""
    url: str = ""
    token: Path = Path()
    """The agent's."""

    def add_pod(self, name: str, **changes: Any) -> None:
        meta = {"name": name, "namespace": "ml", "uid": f"uid-{name}"} | changes.pop("metadata", {})
        self.pods[name] = {"kind": "Pod", "metadata": meta, "status": {"phase": "Running"} | changes}

    def taints(self) -> list[dict[str, Any]]:
        return self.node["spec"].get("taints") or []

    def annotations(self, pod: str | None = None) -> dict[str, str]:
        return (self.pods[pod] if pod else self.node)["metadata"].get("annotations") or {}

    def patched(self) -> list[str]:
        return [r.removeprefix("PATCH ") for r in self.requests if r.startswith("PATCH")]

    @web.middleware
    async def admit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self.requests.append(f"{request.method} {request.path}")
        self.authorizations.add(request.headers.get("Authorization", ""))
        if self.refused and self.requests[-1].startswith(self.refused):
            return web.Response(status=403, text="forbidden")
        if self.foreign and self.requests[-1].startswith(self.foreign):
            return web.json_response({"items": [{"login": "please"}]})
        if self.faults:
            return web.json_response({"kind": "Status"}, status=self.faults.pop(0))
        return await handler(request)

    async def get_node(self, request: web.Request) -> web.Response:
        return web.json_response(self.node)

    async def patch_node(self, request: web.Request) -> web.Response:
        patch = await request.json()
        if patch["metadata"].pop("resourceVersion") != self.node["metadata"]["resourceVersion"]:
            return web.Response(status=409, text="the object has been modified")
        self.node = merge(self.node, patch)
        self.node["metadata"]["resourceVersion"] += "0"
        return web.json_response(self.node)

    async def list_pods(self, request: web.Request) -> web.Response:
        assert request.query["labelSelector"] == names.POD_SELECTOR
        assert request.query["fieldSelector"] == "spec.nodeName=n1"
        namespace = request.match_info.get("namespace")
        items = [p for p in self.pods.values() if namespace in (None, p["metadata"]["namespace"])]
        assert request.query["resourceVersion"] == "0"
        if self.stale_lists:
            self.stale_lists -= 1
            items = [merge(p, {"metadata": {"uid": "predecessor"}}) for p in items]
        return web.json_response({"kind": "PodList", "items": items})

    async def patch_pod(self, request: web.Request) -> web.Response:
        assert request.content_type == "application/merge-patch+json"
        name, patch = request.match_info["pod"], await request.json()
        if name not in self.pods:
            return web.Response(status=404)
        if patch["metadata"]["uid"] != self.pods[name]["metadata"]["uid"]:
            return web.Response(status=422, text="metadata.uid: field is immutable")
        self.pods[name] = merge(self.pods[name], patch)
        return web.json_response(self.pods[name])

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self.admit])
        app.router.add_get("/api/v1/nodes/n1", self.get_node)
        app.router.add_patch("/api/v1/nodes/n1", self.patch_node)
        app.router.add_get("/api/v1/pods", self.list_pods)
        app.router.add_get("/api/v1/namespaces/{namespace}/pods", self.list_pods)
        app.router.add_patch("/api/v1/namespaces/{namespace}/pods/{pod}", self.patch_pod)
        return app


def node_body() -> dict[str, Any]:
    meta = {"name": "n1", "resourceVersion": "1", "annotations": {"theirs": "1"}}
    return {"kind": "Node", "metadata": meta, "spec": {}}


def merge(target: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        result.pop(key, None) if value is None else result.update({key: merge(result.get(key), value)})
    return result


@asynccontextmanager
async def fake_api() -> AsyncIterator[FakeApi]:
    api = FakeApi(node=node_body())
    runner = web.AppRunner(api.application(), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    api.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield api
    finally:
        await runner.cleanup()


@asynccontextmanager
async def running(
    make: Callable[[Client], Source],
    url: str,
    api: FakeApi,
    *,
    namespaces: tuple[str, ...] = (),
    now: Callable[[], datetime] = lambda: SEEN,
) -> AsyncIterator[Agent]:
    """An agent that polls fast, for the length of the block."""
    async with aiohttp.ClientSession() as session:
        client = Client(session, endpoint=url, timeout=0.2)

        async def find() -> Source:
            return make(client)

        agent = Agent(
            find,
            Api(session, Endpoint(url=api.url, token_file=api.token), node="n1", namespaces=namespaces),
            poll_seconds=0.01,
            retry_seconds=0.01,
            now=now,
        )
        work = asyncio.create_task(agent.run())
        try:
            yield agent
            assert not work.done(), "the agent has ended"
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)


def on_aws(imds: FakeImds, api: FakeApi, **options: Any) -> AbstractAsyncContextManager[Agent]:
    return running(Aws, imds.url, api, **options)


async def why(source: Source) -> str:
    """Why the first value of a metadata service cannot be read."""
    with pytest.raises(Unreadable) as refused:
        await source.watches[0].read()
    return str(refused.value)


def refusal(parse: Callable[[str], Findings], text: str) -> str:
    """Why a body cannot be read, in a short sentence."""
    with pytest.raises(Unreadable) as refused:
        parse(text)
    assert len(str(refused.value)) < 1000
    return str(refused.value)


def announced(imds: FakeImds) -> None:
    imds.announce("terminate", "2026-11-21T10:02:00Z")


def events(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """What the agent has logged since the last call."""
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


async def until(condition: Callable[[], bool], what: str) -> None:
    """Waits for a condition; the bound only ends a test that hangs."""
    try:
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"it never came to be that {what}") from None

"""The client of the API server against a small HTTP server: pauses, priorities, watches, connections."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from kubernetes.aio import client
from spottrain_operator.errors import ApiError, ApiFailure
from spottrain_operator.io import cluster as cluster_module
from spottrain_operator.io.cluster import CREATIONS, OTHERS, Cluster

from tests.support.loopback import cut, on_loopback

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]
THERE = {"metadata": {"namespace": "ml"}}


@asynccontextmanager
async def connected(answer: Answer, **settings: Any) -> AsyncIterator[Cluster]:
    """A client of a server that answers each request so."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with on_loopback(app) as url:
        cluster = Cluster(client.ApiClient(client.Configuration(host=url, **settings)))
        try:
            yield cluster
        finally:
            await cluster.close()


def refusal(status: int, **headers: str) -> web.Response:
    body = {"kind": "Status", "message": "too many requests", "code": status}
    return web.json_response(
        body, status=status, headers={k.replace("_", "-"): v for k, v in headers.items()}
    )


@pytest.mark.parametrize("status", [500, 503, 404, 429])
async def test_a_refusal_holds_nothing_else_back(status: int) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        refused = "nodes" in request.path
        return refusal(status, Retry_After="30") if refused else web.json_response({"kind": "Pod"})

    async with connected(answer) as cluster:
        with pytest.raises(ApiError, match="too many requests"):
            await cluster.patch("nodes", "n", "", {}, uid="u")
        async with asyncio.timeout(0.5):
            assert await cluster.get("pods", "p", "ml")


# --- bounds -------------------------------------------------------------------------------------------
async def test_a_deletion_at_a_notice_does_not_wait_behind_bulk_creations() -> None:
    release, busy = asyncio.Event(), 0

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal busy
        if request.method == "POST":
            busy += 1
            await release.wait()
        return web.json_response({"metadata": {}})

    async with connected(answer) as cluster:
        pods = [{"metadata": {"namespace": "ml", "name": f"p{n}"}} for n in range(100)]
        creations = [asyncio.create_task(cluster.create("pods", pod)) for pod in pods]
        async with asyncio.timeout(10):
            while busy < CREATIONS:
                await asyncio.sleep(0.01)
            await cluster.patch("pods", "q", "ml", {"metadata": {"annotations": {"a": "b"}}}, uid="u")
            await cluster.delete("pods", "q", "ml", uid="u", grace=5)
        assert busy == CREATIONS, "the others wait for a connection"
        release.set()
        await asyncio.gather(*creations)
        assert busy == 100


async def test_the_time_of_a_request_counts_from_when_it_is_sent() -> None:
    first = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path.endswith("/hangs"):
            await asyncio.sleep(5)
        if request.method == "GET":
            await first.wait()
        return web.json_response({"metadata": {}})

    async with connected(answer) as cluster:
        with pytest.raises(ApiError) as no:
            await cluster.patch("pods", "hangs", "ml", {}, uid="u", seconds=0.3)
        assert no.value.kind is ApiFailure.UNREACHABLE
        others = [asyncio.create_task(cluster.get("pods", f"p{n}", "ml")) for n in range(OTHERS)]
        await asyncio.sleep(0)
        waits = asyncio.create_task(cluster.patch("pods", "q", "ml", {}, uid="u", seconds=0.3))
        await asyncio.sleep(0.5)
        assert not waits.done(), "it waits for a place"
        first.set()
        assert await waits == {"metadata": {}}
        await asyncio.gather(*others)


async def test_connections_are_kept_and_no_more_than_the_bound_are_opened() -> None:
    peers: set[Any] = set()

    async def answer(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        peers.add(request.transport.get_extra_info("peername"))
        await asyncio.sleep(0.01)
        return web.json_response({})

    async with connected(answer) as cluster:
        for _ in range(3):
            await asyncio.gather(
                *(cluster.create("events", {"metadata": {"namespace": "ml"}}) for _ in range(60))
            )
    assert len(peers) == CREATIONS


# --- watches ------------------------------------------------------------------------------------------
def streaming(*chunks: bytes, hang: bool = False, broken: bool = False) -> Answer:
    async def answer(request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse()
        await reply.prepare(request)
        for chunk in chunks:
            await reply.write(chunk)
            await asyncio.sleep(0.01)
        if hang:
            await asyncio.sleep(60)
        if broken:
            cut(request)
        return reply

    return answer


def line(kind: str, name: str) -> bytes:
    return json.dumps({"type": kind, "object": {"metadata": {"name": name}}}).encode() + b"\n"


async def watched(answer: Answer) -> list[str]:
    async with connected(answer) as cluster:
        return [e["object"]["metadata"]["name"] async for e in cluster.watch("pods", "ml", "7")]


async def test_events_are_whole_lines_however_they_are_cut_and_of_any_length() -> None:
    long = "n" * 3_000_000
    text = line("ADDED", "a") + line("MODIFIED", long) + line("BOOKMARK", "ü")
    assert await watched(streaming(text)) == ["a", long, "ü"]
    cuts = [text[:5], text[5:40], text[40:2_000_000], text[2_000_000:]]
    assert await watched(streaming(*cuts)) == ["a", long, "ü"]
    assert await watched(streaming(line("ADDED", "a") + b'{"type": "ADD')) == ["a"], (
        "the last one was cut off"
    )


async def test_a_watch_asks_for_bookmarks_and_an_end_from_the_version_on_with_our_selector() -> None:
    asked: list[web.Request] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        asked.append(request)
        return web.Response()

    assert await watched(answer) == []
    query = dict(asked[0].query)
    assert asked[0].path == "/api/v1/namespaces/ml/pods"
    assert 300 <= int(query.pop("timeoutSeconds")) <= 600
    assert query == {
        "watch": "true",
        "allowWatchBookmarks": "true",
        "resourceVersion": "7",
        "labelSelector": cluster_module.SELECTORS["pods"],
    }


@pytest.mark.parametrize("code", [410, 500])
async def test_an_event_error_is_an_error_with_its_code(code: int) -> None:
    error = {"type": "ERROR", "object": {"kind": "Status", "code": code, "message": "too old"}}
    with pytest.raises(ApiError, match="too old") as no:
        await watched(streaming(line("ADDED", "a"), json.dumps(error).encode() + b"\n"))
    assert no.value.status == code
    assert (no.value.kind is ApiFailure.EXPIRED) == (code == 410)


async def test_a_watch_that_is_refused_is_an_error_with_its_status() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        return refusal(403) if "pods" in request.path else web.Response()

    async with connected(answer) as cluster:
        with pytest.raises(ApiError) as no:
            await anext(cluster.watch("pods", "ml", "7"))
        assert [e async for e in cluster.watch("nodes", "", "7")] == []
    assert no.value.kind is ApiFailure.FORBIDDEN


@pytest.mark.parametrize(
    "said", [b"<html>\n", b"[]\n", b'{"type": 5}\n', b'{"type": "ADDED", "object": 5}\n']
)
async def test_what_is_no_watch_counts_as_no_response(said: bytes) -> None:
    with pytest.raises(ApiError, match="WATCH /api/v1/namespaces/ml/pods: ") as no:
        await watched(streaming(said))
    assert no.value.status == 0


async def test_a_silent_watch_and_a_broken_one_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    short = aiohttp.ClientTimeout(total=None, sock_read=0.2)
    monkeypatch.setattr(cluster_module, "_WATCH_TIMEOUT", short)
    for answer in (streaming(line("ADDED", "a"), hang=True), streaming(line("ADDED", "a"), broken=True)):
        with pytest.raises(ApiError) as no:
            await watched(answer)
        assert no.value.status == 0


# --- connections --------------------------------------------------------------------------------------
async def test_a_proxy_that_the_environment_names_is_used_and_read_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []

    async def proxy(request: web.Request) -> web.StreamResponse:
        seen.append(str(request.raw_path))
        return web.json_response({"kind": "Node"})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", proxy)
    async with on_loopback(app) as url:
        monkeypatch.setenv("http_proxy", url)
        monkeypatch.setenv("no_proxy", "other.example.com")
        cluster = Cluster(client.ApiClient(client.Configuration(host="http://api.example.com:8080")))
        monkeypatch.delenv("http_proxy")
        assert await cluster.get("nodes", "n") == {"kind": "Node"}
        await cluster.close()
    assert seen == ["http://api.example.com:8080/api/v1/nodes/n"]


async def test_the_kubeconfigs_proxy_goes_first_and_no_proxy_is_heeded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("https_proxy", "http://proxy:1")
    settings = client.Configuration(host="https://10.0.0.1:6443")
    assert cluster_module._proxy(settings) == "http://proxy:1"
    settings.proxy = "http://own:2"
    assert cluster_module._proxy(settings) == "http://own:2"
    monkeypatch.setenv("no_proxy", "10.0.0.1")
    settings.proxy = None
    assert cluster_module._proxy(settings) is None


async def test_a_token_that_the_kubelet_has_replaced_is_used_and_one_that_is_missing_is_an_error(
    tmp_path: Path,
) -> None:
    tokens: list[str] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        tokens.append(request.headers["Authorization"])
        return web.json_response({})

    file = tmp_path / "token"
    file.write_text("first")

    def read(settings: client.Configuration) -> None:
        """What the official client's hook for service accounts does once a minute."""
        settings.api_key["BearerToken"] = f"bearer {file.read_text()}"

    async with connected(answer, api_key={"BearerToken": "old"}) as cluster:
        cluster._api.configuration.refresh_api_key_hook = read
        await cluster.get("nodes", "n")
        file.write_text("second")
        await cluster.get("nodes", "n")
        _ = [event async for event in cluster.watch("nodes", "", "1")]
        file.unlink()
        with pytest.raises(ApiError, match="No such file"):
            await cluster.get("nodes", "n")
    assert tokens == ["bearer first", "bearer second", "bearer second"]


async def test_a_redirect_is_not_followed_with_our_token() -> None:
    async def answer(_: web.Request) -> web.StreamResponse:
        raise web.HTTPTemporaryRedirect("http://169.254.169.254/")

    async with connected(answer) as cluster:
        with pytest.raises(ApiError) as no:
            await cluster.get("nodes", "n")
    assert no.value.status == 0

"""The client of the API server against a small HTTP server: pauses, priorities, watches, connections."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from kubernetes.aio import client
from spottrain_operator.errors import ApiError, ApiFailure
from spottrain_operator.io import cluster as cluster_module
from spottrain_operator.io.cluster import KubeCluster
from spottrain_operator.io.metrics import PAUSES
from spottrain_operator.io.throttle import (
    AT_ONCE,
    DEFAULT_PAUSE,
    LONGEST_PAUSE,
    Priority,
    Throttle,
    pause_seconds,
)

from tests.builders import NOW
from tests.support.loopback import cut, on_loopback
from tests.support.virtualtime import run_virtually

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def connected(answer: Answer, **settings: Any) -> AsyncIterator[KubeCluster]:
    """A client of a server that answers each request so."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with on_loopback(app) as url:
        cluster = KubeCluster(client.ApiClient(client.Configuration(host=url, **settings)))
        try:
            yield cluster
        finally:
            await cluster.close()


def refusal(status: int, **headers: str) -> web.Response:
    body = {"kind": "Status", "message": "too many requests", "code": status}
    return web.json_response(
        body, status=status, headers={k.replace("_", "-"): v for k, v in headers.items()}
    )


# --- Retry-After --------------------------------------------------------------------------------------
@pytest.mark.parametrize("status", [429, 503])
async def test_a_read_that_is_refused_for_now_is_sent_again_after_the_time_that_was_asked_for(
    status: int,
) -> None:
    asked: list[float] = []

    async def answer(_: web.Request) -> web.StreamResponse:
        asked.append(asyncio.get_running_loop().time())
        return refusal(status, Retry_After="1") if len(asked) == 1 else web.json_response({"items": [{}]})

    async with connected(answer) as cluster:
        assert await cluster.pod_events("ml", "u") == [{}]
    assert asked[1] - asked[0] >= 1.0


async def test_a_pause_holds_back_requests_and_watches_of_the_process_and_a_write_fails_at_once() -> None:
    asked: list[tuple[str, float]] = []
    before = PAUSES._value.get()

    async def answer(request: web.Request) -> web.StreamResponse:
        verb = "WATCH" if "watch" in request.query else request.method
        what = request.path.removeprefix("/api/v1/namespaces/ml/")
        asked.append((f"{verb} {what}", asyncio.get_running_loop().time()))
        return refusal(429, Retry_After="1") if len(asked) == 1 else web.json_response({"items": []})

    async with connected(answer) as cluster:
        with pytest.raises(ApiError, match="too many requests") as no:
            await cluster.create_event("ml", {})
        assert no.value.kind is ApiFailure.TOO_MANY_REQUESTS
        assert len(asked) == 1, "the write is planned again: what it was for may have changed"

        async def watch() -> None:
            assert [event async for event in cluster.watch("pods", "ml", "1")] == []

        await asyncio.gather(
            cluster.pod_events("ml", "u"),
            cluster.create_event("ml", {}),
            cluster.list_pods("ml", "a=b"),
            cluster.delete_pod("ml", "p", uid="u", grace=5),
            watch(),
        )
    refused = asked.pop(0)[1]
    urgent = {what for what, at in asked if at - refused < 0.9}
    assert urgent == {"DELETE pods/p", "GET pods"}, "what a notice and the next plan need"
    assert {what for what, at in asked if at - refused >= 1.0} == {"GET events", "POST events", "WATCH pods"}
    assert PAUSES._value.get() == before + 1


async def test_a_read_that_is_refused_again_and_again_fails() -> None:
    asked = 0

    async def answer(_: web.Request) -> web.StreamResponse:
        nonlocal asked
        asked += 1
        return refusal(429, Retry_After="0")

    async with connected(answer) as cluster:
        with pytest.raises(ApiError) as no:
            await cluster.get_node("n")
    assert no.value.kind is ApiFailure.TOO_MANY_REQUESTS and asked == cluster_module.READ_TRIES


@pytest.mark.parametrize("status", [500, 503, 404, 429])
async def test_other_refusals_pause_nothing(status: int) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        return refusal(status) if "nodes" in request.path else web.json_response({"kind": "Pod"})

    async with connected(answer) as cluster:
        with pytest.raises(ApiError):
            await cluster.annotate_pod("nodes", "p", uid="u", annotations={})
        async with asyncio.timeout(0.5):
            assert await cluster.get_pod("ml", "p")


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("3", 3.0),
        (" 3 ", 3.0),
        ("0", 0.0),
        ("86400", LONGEST_PAUSE),
        ("9" * 400, LONGEST_PAUSE),
        ("-5", DEFAULT_PAUSE),
        ("soon", DEFAULT_PAUSE),
        ("", DEFAULT_PAUSE),
        (format_datetime(NOW + timedelta(seconds=7), usegmt=True), 7.0),
        (format_datetime(NOW - timedelta(days=7), usegmt=True), 0.0),
        (format_datetime(datetime(9999, 12, 31, tzinfo=UTC), usegmt=True), LONGEST_PAUSE),
    ],
)
def test_retry_after_is_seconds_or_a_date_within_limits(header: str, seconds: float) -> None:
    assert pause_seconds(header, NOW) == pytest.approx(seconds)


def test_a_request_waits_once_though_the_pause_is_extended_and_an_urgent_one_half_a_second(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def play() -> None:
        throttle, loop = Throttle(), asyncio.get_running_loop()
        went: dict[Priority, list[float]] = {priority: [] for priority in Priority}

        async def one(priority: Priority) -> None:
            async with throttle.slot(priority):
                went[priority].append(loop.time())

        async def refuse() -> None:
            """Each second another request is refused."""
            for _ in range(60):
                assert throttle.hear(429, {"Retry-After": "5"})
                await asyncio.sleep(1)

        refusing = asyncio.create_task(refuse())
        await asyncio.sleep(0)
        many = AT_ONCE[Priority.URGENT]
        await asyncio.gather(*(one(priority) for priority in Priority for _ in range(many)))
        assert all(5.0 <= at <= 6.25 for at in went[Priority.BULK])
        assert len(set(went[Priority.BULK])) == many, "not all at the same instant"
        assert all(0.4 <= at <= 0.5 for at in went[Priority.URGENT])
        began = loop.time()
        await asyncio.gather(*(one(Priority.URGENT) for _ in range(10 * many)))
        assert loop.time() - began <= 0.5, "the whole gang, not each that waits for a place"
        await refusing

    run_virtually(play())
    assert len([r for r in caplog.records if "asks for a pause" in r.message]) == 1


# --- priorities -----------------------------------------------------------------------------------------
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
        creations = [asyncio.create_task(cluster.create_pod(pod)) for pod in pods]
        async with asyncio.timeout(10):
            while busy < AT_ONCE[Priority.BULK]:
                await asyncio.sleep(0.01)
            await cluster.annotate_pod("ml", "q", uid="u", annotations={"a": "b"})
            await cluster.delete_pod("ml", "q", uid="u", grace=5)
        assert busy == AT_ONCE[Priority.BULK], "the others wait for a connection"
        release.set()
        await asyncio.gather(*creations)
        assert busy == 100


async def test_the_time_of_an_annotation_counts_from_when_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module, "ANNOTATE_SECONDS", 0.3)
    first = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path.endswith("/hangs"):
            await asyncio.sleep(5)
        if request.method == "GET":
            await first.wait()
        return web.json_response({"metadata": {}})

    async with connected(answer) as cluster:
        with pytest.raises(ApiError) as no:
            await cluster.annotate_pod("ml", "hangs", uid="u", annotations={})
        assert no.value.kind is ApiFailure.UNREACHABLE
        others = [
            asyncio.create_task(cluster.get_pod("ml", f"p{n}")) for n in range(AT_ONCE[Priority.URGENT])
        ]
        await asyncio.sleep(0)
        waits = asyncio.create_task(cluster.annotate_pod("ml", "q", uid="u", annotations={}))
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
            await asyncio.gather(*(cluster.create_event("ml", {}) for _ in range(60)))
    assert len(peers) == AT_ONCE[Priority.BULK]


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


async def test_a_watch_that_is_refused_is_an_error_with_its_status_and_was_never_open() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        return refusal(403) if "pods" in request.path else web.Response()

    opened: list[str] = []
    async with connected(answer) as cluster:
        with pytest.raises(ApiError) as no:
            await anext(cluster.watch("pods", "ml", "7", lambda: opened.append("pods")))
        assert [e async for e in cluster.watch("nodes", "", "7", lambda: opened.append("nodes"))] == []
    assert no.value.kind is ApiFailure.FORBIDDEN and opened == ["nodes"]


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
        cluster = KubeCluster(client.ApiClient(client.Configuration(host="http://api.example.com:8080")))
        monkeypatch.delenv("http_proxy")
        assert await cluster.get_node("n") == {"kind": "Node"}
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
        await cluster.get_node("n")
        file.write_text("second")
        await cluster.get_node("n")
        _ = [event async for event in cluster.watch("nodes", "", "1")]
        file.unlink()
        with pytest.raises(ApiError, match="No such file"):
            await cluster.get_node("n")
    assert tokens == ["bearer first", "bearer second", "bearer second"]


async def test_a_redirect_is_not_followed_with_our_token() -> None:
    async def answer(_: web.Request) -> web.StreamResponse:
        raise web.HTTPTemporaryRedirect("http://169.254.169.254/")

    async with connected(answer) as cluster:
        with pytest.raises(ApiError) as no:
            await cluster.get_node("n")
    assert no.value.status == 0

"""The informer and its client on a real API server: watches that end, expire and freeze; LISTs in pages."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from urllib.parse import urlsplit

import aiohttp
import pytest
from kubernetes.aio import client, config
from localcluster.apiserver import ApiServer, api_server
from spottrain_operator.api.observed import PodView
from spottrain_operator.control.caches import Caches
from spottrain_operator.control.informer import NODES, PODS, Informer, Why
from spottrain_operator.errors import ApiError, ApiFailure
from spottrain_operator.io import cluster as cluster_module
from spottrain_operator.io.cluster import Cluster, Json, Page
from spottrain_operator.io.metrics import RELISTS
from spottrain_operator.names import (
    API_VERSION,
    ATTEMPT_LABEL,
    JOB_LABEL,
    JOB_UID_LABEL,
    KIND,
    POD_SELECTOR,
    pod_name,
)

from tests.api.kube import Kube
from tests.support.connections import close_server

SECONDS = 30.0
"""Bound of every wait."""


async def until(what: str, look: Callable[[], object]) -> None:
    try:
        async with asyncio.timeout(SECONDS):
            while not look():
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"waited {SECONDS:.0f} s in vain for {what}") from None


class Staged(Cluster):
    """The client, with what a test lets happen between two steps."""

    gate: asyncio.Event
    """Watches begin when it is set."""
    old_version: str = ""
    """The next watch begins there instead."""
    between: asyncio.Event
    """The next page of a LIST is asked for when it is set."""
    paging = 0
    watches = 0

    def __init__(self, api: client.ApiClient) -> None:
        super().__init__(api)
        self.gate, self.between = asyncio.Event(), asyncio.Event()
        self.gate.set()
        self.between.set()

    async def pages(self, kind: str, namespace: str) -> AsyncIterator[Page]:
        async for page in super().pages(kind, namespace):
            yield page
            self.paging += 1
            await self.between.wait()

    async def next_watch(self) -> None:
        watches = self.watches
        await until("another watch", lambda: self.watches > watches)

    async def watch(self, kind: str, namespace: str, version: str) -> AsyncGenerator[Json]:
        await self.gate.wait()
        self.watches += 1
        version, self.old_version = self.old_version or version, ""
        async with contextlib.aclosing(super().watch(kind, namespace, version)) as events:
            async for event in events:
                yield event


@contextlib.asynccontextmanager
async def connected(server: ApiServer, url: str = "") -> AsyncIterator[Staged]:
    settings = client.Configuration()
    path = str(server.kubeconfig)
    await config.load_kube_config(path, client_configuration=settings)  # type: ignore[no-untyped-call]
    settings.host = url or settings.host
    cluster = Staged(client.ApiClient(settings))
    try:
        yield cluster
    finally:
        await cluster.close()
        await asyncio.sleep(0.05)  # the event loop closes TLS connections later


class Followed:
    """An informer of a namespace's pods that runs."""

    def __init__(self, cluster: Staged, kube: Kube, namespace: str) -> None:
        self.cluster, self.kube, self.namespace = cluster, kube, namespace
        self.cache = Caches().pods
        self.changed: list[str] = []
        self.informer: Informer[str, PodView] = Informer(
            PODS,
            cluster=cluster,
            cache=self.cache,
            changed=lambda pod, _: self.changed.append(pod.job.name),
            namespace=namespace,
        )

    @property
    def names(self) -> set[str]:
        """Of the jobs, each of which has one pod."""
        return {pod.job.name for pod in self.cache}

    def create(self, name: str) -> None:
        body = {"metadata": metadata(name), "spec": {"containers": [{"name": "trainer", "image": "x"}]}}
        self.kube.call("POST", f"/api/v1/namespaces/{self.namespace}/pods", body)

    def delete(self, name: str) -> None:
        options = {"kind": "DeleteOptions", "apiVersion": "v1", "gracePeriodSeconds": 0}
        path = f"/api/v1/namespaces/{self.namespace}/pods/{pod_name(name, 'u', 1)}"
        self.kube.call("DELETE", path, options)

    async def sees(self, *names: str) -> None:
        await until(f"the cache to have {names}", lambda: self.names == set(names))


@contextlib.asynccontextmanager
async def following(cluster: Staged, kube: Kube, namespace: str) -> AsyncIterator[Followed]:
    followed = Followed(cluster, kube, namespace)
    task = asyncio.create_task(followed.informer.run())
    try:
        await until("the first LIST", followed.informer.synced.is_set)
        yield followed
        assert not task.done(), task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def metadata(name: str) -> Json:
    labels = dict(label.split("=") for label in POD_SELECTOR.split(","))
    labels |= {ATTEMPT_LABEL: "1", JOB_LABEL: name, JOB_UID_LABEL: "u"}
    owner = {"apiVersion": API_VERSION, "kind": KIND, "name": name, "uid": "u", "controller": True}
    return {"name": pod_name(name, "u", 1), "labels": labels, "ownerReferences": [owner]}


async def is_expired(cluster: Staged, namespace: str, version: str) -> bool:
    try:
        async with (
            asyncio.timeout(1),
            contextlib.aclosing(cluster.watch("pods", namespace, version)) as events,
        ):
            async for _ in events:
                pass
    except TimeoutError:
        return False
    except ApiError as error:
        return error.kind is ApiFailure.EXPIRED
    return False


def relists(why: Why) -> float:
    return RELISTS.labels("pods", why)._value.get()  # type: ignore[no-any-return]


async def test_events_arrive_and_unlabelled_pods_do_not(
    server: ApiServer, kube: Kube, namespace: str
) -> None:
    async with connected(server) as cluster, following(cluster, kube, namespace) as followed:
        assert followed.names == set()
        followed.create("a")
        body = {"metadata": {"name": "foreign"}, "spec": {"containers": [{"name": "c", "image": "x"}]}}
        kube.call("POST", f"/api/v1/namespaces/{namespace}/pods", body)
        followed.create("b")
        await followed.sees("a", "b")
        followed.delete("a")
        await followed.sees("b")
        assert followed.changed[-1] == "a", "its job is woken"


async def test_a_watch_that_the_api_server_ends_goes_on_without_a_list(
    server: ApiServer, kube: Kube, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_module, "WATCH_SECONDS", (1, 1))
    async with connected(server) as cluster, following(cluster, kube, namespace) as followed:
        lists = cluster.paging
        for number in range(3):
            followed.create(f"p{number}")
            await cluster.next_watch()
        await followed.sees("p0", "p1", "p2")
        assert cluster.paging == lists


@pytest.fixture(scope="module")
def forgetful() -> Iterator[ApiServer]:
    """An API server that has etcd drop old versions after a second, instead of after five minutes."""
    with api_server(flags=("--etcd-compaction-interval=1s", "--watch-cache=false")) as running:
        yield running


async def test_a_version_that_is_too_old_leads_to_a_list_that_drops_what_is_gone(
    forgetful: ApiServer,
) -> None:
    kube, namespace = Kube.from_kubeconfig(forgetful.kubeconfig), "old"
    kube.make_namespace(namespace)
    async with connected(forgetful) as cluster:
        before = relists(Why.EXPIRED)
        async with asyncio.timeout(SECONDS):
            while not await is_expired(cluster, namespace, "1"):
                await asyncio.sleep(0.2)
        cluster.gate.clear()
        async with following(cluster, kube, namespace) as followed:
            followed.create("a")
            cluster.gate.set()
            await followed.sees("a")
        # The same cache, while nothing watches.
        cluster.gate.clear()
        task = asyncio.create_task(followed.informer.run())
        followed.create("b")
        followed.delete("a")
        cluster.old_version = "1"
        cluster.gate.set()
        await followed.sees("b")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert relists(Why.EXPIRED) == before + 1
        assert followed.changed[-1] == "a" or followed.changed[-2] == "a", "its job is woken"


async def test_a_pod_that_is_deleted_during_a_list_in_pages_does_not_come_back(
    server: ApiServer, kube: Kube, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_module, "PAGE", 1)
    async with connected(server) as cluster, following(cluster, kube, namespace) as followed:
        for name in "abc":
            followed.create(name)
        await followed.sees("a", "b", "c")
        cluster.between.clear()
        pages = cluster.paging
        listing = asyncio.create_task(followed.informer.relist())
        await until("the first page", lambda: cluster.paging > pages)
        followed.delete("c")
        await followed.sees("a", "b")
        cluster.between.set()
        async with asyncio.timeout(SECONDS):
            await listing
        assert cluster.paging == pages + 3, "the last page still had the pod: a LIST is one snapshot"
        assert followed.names == {"a", "b"}


async def test_a_connection_that_is_dead_is_noticed(
    server: ApiServer, kube: Kube, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proxy accepts what is sent and forwards nothing, so TCP itself has nothing to complain about."""
    silence = aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=2)
    monkeypatch.setattr(cluster_module, "_WATCH_TIMEOUT", silence)
    async with (
        Pipe(server.url) as pipe,
        connected(server, pipe.url) as cluster,
        following(cluster, kube, namespace) as followed,
    ):
        followed.create("a")
        await followed.sees("a")
        pipe.freeze()
        followed.create("b")
        await followed.sees("a", "b")
        assert pipe.opened >= 2


@pytest.mark.heavy  # the API server sends one a minute
async def test_an_idle_watch_gets_bookmarks_within_the_limit_of_silence(
    server: ApiServer, kube: Kube, namespace: str
) -> None:
    """Else each quiet watch would be taken for dead."""
    async with connected(server) as cluster, following(cluster, kube, namespace) as followed:
        events = followed.informer._events
        async with asyncio.timeout(cluster_module.SILENCE_SECONDS):
            while followed.informer._events == events:
                await asyncio.sleep(0.5)
        assert followed.names == set()


async def test_a_heartbeat_of_a_node_is_no_change(server: ApiServer, kube: Kube) -> None:
    caches, changed = Caches(), list[str]()
    async with connected(server) as cluster:
        informer = Informer(
            NODES, cluster=cluster, cache=caches.nodes, changed=lambda node, _: changed.append(node.name)
        )
        task = asyncio.create_task(informer.run())
        await until("the first LIST", informer.synced.is_set)
        kube.call("POST", "/api/v1/nodes", {"metadata": {"name": "beating"}})
        for second in range(3):
            beat = f"2026-03-01T11:50:0{second}Z"
            condition = {"type": "Ready", "status": "True", "lastHeartbeatTime": beat}
            patched = kube.call(
                "PATCH",
                "/api/v1/nodes/beating/status",
                {"status": {"conditions": [condition]}},
                kind="application/strategic-merge-patch+json",
            )
        last = int(patched["metadata"]["resourceVersion"])

        def seen() -> bool:
            node = caches.nodes.get("beating")
            return node is not None and node.resource_version >= last

        await until("the last heartbeat", seen)
        assert changed.count("beating") <= 2, "created, and Ready"
        kube.call("DELETE", "/api/v1/nodes/beating")
        await until("the deletion", lambda: caches.nodes.get("beating") is None)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class Pipe:
    """A TCP proxy. What it had open when it froze stays open, and says nothing more."""

    def __init__(self, target: str) -> None:
        self._target = urlsplit(target)
        self.opened = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> Pipe:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"https://127.0.0.1:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await close_server(self._server)
        self.freeze()
        for writer in self._writers:
            writer.transport.abort()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    def freeze(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.opened += 1
        up_reader, up_writer = await asyncio.open_connection(self._target.hostname, self._target.port)
        self._writers += [writer, up_writer]
        for source, sink in ((reader, up_writer), (up_reader, writer)):
            self._tasks.add(asyncio.create_task(self._forward(source, sink)))

    async def _forward(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(65536):
                sink.write(data)
                await sink.drain()
            sink.close()

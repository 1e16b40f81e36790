"""The operator's client of the API server.

Arguments and results are plain dicts: the client's pydantic models cost memory and time on every object.
Login, renewal of tokens, and TLS are the official client's. The connections are this module's: requests and
watches share one pool, and the proxy is read from the environment once instead of for each request.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, Protocol
from urllib.parse import quote, urlencode, urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
from kubernetes.aio import client, config
from kubernetes.aio.config.incluster_config import InClusterConfigLoader

from spottrain_operator import names
from spottrain_operator.errors import ApiError, ApiFailure, NotLeading
from spottrain_operator.io.metrics import REQUESTS
from spottrain_operator.io.throttle import Priority, Throttle

Json = dict[str, Any]

APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
JSON = "application/json"
SELECTORS = {
    "pods": names.POD_SELECTOR,
    "deployments": names.OPERATOR_SELECTOR,
    "workloads": names.OURS_SELECTOR,
}
CLUSTER_WIDE: Final = frozenset({"nodes", names.NODE_POOLS})
PAGE = 500
SHOWN = 100
"""Maximum number of bytes of an unusable response in an error message."""
TIMEOUT = 30.0
"""Seconds for one request; after a timeout the work queue retries."""
ANNOTATE_SECONDS: Final = 1.0
"""The same for an annotation of a pod: a DELETE waits for it, and a webhook may take half a minute."""
READ_TRIES: Final = 4
"""Times that a read is sent while the API server asks to try later. A write fails: it is planned again."""
CONNECT_SECONDS: Final = 10.0
KEPT_SECONDS: Final = 60.0
"""An unused connection is closed after this time; the API server closes it after 90 s."""
BUFFER: Final = 2**18
"""Bytes of a watch that are read ahead; what they hold is processed before other tasks run."""
WATCH_SECONDS: Final = (300, 600)
"""The API server ends a watch after a random time in this range, so that not all are restarted at once."""
SILENCE_SECONDS: Final = 150.0
"""A watch without events and bookmarks for so long is dead. Bookmarks come every 60 to 75 s; from a busy
API server later (more than 90 s were seen)."""
DEAD_PEER_SECONDS: Final = 30
"""The kernel gives a connection up when the other side has confirmed nothing for so long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """A part of a LIST."""

    items: list[Json]
    version: str
    """The resourceVersion of the whole LIST, which is one snapshot; a watch may continue from there."""


class Cluster(Protocol):
    """Requests to Kubernetes.

    Every method raises ApiError, whose `kind` says why, on a failure. Those that write raise NotLeading, and
    send nothing, where this process may not write.
    """

    async def get_job(self, namespace: str, name: str) -> Json | None: ...

    async def get_node(self, name: str) -> Json | None: ...

    async def get_namespace(self, name: str) -> Json | None: ...

    async def get_pod(self, namespace: str, name: str) -> Json | None: ...

    async def get_claim(self, namespace: str, name: str) -> Json | None: ...

    async def get_config_map(self, namespace: str, name: str) -> Json | None: ...

    async def write_config_map(self, manifest: Json) -> None:
        """Creates a ConfigMap of ours, or replaces what it has."""

    async def get_custom(self, kind: str, name: str, namespace: str = "") -> Json | None:
        """Returns an object of `group/version/plural`."""

    async def list_pods(self, namespace: str, selector: str) -> list[Json]: ...

    async def pod_events(self, namespace: str, uid: str) -> list[Json]:
        """Returns the Events about one pod."""

    def every(self, kind: str, namespaces: tuple[str, ...]) -> AsyncIterator[Json]:
        """Lists all jobs, our pods, nodes, Karpenter's NodePools, or operators (deployments), in pages."""

    def pages(self, kind: str, namespace: str) -> AsyncIterator[Page]:
        """Lists one collection; namespace "" is the whole cluster.

        `kind`: the plural, of what is not ours and not in the core group as `group/version/plural`.
        """

    def watch(
        self, kind: str, namespace: str, version: str, opened: Callable[[], None] = lambda: None
    ) -> AsyncGenerator[Json]:
        """Yields the events after this version, and bookmarks, until the API server ends the watch.

        Calls `opened` once the API server has accepted it, which a pause may delay.
        Raises ApiError, also for an event ERROR. EXPIRED: a new LIST is needed.
        """

    async def create_pod(self, manifest: Json, *, dry_run: bool = False) -> Json: ...

    async def delete_pod(
        self, namespace: str, name: str, *, uid: str, grace: int | None, resource_version: int | None = None
    ) -> None:
        """Deletes a pod. A conflict: it is another pod, or it has changed since that version."""

    async def annotate_pod(self, namespace: str, name: str, *, uid: str, annotations: Json) -> Json:
        """Annotates a pod, within ANNOTATE_SECONDS from when it is sent."""

    async def release_pod(self, namespace: str, name: str, *, uid: str) -> None:
        """Removes our finalizer."""

    async def apply_status(
        self, namespace: str, name: str, *, uid: str, resource_version: int, status: Json
    ) -> Json: ...

    async def create(self, kind: str, manifest: Json, *, group: str = "") -> Json:
        """Creates an object. `kind` is the plural; `group` includes the version, "" is the core group."""

    async def patch_custom_status(self, kind: str, namespace: str, name: str, patch: Json) -> Json:
        """Changes the status of an object of `group/version/plural` by a merge patch."""

    async def delete_custom(self, kind: str, namespace: str, name: str, *, uid: str) -> None: ...

    async def hold_job(self, namespace: str, name: str, *, uid: str, on: bool) -> Json:
        """Adds our finalizer to the job's object, or removes it."""

    async def delete_job(self, namespace: str, name: str, *, uid: str) -> None: ...

    async def create_event(self, namespace: str, event: Json) -> None: ...

    async def served(self, group: str) -> Json | None:
        """Returns the API server's discovery document of a group, or of one version (`group/version`)."""


class KubeCluster:
    """`Cluster` at an API server. Must be created in a running event loop."""

    def __init__(
        self,
        api: client.ApiClient,
        *,
        write_timeout: float = TIMEOUT,
        time_to_write: Callable[[], float] = lambda: math.inf,
    ) -> None:
        self._api = api
        self._write_timeout, self._time_to_write = write_timeout, time_to_write
        self._throttle = Throttle()
        self._session = _session(api)
        self._proxy = _proxy(api.configuration)

    @classmethod
    async def connect(
        cls, *, write_timeout: float = TIMEOUT, time_to_write: Callable[[], float] = lambda: math.inf
    ) -> KubeCluster:
        """Connects with the service account in a pod, with $KUBECONFIG where there is no account.

        Args:
            write_timeout: Maximum number of seconds of one write.
            time_to_write: Returns for how many seconds this process may still write. Asked right before each
                write, which ends by then; where it is 0, nothing is sent.
        """
        try:
            account = names.service_account(os.environ)
            loader = InClusterConfigLoader(str(account / "token"), str(account / "ca.crt"))  # type: ignore[no-untyped-call]
            loader.load_and_set()  # type: ignore[no-untyped-call]
        except config.ConfigException:
            await config.load_kube_config()  # type: ignore[no-untyped-call]
        return cls(client.ApiClient(), write_timeout=write_timeout, time_to_write=time_to_write)

    async def close(self) -> None:
        await self._session.close()
        await self._api.close()  # type: ignore[no-untyped-call]

    # --- reads ---
    async def get_job(self, namespace: str, name: str) -> Json | None:
        return await self._get(_job(namespace, name))

    async def get_node(self, name: str) -> Json | None:
        return await self._get(f"/api/v1/nodes/{name}")

    async def get_namespace(self, name: str) -> Json | None:
        return await self._get(f"/api/v1/namespaces/{name}")

    async def get_pod(self, namespace: str, name: str) -> Json | None:
        return await self._get(_pods(namespace, name))

    async def get_claim(self, namespace: str, name: str) -> Json | None:
        # A template may contain any claim name: the API server accepts the pod.
        return await self._get(f"/api/v1/namespaces/{namespace}/{names.CLAIMS}/{quote(name, safe='')}")

    async def get_config_map(self, namespace: str, name: str) -> Json | None:
        return await self._get(f"/api/v1/namespaces/{namespace}/configmaps/{name}")

    async def get_custom(self, kind: str, name: str, namespace: str = "") -> Json | None:
        return await self._get(f"{_collection(kind, namespace)}/{quote(name, safe='')}")

    async def list_pods(self, namespace: str, selector: str) -> list[Json]:
        items, _ = await self._page(_pods(namespace), {"labelSelector": selector}, Priority.URGENT)
        return items

    async def pod_events(self, namespace: str, uid: str) -> list[Json]:
        query = {"fieldSelector": f"involvedObject.uid={uid}", "limit": str(PAGE)}
        items, _ = await self._page(f"/api/v1/namespaces/{namespace}/events", query)
        return items

    async def every(self, kind: str, namespaces: tuple[str, ...]) -> AsyncIterator[Json]:
        everywhere = kind in CLUSTER_WIDE or not namespaces
        for namespace in ("",) if everywhere else namespaces:
            async for page in self.pages(kind, namespace):
                for item in page.items:
                    yield item

    async def pages(self, kind: str, namespace: str) -> AsyncIterator[Page]:
        path, query = _collection(kind, namespace), {"limit": str(PAGE), **_selected(kind)}
        while True:
            items, meta = await self._page(path, query)
            yield Page(items=items, version=meta.get("resourceVersion") or "")
            query["continue"] = meta.get("continue") or ""
            if not query["continue"]:
                break

    async def watch(
        self, kind: str, namespace: str, version: str, opened: Callable[[], None] = lambda: None
    ) -> AsyncGenerator[Json]:
        path = _collection(kind, namespace)
        query = {"watch": "true", "allowWatchBookmarks": "true", "resourceVersion": version}
        query |= {"timeoutSeconds": str(random.randint(*WATCH_SECONDS)), **_selected(kind)}
        await self._throttle.resume()
        with _failures("WATCH", path):
            async with self._reply("GET", path, None, query=query) as reply:
                REQUESTS.labels("WATCH", reply.status).inc()
                self._throttle.hear(reply.status, reply.headers)
                if reply.status >= 300:
                    answer = _parsed(reply.status, await reply.read())
                    raise _refusal("WATCH", path, reply.status, answer)
                opened()
                async for line in _lines(reply.content):
                    yield _event(line)

    async def served(self, group: str) -> Json | None:
        return await self._get(f"/apis/{group}")

    # --- writes ---
    async def create_pod(self, manifest: Json, *, dry_run: bool = False) -> Json:
        query = {"fieldManager": names.FIELD_MANAGER, "fieldValidation": "Strict"}
        if dry_run:
            query["dryRun"] = "All"
        path = _pods(manifest["metadata"]["namespace"])
        return await self._call("POST", path, query=query, body=manifest, priority=Priority.BULK)

    async def write_config_map(self, manifest: Json) -> None:
        meta = manifest["metadata"]
        path = f"/api/v1/namespaces/{meta['namespace']}/configmaps/{meta['name']}"
        await self._patch(path, manifest, APPLY, {"force": "true"}, priority=Priority.BULK)

    async def delete_pod(
        self, namespace: str, name: str, *, uid: str, grace: int | None, resource_version: int | None = None
    ) -> None:
        conditions = {"uid": uid}
        if resource_version is not None:
            conditions["resourceVersion"] = str(resource_version)
        options: Json = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": conditions}
        if grace is not None:
            options["gracePeriodSeconds"] = grace
        await self._call("DELETE", _pods(namespace, name), body=options)

    async def annotate_pod(self, namespace: str, name: str, *, uid: str, annotations: Json) -> Json:
        body = {"metadata": {"uid": uid, "annotations": annotations}}
        return await self._patch(_pods(namespace, name), body, MERGE, most=ANNOTATE_SECONDS)

    async def release_pod(self, namespace: str, name: str, *, uid: str) -> None:
        body = {"metadata": {"uid": uid, "$deleteFromPrimitiveList/finalizers": [names.OUTCOME_FINALIZER]}}
        await self._patch(_pods(namespace, name), body, STRATEGIC, priority=Priority.BULK)

    async def apply_status(
        self, namespace: str, name: str, *, uid: str, resource_version: int, status: Json
    ) -> Json:
        meta = {"name": name, "namespace": namespace, "uid": uid, "resourceVersion": str(resource_version)}
        body = {"apiVersion": names.API_VERSION, "kind": names.KIND, "metadata": meta, "status": status}
        return await self._patch(f"{_job(namespace, name)}/status", body, APPLY, {"force": "true"})

    async def hold_job(self, namespace: str, name: str, *, uid: str, on: bool) -> Json:
        raw = await self._call("GET", _job(namespace, name))
        finalizers = [f for f in raw["metadata"].get("finalizers", ()) if f != names.CHECKPOINTS_FINALIZER]
        meta = {"uid": uid, "resourceVersion": raw["metadata"]["resourceVersion"]}
        finalizers += [names.CHECKPOINTS_FINALIZER] if on else []
        return await self._patch(
            _job(namespace, name), {"metadata": meta | {"finalizers": finalizers}}, MERGE
        )

    async def create(self, kind: str, manifest: Json, *, group: str = "") -> Json:
        root = f"/apis/{group}" if group else "/api/v1"
        path = f"{root}/namespaces/{manifest['metadata']['namespace']}/{kind}"
        query = {"fieldManager": names.FIELD_MANAGER, "fieldValidation": "Strict"}
        return await self._call("POST", path, query=query, body=manifest, priority=Priority.BULK)

    async def patch_custom_status(self, kind: str, namespace: str, name: str, patch: Json) -> Json:
        return await self._patch(f"{_collection(kind, namespace)}/{name}/status", patch, MERGE)

    async def delete_custom(self, kind: str, namespace: str, name: str, *, uid: str) -> None:
        options: Json = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}}
        await self._call("DELETE", f"{_collection(kind, namespace)}/{name}", body=options)

    async def delete_job(self, namespace: str, name: str, *, uid: str) -> None:
        options: Json = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}}
        await self._call("DELETE", _job(namespace, name), body=options | {"propagationPolicy": "Background"})

    async def create_event(self, namespace: str, event: Json) -> None:
        await self._call("POST", f"/api/v1/namespaces/{namespace}/events", body=event, priority=Priority.BULK)

    # --- the Lease ---
    async def get_lease(self, namespace: str, name: str, *, seconds: float) -> Json:
        return await self._call("GET", _lease(namespace, name), seconds=seconds)

    async def create_lease(self, namespace: str, lease: Json, *, seconds: float) -> Json:
        return await self._call("POST", _lease(namespace), body=lease, seconds=seconds)

    async def replace_lease(self, namespace: str, name: str, lease: Json, *, seconds: float) -> Json:
        return await self._call("PUT", _lease(namespace, name), body=lease, seconds=seconds)

    # --- one request ---
    async def _patch(
        self,
        path: str,
        body: Json,
        kind: str,
        query: dict[str, str] | None = None,
        priority: Priority = Priority.URGENT,
        most: float = TIMEOUT,
    ) -> Json:
        query = {"fieldManager": names.FIELD_MANAGER, **(query or {})}
        return await self._call(
            "PATCH", path, query=query, body=body, kind=kind, priority=priority, most=most
        )

    async def _page(
        self, path: str, query: dict[str, str], priority: Priority = Priority.BULK
    ) -> tuple[list[Json], Json]:
        """Returns one page of a LIST, and its metadata."""
        page = await self._call("GET", path, query=query, priority=priority)
        items = page["items"] or [] if "items" in page else None
        if not isinstance(items, list):
            raise ApiError(0, f"GET {path}: the response is not a list of objects")
        return items, page.get("metadata") or {}

    async def _get(self, path: str) -> Json | None:
        try:
            return await self._call("GET", path)
        except ApiError as error:
            if error.kind is ApiFailure.NOT_FOUND:
                return None
            raise

    async def _call(
        self,
        verb: str,
        path: str,
        *,
        query: dict[str, str] | None = None,
        body: Json | None = None,
        kind: str = JSON,
        seconds: float | None = None,
        most: float = TIMEOUT,
        priority: Priority = Priority.URGENT,
    ) -> Json:
        """Returns the parsed response.

        Args:
            seconds: Limit of a request that is never held back.
            most: Limit of one that is, from when it is sent.
        """
        held_back = seconds is None
        limit = most if seconds is None else seconds
        tries = READ_TRIES if verb == "GET" and held_back else 1
        while True:
            tries -= 1
            async with self._throttle.slot(priority) if held_back else nullcontext():
                with _failures(verb, path):
                    async with self._reply(verb, path, limit, query=query, body=body, kind=kind) as reply:
                        answer = _parsed(reply.status, await reply.read())
                REQUESTS.labels(verb, reply.status).inc()
                paused = held_back and self._throttle.hear(reply.status, reply.headers)
            if reply.status < 300:
                return answer
            if not (paused and tries):
                raise _refusal(verb, path, reply.status, answer)

    @asynccontextmanager
    async def _reply(
        self,
        verb: str,
        path: str,
        limit: float | None,
        *,
        query: dict[str, str] | None = None,
        body: Json | None = None,
        kind: str = JSON,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Sends a request once, whatever the answer is. `limit` is in seconds; None: it is a watch."""
        settings = self._api.configuration
        headers = {"Accept": JSON, "Content-Type": kind, "User-Agent": names.FIELD_MANAGER}
        await self._api.update_params_for_auth(headers, [], ["BearerToken"], path, verb, body)
        timeout = _WATCH_TIMEOUT
        if limit is not None:
            if verb != "GET":
                limit = min(limit, self._write_timeout, self._time_to_write())
                if limit <= 0:
                    raise NotLeading(f"{verb} {path} is not sent: another process may be the leader")
            timeout = aiohttp.ClientTimeout(total=limit, sock_connect=CONNECT_SECONDS)
        async with self._session.request(
            verb,
            f"{settings.host}{path}{'?' + urlencode(query) if query else ''}",
            headers=headers,
            data=None if body is None else json.dumps(body),
            timeout=timeout,
            proxy=self._proxy,
            proxy_headers=settings.proxy_headers,
            server_hostname=settings.tls_server_name,
            allow_redirects=False,
        ) as reply:
            yield reply


_WATCH_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=SILENCE_SECONDS)


# --- connections --------------------------------------------------------------------------------------
def _session(api: client.ApiClient) -> aiohttp.ClientSession:
    """Returns a session that reads nothing from the environment; its requests are bounded by the throttle."""
    rest: Any = api.rest_client
    connector = aiohttp.TCPConnector(
        limit=0, ssl=rest.ssl_context, keepalive_timeout=KEPT_SECONDS, socket_factory=_socket
    )
    return aiohttp.ClientSession(
        connector=connector, cookie_jar=aiohttp.DummyCookieJar(), read_bufsize=BUFFER, trust_env=False
    )


def _socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """Returns a socket whose connection the kernel ends when the other side is gone without a word."""
    made = socket.socket(*address[:3])
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _TCP_OPTIONS.items():
        if (option := getattr(socket, name, None)) is not None:  # not every system has all of them
            made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made


_TCP_OPTIONS: Final = {
    "TCP_KEEPIDLE": DEAD_PEER_SECONDS // 2,
    "TCP_KEEPINTVL": DEAD_PEER_SECONDS // 6,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": DEAD_PEER_SECONDS * 1000,
}


def _proxy(settings: client.Configuration) -> str | None:
    """Returns the kubeconfig's proxy, else that of HTTPS_PROXY unless NO_PROXY names the API server."""
    if settings.proxy:
        return str(settings.proxy)
    url = urlsplit(settings.host)
    return None if proxy_bypass(url.netloc) else getproxies().get(url.scheme)


@contextmanager
def _failures(verb: str, path: str) -> Iterator[None]:
    """Raises ApiError, with status 0, where there is no response or one that is not the API server's.

    ConfigException: the token cannot be read.
    """
    try:
        yield
    except (aiohttp.ClientError, config.ConfigException, OSError, RecursionError, ValueError) as error:
        REQUESTS.labels(verb, "none").inc()
        raise ApiError(0, f"{verb} {path}: {type(error).__name__} {error}") from error


def _refusal(verb: str, path: str, status: int, answer: Json) -> ApiError:
    words = answer.get("message") or f"{verb} {path}: status {status}"
    return ApiError(status, words, answer.get("details"))


# --- responses ----------------------------------------------------------------------------------------
async def _lines(stream: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yields whole lines. What follows the last one when the stream ends was cut off, and is dropped."""
    rest = b""
    async for chunk in stream.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line
        await asyncio.sleep(0)  # a stream that is always ahead would never let other tasks run


def _event(line: bytes) -> Json:
    """Parses a line of a watch. Raises ApiError for an event ERROR, ValueError where it is no event."""
    event = _parsed(200, line)
    kind, about = event.get("type"), event.get("object")
    if not isinstance(kind, str) or not isinstance(about, dict):
        raise ValueError(f"it is not an event of a watch: {line[:SHOWN]!r}")
    if kind == "ERROR":
        words = f"the watch has ended: {about.get('message') or about.get('reason')}"
        raise ApiError(int(about.get("code") or 500), words, about.get("details"))
    return event


def _parsed(status: int, body: bytes) -> Json:
    """Parses a response. Raises ValueError where it is not the API server's, such as a load balancer's page.

    RecursionError: its JSON is nested too deeply.
    The API server itself rejects in plain text what it does not serve, such as a kind without its CRD.
    """
    try:
        answer = json.loads(body or b"{}")
    except ValueError:
        if not 400 <= status < 500:
            raise
        answer = None
    if not isinstance(answer, dict) and status < 400:
        raise ValueError(f"the response is not a JSON object but {body[:SHOWN]!r}")
    return answer if isinstance(answer, dict) else {}


def _pods(namespace: str, name: str = "") -> str:
    return f"/api/v1/namespaces/{namespace}/pods" + (f"/{name}" if name else "")


def _job(namespace: str, name: str) -> str:
    return f"/apis/{names.API_VERSION}/namespaces/{namespace}/{names.PLURAL}/{name}"


def _lease(namespace: str, name: str = "") -> str:
    return f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases" + (f"/{name}" if name else "")


def _collection(kind: str, namespace: str) -> str:
    """Returns the path of a collection: of a namespace, or of the whole cluster."""
    roots = {
        names.PLURAL: f"/apis/{names.API_VERSION}",
        names.NODE_POOLS: "/apis/karpenter.sh/v1",
        "deployments": "/apis/apps/v1",
    }
    version, _, plural = kind.rpartition("/")
    root = f"/apis/{version}" if version else roots.get(kind, "/api/v1")
    kind = plural
    return f"{root}/namespaces/{namespace}/{kind}" if namespace else f"{root}/{kind}"


def _selected(kind: str) -> dict[str, str]:
    selector = SELECTORS.get(kind.rpartition("/")[2])
    return {"labelSelector": selector} if selector else {}

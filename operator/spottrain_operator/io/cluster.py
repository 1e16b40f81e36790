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
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote, urlencode, urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
from kubernetes.aio import client, config
from kubernetes.aio.config.incluster_config import InClusterConfigLoader

from spottrain_operator import names
from spottrain_operator.errors import ApiError, ApiFailure, NotLeading
from spottrain_operator.io.metrics import REQUESTS

Json = dict[str, Any]
Objects = list[Json]

APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
JSON = "application/json"
GROUPS: Final = {
    names.PLURAL: names.API_VERSION,
    names.NODE_POOLS: "karpenter.sh/v1",
    "deployments": "apps/v1",
    "leases": "coordination.k8s.io/v1",
}
"""Groups of the kinds that are named by their plural alone, of those that are not in the core group."""
SELECTORS = {
    "pods": names.POD_SELECTOR,
    "deployments": names.OPERATOR_SELECTOR,
    "workloads": names.OURS_SELECTOR,
}
PAGE = 500
SHOWN = 100
"""Maximum number of bytes of an unusable response in an error message."""
TIMEOUT = 30.0
"""Seconds for one request; after a timeout the work queue retries."""
CREATIONS: Final = 4
OTHERS: Final = 8
"""Concurrent creations, and other requests, so that what a termination notice needs never waits behind the
pods of a gang. All are kept connections. More do not end earlier where the API server has two cores: with 16
of each it cut watches that it could not serve, and worked 1.6 times as long (docs/adr/0015-informer.md)."""
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


class Cluster:
    """Requests to an API server. Must be created in a running event loop.

    A kind is its plural; `group/version/plural` where it is neither ours nor in the core group. Namespace ""
    is for kinds that have none, and for LISTs and watches of the whole cluster.
    Every method raises ApiError, whose `kind` says why, on a failure. Those that write raise NotLeading, and
    send nothing, where this process may not write.
    """

    def __init__(
        self,
        api: client.ApiClient,
        *,
        write_timeout: float = TIMEOUT,
        time_to_write: Callable[[], float] = lambda: math.inf,
    ) -> None:
        self._api = api
        self._write_timeout, self._time_to_write = write_timeout, time_to_write
        self._creations, self._others = asyncio.Semaphore(CREATIONS), asyncio.Semaphore(OTHERS)
        self._session = _session(api)
        self._proxy = _proxy(api.configuration)

    @classmethod
    async def connect(
        cls, *, write_timeout: float = TIMEOUT, time_to_write: Callable[[], float] = lambda: math.inf
    ) -> Cluster:
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
    async def get(
        self, kind: str, name: str, namespace: str = "", *, seconds: float = TIMEOUT
    ) -> Json | None:
        """Returns None where it does not exist."""
        return await self._get(_object(kind, name, namespace), seconds)

    async def list(
        self, kind: str, namespace: str, *, labels: str = "", fields: str = "", limit: int = 0
    ) -> Objects:
        """Returns what selectors of labels and fields match, by one request. `limit` 0: all of it."""
        query = {"labelSelector": labels, "fieldSelector": fields, "limit": str(limit or "")}
        items, _ = await self._page(_collection(kind, namespace), {k: v for k, v in query.items() if v})
        return items

    async def pages(self, kind: str, namespace: str) -> AsyncIterator[Page]:
        """Lists one collection. Of pods, Workloads and Deployments only ours."""
        path, query = _collection(kind, namespace), {"limit": str(PAGE), **_selected(kind)}
        while True:
            items, meta = await self._page(path, query)
            yield Page(items=items, version=meta.get("resourceVersion") or "")
            query["continue"] = meta.get("continue") or ""
            if not query["continue"]:
                break

    async def watch(self, kind: str, namespace: str, version: str) -> AsyncGenerator[Json]:
        """Yields the events after this version, and bookmarks, until the API server ends the watch.

        Raises ApiError, also for an event ERROR. EXPIRED: a new LIST is needed.
        """
        path = _collection(kind, namespace)
        query = {"watch": "true", "allowWatchBookmarks": "true", "resourceVersion": version}
        query |= {"timeoutSeconds": str(random.randint(*WATCH_SECONDS)), **_selected(kind)}
        with _failures("WATCH", path):
            async with self._reply("GET", path, None, query=query) as reply:
                REQUESTS.labels("WATCH", reply.status).inc()
                if reply.status >= 300:
                    answer = _parsed(reply.status, await reply.read())
                    raise _refusal("WATCH", path, reply.status, answer)
                async for line in _lines(reply.content):
                    yield _event(line)

    async def served(self, group: str) -> Json | None:
        """Returns the API server's discovery document of a group, or of one version (`group/version`)."""
        return await self._get(f"/apis/{group}")

    # --- writes ---
    async def create(
        self, kind: str, manifest: Json, *, dry_run: bool = False, seconds: float = TIMEOUT
    ) -> Json:
        query = {"fieldManager": names.FIELD_MANAGER, "fieldValidation": "Strict"}
        query |= {"dryRun": "All"} if dry_run else {}
        path = _collection(kind, manifest["metadata"].get("namespace", ""))
        return await self._call("POST", path, query=query, body=manifest, seconds=seconds)

    async def patch(
        self,
        kind: str,
        name: str,
        namespace: str,
        change: Json,
        *,
        uid: str = "",
        version: int | None = None,
        form: str = MERGE,
        subresource: str = "",
        seconds: float = TIMEOUT,
    ) -> Json:
        """Changes an object, or makes it by APPLY. A conflict: it is another, or in another version."""
        body = change | {"metadata": change.get("metadata", {}) | _preconditions(uid, version)}
        path = _object(kind, name, namespace) + (f"/{subresource}" if subresource else "")
        query = {"fieldManager": names.FIELD_MANAGER, "fieldValidation": "Strict"}
        query |= {"force": "true"} if form == APPLY else {}
        return await self._call("PATCH", path, query=query, body=body, form=form, seconds=seconds)

    async def delete(
        self,
        kind: str,
        name: str,
        namespace: str,
        *,
        uid: str,
        version: int | None = None,
        grace: int | None = None,
    ) -> None:
        """Deletes an object. A conflict: as of `patch`. `grace`: seconds; None: the object's own."""
        options: Json = {"apiVersion": "v1", "kind": "DeleteOptions"}
        options["preconditions"] = _preconditions(uid, version)
        if grace is not None:
            options["gracePeriodSeconds"] = grace
        await self._call("DELETE", _object(kind, name, namespace), body=options)

    async def replace(self, kind: str, manifest: Json, *, seconds: float) -> Json:
        meta = manifest["metadata"]
        path = _object(kind, meta["name"], meta["namespace"])
        return await self._call("PUT", path, body=manifest, seconds=seconds)

    # --- one request ---
    async def _get(self, path: str, seconds: float = TIMEOUT) -> Json | None:
        try:
            return await self._call("GET", path, seconds=seconds)
        except ApiError as error:
            if error.kind is ApiFailure.NOT_FOUND:
                return None
            raise

    async def _page(self, path: str, query: dict[str, str]) -> tuple[Objects, Json]:
        """Returns one page of a LIST, and its metadata."""
        page = await self._call("GET", path, query=query)
        items = page["items"] or [] if "items" in page else None
        if not isinstance(items, list):
            raise ApiError(0, f"GET {path}: the response is not a list of objects")
        return items, page.get("metadata") or {}

    async def _call(
        self,
        verb: str,
        path: str,
        *,
        query: dict[str, str] | None = None,
        body: Json | None = None,
        form: str = JSON,
        seconds: float = TIMEOUT,
    ) -> Json:
        """Returns the parsed response. The time counts from when the request is sent."""
        async with self._creations if verb == "POST" else self._others:
            with _failures(verb, path):
                async with self._reply(verb, path, seconds, query=query, body=body, form=form) as reply:
                    answer = _parsed(reply.status, await reply.read())
        REQUESTS.labels(verb, reply.status).inc()
        if reply.status >= 300:
            raise _refusal(verb, path, reply.status, answer)
        return answer

    @asynccontextmanager
    async def _reply(
        self,
        verb: str,
        path: str,
        limit: float | None,
        *,
        query: dict[str, str] | None = None,
        body: Json | None = None,
        form: str = JSON,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Sends a request once, whatever the answer is. `limit` is in seconds; None: it is a watch."""
        settings = self._api.configuration
        headers = {"Accept": JSON, "Content-Type": form, "User-Agent": names.FIELD_MANAGER}
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
    """Returns a session that reads nothing from the environment; `_call` bounds its requests."""
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


def _collection(kind: str, namespace: str) -> str:
    """Returns the path of a collection: of a namespace, or of the whole cluster."""
    version, _, plural = kind.rpartition("/")
    version = version or GROUPS.get(kind, "")
    root = f"/apis/{version}" if version else "/api/v1"
    return f"{root}/namespaces/{namespace}/{plural}" if namespace else f"{root}/{plural}"


def _object(kind: str, name: str, namespace: str) -> str:
    # A template may contain any claim name: the API server accepts the pod.
    return f"{_collection(kind, namespace)}/{quote(name, safe='')}"


def _preconditions(uid: str, version: int | None) -> Json:
    preconditions = {"uid": uid, "resourceVersion": str(version or "")}
    return {name: value for name, value in preconditions.items() if value}


def _selected(kind: str) -> dict[str, str]:
    selector = SELECTORS.get(kind.rpartition("/")[2])
    return {"labelSelector": selector} if selector else {}


# --- our finalizers -----------------------------------------------------------------------------------
async def release_pod(cluster: Cluster, name: str, namespace: str, *, uid: str) -> Json:
    """Removes our finalizer of a pod, whatever else has changed there, and what says who set its fields.

    Nobody asks that of a pod that ends, and it is half of what each later write costs the API server.
    """
    gone = {"$deleteFromPrimitiveList/finalizers": [names.OUTCOME_FINALIZER], "managedFields": [{}]}
    change = {"metadata": gone}
    return await cluster.patch("pods", name, namespace, change, uid=uid, form=STRATEGIC)


async def set_finalizer(cluster: Cluster, name: str, namespace: str, *, uid: str, on: bool) -> Json:
    """Adds our finalizer to a job's object, or removes it; returns the object."""
    raw = await cluster.get(names.PLURAL, name, namespace)
    if raw is None:
        raise ApiError(404, f"TrainingJob {namespace}/{name} does not exist")
    others = [f for f in raw["metadata"].get("finalizers", ()) if f != names.CHECKPOINTS_FINALIZER]
    change = {"metadata": {"finalizers": [*others, names.CHECKPOINTS_FINALIZER] if on else others}}
    version = int(raw["metadata"]["resourceVersion"])
    return await cluster.patch(names.PLURAL, name, namespace, change, uid=uid, version=version)

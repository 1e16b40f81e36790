"""A bare client of the API server: requests, and watches that read as little as they need."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp

from tests.api.kube import APPLY, JSON, MERGE, Kube, Refused
from tests.chaosop.api import lines

Json = dict[str, Any]
TABLE: Final = f"{JSON};as=Table;v=v1;g=meta.k8s.io"
AT_ONCE: Final = 32
"""Requests under way at the same time, where many objects are made or deleted."""
LOOK: Final = 0.05
AGENT: Final = "bench"
"""User agent of all that a benchmark writes itself."""

__all__ = [
    "AGENT",
    "APPLY",
    "JSON",
    "MERGE",
    "Api",
    "Json",
    "Refused",
    "Seen",
    "Timeout",
    "each",
    "key",
    "seen",
    "wait",
]


class Timeout(Exception):
    """Something did not come in time; the text says what."""


@dataclass(frozen=True, kw_only=True)
class Api:
    kube: Kube
    session: aiohttp.ClientSession

    async def call(self, method: str, path: str, body: Any = None, *, kind: str = JSON) -> Json:
        """Raises Refused."""
        url, text = f"https://{self.kube.host}{path}", None if body is None else json.dumps(body)
        headers = {"Content-Type": kind, "Accept": JSON}
        async with self.session.request(
            method, url, data=text, headers=headers, ssl=self.kube.context
        ) as reply:
            content = await reply.read()
        answer: Json = json.loads(content) if content.startswith(b"{") else {"message": content.decode()}
        if reply.status >= 400:
            raise Refused(reply.status, f"{method} {path}: {answer.get('message', '')}")
        return answer

    async def delete(self, path: str) -> None:
        options = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        with contextlib.suppress(Refused):  # gone already
            await self.call("DELETE", path, options)

    async def watch(self, path: str, *, table: bool) -> AsyncIterator[tuple[str, Json]]:
        """Events with whole objects, or with rows of a table, which are a tenth of the size of a pod.

        Never ends. An object that vanished while no watch was open is reported as DELETED.
        """
        known: dict[str, Json] = {}
        while True:
            version, live = await self._list(path, table=table)
            for name in known.keys() - live.keys():
                yield "DELETED", known.pop(name)
            for name, item in live.items():
                known[name] = item
                yield "ADDED", item
            with contextlib.suppress(aiohttp.ClientError):
                async for kind, item in self._watch_from(version, path, table=table):
                    known[key(item)] = item
                    if kind == "DELETED":
                        del known[key(item)]
                    yield kind, item

    async def _list(self, path: str, *, table: bool) -> tuple[str, dict[str, Json]]:
        headers, url = {"Accept": TABLE if table else JSON}, f"https://{self.kube.host}{path}"
        async with self.session.get(url, headers=headers, ssl=self.kube.context) as reply:
            page = json.loads(await reply.read())
        items = page.get("rows" if table else "items") or ()
        return page["metadata"]["resourceVersion"], {key(item): item for item in items}

    async def _watch_from(self, version: str, path: str, *, table: bool) -> AsyncIterator[tuple[str, Json]]:
        join, headers = "&" if "?" in path else "?", {"Accept": TABLE if table else JSON}
        url = f"https://{self.kube.host}{path}{join}watch=true&resourceVersion={version}"
        timeout = aiohttp.ClientTimeout(total=None)
        async with self.session.get(url, headers=headers, ssl=self.kube.context, timeout=timeout) as reply:
            async for line in lines(reply.content):
                event = json.loads(line)
                if event["type"] == "ERROR":
                    return
                for item in event["object"]["rows"] if table else (event["object"],):
                    yield event["type"], item


def key(item: Json) -> str:
    """Namespace and name of an object, or of a row's."""
    meta = item.get("object", item)["metadata"]
    return f"{meta.get('namespace', '')}/{meta['name']}"


@dataclass(kw_only=True)
class Seen:
    """Which objects of a watch exist, and when each first was in the state that is looked for."""

    fits: Callable[[Json], bool]
    live: dict[str, Json] = field(default_factory=dict)
    """By name: each that exists, as it was last seen."""
    reached: dict[str, float] = field(default_factory=dict)
    """By `time.monotonic`."""
    fitting: set[str] = field(default_factory=set)
    """Those that are in that state now."""

    async def follow(self, api: Api, path: str, *, table: bool) -> None:
        async for kind, item in api.watch(path, table=table):
            name = key(item).partition("/")[2]
            if kind == "DELETED":
                self.live.pop(name, None)
                self.fitting.discard(name)
                continue
            self.live[name] = item
            if self.fits(item):
                self.fitting.add(name)
                self.reached.setdefault(name, time.monotonic())
            else:
                self.fitting.discard(name)


@contextlib.asynccontextmanager
async def seen(
    api: Api, path: str, fits: Callable[[Json], bool], *, table: bool = False
) -> AsyncIterator[Seen]:
    """What a watch of `path` sees while the body runs."""
    found = Seen(fits=fits)
    task = asyncio.create_task(found.follow(api, path, table=table))
    try:
        yield found
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def cell(column: int, value: str) -> Callable[[Json], bool]:
    """Whether a row of a table has this value."""
    return lambda row: row["cells"][column] == value


POD_RUNNING: Final = cell(2, "Running")


async def wait(
    what: Callable[[], str], ready: Callable[[], bool], *, seconds: float, every: float = LOOK
) -> None:
    end = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > end:
            raise Timeout(f"after {seconds:.0f} s: {what()}")
        await asyncio.sleep(every)


async def each(
    do: Callable[[Any], Awaitable[Any]], items: Iterable[Any], *, at_once: int = AT_ONCE
) -> list[Any]:
    """Does it for all of them, so many at the same time."""
    slots = asyncio.Semaphore(at_once)

    async def one(item: Any) -> Any:
        async with slots:
            return await do(item)

    return await asyncio.gather(*map(one, items))

"""Between operator and API server: loses, delays, repeats and refuses, and kills the operator between writes.

Plain HTTP towards the operator. What happens to a request or to an event of a watch is drawn in faults.py.
Run by stage.py; tests/api/killer.py is its small sister.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import json
import re
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Final

import aiohttp
from aiohttp import web
from spottrain_operator.names import FIELD_MANAGER

from tests.api.killer import HOP
from tests.api.kube import Kube
from tests.chaosop.api import lines
from tests.chaosop.faults import (
    REFUSALS,
    SPARED,
    Fate,
    Fault,
    event_fate,
    kill_at,
    request_fate,
    stream_fate,
)
from tests.chaosop.scene import Scene
from tests.chaosop.trainer import heard

NAMESPACED: Final = re.compile(r"/namespaces/([^/]+)/")
POD: Final = re.compile(r"/namespaces/[^/]+/pods/[^/]+$")
NODE: Final = re.compile(r"^(chaos-\d+)-n\d+$")
QUIET: Final = ("/api", "/apis", "/version")
"""Discovery: kopf waits whole seconds after a refusal of these, and they are no part of the work."""
NOWHERE: Final = "everywhere"
"""The place of what has no namespace."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A request of the operator's."""

    method: str
    path: str
    raw_path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes

    @property
    def place(self) -> str:
        found = NAMESPACED.search(self.path)
        return found[1] if found else NOWHERE

    @property
    def writes(self) -> bool:
        return self.method != "GET" and "dryRun" not in self.query

    @property
    def kind(self) -> str:
        """Of faults.KINDS."""
        if self.writes:
            return "write"
        ours = self.headers.get("User-Agent") == FIELD_MANAGER  # kopf lists page by page too
        return "list" if ours and "limit" in self.query else "read"

    @property
    def updates_pod(self) -> bool:
        return self.method in ("PATCH", "PUT") and POD.search(self.path) is not None

    @property
    def watches(self) -> bool:
        return self.query.get("watch") == "true"


@dataclass
class FaultProxy:
    kube: Kube
    session: aiohttp.ClientSession
    seed: int
    scenes: Mapping[str, Scene]
    """By namespace."""
    kill: Callable[[], bool]
    """Ends the operator; False where it has only just started."""
    say: Callable[[str, str], None]
    """For a namespace, what was done."""
    counts: Counter[Fault] = field(default_factory=Counter)
    port: int = 0

    def __post_init__(self) -> None:
        self._numbers: dict[str, Iterator[int]] = defaultdict(lambda: itertools.count(1))
        self._owed: dict[str, bool] = {}
        self._missed: set[str] = set()
        """Paths whose watch has kept an event back: the next watch of it is answered with 410."""
        self._webhook_up_at: dict[str, float] = {}
        self._down = asyncio.Event()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[FaultProxy]:
        app = web.Application(client_max_size=16 * 2**20)
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.port = runner.addresses[0][1]
        try:
            yield self
        finally:
            await runner.cleanup()

    # --- a request ---
    async def _handle(self, request: web.Request) -> web.StreamResponse:
        asked = Asked(
            method=request.method,
            path=request.path,
            raw_path=request.raw_path,
            query=request.query,
            headers={k: v for k, v in request.headers.items() if k.lower() not in HOP},
            body=await request.read(),
        )
        fate = self._fate(asked)
        if fate.fault is not Fault.NONE:
            self._tell(asked.place, fate, f"{asked.method} {asked.raw_path[:120]}")
        dies_before = self._dies(asked)
        if dies_before and self.kill():
            return _cut(request)
        if fate.fault is Fault.LOST:
            return _cut(request)
        if fate.fault in REFUSALS:
            return _refusal(*REFUSALS[fate.fault])
        if self._webhook_fails(asked):
            self._tell(asked.place, Fate(fault=Fault.WEBHOOK), f"{asked.method} {asked.raw_path[:120]}")
            return _refusal(500, "InternalError")
        await asyncio.sleep(fate.seconds if fate.fault is Fault.LATE else 0)
        if asked.watches:
            return await self._watch(request, asked)
        return await self._pass(request, asked, fate.fault, dies_after=dies_before is False)

    def _fate(self, asked: Asked) -> Fate:
        if (
            asked.path.startswith(QUIET)
            and asked.path.count("/") < 5
            and asked.place == NOWHERE
            and not (asked.path.endswith(("pods", "nodes", "trainingjobs")))
        ):
            return SPARED
        count = next(self._numbers[f"{asked.place}/{asked.kind}"])
        return request_fate(self.seed, asked.place, asked.kind, count)

    def _webhook_fails(self, asked: Asked) -> bool:
        scene = self.scenes.get(asked.place)
        if scene is None or not scene.webhook_down or not asked.updates_pod:
            return False
        now = asyncio.get_running_loop().time()
        return now < self._webhook_up_at.setdefault(asked.place, now + scene.webhook_down)

    def _dies(self, asked: Asked) -> bool | None:
        """A kill that came too soon after another waits for the scene's next write."""
        scene = self.scenes.get(asked.place)
        if scene is None or not asked.writes:
            return None
        due = kill_at(scene, next(self._numbers[f"{asked.place}/kill"]))
        if due is None:
            return self._owed.pop(asked.place, None)
        return due

    async def _pass(
        self, request: web.Request, asked: Asked, fault: Fault, *, dies_after: bool
    ) -> web.StreamResponse:
        for _ in range(2 if fault is Fault.TWICE else 1):
            status, kind, content = await self._forward(asked)
        if dies_after and status < 400:
            if self.kill():
                return _cut(request)
            self._owed[asked.place] = False
        if fault is Fault.ANSWER_LOST:
            return _cut(request)
        if fault is Fault.ANSWER_500:
            return _refusal(500, "InternalError")
        return web.Response(status=status, body=content, headers={"Content-Type": kind})

    async def _forward(self, asked: Asked) -> tuple[int, str, bytes]:
        async with self._ask(asked) as upstream:
            kind = upstream.headers.get("Content-Type", "application/json")
            return upstream.status, kind, await upstream.read()

    def _ask(self, asked: Asked) -> Any:
        return self.session.request(
            asked.method,
            f"https://{self.kube.host}{asked.raw_path}",
            data=asked.body or None,
            headers=asked.headers,
            ssl=self.kube.context,
            timeout=aiohttp.ClientTimeout(total=None),
        )

    def _tell(self, place: str, fate: Fate, what: str) -> None:
        self.counts[fate.fault] += 1
        self.say(place, f"proxy: {fate.fault}: {what}")

    # --- a watch ---
    async def _watch(self, request: web.Request, asked: Asked) -> web.StreamResponse:
        async with self._ask(asked) as upstream:
            reply = web.StreamResponse(status=upstream.status)
            reply.headers["Content-Type"] = upstream.headers.get("Content-Type", "application/json")
            with contextlib.suppress(ConnectionError, aiohttp.ClientError):
                await reply.prepare(request)
                if upstream.status >= 400:
                    await reply.write(await upstream.read())
                elif asked.path in self._missed:
                    self._missed.remove(asked.path)
                    await reply.write(_error(410))
                else:
                    await self._stream(upstream.content, reply, asked.path)
        return reply

    async def _stream(self, upstream: aiohttp.StreamReader, reply: web.StreamResponse, path: str) -> None:
        """Until either side ends it, or its fate is to be cut."""
        sender = Sender(reply)
        tasks = [asyncio.create_task(sender.run()), asyncio.create_task(self._events(upstream, sender))]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if sender.keeps_back():
                self._missed.add(path)

    async def _events(self, upstream: aiohttp.StreamReader, sender: Sender) -> None:
        async for line in lines(upstream):
            if (end := self._event(json.loads(line), line, sender)) is not Fault.NONE:
                await sender.end(end)
                return

    def _event(self, event: dict[str, Any], line: bytes, sender: Sender) -> Fault:
        meta = event["object"].get("metadata", {})
        if event["type"] in ("BOOKMARK", "ERROR"):
            sender.send("", line, 0)
            return Fault.NONE
        node = NODE.match(meta.get("name", ""))
        place = meta.get("namespace") or (node[1] if node else NOWHERE)
        fate = event_fate(self.seed, place, next(self._numbers[f"{place}/event"]))
        if fate.fault is not Fault.NONE:
            words = (
                event["type"],
                event["object"].get("kind"),
                meta.get("name"),
                meta.get("resourceVersion"),
            )
            self._tell(place, fate, " ".join(map(str, words)))
        if fate.fault is Fault.DROPPED:
            sender.expire(fate.seconds)
        else:
            sender.send(meta.get("uid", ""), line, fate.seconds if fate.fault is Fault.DELAYED else 0)
        if fate.fault is Fault.DOUBLED:
            sender.send_again(line, fate.seconds)
        end = stream_fate(self.seed, next(self._numbers["stream"]))
        if end is not Fault.NONE:
            self._tell(NOWHERE, Fate(fault=end), str(event["object"].get("kind")))
        return end


class What(Enum):
    NEWS = auto()
    REPEAT = auto()
    EXPIRY = auto()


class Sender:
    """The events of one watch, each at its time; those of one object in their order, but for the repeated."""

    def __init__(self, reply: web.StreamResponse) -> None:
        self._reply = reply
        self._waiting: list[tuple[float, int, bytes, What]] = []
        self._last: dict[str, float] = {}
        self._count = itertools.count()
        self._news = asyncio.Event()

    def send(self, uid: str, line: bytes, delay: float) -> None:
        now = asyncio.get_running_loop().time()
        due = max(now + delay, self._last.get(uid, 0.0)) if uid else now
        if uid and due > now:
            self._last[uid] = due
        self._push(due, line, What.NEWS)

    def send_again(self, line: bytes, delay: float) -> None:
        self._push(asyncio.get_running_loop().time() + delay, line, What.REPEAT)

    def expire(self, delay: float) -> None:
        """An event was dropped: the watch ends by 410, as an API server's does that has it no longer."""
        self._push(asyncio.get_running_loop().time() + delay, _error(410), What.EXPIRY)

    def keeps_back(self) -> bool:
        """Whether its reader has not heard all, and could not know."""
        return any(what is not What.REPEAT for _, _, _, what in self._waiting)

    def _push(self, due: float, line: bytes, what: What) -> None:
        heapq.heappush(self._waiting, (due, next(self._count), line, what))
        self._news.set()

    async def run(self) -> None:
        """Until its reader goes, or is told that the watch has expired."""
        with contextlib.suppress(ConnectionError, aiohttp.ClientError):
            while True:
                self._news.clear()
                left = self._waiting[0][0] - asyncio.get_running_loop().time() if self._waiting else None
                if left is None or left > 0:
                    await heard(self._news, left)
                    continue
                _, _, line, what = self._waiting[0]
                await self._reply.write(line.rstrip() + b"\n")
                heapq.heappop(self._waiting)
                if what is What.EXPIRY:
                    self._waiting.clear()
                    return

    async def end(self, how: Fault) -> None:
        """After 410 its reader lists anew; after 500 its process ends."""
        code = {Fault.GONE: 410, Fault.BROKEN: 500}.get(how)
        if code is not None:
            with contextlib.suppress(ConnectionError, aiohttp.ClientError):
                await self._reply.write(_error(code))
                self._waiting.clear()


def _cut(request: web.Request) -> web.Response:
    """The connection ends without an answer."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response()


def _refusal(code: int, reason: str) -> web.Response:
    headers = {"Retry-After": "1"} if code == 429 else None
    return web.json_response(_status(code, reason), status=code, headers=headers)


def _error(code: int) -> bytes:
    """The event that ends a watch."""
    event = {"type": "ERROR", "object": _status(code, "Expired" if code == 410 else "InternalError")}
    return json.dumps(event).encode() + b"\n"


def _status(code: int, reason: str) -> dict[str, Any]:
    words = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
    return words | {"code": code, "reason": reason, "message": f"chaos: {reason}"}

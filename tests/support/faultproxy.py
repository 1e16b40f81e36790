"""An HTTP/1.1 proxy on loopback that delays, loses, repeats and breaks requests by plan, and records all.

Stands between S3 clients and the real server in tests/s3. The head of a request is
passed on as it came, Host included, because the S3 signature covers it. Each client gets a port of its own,
which is how the record tells clients apart.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from tests.support.connections import close_server

BLOCK: Final = 1 << 16
"""Unit of a slow connection."""


class Fault(StrEnum):
    NONE = "none"
    REPLY_LOST = "reply lost"
    """The server did it; the client sees the connection end."""
    REPLY_HANGS = "reply hangs"
    """The server did it; the client hears nothing until its time-out."""
    REPLY_CUT = "reply cut"
    """The connection ends in the middle of the reply."""
    REPLY_STALLS = "reply stalls"
    """Half of the reply, then silence until the client's time-out."""
    ERROR_AFTER = "500 after the fact"
    REQUEST_LOST = "request lost"
    REQUEST_CUT = "request cut"
    """The connections on both sides end in the middle of the request's body."""
    REQUEST_LATE = "request late"
    """The connection ends at once, and the server does it later."""
    ERROR_500 = "500 instead"
    ERROR_503 = "503 instead"
    ANSWER = "answer instead"
    """`Treatment.answer`, and the server hears nothing."""
    ANSWER_AFTER = "answer after the fact"
    """`Treatment.answer` in place of the server's reply."""
    CONDITION_IGNORED = "condition ignored"
    """As by a store without conditional writes: what was refused is said to be done."""
    TWICE = "twice"
    """Answered as usual, and the server does it once more later."""


AMBIGUOUS: Final = frozenset({Fault.REPLY_LOST, Fault.REPLY_HANGS, Fault.ERROR_AFTER, Fault.REQUEST_LATE})
"""The client has no word of a write that takes, or may take, effect."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Treatment:
    fault: Fault = Fault.NONE
    delay: float = 0.0
    """Seconds before the request goes on."""
    late: float = 0.0
    """Seconds before a late or second copy lands."""
    pace: float = 0.0
    """Seconds for each 64 KiB of the request's body and of the reply."""
    answer: bytes = b""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    client: int
    number: int
    """Of this client, from 0."""
    method: str
    path: str
    headers: dict[str, str]
    raw_head: bytes
    body: bytes


@dataclass(kw_only=True, slots=True)
class Exchange:
    """One request as the client made it. `began` and `ended` count events, in one order for all clients."""

    request: Request
    treatment: Treatment
    began: int
    ended: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Landing:
    """One arrival of a request at the server, and its answer."""

    request: Request
    status: int
    etag: str


Plan = Callable[[Request], Treatment]


def plain(request: Request) -> Treatment:
    return Treatment()


@dataclass
class FaultProxy:
    upstream_port: int
    plan: Plan = plain
    upstream_host: str = "127.0.0.1"
    exchanges: list[Exchange] = field(default_factory=list)
    landings: list[Landing] = field(default_factory=list)
    ports: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._events = itertools.count(1)
        self._numbers: dict[int, Iterator[int]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def reset(self, plan: Plan) -> None:
        """Forget the record and the counts, between rounds in which no request is under way."""
        self.exchanges, self.landings, self.plan = [], [], plan
        self._numbers = {client: itertools.count() for client in self._numbers}

    @contextlib.contextmanager
    def running(self, clients: int = 1) -> Iterator[FaultProxy]:
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, name="faultproxy", daemon=True)
        thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._start(clients), loop).result(timeout=10)
            yield self
        finally:
            asyncio.run_coroutine_threadsafe(self._stop(), loop).result(timeout=10)
            loop.call_soon_threadsafe(loop.stop)
            thread.join(timeout=10)
            loop.close()

    def settle(self, loop_timeout: float = 10.0) -> None:
        """Wait until late and second copies have landed."""
        asyncio.run_coroutine_threadsafe(self._settled(), self._loop).result(timeout=loop_timeout)

    def endpoint(self, client: int = 0) -> str:
        return f"http://127.0.0.1:{self.ports[client]}"

    async def _start(self, clients: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._servers = []
        for client in range(clients):
            self._numbers[client] = itertools.count()
            server = await asyncio.start_server(self._serve(client), "127.0.0.1", 0)
            self._servers.append(server)
            self.ports.append(server.sockets[0].getsockname()[1])

    async def _stop(self) -> None:
        for server in self._servers:
            await close_server(server)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0)  # the transports that those tasks closed are let go in the loop's next turn
        await asyncio.sleep(0)
        await self._loop.shutdown_asyncgens()

    async def _settled(self) -> None:
        while self._tasks - {asyncio.current_task()}:
            await asyncio.sleep(0.005)

    def _serve(self, client: int) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]:
        def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = self._spawn(self._one(client, reader, writer))
            task.add_done_callback(lambda _: writer.close())  # whatever it came to, or if it never began

        return serve

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _one(self, client: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request; every reply ends its connection."""
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            request = await self._read_head(client, reader, writer)
            treatment = self.plan(request)
            exchange = Exchange(request=request, treatment=treatment, began=next(self._events))
            self.exchanges.append(exchange)
            try:
                request = exchange.request = await self._read_body(request, treatment, reader)
                reply = await self._treat(request, exchange.treatment, reader)
                for at in range(0, len(reply), BLOCK) if treatment.pace else ():
                    writer.write(reply[at : at + BLOCK])
                    await asyncio.sleep(treatment.pace)
                writer.write(b"" if treatment.pace else reply)
                await writer.drain()
                if exchange.treatment.fault is Fault.REPLY_STALLS:
                    await reader.read()  # until the client gives up
            finally:
                exchange.ended = next(self._events)

    async def _read_head(
        self, client: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> Request:
        raw = await reader.readuntil(b"\r\n\r\n")
        first, *lines = raw.decode("latin-1").rstrip("\r\n").split("\r\n")
        method, path, _ = first.split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if headers.get("expect", "").lower() == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return Request(
            client=client,
            number=next(self._numbers[client]),
            method=method,
            path=path,
            headers=headers,
            raw_head=_passed_on(raw),
            body=b"",
        )

    async def _read_body(self, request: Request, how: Treatment, reader: asyncio.StreamReader) -> Request:
        """The request with its body, or with half of it where it is to be cut."""
        size = int(request.headers.get("content-length", "0"))
        if how.fault is Fault.REQUEST_CUT:
            size //= 2
        if not how.pace:
            return replace(request, body=await reader.readexactly(size))
        body = bytearray()
        while len(body) < size:
            body += await reader.readexactly(min(BLOCK, size - len(body)))
            await asyncio.sleep(how.pace)
        return replace(request, body=bytes(body))

    async def _treat(self, request: Request, how: Treatment, client: asyncio.StreamReader) -> bytes:
        """The bytes that the client gets."""
        await asyncio.sleep(how.delay)
        instead = await self._instead(request, how)
        if instead is not None:
            return instead
        reply = await self._land(request)
        match how.fault:
            case Fault.REPLY_LOST:
                return b""
            case Fault.REPLY_HANGS:
                await client.read()
                return b""
            case Fault.REPLY_CUT | Fault.REPLY_STALLS:
                return reply[: len(reply) - 3]
            case Fault.ERROR_AFTER:
                return error(500)
            case Fault.ANSWER_AFTER:
                return how.answer
            case Fault.CONDITION_IGNORED if b" 412 " in reply[:16]:
                return b'HTTP/1.1 200 OK\r\nETag: "any"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n'
            case Fault.TWICE:
                self._spawn(self._land_later(request, how.late))
        return reply

    async def _instead(self, request: Request, how: Treatment) -> bytes | None:
        """What the client gets where the server is not asked, at least not now."""
        match how.fault:
            case Fault.REQUEST_LOST:
                return b""
            case Fault.REQUEST_CUT:
                await self._send_half(request)
                return b""
            case Fault.REQUEST_LATE:
                self._spawn(self._land_later(request, how.late))
                return b""
            case Fault.ANSWER:
                return how.answer
            case Fault.ERROR_500 | Fault.ERROR_503:
                return error(500 if how.fault is Fault.ERROR_500 else 503)
        return None

    async def _land_later(self, request: Request, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await self._land(request)

    async def _send_half(self, request: Request) -> None:
        _, writer = await asyncio.open_connection(self.upstream_host, self.upstream_port)
        writer.write(request.raw_head + request.body)
        await writer.drain()
        writer.close()

    async def _land(self, request: Request) -> bytes:
        reader, writer = await asyncio.open_connection(self.upstream_host, self.upstream_port)
        try:
            writer.write(request.raw_head + request.body)
            await writer.drain()
            reply = await reader.read()
        finally:
            writer.close()
        head = reply.split(b"\r\n\r\n", 1)[0].decode("latin-1").split("\r\n")
        etag = next((line.split(":", 1)[1].strip() for line in head if line.lower().startswith("etag:")), "")
        self.landings.append(Landing(request=request, status=int(head[0].split(" ")[1]), etag=etag))
        return reply


def _passed_on(raw: bytes) -> bytes:
    """The same head, but one request per connection and no waiting for 100-continue (neither is signed)."""
    lines = raw.rstrip(b"\r\n").split(b"\r\n")
    kept = [line for line in lines if not line.lower().startswith((b"expect:", b"connection:"))]
    return b"\r\n".join([*kept, b"Connection: close", b"", b""])


CODES: Final = {
    403: "AccessDenied",
    404: "NoSuchBucket",
    409: "ConditionalRequestConflict",
    412: "PreconditionFailed",
    500: "InternalError",
    503: "SlowDown",
}


def error(status: int, code: str = "", *, http_status: int = 0, inside: str = "") -> bytes:
    """A reply of S3's with an error in its body; `inside` is further XML of it."""
    code = code or CODES[status]
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>by the proxy</Message>{inside}</Error>"
    head = f"HTTP/1.1 {http_status or status} {code}\r\nContent-Type: application/xml\r\n"
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode()

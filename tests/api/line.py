"""A TCP proxy between an operator and the API server that can be cut: then nothing passes either way.

No connection is closed, as when a switch drops packets.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from pathlib import Path

import yaml

from tests.api.kube import Kube
from tests.support.connections import close_server


class Line:
    def __init__(self, kube: Kube) -> None:
        host, port = kube.host.rsplit(":", 1)
        self._server = host, int(port)
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._up, self._ready = asyncio.Event(), threading.Event()
        self._up.set()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> Line:
        self._thread.start()
        assert self._ready.wait(10), "the proxy did not start"
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    def cut(self) -> None:
        self._loop.call_soon_threadsafe(self._up.clear)

    def mend(self) -> None:
        self._loop.call_soon_threadsafe(self._up.set)

    def kubeconfig(self, of: Path, folder: Path) -> Path:
        """A copy that goes through this proxy; the certificate is for the host."""
        config = yaml.safe_load(of.read_text())
        config["clusters"][0]["cluster"]["server"] = f"https://{self._server[0]}:{self.port}"
        path = folder / "kubeconfig-line"
        path.write_text(yaml.safe_dump(config))
        return path

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._run())

    async def _run(self) -> None:
        server = await asyncio.start_server(self._join, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        await close_server(server)

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_ones = [writer]
        try:
            await self._up.wait()
            up_reader, up_writer = await asyncio.open_connection(*self._server)
            open_ones.append(up_writer)
            await asyncio.gather(self._pass(reader, up_writer), self._pass(up_reader, writer))
        finally:
            for each in open_ones:
                each.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                await self._up.wait()
                writer.write(data)
                await writer.drain()
        with contextlib.suppress(ConnectionError):
            writer.close()

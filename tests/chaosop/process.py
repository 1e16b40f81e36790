"""The operator's process: started, killed, and started again as a kubelet would. Made by stage.py."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Final

import aiohttp
import yaml

from tests.chaosop.faults import Jump
from tests.chaosop.zygote import CLOCK, LOG, set_clock

ROOT: Final = Path(__file__).resolve().parents[2]
PROBE_SECONDS: Final = 1.0
FAILURES: Final = 6
"""Probes of /livez in a row that fail before the process is killed: the chart's, but ten times as often."""
LEAST_LIFE: Final = 1.5
"""Seconds for which a process is left alone: else of many scenes' kills none would get anything done."""
SETTINGS: Final = {
    "RESYNC_SECONDS": "10",
    "PROGRESS_SECONDS": "1",
    "PROGRESS_WRITE_SECONDS": "5",
    "DEAD_SLACK_SECONDS": "2",
    "DEFAULT_POOL": '{"platform": "AWS"}',
    "LOG_LEVEL": "INFO",
}
"""Waits cut short: what a production operator sees in hours is to happen in seconds."""


@dataclass(kw_only=True)
class Operator:
    folder: Path
    random: Random
    say: Callable[[str], None]
    starts: int = 0
    kills: int = 0
    deaths: int = 0
    """Ends that nobody asked for."""
    jumps: int = 0
    """Of its clock, by a second or more."""
    hangs: int = 0
    """Kills by the liveness probe."""
    health_port: int = field(default_factory=lambda: free_port())
    _zygote: asyncio.subprocess.Process | None = None
    _pid: int = 0
    _born: float = 0.0
    _ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def log(self) -> Path:
        return self.folder / "operator.log"

    @property
    def clock(self) -> Path:
        return self.folder / "clock"

    @asynccontextmanager
    async def running(self, port: int, jumps: Sequence[Jump]) -> AsyncIterator[Operator]:
        """Through the proxy's port, and always there, but for moments."""
        set_clock(self.clock, 0.0)
        self._zygote = await self._start_zygote(port)
        works = (self._supervise(), self._jump(jumps), self._probe())
        tasks = [asyncio.create_task(work) for work in works]
        try:
            yield self
        finally:
            for task in tasks:
                task.cancel()
            with suppress(ProcessLookupError):
                self._zygote.kill()
            await self._zygote.wait()
            self._send_kill()

    async def _start_zygote(self, port: int) -> asyncio.subprocess.Process:
        env = os.environ | {f"SPOTTRAIN_OPERATOR_{name}": value for name, value in SETTINGS.items()}
        paths = [os.environ.get("PYTHONPATH", ""), str(ROOT), str(ROOT / "operator"), str(ROOT / "runtime")]
        env |= {
            "KUBECONFIG": str(_kubeconfig(self.folder, port)),
            "PYTHONPATH": ":".join(path for path in paths if path),
            "SPOTTRAIN_OPERATOR_HEALTH_PORT": str(self.health_port),
            CLOCK: str(self.clock),
            LOG: str(self.log),
        }
        command = ("setpriv", "--pdeathsig", "KILL", sys.executable, "-m", "tests.chaosop.zygote")
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, env=env, cwd=ROOT)

    async def _supervise(self) -> None:
        while True:
            await self._start()
            await self._ended.wait()
            await asyncio.sleep(self.random.choice((0.0, self.random.uniform(0, 1.5))))

    async def _start(self) -> None:
        assert self._zygote is not None and self._zygote.stdin is not None and self._zygote.stdout is not None
        self._zygote.stdin.write(b"start\n")
        answer = await self._zygote.stdout.readline()
        if not answer:
            raise RuntimeError("the operator could not be imported; its words are on standard error")
        self._pid, self._born = int(answer), time.monotonic()
        self.starts += 1
        self._ended.clear()
        handle = os.pidfd_open(self._pid)
        asyncio.get_running_loop().add_reader(handle, self._on_end, handle, self.kills)
        self.say(f"operator {self._pid} starts")

    def _on_end(self, handle: int, kills: int) -> None:
        asyncio.get_running_loop().remove_reader(handle)
        os.close(handle)
        if kills == self.kills:
            self.deaths += 1
            self.say(f"operator {self._pid} has ended by itself")
        self._pid = 0
        self._ended.set()

    def kill(self) -> bool:
        if not self._pid or time.monotonic() - self._born < LEAST_LIFE:
            return False
        self.kills += 1
        self.say(f"operator {self._pid} is killed")
        self._send_kill()
        return True

    async def _probe(self) -> None:
        """The kubelet's liveness probe."""
        failed = 0
        timeout = aiohttp.ClientTimeout(total=PROBE_SECONDS)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while True:
                await asyncio.sleep(PROBE_SECONDS)
                fresh = time.monotonic() - self._born < PROBE_SECONDS
                failed = 0 if fresh or await self._alive(session) else failed + 1
                if failed >= FAILURES and self.kill():
                    self.say("... because its liveness probe fails")
                    self.hangs += 1
                    failed = 0

    async def _alive(self, session: aiohttp.ClientSession) -> bool:
        try:
            async with session.get(f"http://127.0.0.1:{self.health_port}/livez") as reply:
                return reply.status < 400
        except (aiohttp.ClientError, TimeoutError):
            return False

    def _send_kill(self) -> None:
        if self._pid:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)

    async def _jump(self, jumps: Sequence[Jump]) -> None:
        began = time.monotonic()
        for jump in jumps:
            await asyncio.sleep(max(0.0, jump.at - (time.monotonic() - began)))
            set_clock(self.clock, jump.ahead)
            self.jumps += abs(jump.ahead) >= 1
            self.say(f"the operator's clock is ahead by {jump.ahead:.0f} s")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def _kubeconfig(folder: Path, port: int) -> Path:
    path = folder / "kubeconfig"
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "p", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "p", "user": {}}],
        "contexts": [{"name": "p", "context": {"cluster": "p", "user": "p"}}],
        "current-context": "p",
    }
    path.write_text(yaml.safe_dump(config))
    return path

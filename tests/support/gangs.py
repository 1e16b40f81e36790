"""Starts a real gang of processes (`gangworker`) on loopback and talks to them."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SECONDS = 120.0
"""For any one answer, on a machine where others work too."""


@dataclass
class Rank:
    number: int
    process: subprocess.Popen[str]
    answers: queue.Queue[str | None] = field(default_factory=queue.Queue)

    def __post_init__(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.answers.put(line)
        self.answers.put(None)

    def tell(self, name: str, *arguments: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([name, *arguments]) + "\n")
        self.process.stdin.flush()

    def answer(self, timeout: float = SECONDS) -> Any:
        try:
            line = self.answers.get(timeout=timeout)
        except queue.Empty:
            raise AssertionError(f"rank {self.number} did not answer within {timeout} s") from None
        assert line is not None, f"rank {self.number} has ended with {self.process.wait()}"
        return json.loads(line)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@contextmanager
def gang(size: int) -> Iterator[list[Rank]]:
    """Ranks that have met and wait for commands."""
    common = {
        **os.environ,
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "runtime")]),
    }
    ranks = [
        Rank(
            number,
            subprocess.Popen(
                [sys.executable, "-m", "tests.support.gangworker"],
                env={**common, "RANK": str(number), "LOCAL_RANK": str(number)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            ),
        )
        for number in range(size)
    ]
    try:
        for rank in ranks:
            rank.answer()
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            for pipe in (rank.process.stdin, rank.process.stdout):
                if pipe is not None:
                    pipe.close()

"""A program in a pseudo-terminal, and what a person would see on its screen."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

WIDTH: Final = 100


def screen(data: str) -> list[str]:
    """The rows of a terminal that was sent `data`, which may only move to the start of a row and clear it."""
    rows, column = [""], 0
    for piece in re.findall(r"\r|\n|\x1b\[2K|\x1b\[G|\x1b.{0,5}|[^\r\n\x1b]+", data):
        if piece in ("\r", "\x1b[G"):
            column = 0
        elif piece == "\n":
            rows.append("")
        elif piece == "\x1b[2K":
            rows[-1] = ""
        else:
            assert not piece.startswith("\x1b"), f"a control sequence that is not known: {piece!r}"
            rows[-1] = rows[-1][:column].ljust(column) + piece + rows[-1][column + len(piece) :]
            column += len(piece)
    return rows


class Terminal:
    """`command` in `folder`, as the foreground process of a terminal. All waits are bounded."""

    def __init__(self, folder: Path, command: Sequence[str], env: Mapping[str, str]) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, WIDTH, 0, 0))
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**os.environ, "TERM": "xterm", **env},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(slave)
        self.sent = ""

    @property
    def rows(self) -> list[str]:
        return screen(self.sent)

    def hang_up(self) -> None:
        """Closes the terminal, as when an ssh connection is lost: the program gets SIGHUP."""
        os.close(self._master)
        self._master = os.open(os.devnull, os.O_RDWR)

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def _read(self, seconds: float) -> bool:
        """Returns False once the program has closed the terminal."""
        if not select.select([self._master], [], [], seconds)[0]:
            return True
        try:
            data = os.read(self._master, 65536)
        except OSError:  # Linux: EIO once no process has it open
            return False
        self.sent += data.decode()
        return bool(data)

    def until_rows(self, pattern: str, count: int, seconds: float = 60) -> None:
        """Waits until so many rows of the screen have the pattern."""
        self._wait(lambda rows: sum(bool(re.search(pattern, row)) for row in rows) >= count, pattern, seconds)

    def _wait(self, done: Callable[[list[str]], bool], what: str, seconds: float) -> None:
        give_up = time.monotonic() + seconds
        while not done(self.rows):
            assert time.monotonic() < give_up, f"no {what!r} within {seconds} s:\n" + "\n".join(self.rows)
            assert self._read(0.1), f"it ended before {what!r}:\n" + "\n".join(self.rows)

    def end(self, seconds: float = 60) -> int:
        give_up = time.monotonic() + seconds
        while self._read(0.1):
            assert time.monotonic() < give_up, f"it did not end within {seconds} s:\n" + "\n".join(self.rows)
        return self.process.wait(10)

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        os.close(self._master)

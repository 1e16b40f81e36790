"""Starts `spottrain run` as real processes without paying for `import torch` each time.

Run as a program it imports torch once, and forks a child per command, which then behaves like a fresh
`spottrain run`: its own process group, standard output, environment, signals and exit code.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from spottrain.contract import Env, TerminationMessage


class Zygote:
    """The test's side."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, **command: Any) -> Any:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        with self._process:
            assert self._process.stdin
            self._process.stdin.close()


class Run:
    """One `spottrain run`. All waits are bounded and name what they waited for."""

    def __init__(
        self, zygote: Zygote, folder: Path, argv: list[str], env: dict[str, str], number: int
    ) -> None:
        self._zygote = zygote
        self._message = folder / f"message-{number}.json"
        self._log = folder / f"run-{number}.log"
        self._code: int | None = None
        env = env | {Env.TERMINATION_MESSAGE: str(self._message)}
        self.pid = zygote.ask(start=argv, env=env, log=str(self._log), folder=str(folder))

    @property
    def log(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    @property
    def message(self) -> TerminationMessage:
        found = TerminationMessage.from_json(self._message.read_text())
        assert found is not None
        return found

    @property
    def losses(self) -> dict[int, str]:
        """The logged loss of each step, as written."""
        words = [line.split() for line in self.log.splitlines() if " step=" in line and "event=" not in line]
        return {int(w[1][5:].split("/")[0]): next(x for x in w if x.startswith("loss=")) for w in words}

    @property
    def digest(self) -> str:
        return self.log.rsplit("digest=", 1)[1].split()[0]

    @property
    def trainer(self) -> int:
        """The process that trains: a child with a group of its own, where the output is kept."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        ranks = [int(pid) for pid in children if os.getpgid(int(pid)) == int(pid)]
        return ranks[0] if ranks else self.pid

    def until(self, text: str, seconds: float = 30) -> Run:
        """Waits until `text` is in the log."""
        give_up = time.monotonic() + seconds
        while text not in self.log:
            assert self.code is None, f"it ended ({self.code}) before {text!r}:\n{self.log}"
            assert time.monotonic() < give_up, f"no {text!r} within {seconds} s:\n{self.log}"
            time.sleep(0.01)
        return self

    def send(self, signum: signal.Signals = signal.SIGTERM) -> Run:
        os.kill(self.pid, signum)
        return self

    def end(self, seconds: float = 30) -> int:
        """The exit code; -N when signal N killed it."""
        give_up = time.monotonic() + seconds
        while self.code is None:
            if time.monotonic() >= give_up:
                self.send(signal.SIGKILL)
                raise AssertionError(f"it did not end within {seconds} s:\n{self.log}")
            time.sleep(0.01)
        return self._code  # type: ignore[return-value]

    @property
    def code(self) -> int | None:
        if self._code is None:
            self._code = self._zygote.ask(poll=self.pid)
        return self._code


# --- the program --------------------------------------------------------------------------------------
def _serve() -> None:
    import spottrain.training.trainer  # noqa: F401
    import torch._dynamo

    assert torch
    for line in sys.stdin:
        command = json.loads(line)
        answer: object
        if "preload" in command:
            answer = importlib.import_module(command["preload"]).__name__
        elif "poll" in command:
            done, status = os.waitpid(command["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if done else None
        elif (answer := os.fork()) == 0:
            return _be_run(command)
        print(json.dumps(answer), flush=True)


def _be_run(command: dict[str, Any]) -> None:
    from spottrain.cli.main import main

    os.setsid()
    os.chdir(command["folder"])
    log = os.open(command["log"], os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(command["env"])
    sys.exit(main(["run", *command["start"]]))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        _serve()

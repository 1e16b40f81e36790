"""Running programs, waiting with a bound, and the one error that a person sees. Used by all other modules."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class ClusterError(Exception):
    """Says in a sentence what failed, where, and what to do. The command line prints it without a trace."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run(
    command: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    log: Path | None = None,
    timeout: float = 60,
) -> str:
    """Runs a program to its end and returns what it printed; with `log` the output goes there instead."""
    words = [str(word) for word in command]
    try:
        if log is not None:
            return _run_logged(words, env=env, cwd=cwd, log=log, timeout=timeout)
        done = subprocess.run(
            words,
            env=_env(env),
            cwd=cwd,
            timeout=timeout,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        raise ClusterError(f"`{' '.join(words)}` was still running after {timeout:.0f} s") from None
    except FileNotFoundError:
        raise ClusterError(
            f"the program {words[0]} is not there; `python3 dev/cluster.py up` installs it"
        ) from None
    if done.returncode != 0:
        raise ClusterError(f"`{' '.join(words)}` ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
    return done.stdout


def _run_logged(
    words: list[str], *, env: Mapping[str, str] | None, cwd: Path | None, log: Path, timeout: float
) -> str:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        done = subprocess.run(
            words, env=_env(env), cwd=cwd, timeout=timeout, stdout=out, stderr=out, stdin=subprocess.DEVNULL
        )
    if done.returncode != 0:
        raise ClusterError(
            f"`{' '.join(words[:4])} ...` ended with {done.returncode}; its output ends:\n{tail(log)}"
        )
    return ""


def _env(extra: Mapping[str, str] | None) -> dict[str, str]:
    return {**os.environ, **(extra or {})}


def tail(log: Path, lines: int = 12) -> str:
    """The end of a log, under its path, for an error message."""
    try:
        text = log.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        text = ["(no such file)"]
    return "\n".join([f"  {log}", *(f"  | {line[:300]}" for line in text[-lines:])])


def start_daemon(
    command: Sequence[str | Path],
    *,
    log: Path,
    env: Mapping[str, str] | None = None,
    preexec: Callable[[], None] | None = None,
) -> subprocess.Popen[bytes]:
    """Starts a program that outlives this call: its own session, and no pipe that a reader could wait on."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        return subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=_env(env),
            start_new_session=True,
            preexec_fn=preexec,
        )


def wait_until(
    what: str,
    ready: Callable[[], bool],
    *,
    seconds: float,
    log: Path | None = None,
    process: subprocess.Popen[bytes] | None = None,
    every: float = 0.05,
) -> None:
    """Waits for a named thing; if `seconds` are over or `process` ends first, says so and where to look."""
    end = time.monotonic() + seconds
    while not ready():
        where = f"; the log ends:\n{tail(log)}" if log else ""
        if process is not None and process.poll() is not None:
            raise ClusterError(f"{what} did not come: its process ended with {process.returncode}{where}")
        if time.monotonic() > end:
            raise ClusterError(f"{what} did not come within {seconds:.0f} s{where}")
        time.sleep(every)


def discard(folder: Path, trash: Path) -> None:
    """Takes a folder away at once and deletes it in the background: a node's image store has 60,000 names."""
    trash.mkdir(parents=True, exist_ok=True)
    if folder.exists():
        folder.rename(trash / f"{folder.name}-{time.time_ns()}")
    start_daemon(["rm", "-rf", *trash.iterdir()], log=Path(os.devnull))


def write_json(path: Path, value: Any, *, mode: int = 0o644) -> None:
    """Writes whole or not at all: readers may look at any moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(value, indent=2) + "\n")
    partial.chmod(mode)
    partial.replace(path)


def read_json(path: Path) -> Any:
    """The file's value, or None where there is no such file."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None


@contextmanager
def locked(path: Path, *, seconds: float = 900) -> Iterator[None]:
    """One `up`, `down` or `build` at a time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as handle:
        wait_until(
            f"the lock {path} (another run holds it)", lambda: _try_lock(handle.fileno()), seconds=seconds
        )
        yield


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True

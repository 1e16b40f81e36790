"""Starting and ending a cluster from outside, and taking away what a killed one left."""

from __future__ import annotations

import fcntl
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from localcluster import layout
from localcluster.api import Cluster
from localcluster.layout import Paths
from localcluster.shell import ClusterError, read_json, tail

from processcluster import marks
from processcluster.supervisor import FAILED, READY

_START_SECONDS: Final = 120.0
_STOP_SECONDS: Final = 15.0
_PREFIX: Final = "spottrain-"
_LOCK: Final = "lock"


@dataclass(kw_only=True)
class Running:
    """A cluster that this process has started: its folder, its supervisor, and the lock on the folder."""

    folder: Path
    process: subprocess.Popen[bytes]
    lock: IO[str]

    @property
    def cluster(self) -> Cluster:
        return Cluster.attach(Paths(state=self.folder))

    @property
    def log(self) -> Path:
        return self.folder / "supervisor.log"

    def wait_ready(self) -> None:
        """Returns when the API server serves and both nodes are Ready."""
        end = time.monotonic() + _START_SECONDS
        while not (self.folder / "run" / READY).exists():
            failed = read_json(self.folder / "run" / FAILED)
            if failed is not None or self.process.poll() is not None:
                why = failed["error"] if failed else f"its supervisor ended with {self.process.returncode}"
                raise ClusterError(f"the cluster did not start: {why}\n{tail(self.log)}")
            if time.monotonic() > end:
                raise ClusterError(
                    f"the cluster was not ready after {_START_SECONDS:.0f} s\n{tail(self.log)}"
                )
            time.sleep(0.1)

    def stop(self) -> None:
        """Ends all of it: first as it wants to end, then by force."""
        if self.process.stdin is not None:
            with suppress(BrokenPipeError):
                self.process.stdin.close()
        self.process.terminate()
        try:
            self.process.wait(timeout=_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        marks.kill_marked(marks.CLUSTER, str(self.folder))  # what a supervisor leaves that was killed
        self.lock.close()


def start(folder: Path, *, with_us: bool) -> Running:
    """Starts a cluster in an empty folder. `with_us`: it ends when this process does, however that ends."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    lock = _locked(folder)
    if lock is None:
        raise ClusterError(f"a cluster runs in {folder}; `make cluster-down` ends it")
    (folder / "bin").symlink_to(layout.default_paths().bin)
    words = [sys.executable, "-m", "processcluster.supervisor", str(folder)]
    with (folder / "supervisor.log").open("ab") as out:
        process = subprocess.Popen(
            [*words, *(["--until-stdin-closes"] if with_us else [])],
            env=os.environ | {"PYTHONPATH": str(layout.source_folder()), "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.PIPE if with_us else subprocess.DEVNULL, stdout=out, stderr=out,
            start_new_session=True, pass_fds=(lock.fileno(),),
        )  # fmt: skip
    return Running(folder=folder, process=process, lock=lock)


@contextmanager
def temporary_cluster() -> Iterator[Running]:
    """A cluster for the length of the block, in a folder of its own that goes with it."""
    sweep()
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getuid()}-"))
    running = start(folder, with_us=True)
    try:
        running.wait_ready()
        yield running
    finally:
        with _no_interrupt(running):
            running.stop()
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _no_interrupt(running: Running) -> Iterator[None]:
    """A further Ctrl-C or SIGTERM while the cluster ends: it ends by force."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {n: signal.signal(n, lambda *_: running.process.kill()) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def sweep() -> None:
    """Takes away temporary clusters of this user whose supervisor was killed: processes, ports and
    folders.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}{os.getuid()}-*"):
        if (folder / _LOCK).exists() and folder.stat().st_uid == os.getuid():
            lock = _locked(folder)
            if lock is not None:
                marks.kill_marked(marks.CLUSTER, str(folder))
                shutil.rmtree(folder, ignore_errors=True)
                lock.close()


def clear(folder: Path) -> None:
    """The same for the cluster of `make cluster-up`, whose folder is always the same one."""
    lock = _locked(folder) if folder.exists() else None
    if lock is not None:
        marks.kill_marked(marks.CLUSTER, str(folder))
        shutil.rmtree(folder, ignore_errors=True)
        lock.close()


def _locked(folder: Path) -> IO[str] | None:
    """The lock on a folder, which its supervisor inherits; None while one lives.

    The file gets its name once it is locked, so that nobody finds a new folder with a free lock.
    """
    file = folder / _LOCK
    handle = (file if file.exists() else folder / f".{_LOCK}-{os.getpid()}").open("a")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.close()
        return None
    if not file.exists():
        os.rename(handle.name, file)
    return handle


def end(folder: Path) -> bool:
    """Ends the cluster that somebody else has started in a folder; whether there was one."""
    pids = [
        int(entry.name)
        for entry in Path("/proc").glob("[0-9]*")
        if _words_of(entry)[-2:] == ["processcluster.supervisor", str(folder)]
    ]
    for pid in pids:
        handle = os.pidfd_open(pid)
        signal.pidfd_send_signal(handle, signal.SIGTERM)
        if not select.select([handle], [], [], _STOP_SECONDS)[0]:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            select.select([handle], [], [], _STOP_SECONDS)
        os.close(handle)
    clear(folder)
    return bool(pids)


def _words_of(entry: Path) -> list[str]:
    try:
        return (entry / "cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return []

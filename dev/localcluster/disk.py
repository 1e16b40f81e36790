"""Measures how much disk and time the long steps take, and keeps the figures. Used by `up` and `build`."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from localcluster.shell import read_json, write_json

_GB = 1e9


def used_gb(folder: Path) -> float:
    """Disk used below a folder; a file with several names (hard links) counts once."""
    seen: set[int] = set()
    total = 0
    stack = [str(folder)]
    device = folder.stat().st_dev
    while stack:
        total += _scan(stack.pop(), stack, seen, device)
    return total / _GB


def _scan(folder: str, stack: list[str], seen: set[int], device: int) -> int:
    total = 0
    try:
        for entry in os.scandir(folder):
            info = entry.stat(follow_symlinks=False)
            if info.st_dev != device:  # something mounted here shows files that lie elsewhere
                continue
            if entry.is_dir(follow_symlinks=False):
                stack.append(entry.path)
            elif info.st_nlink > 1 and info.st_ino in seen:
                continue
            seen.add(info.st_ino)
            total += info.st_blocks * 512
    except OSError:  # a build removes files while we look
        pass
    return total


def free_gb(folder: Path) -> float:
    while not folder.exists():
        folder = folder.parent
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize / _GB


@dataclass(kw_only=True, slots=True)
class Meter:
    """Samples the state folder, where every long step keeps its temporary files too."""

    state: Path
    file: Path
    _peak: float = field(default=0.0, init=False)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Records the seconds and the highest disk use of one named step."""
        done = threading.Event()
        self._peak = 0.0
        sampler = threading.Thread(target=self._sample, args=(done,), daemon=True)
        sampler.start()
        started = time.monotonic()
        try:
            yield
        finally:
            done.set()
            sampler.join()
            self._record(name, time.monotonic() - started)

    def _sample(self, done: threading.Event) -> None:
        pause = 1.0
        while not done.wait(pause):
            started = time.monotonic()
            self._peak = max(self._peak, used_gb(self.state))
            pause = max(1.0, 10 * (time.monotonic() - started))  # a tenth of one core at most

    def _record(self, name: str, seconds: float) -> None:
        self._peak = max(self._peak, used_gb(self.state))
        measures: dict[str, Any] = read_json(self.file) or {"peak_gb": 0.0, "steps": {}}
        measures["steps"][name] = {"seconds": round(seconds, 1), "peak_gb": round(self._peak, 2)}
        measures["peak_gb"] = round(max(measures["peak_gb"], self._peak), 2)
        write_json(self.file, measures)

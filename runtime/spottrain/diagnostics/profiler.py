"""`Profiler`: profiles some steps with torch.profiler, to show what is slow inside a step.

    profiler = Profiler(window, store, attempt=1, rank=0)
    for ...: ...one optimizer step...; profiler.step()
    profiler.close()

At the end of the window each rank stores, in `profiles/attempt-N/rank-R/` below the checkpoint URI,

    rank-R.<time>.pt.trace.json.gz   the trace: open it in Perfetto, or in TensorBoard's profiler plugin
                                     (torch_tb_profiler), which reads a copy of the folder
    rank-R.<time>.top.txt            a summary, and the TOP operations by device time (CPU: by CPU time)

The summary first says whether the loader is the problem. Without a window torch.profiler is not imported, and
a step costs one comparison. Profiling slows the steps of its window (it records shapes and memory), so their
time split is not comparable with that of other steps.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch

from spottrain.contract import profile_key
from spottrain.core import log
from spottrain.core.log_format import duration
from spottrain.core.training_settings import Profile
from spottrain.diagnostics.bottleneck import Measurements, advice, diagnose, utilised
from spottrain.errors import ConfigurationError
from spottrain.lifecycle.session import existing
from spottrain.storage.base import Store

TOP: Final = 20
NAME_WIDTH: Final = 48
"""The longest name of an operation: its row has room in a terminal."""
LAST_SECONDS: Final = 60.0
"""Longest wait of `close` for a profile that is being stored, in seconds."""
LOADER: Final = "enumerate(DataLoader)"
"""Prefix of the events that torch's DataLoader records for each wait for a batch."""
COPIES: Final = ("Memcpy", "Memset")
"""Prefixes of device events that are not work of its cores."""


class Profiler:
    """Profiles a window of steps and stores the result. A later failure is logged and does not end training.

    Args:
        window: steps to profile; None: does nothing.
        store: where the profile is stored.
        attempt: number of this attempt, for the path.
        rank: this rank, for the path.
        device: the device that trains; None: a CPU.
        facts: returns measurements of the steps so far, for the summary; None if there are none.
        clock: host clock in seconds.

    Raises:
        ConfigurationError: there is no store for the profile.
    """

    def __init__(
        self,
        window: Profile | None,
        store: Store | None,
        *,
        attempt: int,
        rank: int,
        device: torch.device | None = None,
        facts: Callable[[], Measurements | None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._profile: Any = None
        self._storing: threading.Thread | None = None
        if window is None:
            return
        if store is None:
            raise ConfigurationError(
                "a profile is requested, but there is no store for it: set checkpoint.uri, or --checkpoint"
            )
        self._window, self._store = window, store
        self._attempt, self._rank = attempt, rank
        self._device = device if device is not None and device.type == "cuda" else None
        self._facts, self._clock = facts, clock
        self._left = window.steps
        self._active_since, self._seconds = clock(), 0.0
        self._profile = self._begin(window)

    @property
    def on(self) -> bool:
        """Whether the window is not over."""
        return self._profile is not None

    @property
    def recording(self) -> bool:
        """Whether what is done now will be in the profile."""
        return self._profile is not None and self._left <= self._window.active

    def step(self) -> None:
        """Ends a step. Call it after each optimizer step. At the window's end it takes seconds."""
        if self._profile is None:
            return
        self._left -= 1
        if self._left in (0, self._window.active):
            if self._device is not None:  # so that the window has exactly its own kernels
                torch.cuda.synchronize(self._device)
            self._seconds = self._clock() - self._active_since  # before torch stops and collects events
        self._profile.step()
        if self._left == self._window.active:
            self._active_since = self._clock()
        if self._left == 0:
            self._end()

    def close(self) -> None:
        """Waits up to LAST_SECONDS until the profile is stored; discards an incomplete one."""
        if self._profile is not None:
            self._end()
            log.event(
                "profile-cut-short",
                steps_missing=self._left,
                why="the loop ended before the end of the window",
            )
        if self._storing is not None:
            self._storing.join(LAST_SECONDS)

    # --- private ------------------------------------------------------------------------------------
    def _begin(self, window: Profile) -> Any:
        from torch import profiler  # lazy: most runs do not need it

        profile = profiler.profile(
            activities=profiler.supported_activities(),  # type: ignore[no-untyped-call]
            schedule=profiler.schedule(
                wait=window.wait, warmup=window.warmup, active=window.active, repeat=1
            ),
            record_shapes=True,
            profile_memory=True,
        )
        profile.start()
        log.event("profiling", wait=window.wait, warmup=window.warmup, active=window.active)
        return profile

    def _end(self) -> None:
        """Ends the profile, and stores that of a whole window."""
        profile, self._profile = self._profile, None
        try:
            profile.stop()
            if self._left <= 0:
                self._write(profile)
        except Exception as error:  # e.g. a full disk, or torch's own: training goes on
            log.event("profile-failed", error=f"{type(error).__name__}: {error}")

    def _write(self, profile: Any) -> None:
        averages, events, seconds = profile.key_averages(), profile.events(), self._seconds
        busy = None if self._device is None else kernel_seconds(events) / seconds
        first = first_words(self._facts(), busy, loader_seconds(events) / seconds)
        log.event("profiled", steps=self._window.active, seconds=seconds, first=first or None)
        operations = table(averages, gpu=self._device is not None)
        stem = f"rank-{self._rank:05d}.{time.time_ns()}"
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"{stem}.pt.trace.json.gz"
            profile.export_chrome_trace(str(path))
            trace = path.read_bytes()
        text = f"{first}\n\n{operations}\n" if first else f"{operations}\n"
        if self._rank == 0:
            print(operations, flush=True)
        parts = {path.name: trace, f"{stem}.top.txt": text.encode()}
        self._storing = threading.Thread(
            target=self._keep, args=(parts,), name="spottrain-profile", daemon=True
        )
        self._storing.start()

    def _keep(self, parts: dict[str, bytes]) -> None:
        try:
            for name, body in parts.items():
                self._store.upload(profile_key(self._attempt, self._rank, name), memoryview(body))
        except Exception as error:
            log.event("profile-not-stored", error=f"{type(error).__name__}: {error}")
        else:
            folder = profile_key(self._attempt, self._rank, "")
            if (session := existing()) is not None:
                session.profiled = True
            log.event("profile-stored", folder=folder, bytes=sum(map(len, parts.values())))


def table(averages: Iterable[Any], *, gpu: bool) -> str:
    """Returns the TOP operations that take longest themselves, a row for each."""
    took = "self_device_time_total" if gpu else "self_cpu_time_total"
    rows = sorted(((float(getattr(each, took)), each) for each in averages), key=lambda row: -row[0])
    whole = sum(time for time, _ in rows) or 1.0
    lines = [
        f"{time / whole:6.1%} {duration(time / 1e6):>9} {each.count:>7}  {each.key[:NAME_WIDTH]}"
        for time, each in rows[:TOP]
    ]
    return "\n".join([f"{'share':>6} {'time':>9} {'calls':>7}  operation", *lines])


def kernel_seconds(events: Iterable[Any]) -> float:
    """Returns seconds with at least one kernel on the device. Streams overlap, so times are not summed.

    `events`: of torch.profiler. CPU events and user annotations are left out: they repeat kernels.
    """
    spans = sorted(
        (each.time_range.start, each.time_range.end)
        for each in events
        if each.device_type.name != "CPU" and not each.is_user_annotation and not each.name.startswith(COPIES)
    )
    total, reached = 0.0, float("-inf")
    for start, end in spans:
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total / 1e6


def loader_seconds(events: Iterable[Any]) -> float:
    """Returns seconds that the loop waited for batches of a torch DataLoader."""
    waits = (each for each in events if each.name.startswith(LOADER))
    return sum(float(each.time_range.end - each.time_range.start) for each in waits) / 1e6


def first_words(facts: Measurements | None, busy: float | None, loader: float = 0.0) -> str:
    """Returns the summary of a profile: utilisation first, then the verdict.

    Args:
        facts: measurements of the loop; None for a loop without phase marks.
        busy: utilisation of the device in the window, from 0 to 1; None if unknown.
        loader: share of the window in which the loop waited for a DataLoader; used without `facts`. The host
            may be ahead of the device, so a wait counts at most as long as the device was idle.
    """
    if facts is None:
        return utilised(1 - loader if busy is None else min(busy, 1.0), loader)
    if busy is not None and not facts.busy:
        facts = replace(facts, busy=(min(busy, 1.0),))
    verdict = diagnose(facts)
    words = [advice(facts), "" if verdict is None else verdict.text]
    return "; ".join(word for word in words if word)

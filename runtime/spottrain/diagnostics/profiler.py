"""A profile of some steps, by torch.profiler: what is slow inside a step. Made by the loop; `of_run` makes
that of `Trainer`, `Run` and the callbacks of the integrations.

    profiler = Profiler(window, store, attempt=1, rank=0, total_steps=1000)
    for ...: ...one optimizer step...; profiler.step()
    profiler.close()

At the end of the window each rank has stored, at `profiles/attempt-N/rank-R/` below the checkpoint URI,

    rank-R.<time>.pt.trace.json.gz   the trace: open it in Perfetto, or point TensorBoard's profiler plugin
                                     (torch_tb_profiler) at a copy of the folder, whose names these are
    rank-R.<time>.top.txt            the first words, and the TOP operations by device time (CPU: by CPU time)

and says first whether it is the loader that wants fixing. Without a window nothing of torch.profiler is
imported, and a step costs one comparison. Profiling itself slows the steps of its window (shapes, memory);
the split of those steps is told, and is not comparable with others.
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

from spottrain.core import log
from spottrain.core.profile_window import MADE, Window, chosen, profile_key, require_window
from spottrain.core.training_spec import Profile
from spottrain.diagnostics.bottleneck import Measurements, advice, diagnose, utilised
from spottrain.errors import ConfigurationError
from spottrain.lifecycle.session import Session
from spottrain.storage.base import Store

TOP: Final = 20
LAST_SECONDS: Final = 60.0
"""That `close` waits for what is still being stored."""
LOADER: Final = "enumerate(DataLoader)"
"""How the name begins of what torch's DataLoader records of each wait for a batch."""
COPIES: Final = ("Memcpy", "Memset")
"""On the device, and not the work of its cores."""


class Profiler:
    """`facts`: what is known of the steps so far, for the first words; None where nothing is.

    `total_steps`: None where only the loop knows. `start`: steps that were done before.
    Raises ConfigurationError where the window ends after the run, or where there is no store to keep the
    profile in. A profile that fails later ends no training: it is told.
    """

    def __init__(
        self,
        window: Window | None,
        store: Store | None,
        *,
        attempt: int,
        rank: int,
        total_steps: int | None,
        start: int = 0,
        device: torch.device | None = None,
        facts: Callable[[], Measurements | None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._profile: Any = None
        self._storing: threading.Thread | None = None
        if window is None:
            return
        if total_steps is not None:
            require_window(window.wait, window.warmup, window.active, total_steps, start)
        if store is None:
            raise ConfigurationError(
                "a profile is asked for, and there is nowhere to keep it: set checkpoint.uri, or --checkpoint"
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
        """Whether a step is still to be profiled."""
        return self._profile is not None

    def step(self) -> None:
        """After each optimizer step. The one that ends the window writes the trace, which takes seconds."""
        if self._profile is None:
            return
        self._left -= 1
        if self._left in (0, self._window.active):
            self._settle()
            self._seconds = self._clock() - self._active_since  # before torch stops, and reads what it has
        self._profile.step()
        if self._left == self._window.active:
            self._active_since = self._clock()
        if self._left == 0:
            self._end()

    def close(self) -> None:
        """At the end of the loop, however it came: waits for what is being stored, throws away the rest."""
        if self._profile is not None:
            self._end()
            log.event("profile-cut-short", steps_missing=self._left, why="the loop ended before the window")
        if self._storing is not None:
            self._storing.join(LAST_SECONDS)

    # --- inside -------------------------------------------------------------------------------------
    def _settle(self) -> None:
        """Waits for what was queued: the window is to have all of its own kernels, and no others."""
        if self._device is not None:
            torch.cuda.synchronize(self._device)

    def _begin(self, window: Window) -> Any:
        from torch import profiler  # not above: 99 of 100 runs do not need it

        profile = profiler.profile(
            activities=profiler.supported_activities(),  # type: ignore[no-untyped-call]
            schedule=profiler.schedule(
                wait=window.wait, warmup=window.warmup, active=window.active, repeat=1
            ),
            on_trace_ready=self._ready,
            record_shapes=True,
            profile_memory=True,
            with_flops=True,
        )
        profile.start()
        log.event("profiling", wait=window.wait, warmup=window.warmup, active=window.active)
        return profile

    def _end(self) -> None:
        profile, self._profile = self._profile, None
        try:
            profile.stop()
        except Exception as error:
            log.event("profile-failed", error=f"{type(error).__name__}: {error}")

    def _ready(self, profile: Any) -> None:
        """Called by torch in the step that ends the window, or by `stop` within it."""
        if self._left > 0:
            return
        try:
            self._write(profile)
        except Exception as error:  # a full disk, torch's own: the training goes on
            log.event("profile-failed", error=f"{type(error).__name__}: {error}")

    def _write(self, profile: Any) -> None:
        averages, events, seconds = profile.key_averages(), profile.events(), self._seconds
        busy = None if self._device is None else kernel_seconds(events) / seconds
        first = first_words(self._facts(), busy, loader_seconds(events) / seconds)
        log.event("profiled", steps=self._window.active, seconds=seconds, first=first or None)
        by = "self_cpu_time_total" if self._device is None else "self_device_time_total"
        table = averages.table(sort_by=by, row_limit=TOP, max_name_column_width=40)
        stem = f"rank-{self._rank:05d}.{time.time_ns()}"
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"{stem}.pt.trace.json.gz"
            profile.export_chrome_trace(str(path))
            trace = path.read_bytes()
        text = f"{first}\n\n{table}\n" if first else f"{table}\n"
        if self._rank == 0:
            print(text, flush=True)
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
            MADE.append(folder)
            log.event("profile-stored", folder=folder, bytes=sum(map(len, parts.values())))


def of_run(
    session: Session,
    wanted: Profile | None,
    *,
    start: int,
    total_steps: int | None,
    device: torch.device | None,
    facts: Callable[[], Measurements | None] = lambda: None,
) -> Profiler:
    """The profiler of an attempt that goes on after step `start`; it does nothing where none is asked for.

    `wanted`: of the settings. A successor with too few steps left for the window makes none: that is no
    reason to end. Raises ConfigurationError.
    """
    window = chosen(session.env, wanted)
    if window is not None and start and total_steps is not None and start + window.steps > total_steps:
        why = f"{total_steps - start} steps are left, and the window has {window.steps}"
        log.event("profile-left-out", why=why)
        window = None
    return Profiler(
        window,
        session.store,
        attempt=session.attempt,
        rank=session.world.rank,
        total_steps=total_steps,
        start=start,
        device=device,
        facts=facts,
    )


def kernel_seconds(events: Iterable[Any]) -> float:
    """In which at least one kernel was on the device; torch's events. Streams overlap, so it is no sum.

    What a CPU operation has launched, and what a person or torch has named on the device's track, repeat
    the kernels below them.
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
    """That the loop has waited for batches of a torch DataLoader."""
    waits = (each for each in events if each.name.startswith(LOADER))
    return sum(float(each.time_range.end - each.time_range.start) for each in waits) / 1e6


def first_words(facts: Measurements | None, busy: float | None, loader: float = 0.0) -> str:
    """Utilisation first, then the verdict.

    busy: of the window, the device's utilisation, if it is known. loader: the share of it in which the loop
    waited for a DataLoader, for loops that tell no more (`facts`); their host may be ahead of the device, so
    a wait counts for no more than the device was idle.
    """
    if facts is None:
        return utilised(1 - loader if busy is None else min(busy, 1.0), loader)
    if busy is not None and not facts.busy:
        facts = replace(facts, busy=(min(busy, 1.0),))
    verdict = diagnose(facts)
    words = [advice(facts), "" if verdict is None else verdict.text]
    return "; ".join(word for word in words if word)

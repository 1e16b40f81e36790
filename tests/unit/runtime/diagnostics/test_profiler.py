"""What a profile says first, from events of our own making: no GPU was there to record any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from spottrain.core.training_settings import Profile
from spottrain.diagnostics.profiler import Profiler, first_words, kernel_seconds, loader_seconds
from spottrain.storage.local import FolderStore
from torch.autograd.profiler_util import FunctionEvent, Kernel


def event(name: str, start: float, end: float, **more: Any) -> FunctionEvent:
    """start, end: milliseconds."""
    return FunctionEvent(len(name), name, 1, start * 1e3, end * 1e3, **more)  # type: ignore[no-untyped-call]


def on_gpu(name: str, start: float, end: float, **more: Any) -> FunctionEvent:
    kind = torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]
    return event(name, start, end, device_type=kind, **more)


def test_a_kernel_counts_once_whoever_launched_it_and_whatever_it_is_part_of() -> None:
    launched = event("aten::mm", 0, 1)
    launched.kernels.append(Kernel("gemm", 0, 40_000))  # of its time on the device, as torch keeps it
    step = on_gpu("ProfilerStep#3", 0, 100, is_user_annotation=True)
    assert kernel_seconds([launched, on_gpu("gemm", 10, 50), step]) == pytest.approx(0.040)


def test_kernels_of_two_streams_at_once_count_once_and_copies_do_not() -> None:
    streams = [on_gpu("gemm", 0, 40), on_gpu("add", 30, 60), on_gpu("add", 35, 50), on_gpu("mul", 80, 90)]
    assert kernel_seconds([*streams, on_gpu("Memcpy HtoD (Pinned -> Device)", 60, 80)]) == pytest.approx(0.07)


def test_waits_for_a_dataloader_are_known_by_its_name() -> None:
    name = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
    assert loader_seconds([event(name, 0, 30), event("aten::mm", 30, 40), event(name, 50, 60)]) == 0.04


@pytest.mark.parametrize(
    ("busy", "loader", "words"),
    [
        (0.45, 0.5, "utilisation is 45%, below 70%: speed up data loading first, not the computation"),
        (0.45, 0.02, "below 70%, but data loading is not the cause: waiting for data takes 2%"),
        (None, 0.5, "utilisation is 50%, below 70%: speed up data loading"),
        (0.9, 0.5, ""),  # that wait is hidden behind the device's work
        (1.2, 0.0, ""),
    ],
)
def test_a_loop_that_tells_no_phases_is_judged_by_its_profile(
    busy: float | None, loader: float, words: str
) -> None:
    found = first_words(None, busy, loader)
    assert words in found and bool(words) == bool(found)


def test_the_seconds_are_those_of_the_steps_without_what_torch_takes_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    stop = torch.profiler.profile.stop_trace

    def slow(self: Any) -> None:
        stop(self)
        now[0] += 100.0

    monkeypatch.setattr(torch.profiler.profile, "stop_trace", slow)
    window = Profile(wait=1, warmup=1, active=3)
    store = FolderStore(tmp_path)
    profiler = Profiler(window, store, attempt=1, rank=0, clock=lambda: now[0])
    for _ in range(window.steps):
        now[0] += 1.0
        profiler.step()
    profiler.close()
    assert "event=profiled steps=3 seconds=3.000\n" in capsys.readouterr().out


@pytest.mark.parametrize(("wait", "records"), [(0, True), (1, False)])
def test_whether_the_work_of_a_step_is_counted_within_the_profile_is_known(
    tmp_path: Path, wait: int, records: bool
) -> None:
    """`Monitor.count_work` does it after the first step, but where the profile would show it."""
    window = Profile(wait=wait, warmup=1, active=1)
    profiler = Profiler(window, FolderStore(tmp_path), attempt=1, rank=0)
    profiler.step()
    assert profiler.recording == records
    for _ in range(window.steps - 1):
        profiler.step()
    profiler.close()
    assert not profiler.recording

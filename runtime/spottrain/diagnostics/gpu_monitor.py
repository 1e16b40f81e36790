"""`GPUMonitor`: samples utilisation and memory of this process's GPU with NVML, in a thread.

It needs NVIDIA's `nvidia-ml-py` (module pynvml), which torch does not install. The extra `runtime` and the
spottrain image include it; install it in your own image. Without a GPU, the module or the permission there
are no samples; one log line says why, and nothing is raised.

NVML's utilisation is the share of the last sampling period (1/6 s to 1 s) in which any kernel ran, however
small. So 100 % does not mean that the GPU did much; the roofline and MFU show that.
"""

from __future__ import annotations

import importlib
import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from spottrain.core import log

LATEST: Final = 15
"""Samples in a mean: 15 s, a usual scrape interval of Prometheus."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GPUSample:
    utilisation: float
    """Share of the time with a kernel running, from 0 to 1."""
    memory: float
    """Share of the GPU's memory that all processes use, from 0 to 1."""


class GPUMonitor:
    """Samples a GPU in a thread until `close`.

    `samples` are the last ones of training, by the calls of `stepped` and `restarted`. `on_sample` is called
    with the mean of the last ones of any kind. `read` takes a sample; default: NVML on `device`. `every`:
    seconds between samples, at least NVML's sampling period.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        every: float = 1.0,
        read: Callable[[], GPUSample] | None = None,
        on_sample: Callable[[GPUSample], None] = lambda sample: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._latest: deque[GPUSample] = deque(maxlen=LATEST)
        self._training: deque[tuple[float, GPUSample]] = deque(maxlen=LATEST)
        self._over = threading.Event()
        self._every, self._clock, self._on_sample = every, clock, on_sample
        self._device, self._read = device, read
        self._step, self._not_before = clock(), -math.inf
        """Samples between these times do not belong to training."""
        if read is not None or device.type == "cuda":
            threading.Thread(target=self._run, name="spottrain-nvml", daemon=True).start()

    def stepped(self) -> None:
        """Marks the end of a step."""
        self._step = self._clock()

    def restarted(self) -> None:
        """Drops samples since the last step: they cover an evaluation or similar work."""
        kept = [each for each in tuple(self._training) if each[0] <= self._step]
        self._training, self._not_before = deque(kept, maxlen=LATEST), self._clock() + self._every

    def settled(self) -> None:
        """Drops all samples so far, which cover compilation and first allocations."""
        self._step = -math.inf
        self.restarted()

    @property
    def samples(self) -> tuple[GPUSample, ...]:
        """The last samples of training; oldest first."""
        return tuple(sample for _, sample in tuple(self._training))

    @property
    def utilisation(self) -> float | None:
        """Mean utilisation of `samples`, from 0 to 1; None without samples."""
        found = self.samples
        return statistics.fmean(each.utilisation for each in found) if found else None

    @property
    def memory(self) -> float | None:
        """Share of GPU memory in the last sample, from 0 to 1; None without samples."""
        return self._latest[-1].memory if self._latest else None

    def close(self) -> None:
        self._over.set()

    def _run(self) -> None:
        try:
            read = self._read or reader(self._device)
            while not self._over.wait(self._every):
                self._take(read())
        except Exception as error:  # of driver or module: it must not end training
            why = f"{type(error).__name__}: {error}"
            log.event("utilisation-not-sampled", why=why, next="the time of a step is reported without it")

    def _take(self, sample: GPUSample) -> None:
        now = self._clock()
        self._latest.append(sample)
        if now >= self._not_before:
            self._training.append((now, sample))
        self._on_sample(
            GPUSample(
                utilisation=statistics.fmean(each.utilisation for each in self._latest),
                memory=sample.memory,
            )
        )


def reader(device: torch.device, nvml: Any = None) -> Callable[[], GPUSample]:
    """Returns a function that samples `device`. The GPU is found by UUID: CUDA_VISIBLE_DEVICES renumbers.

    Raises ModuleNotFoundError, or NVML's own errors.
    """
    nvml = nvml or importlib.import_module("pynvml")  # lazy: a user's image may lack it
    nvml.nvmlInit()
    handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")

    def read() -> GPUSample:
        memory, rates = nvml.nvmlDeviceGetMemoryInfo(handle), nvml.nvmlDeviceGetUtilizationRates(handle)
        return GPUSample(utilisation=rates.gpu / 100, memory=memory.used / memory.total)

    return read

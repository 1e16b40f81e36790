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

    `on_sample` is called with the mean utilisation of the last LATEST samples, and the memory now. `read`
    takes a sample; default: NVML on `device`. `every`: seconds between samples, at least NVML's own period.
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
        self._latest: deque[tuple[float, GPUSample]] = deque(maxlen=LATEST)
        self._over = threading.Event()
        self._every, self._clock, self._on_sample = every, clock, on_sample
        self._device, self._read = device, read
        self._from = -math.inf
        if read is not None or device.type == "cuda":
            threading.Thread(target=self._run, name="spottrain-nvml", daemon=True).start()

    def restart(self) -> None:
        """Leaves the samples so far out of `busy`: they are of a compilation, an evaluation or the like."""
        self._from = self._clock() + self._every  # the next sample is still of the time before

    @property
    def busy(self) -> tuple[float, ...]:
        """Utilisation in the samples since `restart`, LATEST at most, from 0 to 1; oldest first."""
        return tuple(sample.utilisation for at, sample in tuple(self._latest) if at >= self._from)

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
        self._latest.append((self._clock(), sample))
        mean = statistics.fmean(each.utilisation for _, each in self._latest)
        self._on_sample(GPUSample(utilisation=mean, memory=sample.memory))


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

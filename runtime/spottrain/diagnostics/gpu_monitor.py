"""How busy this process's GPU is, and how full, by NVML in a thread. Made by the loop; `close` ends it.

Needs NVIDIA's `nvidia-ml-py` (module pynvml), which torch does not bring: the extra `runtime`, and with it
our image, has it; an image of your own wants it installed. Where there is no GPU, no such module or no
permission, there are no samples, one line says why, and nothing is raised.

NVML's utilisation is the share of the last sampling period (1/6 s to 1 s) in which some kernel ran, however
small: 100 % does not say that the GPU did much. That is what the roofline and MFU are for.
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
from spottrain.core.progress import Board

KEPT: Final = 120
"""Samples: two minutes at one a second."""
LATEST: Final = 15
"""Samples whose mean is told: a quarter of a minute, as often as Prometheus mostly asks."""
LEAST: Final = 4
"""Samples that a short window is judged by, the last ones before it included."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GPUSample:
    utilisation: float
    """Of 1."""
    memory: float
    """Bytes that all processes use on that GPU, of 1 of its memory."""
    bandwidth: float = 0.0
    """Of 1, the time in which its memory was read or written."""


class GPUMonitor:
    """`samples` are of the training alone, as far as `stepped` and `restarted` tell; what is told is of all.

    read: takes a sample; by default from the NVML of `device`. every: seconds, no less than the period that
    a sample speaks of. told: is given the mean of the LATEST, whatever the GPU did.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        every: float = 1.0,
        read: Callable[[], GPUSample] | None = None,
        told: Callable[[GPUSample], None] = lambda sample: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._latest: deque[GPUSample] = deque(maxlen=LATEST)
        self._samples: deque[tuple[float, GPUSample]] = deque(maxlen=KEPT)
        self._over = threading.Event()
        self._every, self._clock, self._told = every, clock, told
        self._device = device
        self._read = read
        self._step = self._window = clock()
        self._not_before = -math.inf
        """A sample before it speaks of something else."""
        if read is not None or device.type == "cuda":
            threading.Thread(target=self._run, name="spottrain-nvml", daemon=True).start()

    # --- what the loop says ---------------------------------------------------------------------------
    def stepped(self) -> None:
        """After each step."""
        self._step = self._clock()

    def restarted(self) -> None:
        """What came after the last step was none: an evaluation, or the like."""
        self._samples = deque([each for each in tuple(self._samples) if each[0] <= self._step], maxlen=KEPT)
        self._not_before = self._clock() + self._every

    def settled(self) -> None:
        """From here on it is the training: before it was compiled, and memory allocated."""
        self._samples.clear()
        self._not_before = self._window = self._clock() + self._every

    def window(self) -> None:
        """Begins one."""
        self._window = self._clock()

    # --- what is known ----------------------------------------------------------------------------------
    @property
    def samples(self) -> tuple[GPUSample, ...]:
        """Of the window, but at least the LEAST last ones; the oldest first. Empty where there are none."""
        kept = tuple(self._samples)
        count = sum(taken > self._window for taken, _ in kept)
        return tuple(sample for _, sample in kept[-max(count, LEAST) :])

    @property
    def utilisation(self) -> float | None:
        """Mean of `samples`, of 1; None where there are none."""
        found = self.samples
        return statistics.fmean(each.utilisation for each in found) if found else None

    @property
    def memory(self) -> float | None:
        """The last, of 1."""
        return self._latest[-1].memory if self._latest else None

    def close(self) -> None:
        self._over.set()

    def _run(self) -> None:
        try:
            read = self._read or reader(self._device)
            while not self._over.wait(self._every):
                self._take(read())
        except Exception as error:  # a driver's, a module's: no training is to end by it
            why = f"{type(error).__name__}: {error}"
            log.event("utilisation-not-sampled", why=why, next="the split of the steps is told without it")

    def _take(self, sample: GPUSample) -> None:
        now = self._clock()
        self._latest.append(sample)
        if now >= self._not_before:
            self._samples.append((now, sample))
        self._told(
            GPUSample(
                utilisation=statistics.fmean(each.utilisation for each in self._latest),
                memory=sample.memory,
                bandwidth=statistics.fmean(each.bandwidth for each in self._latest),
            )
        )


def sampled(device: torch.device, board: Board) -> GPUMonitor:
    """Tells the board."""
    return GPUMonitor(
        device, told=lambda gpu: board.update(utilisation=gpu.utilisation, gpu_memory=gpu.memory)
    )


def reader(device: torch.device, nvml: Any = None) -> Callable[[], GPUSample]:
    """Reads the GPU that torch calls `device`; by UUID, for CUDA_VISIBLE_DEVICES numbers them anew.

    Raises ModuleNotFoundError, or NVML's own errors.
    """
    nvml = nvml or importlib.import_module("pynvml")  # not above: an image of the user's may lack it
    nvml.nvmlInit()
    handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")

    def read() -> GPUSample:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        rates = nvml.nvmlDeviceGetUtilizationRates(handle)
        return GPUSample(
            utilisation=rates.gpu / 100, memory=memory.used / memory.total, bandwidth=rates.memory / 100
        )

    return read

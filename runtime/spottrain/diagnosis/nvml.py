"""How busy this process's GPU is, and how full, by NVML in a thread. Made by the loop; `close` ends it.

Needs NVIDIA's `nvidia-ml-py` (module pynvml), which torch does not bring: the extra `runtime`, and with it
our image, has it; an image of your own wants it installed. Where there is no GPU, no such module or no
permission, there are no samples, one line says why, and nothing is raised.

NVML's utilisation is the share of the last sampling period (1/6 s to 1 s) in which some kernel ran, however
small: 100 % does not say that the GPU did much. That is what the roofline and MFU are for.
"""

from __future__ import annotations

import importlib
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from spottrain import log

KEPT: Final = 120
"""Samples: two minutes at one a second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    utilisation: float
    """Of 1."""
    memory: float
    """Bytes that all processes use on that GPU, of 1 of its memory."""


class Sampler:
    """`read`: takes a sample; by default from the NVML of `device`. `every`: seconds."""

    def __init__(
        self, device: torch.device, *, every: float = 1.0, read: Callable[[], Sample] | None = None
    ) -> None:
        self._samples: deque[Sample] = deque(maxlen=KEPT)
        self._over = threading.Event()
        self._every = every
        self._device = device
        self._read = read
        if read is not None or device.type == "cuda":
            threading.Thread(target=self._run, name="spottrain-nvml", daemon=True).start()

    @property
    def samples(self) -> tuple[Sample, ...]:
        """The oldest first; empty where none can be taken."""
        return tuple(self._samples)

    @property
    def utilisation(self) -> float | None:
        """Mean of what is kept, of 1; None where nothing is."""
        kept = self.samples
        return sum(each.utilisation for each in kept) / len(kept) if kept else None

    @property
    def memory(self) -> float | None:
        """The last, of 1."""
        return self._samples[-1].memory if self._samples else None

    def close(self) -> None:
        self._over.set()

    def _run(self) -> None:
        try:
            read = self._read or reader(self._device)
            while not self._over.wait(self._every):
                self._samples.append(read())
        except Exception as error:  # a driver's, a module's: no training is to end by it
            why = f"{type(error).__name__}: {error}"
            log.event("utilisation-not-sampled", why=why, next="the split of the steps is told without it")


def reader(device: torch.device, nvml: Any = None) -> Callable[[], Sample]:
    """Reads the GPU that torch calls `device`; by UUID, for CUDA_VISIBLE_DEVICES numbers them anew.

    Raises ModuleNotFoundError, or NVML's own errors.
    """
    nvml = nvml or importlib.import_module("pynvml")  # not above: an image of the user's may lack it
    nvml.nvmlInit()
    handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")

    def read() -> Sample:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        busy = nvml.nvmlDeviceGetUtilizationRates(handle).gpu
        return Sample(utilisation=busy / 100, memory=memory.used / memory.total)

    return read

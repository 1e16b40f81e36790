"""Tells from an error whether a GPU of this node has failed: by the driver's words, and by asking NVML."""

from __future__ import annotations

import importlib
import sys
import threading
from typing import Any, Final

from spottrain.contract import gpu_fault

LONGEST_CHAIN: Final = 10
"""Errors of a chain of causes that are read."""


def fault_behind(error: BaseException) -> str:
    """What says that an error is a GPU's that has failed; "" where nothing does.

    One that falls off the bus is often "unspecified launch failure" to CUDA, as a bug is: NVML knows which.
    """
    text = _words_of(error)
    found = gpu_fault(text)
    if not found and "CUDA" in text and "torch" in sys.modules:
        found = lost_gpu()
    return found


def _words_of(error: BaseException) -> str:
    """Of an error and of those that led to it: a library may have put one of its own around the driver's."""
    words: list[str] = []
    seen: BaseException | None = error
    while seen is not None and len(words) < LONGEST_CHAIN:
        words.append(str(seen))
        seen = seen.__cause__ or seen.__context__
    return "\n".join(words)


def lost_gpu(nvml: Any = None, *, seconds: float = 5.0) -> str:
    """What NVML says of a GPU that has failed; "" where all answer, or nobody can be asked.

    seconds: no longer than that, because a driver whose GPU is lost may not answer at all.
    """
    found: list[str] = []

    def ask() -> None:
        try:
            api = nvml or importlib.import_module("pynvml")
            api.nvmlInit()
            for number in range(api.nvmlDeviceGetCount()):
                api.nvmlDeviceGetTemperature(api.nvmlDeviceGetHandleByIndex(number), api.NVML_TEMPERATURE_GPU)
        except Exception as error:  # no NVIDIA driver, no module, no permission: nothing is known
            if fault := gpu_fault(str(error)):
                found.append(f"NVML: {fault}")

    asking = threading.Thread(target=ask, name="spottrain-nvml-lost", daemon=True)
    asking.start()
    asking.join(seconds)
    return found[0] if found else ""

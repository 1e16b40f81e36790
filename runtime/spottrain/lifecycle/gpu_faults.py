"""Detects from an error whether a GPU of this node has failed, by the driver's message and by NVML."""

from __future__ import annotations

import importlib
import sys
import threading
from typing import Any, Final

from spottrain.contract import gpu_fault

LONGEST_CHAIN: Final = 10
"""Maximum number of errors read from a chain of causes."""


def fault_behind(error: BaseException) -> str:
    """Returns the evidence that a failed GPU caused `error`; "" if there is none.

    CUDA often reports a GPU that fell off the bus as "unspecified launch failure", like a bug. NVML
    distinguishes the two.
    """
    words: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(words) < LONGEST_CHAIN:  # a library may have wrapped the driver's error
        words.append(str(cause))
        cause = cause.__cause__ or cause.__context__
    text = "\n".join(words)
    found = gpu_fault(text)
    if not found and "CUDA" in text and "torch" in sys.modules:
        found = lost_gpu()
    return found


def lost_gpu(nvml: Any = None, *, seconds: float = 5.0) -> str:
    """Returns NVML's error for a failed GPU; "" if all GPUs respond or NVML cannot be queried.

    seconds: the maximum wait, because a driver that has lost its GPU may not respond at all.
    """
    found: list[str] = []

    def ask() -> None:
        try:
            api = nvml or importlib.import_module("pynvml")
            api.nvmlInit()
            for number in range(api.nvmlDeviceGetCount()):
                api.nvmlDeviceGetTemperature(api.nvmlDeviceGetHandleByIndex(number), api.NVML_TEMPERATURE_GPU)
        except Exception as error:  # no NVIDIA driver, no module, no permission: the state is unknown
            if fault := gpu_fault(str(error)):
                found.append(f"NVML: {fault}")

    asking = threading.Thread(target=ask, name="spottrain-nvml-lost", daemon=True)
    asking.start()
    asking.join(seconds)
    return found[0] if found else ""

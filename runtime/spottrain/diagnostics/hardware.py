"""Peak performance of this machine: arithmetic, memory and launches.

Figures of GPUs are the vendor's (`core.gpu_catalogue`). A CPU has no such figure, so its MFU
is unknown. For a verdict, which needs only ratios, the CPU is
measured in less than half a second.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Final

import torch

from spottrain.core import log
from spottrain.core.device import float32_matmul
from spottrain.core.gpu_catalogue import known_gpu

FORMATS: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TYPES: Final = FORMATS | {"tf32": torch.float32}
CACHE_BYTES: Final = 32 * 2**20
"""Size of the last-level cache, if the system does not report it."""
CUDA_LAUNCH_SECONDS: Final = 6e-6
"""Seconds for Python and torch to dispatch one small operation; an assumption, not measured here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Limits of a machine: FLOP/s, bytes/s, and in `launch` the seconds of one small operation."""

    flops: float
    """Peak FLOP/s in the run's precision."""
    peaks: Mapping[str, float] = field(default_factory=dict)
    """Peak FLOP/s by number format, where known."""
    bandwidth: float
    cache_bytes: int = 0
    """An operation on at most this many bytes runs from the cache, with `cache_bandwidth`."""
    cache_bandwidth: float
    launch: float
    source: str = "measured"

    def rate(self, size: int) -> float:
        """Returns bytes/s for an operation that reads and writes `size` bytes."""
        return self.bandwidth if size > self.cache_bytes else self.cache_bandwidth


def machine(device: torch.device, precision: str) -> Machine | None:
    """Returns the limits of a device; None for an unknown GPU. A CPU is measured once."""
    if device.type == "cpu":
        return _measured(precision, torch.get_num_threads())
    name = torch.cuda.get_device_name(device)
    found = of_gpu(name, precision, tf32=uses_tf32())
    if found is None:
        log.event("peak-unknown", device=name, precision=precision, next="MFU and rooflines are not reported")
    return found


def of_gpu(name: str, precision: str, *, tf32: bool) -> Machine | None:
    gpu, peak = known_gpu(name), peak_flops(name, precision, tf32=tf32)
    if gpu is None or peak is None:
        return None
    peaks = {each: found for each in FORMATS if (found := peak_flops(name, each, tf32=tf32)) is not None}
    return Machine(
        flops=peak,
        peaks=peaks,
        bandwidth=gpu.bandwidth,
        cache_bandwidth=gpu.bandwidth,
        launch=CUDA_LAUNCH_SECONDS,
        source=gpu.source,
    )


def peak_flops(name: str, precision: str, *, tf32: bool = False) -> float | None:
    """Returns peak FLOP/s of the GPU with that name. `tf32`: whether fp32 products use TF32.

    None if unknown, or if the GPU lacks the format (a T4 emulates bf16).
    """
    gpu = known_gpu(name)
    if gpu is None:
        return None
    if precision == "fp32" and tf32 and "tf32" in gpu.flops:
        return gpu.flops["tf32"]
    return gpu.flops.get(precision)


def uses_tf32() -> bool:
    """Whether torch multiplies fp32 matrices in TF32; by default it does not."""
    return float32_matmul() == "tf32"


# --- a CPU, measured --------------------------------------------------------------------------------
@cache
def _measured(precision: str, threads: int) -> Machine:
    """Measures the CPU; results are cached by `threads`. The best of several tries excludes other load."""
    with torch.no_grad(), torch.random.fork_rng([]):
        found = Machine(
            flops=_measure_flops(TYPES[precision]),
            bandwidth=_measure_copy(64 * 2**20),
            cache_bytes=_cache_bytes(),
            cache_bandwidth=_measure_copy(256 * 2**10),
            launch=_measure_launch(),
        )
    log.event(
        "machine-measured",
        precision=precision,
        threads=threads,
        gigaflops=found.flops / 1e9,
        gigabytes=found.bandwidth / 1e9,
        launch_us=found.launch * 1e6,
    )
    return found


def _best(act: Callable[[], object], *, tries: int, within: float) -> float:
    """Returns seconds of the fastest of `tries`, fewer after `within` seconds, following one warm-up."""
    act()
    until, best = time.perf_counter() + within, float("inf")
    for _ in range(tries):
        began = time.perf_counter()
        act()
        now = time.perf_counter()
        best = min(best, now - began)
        if now > until:
            break
    return best


def _measure_flops(kind: torch.dtype, size: int = 512) -> float:
    one, other = torch.ones(size, size, dtype=kind), torch.ones(size, size, dtype=kind)
    into = torch.empty(size, size, dtype=kind)
    return 2 * size**3 / _best(lambda: torch.mm(one, other, out=into), tries=12, within=0.12)


def _measure_copy(size: int) -> float:
    """Returns bytes/s read and written. Small copies are timed in tens: one is as short as a launch."""
    source, target = torch.ones(size // 4), torch.zeros(size // 4)
    times = 1 if size > CACHE_BYTES else 10

    def copy() -> None:
        for _ in range(times):
            target.copy_(source)

    return 2 * size * times / _best(copy, tries=6, within=0.1)


def _measure_launch(ops: int = 100) -> float:
    """Returns seconds of one operation on one element, averaged over forward and backward."""
    value = torch.ones(1, requires_grad=True)

    def chain() -> None:
        with torch.enable_grad():
            result = value
            for _ in range(ops):
                result = result * 1.0001
            result.backward()  # type: ignore[no-untyped-call]

    return _best(chain, tries=20, within=0.05) / (2 * ops)


def _cache_bytes() -> int:
    try:
        return os.sysconf("SC_LEVEL3_CACHE_SIZE") or CACHE_BYTES
    except (ValueError, OSError):
        return CACHE_BYTES

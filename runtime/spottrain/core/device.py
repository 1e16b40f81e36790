"""Where the training runs and what makes it repeatable: device, seeds, random state. Called by all loops.

`seed()` is also for the user's script, so that the model's first weights are the same in every run.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import time
from typing import Any

import torch

from spottrain.contract import Env
from spottrain.core import log
from spottrain.errors import ConfigurationError

_seeded: int | None = None


def seed(default: int = 0) -> int:
    """Seeds Python, NumPy (if imported) and torch, and returns the seed: the manifest's, else `default`."""
    global _seeded
    value = _wanted(default)
    _seed_all(value)
    _seeded = value
    return value


def seed_in_use() -> int:
    """What `seed()` was last given; without such a call, seeds now."""
    return seed() if _seeded is None else _seeded


def _wanted(default: int) -> int:
    from spottrain.core.training_spec import Training

    wanted = Training.from_json(os.environ.get(Env.TRAINING, "")).seed
    return default if wanted is None else wanted


def seeded() -> bool:
    """Whether `seed()` was called, and so the manifest's seed holds."""
    return _seeded is not None


def seed_rank(rank: int) -> None:
    """After the model was made alike on all ranks: from here on each draws numbers of its own."""
    # Not by seed(): whether the script has called it must be the same on all ranks, new ones too.
    base = _wanted(0) if _seeded is None else _seeded
    _seed_all((base * 1_000_003 + rank) % 2**63)


def _seed_all(value: int) -> None:
    random.seed(value)
    torch.manual_seed(value)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(value % 2**32)


def choose(wanted: str | torch.device | None = None) -> torch.device:
    """The wanted device, else the first CUDA device, else the CPU; says which. Raises ConfigurationError."""
    try:
        device = torch.device(wanted or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise ConfigurationError(f"Trainer(device={wanted!r}) is no device: {error}") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigurationError(
            f"Trainer(device={str(device)!r}): only cpu and cuda can be saved and resumed"
        )
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError(f"Trainer(device={str(device)!r}): torch finds no CUDA device here")
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # what random states and copies of this process mean
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    log.event("device", device=device, name=name, threads=torch.get_num_threads(), torch=torch.__version__)
    return device


def device_clock() -> float:
    """Seconds, once the current GPU has done all that was queued: the host runs ahead of it, and by its own
    clock a step is as short as its launches. The host's clock where no GPU is in use."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    return time.perf_counter()


def make_deterministic() -> None:
    """Every kernel repeatable, or an error that names the one which is not.

    The number of threads is kept as it is and logged: on a CPU it decides the order of sums, so resume is
    bit-exact between processes with equally many.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    log.event("deterministic", threads=torch.get_num_threads())


def settle_memory() -> None:
    """After the first step: what is there now, mostly modules, lives to the end.

    Python's collector need not walk all of it again and again: that stopped the training for some 0.2 s each
    time (bench/RESULTS.md), on each rank at another step.
    """
    gc.collect()
    gc.freeze()


def random_state() -> dict[str, Any]:
    """All random state of this process (and its CUDA device) as plain values and tensors."""
    state = _raw_random_state()
    if "numpy" in state:
        kind, keys, position, has_gauss, gauss = state["numpy"]
        state["numpy"] = (kind, keys.tolist(), int(position), int(has_gauss), float(gauss))
    return state


def _raw_random_state() -> dict[str, Any]:
    """As `random_state`, not to be stored: without the conversion, which costs as much as a small step."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state()
    return state


def saved_buffers(model: torch.nn.Module) -> list[torch.Tensor]:
    """Those that are part of the model's state."""
    saved = model.state_dict(keep_vars=True)
    return [buffer for name, buffer in model.named_buffers() if name in saved]


def set_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(state["numpy"])


class Boundary:
    """What the forward passes of a partial step change: the random state, and buffers such as running means.

    Taken before a step of several micro-batches, and restored when a stop cuts it short.
    """

    def __init__(self, buffers: list[torch.Tensor]) -> None:
        self._random = _raw_random_state()
        self._buffers = [(buffer, buffer.clone()) for buffer in buffers]

    def restore(self) -> None:
        set_random_state(self._random)
        for buffer, before in self._buffers:
            buffer.copy_(before)


def to_device(value: Any, device: torch.device) -> Any:
    """Moves every tensor in nested tuples, lists and dicts; everything else stays as it is."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=device.type == "cuda")
    if isinstance(value, dict):
        return {key: to_device(item, device) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_device(item, device) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(to_device(item, device) for item in value)
    return value

"""torch, device and reproducibility: oldest version, device choice, seeds, random state.

Scripts call `seed()` too, so that the model's initial weights are the same in every run.
"""

from __future__ import annotations

import atexit
import copy
import gc
import os
import random
import re
import sys
from collections.abc import Iterable, Mapping, MutableMapping
from pathlib import Path
from typing import Any, Final

import torch

from spottrain.contract import Env
from spottrain.core import log, numpy_random
from spottrain.errors import ConfigurationError

OLDEST_TORCH: Final = (2, 6)
"""The oldest version that the runtime is tested with (docs/own-image.md)."""

_seeded: int | None = None


def require_torch() -> None:
    """Raises ConfigurationError if torch is older than OLDEST_TORCH, which pip checks only with the extra."""
    numbers = re.match(r"(\d+)\.(\d+)", torch.__version__)  # such as 2.6.0a0+ecf3bae40a.nv25.01
    if numbers and tuple(map(int, numbers.groups())) < OLDEST_TORCH:
        raise ConfigurationError(
            f"torch {torch.__version__} at {Path(torch.__file__).parent} is older than "
            f"{'.'.join(map(str, OLDEST_TORCH))}, the oldest that spottrain supports; use a newer one"
        )


def float32_matmul() -> str:
    """Returns torch's format for products of fp32 matrices: `tf32`, `ieee`, or `none` if nothing was set.

    It reads the newer of torch's two settings, which is correct whichever was set. If a script sets only
    `fp32_precision`, `torch.get_float32_matmul_precision()` raises RuntimeError (torch 2.15). Before torch
    2.9 only the older setting exists.
    """
    matmul: Any = torch.backends.cuda.matmul
    if hasattr(matmul, "fp32_precision"):
        return str(matmul.fp32_precision)
    return "none" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def seed(default: int = 0) -> int:
    """Seeds Python, NumPy (if already imported) and torch.

    Call it before the model is made, so that its initial weights are the same in every run.

    Args:
        default: Seed to use unless spec.training.seed is set.

    Returns:
        The seed in use.

    Raises:
        ConfigurationError: SPOTTRAIN_TRAINING is invalid.
    """
    global _seeded
    value = _wanted(default)
    _seed_all(value)
    _seeded = value
    return value


def seed_in_use() -> int:
    """Returns the seed of the last `seed()` call, else that of `torch.manual_seed()`, else seeds now."""
    global _seeded
    own = seed_of_script()
    if _seeded is None and own is not None and _wanted(own) == own:
        _seeded = own  # the script may have seeded Python and NumPy otherwise
    return seed() if _seeded is None else _seeded


def seed_of_script() -> int | None:
    """Returns what the script gave `torch.manual_seed()`; None if it did not call it.

    What torch begins with by itself is larger than a seed that NumPy takes too.
    """
    found = torch.initial_seed()
    return found if found < 2**32 else None


def _wanted(default: int) -> int:
    from spottrain.core.training_settings import read_manifest

    return int(read_manifest(os.environ.get(Env.TRAINING, "")).get("seed", default))


def seeded() -> bool:
    """Whether `seed()` was called, so that the manifest's seed is in use."""
    return _seeded is not None


def seed_rank(rank: int) -> None:
    """Gives each rank its own random numbers, once the model is the same on all ranks."""
    # Does not call seed(): whether the script has called it must be the same on all ranks, new ones too.
    base = _wanted(0) if _seeded is None else _seeded
    _seed_all((base * 1_000_003 + rank) % 2**63)


def _seed_all(value: int) -> None:
    random.seed(value)
    torch.manual_seed(value)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(value % 2**32)


def choose(wanted: str | torch.device | None = None) -> torch.device:
    """Returns the wanted device, else the first CUDA device, else the CPU, and logs it.

    Raises ConfigurationError."""
    try:
        device = torch.device(wanted or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise ConfigurationError(f"Trainer(device={wanted!r}) is not a device: {error}") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigurationError(f"Trainer(device={str(device)!r}): only cpu and cuda are supported")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError(
            f"Trainer(device={str(device)!r}): torch finds no CUDA device on this machine"
        )
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # the device of this process's random state and copies
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    log.event("device", device=device, name=name, threads=torch.get_num_threads(), torch=torch.__version__)
    return device


def make_deterministic() -> None:
    """Makes every kernel deterministic; one that cannot be raises an error with its name.

    The number of threads is kept and logged. On a CPU it determines the order of sums, so a resume is
    bit-exact only between processes with equally many threads.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    log.event("deterministic", threads=torch.get_num_threads())


def settle_memory() -> None:
    """Excludes the objects that exist after the first step from garbage collection.

    They are mostly modules, which live to the end. Collecting them repeatedly stopped the training for about
    0.2 s each time, on each rank at a different step.
    """
    gc.collect()
    gc.freeze()
    atexit.register(
        gc.unfreeze
    )  # else the interpreter's end leaves them, and Triton prints 30 lines of leaks


def random_state(copy: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns all random state of this process (and its CUDA device) as plain values and tensors.

    `copy`: that of a `random_copy`, in place of the present one.
    """
    state = dict(_random_state_of_torch() if copy is None else copy)
    if (of_numpy := numpy_random.plain(state.pop("numpy", None))) is not None:
        state["numpy"] = of_numpy
    return state


def random_copy() -> dict[str, Any]:
    """Returns the same for this process alone, in a fraction of the time."""
    return _random_state_of_torch() | {"numpy": numpy_random.copied()}


def _random_state_of_torch() -> dict[str, Any]:
    """Returns that of Python too."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state and "numpy" in sys.modules:
        numpy_random.restore(state["numpy"])


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Returns whether two states of `random_state` are equal."""
    if one.keys() != other.keys():
        return False
    pairs = [(one[name], other[name]) for name in one]
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


class Boundary:
    """State that the forward passes of a partial step change: random state, buffers such as running means.

    Captured before a step of several micro-batches, and restored when a stop interrupts it. `modules`: all
    modules of the model. `random`: a `random_copy`; None: of the present state.
    """

    def __init__(self, modules: Iterable[torch.nn.Module], random: dict[str, Any] | None = None) -> None:
        self._random = random_copy() if random is None else random
        self._buffers = [(module._buffers, dict(module._buffers)) for module in modules]
        found = (each for _, named in self._buffers for each in named.values() if each is not None)
        self._copies = [(each, each.clone()) for each in found if not overlaps(each)]

    def restore(self) -> None:
        set_random_state(self._random)
        for buffers, before in self._buffers:  # some may have been replaced, or have come into being
            buffers.clear()
            buffers.update(before)
        for buffer, kept in self._copies:
            buffer.copy_(kept)


def overlaps(tensor: torch.Tensor) -> bool:
    """Whether several elements are in one place of memory, as in a tensor made by `expand`."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return False
    return tensor.numel() > span(tensor)


def span(tensor: torch.Tensor) -> int:
    """Returns how many elements of memory there are from the tensor's first to its last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def to_device(value: Any, device: torch.device) -> Any:
    """Moves every tensor in nested mappings, lists and tuples, and each object that has `to(device)`.

    Other values stay as they are.
    """
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=device.type == "cuda")
    if callable(getattr(value, "to", None)) and not isinstance(value, type):
        return value.to(device)  # such as BatchEncoding of transformers, or PackedSequence
    if isinstance(value, Mapping):
        moved = {key: to_device(item, device) for key, item in value.items()}
        return moved if isinstance(value, dict) else _like(value, moved)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_device(item, device) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(to_device(item, device) for item in value)
    return value


def _like(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Returns a mapping of the type of `value` with these items; a dict if the type cannot be made so."""
    try:
        if isinstance(value, MutableMapping):  # which may have attributes beside its items
            clone = copy.copy(value)
            clone.update(items)
            return clone
        return type(value)(items)  # type: ignore[call-arg]
    except TypeError:
        return items

"""Random state that the batches of a DataLoader follow from: the global one, and that of its generators."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from spottrain.checkpoint.plain_values import generator_state, is_generator, set_generator_state
from spottrain.core import device as devices


def random_state(loader: Any) -> dict[str, Any]:
    """Returns the global random state, and the states of the loader's generators by where they are."""
    return devices.random_state() | {"generators": generators(loader)}


def set_random_state(loader: Any, state: dict[str, Any], *, in_workers: bool = False) -> None:
    """Sets both. `in_workers`: the loader's workers read ahead, so its generators stay as they are."""
    devices.set_random_state(state)
    if not in_workers:
        set_generators(loader, state)


def generators(loader: Any) -> dict[str, Any]:
    return {where: generator_state(each) for where, each in _found(loader)}


def set_generators(loader: Any, state: Mapping[str, Any]) -> None:
    """Sets the generators to what `random_state` returned."""
    states = state.get("generators", {})
    for where, each in _found(loader):
        if where in states:
            own = states[where] if isinstance(states[where], Mapping) else {"torch": states[where]}
            set_generator_state(each, own)


def _found(loader: Any) -> Iterator[tuple[str, Any]]:
    """Yields the generators of torch, Python and NumPy, each once."""
    seen: set[int] = set()
    for where, part in _parts(loader):
        for name, value in list(getattr(part, "__dict__", {}).items()):
            if is_generator(value) and id(value) not in seen:
                seen.add(id(value))
                yield f"{where}{name}", value


def _parts(loader: Any) -> Iterator[tuple[str, Any]]:
    yield "", loader
    for name in ("sampler", "batch_sampler"):
        sampler: Any = getattr(loader, name, None)
        while hasattr(sampler, "batch_sampler"):  # Accelerate wraps it, to skip or to divide batches
            sampler = sampler.batch_sampler
        yield f"{name}.", sampler
        yield f"{name}.sampler.", getattr(sampler, "sampler", None)
    dataset = getattr(loader, "dataset", None)
    yield "dataset.", dataset
    yield "dataset.dataset.", getattr(dataset, "dataset", None)


def is_sized(loader: Any) -> bool:
    """Whether the loader has a length, and data."""
    try:
        return len(loader) > 0
    except TypeError:
        return False

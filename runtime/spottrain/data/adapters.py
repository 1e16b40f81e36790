"""`Skipping`, which makes a plain loader `Resumable`, and checks of loaders that have a state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, SequentialSampler

from spottrain.contract import Reason
from spottrain.data.order import mix, seeded
from spottrain.data.plan import of_checkpoint
from spottrain.errors import CheckpointError, ConfigurationError
from spottrain.lifecycle.worker_signals import protect


def require_resumable(loader: Any) -> None:
    """Raises ConfigurationError if the loader of micro-batches cannot be resumed."""
    name = type(loader).__name__
    if not hasattr(loader, "__iter__"):
        raise ConfigurationError(
            f"train_dataset is a {name}, which cannot be iterated over; give a map-style dataset (len and "
            "[i]) or a loader of micro-batches with state_dict() and load_state_dict(), such as torchdata's "
            "StatefulDataLoader"
        )
    if hasattr(loader, "advance"):
        raise ConfigurationError(
            f"train_dataset is a {name}, which is for custom loops that call advance(); give its "
            "dataset instead"
        )
    if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
        require_sampler_state(loader, "train_dataset")
        return
    dataset = getattr(loader, "dataset", None)
    instead = (
        "use torchdata's StatefulDataLoader, or wrap it in spottrain.data.Skipping, which after a "
        "resume fetches the pass again from its beginning"
    )
    if hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset):
        instead = (
            "give the dataset itself as train_dataset, and its num_workers and collate_fn to the Trainer"
        )
    raise ConfigurationError(
        f"train_dataset is a {name} without state_dict(), so it cannot be resumed; {instead}"
    )


def require_sampler_state(loader: Any, where: str) -> None:
    """Raises ConfigurationError for torchdata's StatefulDataLoader if its sampler's order is not saved.

    After a resume it skips what the sampler has yielded, of an order that is drawn again.
    """
    dataset = getattr(loader, "dataset", None)
    if not isinstance(loader, DataLoader) or isinstance(dataset, IterableDataset):
        return
    sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    while type(sampler).__name__ == "BatchSampler" and hasattr(sampler, "sampler"):
        sampler = sampler.sampler
    if loader.generator is not None and getattr(sampler, "generator", None) is loader.generator:
        raise ConfigurationError(
            f"{where} is a {type(loader).__name__} with a generator, from which after an interruption it "
            "would draw another order: leave generator out, and set the seed by spottrain.seed()"
        )
    known = isinstance(sampler, SequentialSampler | DistributedSampler) or hasattr(sampler, "state_dict")
    if not known and not type(sampler).__module__.startswith("torchdata."):
        raise ConfigurationError(
            f"{where} is a {type(loader).__name__} over a {type(sampler).__name__} without state_dict(), "
            "so after an interruption it would draw another order: give the sampler to spottrain.data.loader("
            "dataset, sampler=...), or give it state_dict() and load_state_dict()"
        )


def length(sampler: Any) -> float:
    """Returns how much a sampler yields in a pass; infinity if it does not say."""
    try:
        return len(sampler)
    except TypeError:  # of a stream
        return float("inf")


def samples_in(batch: Any) -> int:
    """Returns the samples of a micro-batch: the length of its first tensor, or 1 without one."""
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.dim() else 1
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, list | tuple) and batch:
        return samples_in(batch[0])
    return 1


class Skipping:
    """Resumes any repeatable loader: fetches the used batches of the pass again and drops them, in O(n).

    Correct only if the loader yields the same batches for the same random state. Each time the loader runs,
    `random`, torch and numpy are seeded by `seed`, pass and batch. `set_epoch(pass)` is called if the loader,
    its sampler or its dataset has it.

    Args:
        loader: yields micro-batches; the same ones for the same seed.
        seed: seeds the random state while the loader runs.
    """

    def __init__(self, loader: Any, *, seed: int = 0) -> None:
        self.loader = loader
        protect(loader)
        self.seed = seed
        self._tried = False
        self._pass, self._used = 0, 0
        self._ended = False
        self._loaded = False

    def __getattr__(self, name: str) -> Any:
        """Has those attributes of the loader that are looked up where its workers begin and end."""
        if name not in ("num_workers", "worker_init_fn", "_iterator"):
            raise AttributeError(name)
        return getattr(self.loader, name, 0 if name == "num_workers" else None)

    def __iter__(self) -> Iterator[Any]:
        if not self._loaded and (self._used or self._ended):
            self._pass, self._used = self._pass + 1, 0
        self._loaded = self._ended = False
        again = self._used
        self._used = 0
        yield from islice(self._whole(), again, None)
        self._ended = True

    def _whole(self) -> Iterator[Any]:
        for part in (self.loader, *(getattr(self.loader, name, None) for name in ("sampler", "dataset"))):
            set_epoch = getattr(part, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(self._pass)
        self._require_same_order()
        with self._seeded():
            stream = iter(self.loader)
        while True:
            with seeded(mix(mix(self.seed, self._pass), self._used + 1)):
                try:
                    batch = next(stream)
                except StopIteration:
                    return
            self._used += 1
            yield batch

    @contextmanager
    def _seeded(self) -> Iterator[None]:
        """The random state in which a pass begins, also of generators that loader and samplers were given."""
        batches, sampler = (getattr(self.loader, name, None) for name in ("batch_sampler", "sampler"))
        for part in (self.loader, sampler, batches, getattr(batches, "sampler", None)):
            if isinstance(generator := getattr(part, "generator", None), torch.Generator):
                generator.manual_seed(mix(self.seed, self._pass))
        with seeded(mix(mix(self.seed, self._pass), 0)):
            yield

    def _require_same_order(self) -> None:
        """Raises ConfigurationError if the loader's sampler does not yield the same twice."""
        samplers = (getattr(self.loader, name, None) for name in ("batch_sampler", "sampler"))
        sampler = next((each for each in samplers if each is not None), None)
        if self._tried or sampler is None or length(sampler) == float("inf"):
            return
        self._tried, orders = True, []
        for _ in range(2):
            with self._seeded():
                orders.append(str(list(sampler)))
        if orders[0] != orders[1]:
            raise ConfigurationError(
                f"Skipping(loader): its {type(sampler).__name__} yields another order each time, from a "
                "state that no checkpoint holds, so a pass cannot be resumed: have it draw from torch's, "
                "Python's or NumPy's global random numbers, or from what set_epoch(pass) sets"
            )

    def state_dict(self) -> dict[str, Any]:
        """Returns the pass, the batches used of it, the number of workers and the seed."""
        return {"pass": self._pass, "used": self._used, "workers": self.num_workers, "seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the position. Raises CheckpointError if the number of workers has changed."""
        if state["workers"] != self.num_workers:
            raise CheckpointError(
                f"the checkpoint was made with {state['workers']} loader workers, and now there are "
                f"{self.num_workers}, so the batches may come in another order; use num_workers="
                f"{state['workers']}",
                reason=Reason.CHECKPOINT_INCOMPATIBLE,
            )
        self._pass, self._used = state["pass"], state["used"]
        self.seed = of_checkpoint("seed", state["seed"], self.seed)
        self._loaded = True

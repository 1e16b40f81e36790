"""Make `Resumable` what is not: a plain loader, and one over a MosaicML streaming set. Called by `stream`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import torch

from spottrain.contract import Reason
from spottrain.data.dataloader import seeded
from spottrain.data.shuffle import mix
from spottrain.errors import CheckpointError, ConfigurationError


def resumable(loader: Any, *, ranks: int) -> Any:
    """`loader` itself where it has a state of its own. Raises ConfigurationError where it cannot be used."""
    name = type(loader).__name__
    if not hasattr(loader, "__iter__"):
        raise ConfigurationError(
            f"train_set is a {name}, which cannot be iterated over; give a map-style dataset (len and [i]) "
            "or a loader of micro-batches with state_dict() and load_state_dict(), such as torchdata's "
            "StatefulDataLoader"
        )
    if isinstance(loader, Streaming) and loader.ranks is None:
        loader.ranks = ranks
    if isinstance(loader, Skipping | Streaming):
        return loader
    if _counts_samples(loader):
        raise ConfigurationError(
            f"train_set is a {name}, which makes no batches; give it to a DataLoader, and that as train_set"
        )
    if _counts_samples(getattr(loader, "dataset", None)):
        return Streaming(loader, ranks=ranks)
    if hasattr(loader, "advance"):
        raise ConfigurationError(
            f"train_set is a {name}, which is for a loop of one's own: it counts what advance() tells it; "
            "give its dataset instead"
        )
    if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
        return loader
    raise ConfigurationError(
        f"train_set is a {name} without state_dict(), so it cannot go on where it was; {_instead(loader)}"
    )


def _instead(loader: Any) -> str:
    dataset = getattr(loader, "dataset", None)
    if hasattr(dataset, "__getitem__") and not isinstance(dataset, torch.utils.data.IterableDataset):
        return "give its dataset as train_set, and its workers and collate_fn as workers and collate"
    return (
        "use torchdata's StatefulDataLoader, or wrap it in spottrain.data.Skipping, which after a resume "
        "fetches again what was used of the pass"
    )


def _counts_samples(dataset: Any) -> bool:
    """Whether its state must be told the number of samples, as that of MosaicML's StreamingDataset."""
    method = getattr(dataset, "state_dict", None)
    return method is not None and "num_samples" in inspect.signature(method).parameters


def samples_in(batch: Any) -> int:
    """Samples of a micro-batch: the length of the first tensor in it; 1 where there is none."""
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.dim() else 1
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, list | tuple) and batch:
        return samples_in(batch[0])
    return 1


class _Around:
    """What `StreamBatches` looks for in a DataLoader, from the one inside."""

    loader: Any

    @property
    def num_workers(self) -> int:
        return getattr(self.loader, "num_workers", 0)

    @property
    def worker_init_fn(self) -> Any:
        return getattr(self.loader, "worker_init_fn", None)

    @worker_init_fn.setter
    def worker_init_fn(self, function: Any) -> None:
        self.loader.worker_init_fn = function

    @property
    def _iterator(self) -> Any:
        return getattr(self.loader, "_iterator", None)


class Skipping(_Around):
    """Any repeatable loader, resumed by fetching what was used of the pass again and dropping it: O(n).

    It is right only where the loader gives the same in the same random state: `random`, torch and numpy are
    seeded by `seed`, pass and batch each time the loader is called. `set_epoch(pass)` is called where the
    loader, its sampler or its dataset has it.
    """

    def __init__(self, loader: Any, *, seed: int = 0) -> None:
        self.loader, self.seed = loader, seed
        self._pass, self._used = 0, 0
        self._ended = False
        self._loaded = False

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
        with seeded(mix(mix(self.seed, self._pass), 0)):
            stream = iter(self.loader)
        while True:
            with seeded(mix(mix(self.seed, self._pass), self._used + 1)):
                try:
                    batch = next(stream)
                except StopIteration:
                    return
            self._used += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"pass": self._pass, "used": self._used, "workers": self.num_workers, "seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["workers"] != self.num_workers:
            raise CheckpointError(
                f"the checkpoint was made with {state['workers']} loader workers, and now there are "
                f"{self.num_workers}: a stream without a state of its own may come in another order then; "
                "give the loader the same number",
                reason=Reason.CHECKPOINT_INCOMPATIBLE,
            )
        self._pass, self._used, self.seed = state["pass"], state["used"], state["seed"]
        self._loaded = True


class Streaming(_Around):
    """A loader over a set whose state counts samples, as MosaicML's StreamingDataset. Elastic.

    ranks: None: as many as the run has.
    """

    elastic = True

    def __init__(self, loader: Any, *, ranks: int | None = None) -> None:
        if not _counts_samples(getattr(loader, "dataset", None)):
            raise ConfigurationError(
                f"Streaming({type(loader).__name__}): its dataset has no state_dict(num_samples, "
                "from_beginning); give the loader itself as train_set"
            )
        self.loader, self.ranks = loader, ranks
        self._samples = 0
        self._state: dict[str, Any] | None = {}
        """What is the state while no pass has begun since it was loaded; empty: from the beginning."""

    def __iter__(self) -> Iterator[Any]:
        stream = iter(self.loader)
        self._samples = 0
        for batch in stream:
            self._samples += samples_in(batch)
            self._state = None
            yield batch

    def state_dict(self) -> dict[str, Any]:
        if self._state is not None:
            return self._state
        of_all = self._samples * (self.ranks or 1)
        return dict(self.loader.dataset.state_dict(of_all, from_beginning=False))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            self.loader.dataset.load_state_dict(state)
        self._state = state

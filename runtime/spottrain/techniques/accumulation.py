"""Gradient accumulation whose step is the step of one big batch: unequal micro-batches, unequal counts of
tokens, several ranks, and the last window of an epoch too. For loops that are not ours; one import:

    for part in accumulation.parts(loader, 8, model=model, count=lambda batch: int((batch[1] != -100).sum())):
        with part.sync:
            (mean_loss(model, part.batch) * part.weight).backward()
        if part.last:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

The mean of means is the mean only where all parts are equally large: sum(x1)/n1 + sum(x2)/n2 is not what one
batch of both gives, halved or not. A count of tokens differs from one micro-batch to the next and from rank
to rank, so the divisor is the count of the whole optimizer step over all ranks, which must be known before
its first backward pass. transformers divided by micro-batches until October 2024
(huggingface/transformers#34191), and with several GPUs longer (#37474).

`Trainer` weighs by samples (`data.plan.Step.shares`), which is exact where the loss is a mean over samples.
Where it is one over tokens, `Reweighed` gives the shares to use in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, Generic, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from spottrain.core import log
from spottrain.data.dataloader import FetchRequest, Repeatable
from spottrain.data.sampler import Loader
from spottrain.distributed.world import World
from spottrain.errors import ConfigurationError

Batch = TypeVar("Batch")
Count = Callable[[Any], float]
"""Of a batch: over how many items (samples, tokens that are not ignored) its loss is the mean."""


WHOLE: Final = (SequentialSampler, RandomSampler, DistributedSampler)
"""Samplers of torch that give all samples of a set."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch(Generic[Batch]):
    """One micro-batch of an optimizer step."""

    batch: Batch
    weight: float
    """Factor on its loss, which is a mean over its items: with it the gradient that DDP and FSDP leave, a
    mean over ranks, is that of the mean over all items of the step. 0: a filler."""
    sync: AbstractContextManager[Any]
    """Around forward and backward: ranks exchange gradients in the last part alone. Enter it once."""
    last: bool
    """Whether the optimizer steps after this."""


def weights(counts: Sequence[float], world: World | None = None, *, device: Any = "cpu") -> list[float]:
    """Factor on the mean loss of each of this rank's micro-batches of one optimizer step.

    counts: over how many items each loss is the mean. Every rank must call it: the counts of all are summed.
    """
    world = world or joined()
    return [share * world.size for share in shares_by_count(counts, world, device=device)]


def shares_by_count(
    counts: Sequence[float], world: World | None = None, *, device: Any = "cpu"
) -> list[float]:
    """As `Step.shares`, by a count of the loop's choice: over all ranks they add up to 1, or all are 0.

    A loop multiplies a micro-batch's loss by it and by the number of ranks. `device`: where the sum over
    ranks is taken, a GPU's where the process group has NCCL alone.
    """
    world = world or joined()
    _require_counts(counts)
    return _shares(counts, _summed(_table([float(sum(counts))], world, device), 0))


class Reweighed(Generic[Batch]):
    """For a loop with pairs (micro-batch, share of the step), as `Trainer`: the same with shares by count.

        reweighed = Reweighed(loss_weight, world)
        for batch, share in reweighed(micro_batches):
            (loss(model, batch) * share * world.size).backward()

    count: as of `parts`; of a filler, whose share is 0, nothing counts. The micro-batches of a step are all
    fetched before its first backward pass. There are as many after as before, on each rank, as DDP must have
    it: one without anything to count, whose mean loss would be 0 / 0, is another one with share 0 instead.
    spare: asked for that other one, once, where none of this rank's in the step counts. By itself it is the
    last that did, which another attempt does not know: only with a spare that depends on nothing else does
    a model with batch norm, which sees it, go on bit for bit.
    """

    def __init__(
        self,
        count: Count,
        world: World | None = None,
        *,
        device: Any = "cpu",
        spare: Callable[[], Batch] | None = None,
    ) -> None:
        self._count, self._world, self._device = count, world or joined(), device
        self._fillers = _Fillers(spare)

    def __call__(self, micro_batches: Iterable[tuple[Batch, float]]) -> list[tuple[Batch, float]]:
        """Every rank must call it. Raises ConfigurationError where this rank never had one that counts."""
        held = list(micro_batches)
        counts = [float(self._count(batch)) if share else 0.0 for batch, share in held]
        shares = shares_by_count(counts, self._world, device=self._device)
        first = [given for given, each in zip(held, counts, strict=True) if each][:1]
        self._fillers.seen(first)
        return [
            (batch if share else self._fillers.of(first), share)
            for (batch, _), share in zip(held, shares, strict=True)
        ]


def parts(
    loader: Iterable[Batch],
    size: int,
    *,
    model: torch.nn.Module | None = None,
    count: Count | None = None,
    world: World | None = None,
    device: Any = "cpu",
    spare: Callable[[], Batch] | None = None,
) -> Iterator[MicroBatch[Batch]]:
    """The micro-batches of one pass over `loader`, `size` of them to an optimizer step, fewer to the last.

    model: as it is called, wrapped by DDP or FSDP2 or not. count: None: all micro-batches count alike; they
    are not told apart then, so give it where they differ. device: as of `shares_by_count`.

    The micro-batches of one step are held at hand, on the loader's device. With several ranks every rank must
    iterate, and one that runs out of data before the others goes on with fillers, for all must come to each
    exchange. A micro-batch that counts 0 is left out, for its mean is 0 / 0. Where nothing of a step counts
    on any rank it is a step all the same, as with `Trainer`, of one filler: the position in the data moves on
    with it, its gradients are zero, and momentum and weight decay act.

    A filler has weight 0. Where a micro-batch of this rank counts in the step, it is that one, else the first
    of the loader's set that counts: a model with batch norm or dropout sees it, and only so another attempt
    goes on bit for bit. spare: gives it where that cannot be found, for `loader` is no DataLoader over all of
    a map-style set. Without it such a step is left out, in each attempt, and told; and a rank that has
    nothing while others have goes on with the last that counted, which another attempt does not know.
    Raises ConfigurationError.
    """
    if size < 1:
        raise ConfigurationError(f"accumulation over {size} micro-batches: must be at least 1")
    world = world or joined()
    stream, fillers = iter(loader), _Fillers(spare or _first_of(loader, count))
    while True:
        given = list(islice(stream, size))
        counted = [(batch, 1.0 if count is None else float(count(batch))) for batch in given]
        window = [(batch, each) for batch, each in counted if each]
        counts = [each for _, each in window]
        _require_counts(counts)
        table = _table([sum(counts), len(given), len(counts)], world, device)
        if not _summed(table, 1):
            return
        most = int(max(row[2] for row in table))
        if not most and not fillers.repeatable:
            log.event("step-left-out", why="nothing of it counts, and parts(spare=...) is not given")
            continue
        if not most:
            log.event("empty-step", why="no micro-batch of it has anything to count: its gradients are zero")
        shares = _shares(counts, _summed(table, 0))
        filled = [(batch, share * world.size) for (batch, _), share in zip(window, shares, strict=True)]
        missing = max(0, (max(1, most) if _gathers(model) else 1) - len(filled))
        fillers.seen(window)
        filler = fillers.of(window) if missing else None
        yield from _window(model, filled + [(filler, 0.0)] * missing)


class _Fillers:
    """What takes the place of a micro-batch that is not there, or counts nothing."""

    def __init__(self, make: Callable[[], Any] | None) -> None:
        self._make = make
        self._known: Any = None

    @property
    def repeatable(self) -> bool:
        """Whether another attempt takes the same."""
        return self._make is not None

    def of(self, window: Sequence[tuple[Any, float]]) -> Any:
        """For a step in which these of this rank count. Raises ConfigurationError."""
        if window:
            return window[-1][0]
        if self._known is None and self._make is not None:
            self._known = self._make()
        return _spare(self._known)

    def seen(self, window: Sequence[tuple[Any, float]]) -> None:
        """Where nothing makes one, it is the last that counted."""
        if self._make is None and window:
            self._known = window[-1][0]


def _first_of(loader: Any, count: Count | None) -> Callable[[], Any] | None:
    """Finds the first micro-batch of a loader's map-style set that counts, under a seed of its own.

    None where that is no sum of its parts (another library's loader also moves batches to a device), or where
    a sampler of the person's own says which samples there are.
    """
    if type(loader) not in (DataLoader, Loader) or isinstance(loader.dataset, IterableDataset):
        return None
    plan = getattr(loader.batch_sampler, "plan", None)
    size = loader.batch_size if type(loader.sampler) in WHOLE else None
    size = size if plan is None else plan.micro_batch_size
    if size is None:
        return None
    own = isinstance(loader.dataset, Repeatable)
    dataset = loader.dataset if own else Repeatable(loader.dataset, loader.collate_fn)

    def find() -> Any:
        for start in range(0, len(dataset), size):
            samples = list(range(start, min(start + size, len(dataset))))
            batch = dataset.__getitems__(FetchRequest(start, samples))
            if count is None or count(batch):
                return batch
        return None

    return find


def _window(model: torch.nn.Module | None, window: list[tuple[Any, float]]) -> Iterator[MicroBatch[Any]]:
    for number, (batch, weight) in enumerate(window, 1):
        last = number == len(window)
        yield MicroBatch(batch=batch, weight=weight, sync=sync(model, last=last), last=last)


def sync(model: torch.nn.Module | None, *, last: bool) -> AbstractContextManager[Any]:
    """Around forward and backward of a micro-batch: no exchange of gradients but in the last of a step."""
    inner = getattr(model, "_orig_mod", model)
    if _gathers(inner):
        inner.set_requires_gradient_sync(last)  # type: ignore[union-attr, operator]
    elif isinstance(inner, DistributedDataParallel) and not last:
        return inner.no_sync()
    return nullcontext()


def _gathers(model: torch.nn.Module | None) -> bool:
    """Whether each forward pass is a collective (FSDP2), so that all ranks must do equally many."""
    return hasattr(getattr(model, "_orig_mod", model), "set_requires_gradient_sync")


def _spare(batch: Any) -> Any:
    if batch is None:
        raise ConfigurationError(
            "no micro-batch that this rank could take has anything to count, and it must do a pass: each "
            "rank needs at least one to begin with; give it more data, use fewer ranks, look at the count, "
            "or give parts(spare=...)"
        )
    return batch


def _require_counts(counts: Sequence[float]) -> None:
    for count in counts:
        if not 0 <= count < float("inf"):
            raise ConfigurationError(
                f"a micro-batch counts {count} items: count must answer a finite number, at least 0"
            )


def _shares(counts: Sequence[float], whole: float) -> list[float]:
    return [count / whole if whole else 0.0 for count in counts]


# --- ranks ------------------------------------------------------------------------------------------
def joined() -> World:
    """The ranks of torch's process group; one where there is none."""
    if not (dist.is_available() and dist.is_initialized()):
        return World()
    return World(rank=dist.get_rank(), size=dist.get_world_size())


def _table(values: Sequence[float], world: World, device: Any) -> list[list[float]]:
    """The values of every rank, a row for each, by one collective."""
    if not world.distributed:
        return [[float(value) for value in values]]
    rows = torch.zeros(world.size, len(values), dtype=torch.float64, device=device)
    rows[world.rank] = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(rows)
    return [[float(value) for value in row] for row in rows.tolist()]


def _summed(table: list[list[float]], column: int) -> float:
    return sum(row[column] for row in table)

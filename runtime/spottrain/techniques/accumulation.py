"""Gradient accumulation that equals one step of a large batch. For custom loops.

It is exact for unequal micro-batches, unequal token counts, several ranks and the last step of an epoch:

    for part in accumulation.parts(loader, 8, model=model, count=lambda batch: int((batch[1] != -100).sum())):
        with part.sync:
            (mean_loss(model, part.batch) * part.weight).backward()
        if part.last:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

The mean of the micro-batches' means is the mean over all items only if all micro-batches have the same size.
Token counts differ between micro-batches and between ranks. So the divisor is the count of the whole
optimizer step over all ranks, which must be known before its first backward pass. transformers divided by
the number of micro-batches until October 2024 (huggingface/transformers#34191), with several GPUs longer
(#37474).

`Trainer` weights by samples (`data.plan.Step.shares`), which is exact if the loss is a mean over samples. For
a mean over tokens, `Reweighed` computes the shares to use instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from spottrain.core import log
from spottrain.data.dataloader import FetchRequest, Repeatable
from spottrain.data.sampler import BatchSampler, Loader
from spottrain.distributed.world import World
from spottrain.errors import ConfigurationError

Batch = TypeVar("Batch")
Count = Callable[[Any], float]
"""Batch -> the number of items (samples, tokens that are not ignored) that its loss is the mean over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch(Generic[Batch]):
    """One micro-batch of an optimizer step."""

    batch: Batch
    weight: float
    """Factor on its loss, a mean over its items. With it the gradient of DDP and FSDP, a mean over ranks, is
    the gradient of the mean over all items of the step. 0: a filler."""
    sync: AbstractContextManager[Any]
    """Context for forward and backward: ranks exchange gradients only in the last one. Enter it once."""
    last: bool
    """Whether the optimizer steps after this micro-batch."""


class Reweighed(Generic[Batch]):
    """Replaces the shares in pairs (micro-batch, share of the step) by shares by count.

        reweighed = Reweighed(loss_weight, world)
        for batch, share in reweighed(micro_batches):
            (loss(model, batch) * share * world.size).backward()

    All micro-batches of a step are fetched before its first backward pass. Their number on each rank stays
    the same, as DDP requires. A micro-batch that counts 0, whose mean loss would be 0 / 0, is replaced by a
    filler: another micro-batch with share 0.

    Args:
        count: batch -> number of items its loss is the mean over. A filler in the input counts 0.
        world: rank and number of ranks.
        spare: returns the filler for a step in which nothing on this rank counts; called once. None: the last
            micro-batch that counted, which a later attempt does not know. A model with batch norm sees the
            filler, so it resumes bit for bit only with a `spare` that returns the same in every attempt.
    """

    def __init__(self, count: Count, world: World, *, spare: Callable[[], Batch] | None = None) -> None:
        self._count, self._world = count, world
        self._fillers = _Fillers(spare)

    def __call__(self, micro_batches: Iterable[tuple[Batch, float]]) -> list[tuple[Batch, float]]:
        """Returns the micro-batches of one step with shares by count. All ranks must call it.

        Over all ranks the shares add up to 1, or all are 0. Raises ConfigurationError if a count is negative,
        NaN or infinite, or if this rank needs a filler and has none.
        """
        held = list(micro_batches)
        counts = [_checked(self._count(batch)) if share else 0.0 for batch, share in held]
        whole = sum(row[0] for row in _gathered([sum(counts)], self._world, "cpu"))
        filler = self._fillers.of([batch for (batch, _), each in zip(held, counts, strict=True) if each][:1])
        return [
            (batch, each / whole) if each else (filler, 0.0)
            for (batch, _), each in zip(held, counts, strict=True)
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
    """Yields the micro-batches of a pass over `loader`, grouped into optimizer steps. All ranks must iterate.

    All micro-batches of a step are held in memory, on the loader's device. A micro-batch that counts 0 is
    left out, because its mean is 0 / 0. A rank that runs out of data early continues with fillers, so that
    all ranks reach each exchange. If nothing of a step counts on any rank, the step has one filler, as with
    `Trainer`. Then gradients are zero, the position moves on, and momentum and weight decay act.

    A filler has weight 0. It is a micro-batch of this rank that counts in the step, else the first of the
    loader's dataset that counts. A model with batch norm or dropout sees the filler, so this choice makes a
    resume bit-exact. If `loader` is neither `spottrain.data.loader` nor a DataLoader over a
    `spottrain.data.BatchSampler`, the first one cannot be found: give `spare`. Without it, a step in which
    nothing counts is left out in every attempt, and logged. A rank without data, while others have some, then
    repeats the last micro-batch that counted, which a later attempt does not know.

    Args:
        loader: yields this rank's batches.
        size: micro-batches per optimizer step; the last step may have fewer.
        model: the model as it is called, wrapped or not; None: `sync` of each micro-batch does nothing.
        count: batch -> number of items its loss is the mean over; None: all micro-batches count the same.
        world: rank and number of ranks; None: those of torch's process group.
        device: where the sum over ranks is computed; a GPU if the process group has only NCCL.
        spare: returns the filler if none can be found.

    Yields:
        Micro-batches with weight and synchronisation context.

    Raises:
        ConfigurationError: `size` or a count is not valid, or a filler is needed and there is none.
    """
    if size < 1:
        raise ConfigurationError(f"accumulation.parts(size={size}): must be at least 1")
    world = world or joined()
    stream, fillers = iter(loader), _Fillers(spare or _first_of(loader, count))
    while True:
        given = list(islice(stream, size))
        counted = [(batch, 1.0 if count is None else _checked(count(batch))) for batch in given]
        window = [(batch, each) for batch, each in counted if each]
        total = sum(each for _, each in window)
        totals, fetched, counting = zip(
            *_gathered([total, len(given), len(window)], world, device), strict=True
        )
        if not any(fetched):
            return
        most = int(max(counting))
        if not most and not fillers.repeatable:
            log.event("step-left-out", why="it has nothing to count, and parts(spare=...) is not set")
            continue
        if not most:
            log.event("empty-step", why="all its micro-batches count 0 items, so its gradients are zero")
        filler = fillers.of([batch for batch, _ in window])
        micro_batches = [(batch, each / sum(totals) * world.size) for batch, each in window]
        micro_batches += [(filler, 0.0)] * ((max(1, most) if _gathers(model) else 1) - len(window))
        for number, (batch, weight) in enumerate(micro_batches, 1):
            final = number == len(micro_batches)
            yield MicroBatch(batch=batch, weight=weight, sync=sync(model, last=final), last=final)


class _Fillers:
    """Chooses fillers, which replace micro-batches that are missing or count 0."""

    def __init__(self, make: Callable[[], Any] | None) -> None:
        self._make = make
        self.repeatable = make is not None
        """Whether a later attempt chooses the same filler."""
        self._known: Any = None

    def of(self, counting: Sequence[Any]) -> Any:
        """Returns the filler for a step. Raises ConfigurationError if there is none.

        counting: this rank's micro-batches in the step that count.
        """
        if counting:
            if self._make is None:
                self._known = counting[-1]
            return counting[-1]
        if self._known is None and self._make is not None:
            self._known = self._make()
        if self._known is None:
            raise ConfigurationError(
                "this rank has no micro-batch with items to count, but must run a pass because other ranks "
                "do: give it more data, use fewer ranks, check what count(batch) returns, or set "
                "parts(spare=...)"
            )
        return self._known


def _first_of(loader: Any, count: Count | None) -> Callable[[], Any] | None:
    """Returns a function that fetches, with a fixed seed, the dataset's first micro-batch that counts.

    None if the loader is another library's (it may also move batches to a device), or has another sampler.
    """
    if type(loader) not in (DataLoader, Loader) or not isinstance(loader.batch_sampler, BatchSampler):
        return None
    size, own = loader.batch_sampler.plan.micro_batch_size, isinstance(loader.dataset, Repeatable)
    dataset = loader.dataset if own else Repeatable(loader.dataset, loader.collate_fn)

    def find() -> Any:
        for start in range(0, len(dataset), size):
            samples = list(range(start, min(start + size, len(dataset))))
            batch = dataset.__getitems__(FetchRequest(start, samples))
            if count is None or count(batch):
                return batch
        return None

    return find


def sync(model: torch.nn.Module | None, *, last: bool) -> AbstractContextManager[Any]:
    """Returns the context for forward and backward of a micro-batch: only the last exchanges gradients.

    model: the model as it is called, wrapped or not.
    """
    inner = getattr(model, "_orig_mod", model)
    if _gathers(inner):
        inner.set_requires_gradient_sync(last)  # type: ignore[union-attr, operator]
    elif isinstance(inner, DistributedDataParallel) and not last:
        return inner.no_sync()
    return nullcontext()


def _gathers(model: torch.nn.Module | None) -> bool:
    """Whether each forward pass is a collective (FSDP2): all ranks must run the same number of them."""
    return hasattr(getattr(model, "_orig_mod", model), "set_requires_gradient_sync")


def _checked(count: float) -> float:
    if not 0 <= count < float("inf"):
        raise ConfigurationError(f"count(batch) returned {count}: it must return a finite number, at least 0")
    return float(count)


def joined() -> World:
    """Returns the rank and size of torch's process group; a single rank without one."""
    if not (dist.is_available() and dist.is_initialized()):
        return World()
    return World(rank=dist.get_rank(), size=dist.get_world_size())


def _gathered(values: Sequence[float], world: World, device: Any) -> list[list[float]]:
    """Gathers the values of all ranks by one collective: one row per rank."""
    if not world.distributed:
        return [list(values)]
    rows = torch.zeros(world.size, len(values), dtype=torch.float64, device=device)
    rows[world.rank] = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(rows)
    rank_rows: list[list[float]] = rows.tolist()
    return rank_rows

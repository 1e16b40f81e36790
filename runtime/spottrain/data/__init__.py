"""Data loading: assigns samples to optimizer steps, and fetches them. Names are loaded on first use.

    plan.py            `Plan`, `Position`, `Step`: samples of each step by seed, epoch and rank. No I/O.
    order.py           the order of an epoch: shuffled, or of a sampler of one's own
    dataloader.py      the loader of map-style datasets; how many workers it has, which ignore SIGTERM
    source.py          `Batches`: a map-style dataset as a stream of steps; a `Source` of `train_dataset`
    iterable.py        `StreamBatches`: the same for any `Resumable` (StatefulDataLoader, streaming datasets)
    adapters.py        `Skipping`: makes a plain loader `Resumable`
    sampler.py         `BatchSampler`, `loader`: for custom loops with a DataLoader
    download_cache.py  `spottrain.cached`: downloads once for all attempts. No torch

`Batches` and `StreamBatches` are both a `Source`:

    iter(source)            yields (Step, iterator of (micro-batch, share)); endless; lazy until the first
                            next(). A stream waits for its data in next(), a map-style dataset in the iterator
    source.done(step)       after the optimizer step: the position is now step.after
    source.state_dict()     at any time, from any thread: the state at the last `done`
    source.load_state_dict(state)   before the first next(). Raises CheckpointError, also for None, which
                            stands for a checkpoint of the other kind of data
    source.steps_per_epoch  None if unknown before the stream ends
    source.num_workers      loader processes of this rank
    source.per_rank         True: each rank has its own state. Ranks added since the save get rank 0's.
                            False: one state, the same on all ranks

`share` is the weight of the micro-batch's mean loss. All shares of a step, over all ranks, add up to 1.
DDP averages over ranks, so multiply the loss by share x ranks. A share of 0 marks a filler.
`step.shares` are this rank's; every rank has the same number of them. `step.samples` counts all ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spottrain.core import lazy

if TYPE_CHECKING:
    from spottrain.data.adapters import Skipping
    from spottrain.data.iterable import Resumable
    from spottrain.data.sampler import BatchSampler, Loader, loader
    from spottrain.lifecycle.worker_signals import ignore_signals

__all__ = ["BatchSampler", "Loader", "Resumable", "Skipping", "ignore_signals", "loader"]

_HOME = {
    "BatchSampler": "spottrain.data.sampler",
    "Loader": "spottrain.data.sampler",
    "Resumable": "spottrain.data.iterable",
    "Skipping": "spottrain.data.adapters",
    "ignore_signals": "spottrain.lifecycle.worker_signals",
    "loader": "spottrain.data.sampler",
}

# Lazy: the loaders import torch, and `download_cache` must not.
__getattr__ = lazy.names(__name__, _HOME)

"""Which samples make up which optimizer step, and what fetches them. Used by `trainer`, `run`,
`evaluation`. Names are loaded on first use.

    plan.py      `Plan`, `Position`, `Step`: which samples, by seed, epoch, rank. No loader, no files.
    shuffle.py   the order of an epoch
    fetch.py     the loader of map-style sets; workers that outlive a SIGTERM
    workers.py   how many workers it needs, by measurement
    room.py      whether their copies of the set fit into memory
    copies.py    about how much one copy takes
    source.py    what the trainer was given, as a `Source`
    batches.py   `Batches`: a map-style set as an endless stream of optimizer steps
    stream.py    `StreamBatches`: the same over anything `Resumable` (StatefulDataLoader, streaming sets)
    adapters.py  `Skipping`, `Streaming`: make a plain loader or a MosaicML one `Resumable`
    sampler.py   `Sampler`, `BatchSampler`, `loader`: for people who keep their own DataLoader
    cache.py     `spottrain.cached`: what is downloaded once for all attempts. No torch
    locks.py     who fills it, and what dead fillers have left
    durable.py   that it is on the volume before it is shown
    mounts.py    what kind of volume that is

`Batches` and `StreamBatches` are both a `Source`, which is all that the trainer needs:

    iter(source)            yields (Step, iterator of (micro-batch, share)); endless; lazy until the first
                            next(). A stream waits for its data in next(), a map-style set in the iterator
    source.done(step)       after the optimizer step: the position is now step.after
    source.state_dict()     at any time, from any thread: the state at the last `done`
    source.load_state_dict(state)   before the first next(); raises CheckpointError, also where
                            it is None, as in a checkpoint of the other kind of data
    source.steps_per_epoch  None where only the stream knows
    source.workers          loader processes of this rank
    source.per_rank         True: a state for each rank, to be kept in that rank's tree; a rank that had none
                            (there are more now) is given rank 0's. False: one state, the same on all ranks

`share`: weight of the micro-batch's mean loss. Over all ranks and micro-batches of a step they add up to 1,
so where DDP averages over ranks the loss is multiplied by share x ranks. It may be 0 (a filler).
`step.shares` are those of this rank: every rank has as many of them in every step. `step.samples` counts all
ranks' samples.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spottrain.core import lazy

if TYPE_CHECKING:
    from spottrain.data.adapters import Skipping, Streaming
    from spottrain.data.dataloader import load
    from spottrain.data.iterable import Resumable, StreamBatches
    from spottrain.data.map_style import Batches
    from spottrain.data.plan import Dataset, Plan, Position, Source, Step, Stream
    from spottrain.data.sampler import BatchSampler, Loader, Sampler, loader
    from spottrain.lifecycle.worker_signals import ignore_signals

__all__ = [
    "BatchSampler",
    "Batches",
    "Dataset",
    "Loader",
    "Plan",
    "Position",
    "Resumable",
    "Sampler",
    "Skipping",
    "Source",
    "Step",
    "Stream",
    "StreamBatches",
    "Streaming",
    "ignore_signals",
    "load",
    "loader",
]

_HOME = {
    "BatchSampler": "spottrain.data.sampler",
    "Batches": "spottrain.data.map_style",
    "Dataset": "spottrain.data.plan",
    "Loader": "spottrain.data.sampler",
    "Plan": "spottrain.data.plan",
    "Position": "spottrain.data.plan",
    "Resumable": "spottrain.data.iterable",
    "Sampler": "spottrain.data.sampler",
    "Skipping": "spottrain.data.adapters",
    "Source": "spottrain.data.plan",
    "Step": "spottrain.data.plan",
    "Stream": "spottrain.data.plan",
    "StreamBatches": "spottrain.data.iterable",
    "Streaming": "spottrain.data.adapters",
    "ignore_signals": "spottrain.lifecycle.worker_signals",
    "load": "spottrain.data.dataloader",
    "loader": "spottrain.data.sampler",
}

# On first use: the loaders import torch, and `cache` must not.
__getattr__ = lazy.names(__name__, _HOME)

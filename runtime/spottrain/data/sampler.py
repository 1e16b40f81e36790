"""Samplers and a loader for custom loops. They count the samples that were used, not those prefetched.

    sampler = spottrain.data.BatchSampler(dataset, batch_size=32, shuffle=True)
    loader = DataLoader(dataset, batch_sampler=sampler, worker_init_fn=spottrain.data.ignore_signals)

or, with both set and augmentation whose randomness depends on the position only:

    loader = spottrain.data.loader(dataset, batch_size=32, shuffle=True)

`batch_size` is here what it is in torch: the samples of one batch of one rank, elsewhere `micro_batch_size`.

`spottrain.Run` calls `advance()` at each optimizer step, and saves `state_dict()`. A pass over the loader
yields the rest of the epoch, so a loop over epochs resumes within an epoch. After the last step the position
stays at the end of the epoch until the next pass begins. Work between two epochs thus belongs to the first.
A position restored there yields one empty pass, so that the loop repeats this work.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, Final, Literal

import torch
from torch.utils.data import DataLoader, default_collate

from spottrain.core import device as devices
from spottrain.core import log
from spottrain.core.time_split import timed
from spottrain.core.training_settings import AUTO
from spottrain.data.dataloader import Collate, FetchRequest, Repeatable, as_it_is, request, workers
from spottrain.data.order import SamplerOrder
from spottrain.data.plan import Dataset, Plan, Position, Step
from spottrain.distributed.world import World
from spottrain.errors import ConfigurationError
from spottrain.lifecycle.session import existing
from spottrain.lifecycle.worker_signals import end_at_exit, protect, signals_held

OF_WORKERS: Final = ("prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout")
"""DataLoader options that torch refuses without workers."""
_OWN_BATCHES: Final = (
    "give sampler=, which sets the order of the samples; for batches of your own write `data = "
    "spottrain.data.Skipping(DataLoader(dataset, batch_sampler=...))`, `spottrain.Run(data=data)` and `for "
    "batch in run.batches(data)`, which reads the used batches of a pass again after a resume"
)


class BatchSampler(torch.utils.data.Sampler[list[int]]):
    """Yields this rank's batches, for `DataLoader(batch_sampler=...)`, and counts those that were used.

    Its position is the same on all ranks, so any number of ranks can resume from it.

    Args:
        data: the dataset, or its length.
        batch_size: samples of one batch of one rank, as in torch.
        accumulation: batches of one rank in an optimizer step.
        seed: seed of the order; None: that of `spottrain.seed()`, with one rank that of
            `torch.manual_seed()`, else 0. A checkpoint's seed overrides it.
        shuffle: whether each epoch has its own random order.
        drop_last: leave out the last step of an epoch if it is smaller. Otherwise ranks without a batch in
            that step repeat its first one: multiply the loss by `shares`.
        world: rank and number of ranks; None: from the environment.
        order: the order of a sampler of one's own, in place of `shuffle`.
    """

    def __init__(
        self,
        data: Sized | int,
        *,
        batch_size: int = 1,
        accumulation: int = 1,
        seed: int | None = None,
        shuffle: bool = False,
        drop_last: bool = False,
        world: World | None = None,
        order: SamplerOrder | None = None,
    ) -> None:
        self.world = world = World.from_env(os.environ) if world is None else world
        self._order = order
        sized: Sized | int = data if order is None else order
        self.plan = Plan(
            size=sized if isinstance(sized, int) else len(sized),
            global_batch_size=batch_size * accumulation * world.size,
            micro_batch_size=batch_size,
            seed=_order_seed(world) if seed is None else seed,
            shuffle=shuffle,
            drop_last=drop_last,
            rank=world.rank,
            ranks=world.size,
            sampler=order,
        )
        self.position = Position()
        end_at_exit()  # for workers of a DataLoader with `worker_init_fn=ignore_signals`
        self.ahead = False
        """Whether batches are drawn ahead (`Run.ahead`): a pass may begin before the last step of the epoch
        before it is done."""
        self.epoch_of_loop: int | None = None
        """The epoch that `Run.epochs` is in: no pass of another one may begin. None: it is not known."""
        self.taken: int | None = None
        """Batches that the loop has taken in this pass. Only `Loader` knows it: in a sampler the workers are
        ahead."""
        self.ended: int | None = None
        """The epoch whose pass has ended. Only `Loader` sets it: in a sampler the workers are ahead."""
        self._forget_passes()

    def _forget_passes(self) -> None:
        self.ended = None
        self._unused: Position | None = None
        """Start of the last pass that was yielded to its end."""
        self.begun: int | None = None
        """The epoch of the last pass."""
        self._start = self.position
        """Where that pass began."""
        self._empty = False
        """Whether the next pass is empty: the position was restored at the end of an epoch."""

    def advance(self, steps: int = 1) -> None:
        """Moves the position by optimizer steps. Call it after each step, skipped ones included.

        Args:
            steps: optimizer steps done since the last call.

        Raises:
            ConfigurationError: the loop has not taken as many batches as its steps use.
        """
        for _ in range(steps):
            start = self._next
            after = self.plan.after(start)
            self.position = after if after.epoch == start.epoch else Position(start.epoch, self.plan.size)
        self._empty = False
        self.require_taken(self.taken)

    def require_taken(self, taken: int | None) -> None:
        """Raises ConfigurationError unless the steps since the pass began use the batches that were `taken`.

        Otherwise a resume would begin at other samples. None: it is not known how many were.
        """
        if self.begun is None or self.begun > self.position.epoch:
            return  # no pass, or the next one was begun ahead
        if self.position.epoch > self.begun:
            raise ConfigurationError(
                f"more steps were counted than the pass over epoch {self.begun} has, and no other pass has "
                "begun, so the loop does not take its batches from the loader any more (itertools.cycle and "
                "list keep them), and a resume could not find its place: iterate `for batch in "
                "run.batches(loader)`, which begins the passes"
            )
        end = min(self.position.sample, self.plan.samples_per_epoch)
        needed = self.plan.micro_batches(end - self._start.sample)
        if taken is None or needed <= taken <= needed + self.ahead:
            return
        raise ConfigurationError(
            f"the loop has taken {taken} batch(es) of this pass, and the steps that it has counted use "
            f"{needed}, so a resume would begin at other samples: call step_completed() once for each batch; "
            "for several batches in a step give spottrain.data.loader(accumulation=...); a loop that draws "
            "its next batch before it calls step_completed() must iterate over run.ahead(loader)"
            f"{self._of_accumulation}"
        )

    @property
    def over(self) -> bool:
        """Whether all steps of the position's epoch are done."""
        return self.position.sample >= self.plan.samples_per_epoch

    @property
    def _next(self) -> Position:
        """Where the next step begins."""
        return Position(self.position.epoch + 1, 0) if self.over else self.position

    def begin_epoch(self) -> None:
        """Moves on from the end of an epoch, once all work that belongs to it is done."""
        self.position, self._empty = self._next, False

    def set_epoch(self, epoch: int) -> None:
        """Does nothing, because the position counts epochs: here so that it can replace a DistributedSampler.

        Raises:
            ConfigurationError: `epoch` is another one than the position's.
        """
        if epoch not in (self.position.epoch, self._next.epoch):
            raise ConfigurationError(
                f"set_epoch({epoch}) in epoch {self._next.epoch}: a sampler of spottrain.data counts the "
                "epochs, and resumes within one; iterate `for epoch in run.epochs(n)`, and give set_epoch "
                "that number, or leave it out"
            )

    @property
    def shares(self) -> list[float]:
        """Weight of each batch of this rank in the next step; they add up to 1 over all ranks."""
        left = self.plan.samples_per_epoch - self._next.sample
        return self.plan.shares(min(self.plan.global_batch_size, left))

    def state_dict(self) -> dict[str, Any]:
        """Returns plain values, the same on all ranks."""
        state = self.plan.state(self.position)
        return state if self._order is None else {**state, "order": self._order.state()}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Restores the position; takes effect at the next pass.

        Args:
            state: a state of `state_dict`; None: the checkpoint has none.

        Raises:
            CheckpointError: there is none, or the dataset had another size.
        """
        self.plan, self.position = self.plan.resumed(state)
        if self._order is not None and state is not None:
            self._order.load(state.get("order"))
        self._forget_passes()
        self._empty = self.over

    @property
    def _of_accumulation(self) -> str:
        if self.plan.accumulation == 1:
            return ""
        return (
            f". With accumulation={self.plan.accumulation}, an epoch's last step may have fewer "
            "micro-batches: use spottrain.techniques.accumulation.parts(...), which handles that, or "
            "drop_last=True"
        )

    def __len__(self) -> int:
        """Batches of this rank in a whole epoch."""
        return self.plan.micro_batches(self.plan.samples_per_epoch)

    def __iter__(self) -> Iterator[list[int]]:
        for step in self.steps():
            yield from step.micro_batches

    def steps(self) -> Iterator[Step]:
        """Begins a pass: returns the steps from the position to the end of its epoch.

        Raises:
            ConfigurationError: `advance` was not called for the steps of the last pass.
        """
        if self._empty:
            self._empty, self.begun = False, self.position.epoch
            return iter(())
        if self.epoch_of_loop not in (None, self._next.epoch):
            raise ConfigurationError(
                f"a second pass over the loader begins within epoch {self.epoch_of_loop} of run.epochs(...), "
                "so an attempt that resumes there would not know which one to go on with: write `for each in "
                "run.epochs(2 * n)` and `epoch = each // 2` for two passes an epoch, or run.epochs(n, "
                "steps=...) and run.batches(loader); to look at the data only, make another loader"
            )
        self.begin_epoch()
        start = self.position
        if self.ahead and start.epoch == self.ended:
            start = Position(start.epoch + 1, 0)  # the last step before it is not counted yet
        elif start.epoch == self.ended or start == self._unused:
            raise ConfigurationError(
                f"epoch {start.epoch} was given from sample {self._start.sample} to its end, but advance() "
                f"was not called for all of its steps, so the samples from {start.sample} on would come "
                "again: call it after each optimizer step (spottrain.Run does), including the epoch's "
                "last one and steps that the optimizer skips; a loop that draws its next batch before it "
                "calls step_completed() must iterate over run.ahead(loader); to look at the data only, make "
                f"another loader{self._of_accumulation}"
            )
        self.begun, self._start = start.epoch, start
        if self.taken is not None:
            self.taken = 0
        return self._of_epoch(start)

    def _of_epoch(self, start: Position) -> Iterator[Step]:
        for step in self.plan.steps(start):
            if step.epoch != start.epoch:
                break
            yield step
            if step.after.epoch != start.epoch:
                self._unused = start


class _Requests(BatchSampler):
    """Yields the batches as fetch requests with seeds.

    `next`: steps of the next pass; None: the rest of the epoch.
    """

    next: Iterator[Step] | None = None

    def __iter__(self) -> Iterator[FetchRequest]:  # type: ignore[override]
        """Takes its steps at the first `next()`: with workers torch makes two iterators, and uses one."""
        steps, self.next = self.next or self.steps(), None
        for step in steps:
            for samples in step.micro_batches:
                yield request(self.plan.seed, step.epoch, samples)


class Loader(DataLoader[Any]):
    """A DataLoader with a position that can be saved; make one with `loader`."""

    def __init__(self, dataset: Dataset, requests: _Requests, collate_fn: Collate, **options: Any) -> None:
        super().__init__(
            Repeatable(dataset, collate_fn),  # type: ignore[arg-type]
            batch_sampler=requests,
            collate_fn=as_it_is,
            generator=torch.Generator().manual_seed(requests.plan.seed),
            **options,
        )
        protect(self)
        self.requests = requests
        requests.taken = 0

    def __iter__(self) -> Any:
        """Reads the position at the first batch, so a restore after `iter()` still counts."""
        steps = self.requests.steps()
        if self.requests.over:
            return
        epoch = self.requests.begun
        session = existing()
        if session is None:
            batches = self._pass(steps)
        else:
            batches = timed(lambda: self._pass(steps), session.board.clock)
        taken = 0
        for batch in batches:
            self.requests.taken = taken = taken + 1
            yield batch
            del batch  # before the next one is fetched
        self.requests.ended = epoch

    def _pass(self, steps: Iterator[Step]) -> Any:
        self.requests.next = steps
        with signals_held():
            return end_at_exit(super().__iter__())

    @property
    def position(self) -> Position:
        """Epoch and samples used of it, after the last `advance`."""
        return self.requests.position

    @property
    def shares(self) -> list[float]:
        """Weight of each batch of this rank in the next step; they add up to 1 over all ranks."""
        return self.requests.shares

    def advance(self, steps: int = 1) -> None:
        """Moves the position by `steps` optimizer steps. Call it after each step, skipped ones included."""
        self.requests.advance(steps)

    def state_dict(self) -> dict[str, Any]:
        """Returns plain values, the same on all ranks."""
        return self.requests.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the position; takes effect at the next pass. Raises CheckpointError."""
        self.requests.load_state_dict(state)


def loader(
    dataset: Dataset,
    batch_size: int | None = 1,
    shuffle: bool | None = False,
    sampler: Iterable[int] | None = None,
    batch_sampler: None = None,
    num_workers: int | Literal["auto"] = 0,
    collate_fn: Collate | None = None,
    pin_memory: bool = False,
    drop_last: bool = False,
    timeout: float = 0,
    worker_init_fn: Callable[[int], Any] | None = None,
    multiprocessing_context: Any = None,
    generator: None = None,
    *,
    prefetch_factor: int | None = None,
    persistent_workers: bool = False,
    in_order: bool = True,
    accumulation: int = 1,
    seed: int | None = None,
    world: World | None = None,
    **options: Any,
) -> Loader:
    """Makes a DataLoader whose position, order and augmentation survive an interruption.

    Takes the arguments of torch's DataLoader, with its defaults. `batch_sampler`, `generator`,
    `batch_size=None` and `in_order=False` are refused: with them an epoch could not be resumed bit for bit.
    With several ranks each one gets its own share of the data, without a DistributedSampler. Python, torch
    and NumPy are seeded for each batch, so what `dataset[i]` draws depends on the position only. The workers
    ignore SIGTERM and SIGINT.

    Args:
        dataset: map-style dataset, of at least one global batch (batch_size x accumulation x ranks).
        batch_size: samples of one batch of one rank, as in torch with DistributedDataParallel.
        shuffle: whether each epoch has its own random order.
        sampler: sets the order of each epoch, such as torch's WeightedRandomSampler; of all ranks together.
            Its random numbers follow from `seed` and the epoch.
        batch_sampler: refused.
        num_workers: loader processes of this rank. "auto": this rank's CPU cores less one, from 1 to 8.
        collate_fn: makes a batch of a list of samples; None: torch's `default_collate`.
        pin_memory: as in torch.
        drop_last: leave out an epoch's last optimizer step if it is smaller than a global batch. Otherwise
            ranks without a batch in that step repeat its first one: multiply the loss by `shares`.
        timeout: as in torch.
        worker_init_fn: as in torch, but seeds that it sets have no effect.
        multiprocessing_context: as in torch.
        generator: refused; the order is set by `seed`.
        prefetch_factor: as in torch.
        persistent_workers: as in torch.
        in_order: must be True.
        accumulation: batches of one rank in an optimizer step.
        seed: seed of order and augmentation; None: that of `spottrain.seed()`, else 0. A checkpoint's seed
            overrides it.
        world: rank and number of ranks; None: from the environment.
        options: further options of torch's DataLoader. Options of workers are dropped and logged if there are
            none.

    Returns:
        A `Loader`, whose batches are this rank's.

    Raises:
        ConfigurationError: an argument cannot be honoured, or the dataset is not map-style or too small.
    """
    sized = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if not sized or isinstance(dataset, torch.utils.data.IterableDataset):
        raise ConfigurationError(
            f"spottrain.data.loader(dataset=...) is a {type(dataset).__name__}, which has no len() and [i]; "
            "give a map-style dataset, or use torchdata's StatefulDataLoader for a stream"
        )
    for given, name, remedy in (
        (batch_sampler is not None, "batch_sampler=...", _OWN_BATCHES),
        (generator is not None, "generator=...", "seed= sets the order and each batch's random numbers"),
        (batch_size is None, "batch_size=None", "a position counts batches; give a number"),
        (not in_order, "in_order=False", "batches must come in order; leave it out"),
    ):
        if given:
            raise ConfigurationError(f"spottrain.data.loader({name}) cannot be resumed bit for bit: {remedy}")
    if sampler is not None and shuffle:
        raise ConfigurationError(
            "spottrain.data.loader(sampler=..., shuffle=True): both set the order; leave one of them out"
        )
    if isinstance(num_workers, str) and num_workers != AUTO:
        raise ConfigurationError(
            f"spottrain.data.loader(num_workers={num_workers!r}): must be a whole number, or auto"
        )
    options |= {
        "prefetch_factor": prefetch_factor,
        "persistent_workers": persistent_workers,
        "multiprocessing_context": multiprocessing_context,
        "timeout": timeout,
    }
    if num_workers == 0:  # torch refuses these, and a manifest with 0 workers would end the run
        if unused := [name for name in OF_WORKERS if options.get(name)]:
            log.event("advice", about="data", text=f"{', '.join(unused)} cannot act: num_workers is 0")
        options = {name: value for name, value in options.items() if name not in OF_WORKERS}
    assert batch_size is not None, "refused above"
    requests = _Requests(
        dataset,
        batch_size=batch_size,
        accumulation=accumulation,
        seed=seed,
        shuffle=bool(shuffle),
        drop_last=drop_last,
        world=world,
        order=None if sampler is None else SamplerOrder(sampler),
    )
    return Loader(
        dataset,
        requests,
        collate_fn or default_collate,
        num_workers=workers(num_workers, local_ranks=requests.world.local_size),
        pin_memory=pin_memory,
        worker_init_fn=worker_init_fn,
        **options,
    )


def _order_seed(world: World) -> int:
    """Returns the script's seed. That of `torch.manual_seed()` may be another one on each rank."""
    if devices.seeded():
        return devices.seed_in_use()
    return 0 if world.distributed else devices.seed_of_script() or 0

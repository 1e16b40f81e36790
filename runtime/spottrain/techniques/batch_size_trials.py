"""The largest micro-batch that fits: by trial, before training, or the next smaller one after an error.

    def batch_of(size):
        return collate([dataset[i] for i in range(size)])

    memory = memory_of(device)
    trial = Trial(model, optimizer, loss_of=loss_of, batch_of=batch_of, share=64, memory=memory)
    size = agreed(find(trial, 64, clear=trial.clear), world, device)

The global batch stays what it is, so the training does too: gradients are summed over more micro-batches or
fewer. A model of FSDP2 is tried by all ranks at once, with the memory `Together`. Called by `fitting`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from spottrain.core import log
from spottrain.core.device import to_device
from spottrain.distributed import process_group
from spottrain.distributed.dtensor import any_sharded, local
from spottrain.distributed.world import World
from spottrain.errors import ConfigurationError, RunError
from spottrain.techniques import accumulation
from spottrain.techniques.dry_run import rehearsal, release
from spottrain.techniques.memory import StepMemory
from spottrain.techniques.precision import Precision

HEAD_ROOM: Final = 0.1
"""Share of the memory that a trial leaves free: for fragmentation, longer samples, NCCL and an evaluation."""
OUT_OF_MEMORY: Final = re.compile(
    r"DefaultCPUAllocator: (can't allocate memory|not enough memory)|CUDA error: out of memory"
    r"|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_(ALLOC|INTERNAL_ERROR_(HOST|DEVICE)_ALLOCATION)_FAILED"
)
"""What a RuntimeError says that is one of memory (torch 2.15); the GPU's allocator has a class of its own."""
SMALLER_WAYS: Final = (
    "set activation checkpointing (all), precision bf16 instead of fp32, an optimizer with less state, shard "
    "the model over more GPUs (spottrain.shard), or take a smaller model or shorter samples"
)


class MemoryExceeded(MemoryError):
    """A trial needed more than it may, or was foreseen to."""


class OutOfMemoryTogether(Exception):
    """A rank ran out of memory in a trial that the others are in too, so it cannot try another size.

    Of no class that means an error of memory: `fits` must not take it for a size that is too large.
    """

    def __init__(self, size: int) -> None:
        super().__init__(
            f"a trial of {size} samples ran out of memory, and other ranks wait for this one in it: set "
            "microBatchSize auto, which begins again with less, or name a policy of activation checkpointing"
        )
        self.size = size


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a smaller batch may mend it."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and OUT_OF_MEMORY.search(str(error)) is not None


def divisors(share: int) -> list[int]:
    """Of a rank's share of the global batch: the micro-batch sizes that there are, the smallest first."""
    return [size for size in range(1, share + 1) if share % size == 0]


def find(
    trial: Callable[[int], None],
    share: int,
    *,
    largest: int | None = None,
    clear: Callable[[], None] = lambda: None,
) -> int:
    """The largest divisor of `share` that `trial` takes without an error of memory.

    share: samples of one optimizer step on this rank. largest: no size above it is tried. clear: called after
    a trial that failed, when nothing of it is held any more.
    From 1 upwards in growing strides over the divisors, then by halves between the last that fitted and the
    first that did not: so trials far too large, which may end the process, are few. Whatever else `trial`
    raises passes through. Raises ConfigurationError where not even 1 fits.
    """
    if share < 1:
        raise ConfigurationError(f"a rank's share of the global batch is {share}: it must be at least 1")
    sizes = [size for size in divisors(share) if largest is None or size <= largest]
    good, fitted = _first_that_runs(trial, sizes, clear)
    if not fitted:
        least = "one sample" if sizes[good] == 1 else f"{sizes[good]} samples"
        raise ConfigurationError(f"not even {least} at a time fit into memory: {SMALLER_WAYS}")
    tried = [str(sizes[good])]

    def tried_well(at: int) -> bool:
        good = fits(trial, sizes[at], clear)
        tried.append(f"{sizes[at]}{'' if good else ' too large'}")
        return good

    bad, stride = len(sizes), 2
    while good + 1 < bad:
        at = min(good + stride, len(sizes) - 1) if bad == len(sizes) else (good + bad) // 2
        if tried_well(at):
            good, stride = at, stride * 2
        else:
            bad = at
    log.event("batch-size", micro_batch_size=sizes[good], share=share, tried=", ".join(tried))
    return sizes[good]


def _first_that_runs(
    trial: Callable[[int], None], sizes: list[int], clear: Callable[[], None]
) -> tuple[int, bool]:
    """Which is the first size that the model can do at all, and whether it fits.

    Batch norm, for one, cannot do one sample. Where no size can be done the last one's error is raised.
    """
    for at, size in enumerate(sizes):
        try:
            return at, fits(trial, size, clear)
        except Exception as error:
            if size == sizes[-1] or isinstance(error, RunError | OutOfMemoryTogether):
                raise
            log.event("batch-size", left_out=size, why=f"{type(error).__name__}: {error}")
    raise AssertionError("there is always the size 1")


def fits(trial: Callable[[int], None], size: int, clear: Callable[[], None]) -> bool:
    """Whether a trial of that size ends without an error of memory."""
    try:
        trial(size)
        return True
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    clear()  # out here the traceback, and with it what its frames held, is gone
    return False


def smaller(size: int, share: int) -> int:
    """The next smaller micro-batch size that divides `share`: for after an error of memory in the run.

    Raises ConfigurationError where there is none.
    """
    below = [each for each in divisors(share) if each < size]
    if not below:
        raise ConfigurationError(
            f"micro-batches of {size} do not fit, and there is no smaller: {SMALLER_WAYS}"
        )
    return below[-1]


def agreed(size: int, world: World, device: torch.device) -> int:
    """The least of all ranks': GPUs of one run may differ, or share memory with others. All must call it.

    As each is a divisor of the same share, so is the least.
    """
    return round(process_group.earliest(float(size), world, device))


@dataclass(slots=True)
class MemoryOfAllRanks:
    """The memory of all ranks as one, so that all judge a trial alike: the least limit, the largest peak.

    For a model whose forward and backward passes are collectives (FSDP2): there all ranks try the same sizes
    at the same time, and one that runs out leaves the others waiting, so it does not fail softly. All must
    make it and use it alike.
    """

    own: StepMemory
    world: World
    device: torch.device = field(init=False)
    limit: int = field(init=False)
    fails_softly: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.device = self.own.device
        self.limit = agreed(self.own.limit, self.world, self.device)

    def begin(self) -> None:
        self.own.begin()

    def peak(self) -> int:
        return -agreed(-self.own.peak(), self.world, self.device)


class Trial:
    """One optimizer step's worth of memory with micro-batches of a given size; leaves no trace.

    model: plain, not DDP or compiled: a trial waits for no other rank. One of FSDP2 does, with `Together`.
    loss_of(model, batch): scalar tensor. batch_of(size): a batch, not from the loader of the training; the
        same on all ranks where they try together.
    share: as of `find`. With several micro-batches the second pass runs beside the gradients of the first.
    memory: what is measured, and how much there is. head_room: share of it that is to stay free.

    Where going above the limit has no way back, no size is tried that is expected to: smaller ones come
    first, each twice the one before, and a line through the two largest says what the next would need.

    What is set aside for the optimizer's state, where it has none yet, is `state_bytes`; and for its step
    temporary tensors as large as the weights, which torch's foreach optimizers make. Raises
    ConfigurationError.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        loss_of: Callable[[torch.nn.Module, Any], torch.Tensor],
        batch_of: Callable[[int], Any],
        share: int,
        memory: StepMemory,
        precision: Precision | None = None,
        head_room: float = HEAD_ROOM,
    ) -> None:
        self._together = isinstance(memory, MemoryOfAllRanks)
        if not self._together and any_sharded(model):
            raise ConfigurationError(
                "the ranks of a model that is sharded by FSDP2 wait for each other in a trial: give it "
                "memory=Together(memory_of(device), world), on all ranks, or set microBatchSize to a number"
            )
        self.model, self.optimizer = model, optimizer
        self.loss_of, self.batch_of = loss_of, batch_of
        self.share, self.memory, self.head_room = share, memory, head_room
        self.precision = precision or Precision(name="fp32")
        self._state = state_bytes(optimizer)
        self._peaks: dict[int, dict[int, _Peaks]] = {1: {}, 2: {}}
        """By number of passes, for the second one has gradients beside it, and by micro-batch size."""

    def __call__(self, size: int) -> None:
        """Raises MemoryExceeded, or what torch raises where memory ends."""
        known = self._peaks[self._passes(size)]
        if not self.memory.fails_softly:
            self._climb(size, known)
        if size not in known:
            known[size] = self._measure(size, self._passes(size))
        self._require(size, known)

    def peak(self, size: int) -> int:
        """Bytes at most of a size that was tried; all that the process held is in it."""
        return self._peaks[self._passes(size)][size].whole

    def clear(self) -> None:
        """For `find(..., clear=trial.clear)`: gives back what a trial that failed has held."""
        release(self.memory.device)

    def _passes(self, size: int) -> int:
        return 1 if size == self.share else 2

    def _climb(self, size: int, known: dict[int, _Peaks]) -> None:
        """Up to `size`. The line knows little from far below: memory may grow only from some size on."""
        at = 2 * max(known, default=0) or 1
        while at < size:
            self._require_foreseen(size, known)
            try:
                known[at] = self._measure(at, self._passes(size))
            except Exception as error:
                if known or is_out_of_memory(error) or isinstance(error, RunError | OutOfMemoryTogether):
                    raise
                # A model may be unable to do so few samples, see `_first_that_runs`.
            else:
                self._require(at, known)
            at *= 2
        self._require_foreseen(size, known)

    def _measure(self, size: int, passes: int) -> _Peaks:
        self.memory.begin()
        try:
            with rehearsal(self.model):
                return self._step(size, passes)
        except Exception as error:
            if self._together and is_out_of_memory(error):
                raise OutOfMemoryTogether(size) from error
            raise

    def _step(self, size: int, passes: int) -> _Peaks:
        device = self.memory.device
        state = touched(self._state, device)
        for number in range(1, passes + 1):
            with accumulation.sync(self.model, last=number == passes):
                with self.precision.autocast(device):
                    loss = self.loss_of(self.model, to_device(self.batch_of(size), device))
                loss.backward()  # type: ignore[no-untyped-call]
            del loss
        growing = self.memory.peak()
        del state
        # The optimizer's state stays while it steps, and activations are gone: no more than in `backward`
        # where they are large, so both are looked at.
        held = touched(self._state + weight_bytes(self.optimizer), device)
        whole = self.memory.peak()
        del held
        return _Peaks(growing=growing, whole=whole)

    @property
    def _allowed(self) -> int:
        return int(self.memory.limit * (1 - self.head_room))

    def _require(self, size: int, known: dict[int, _Peaks]) -> None:
        if (peak := known[size].whole) > self._allowed:
            raise MemoryExceeded(f"{size} samples need {peak:,} bytes of {self._allowed:,}")

    def _require_foreseen(self, size: int, known: dict[int, _Peaks]) -> None:
        if (foreseen := _foreseen(size, known)) > self._allowed:
            raise MemoryExceeded(f"{size} samples would need some {foreseen:,} bytes of {self._allowed:,}")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Peaks:
    """Bytes at most, of one trial."""

    growing: int
    """In the passes, which grows with the size."""
    whole: int
    """With the optimizer's step."""


def _foreseen(size: int, known: dict[int, _Peaks]) -> int:
    """Bytes at most, on the line through the two largest sizes that were tried; 0 where there is none."""
    tried = sorted(known)[-2:]
    if len(tried) < 2 or size <= tried[1]:
        return 0
    low, high = tried
    less, more = known[low].growing, known[high].growing
    return max(more + (more - less) * (size - high) // (high - low), known[high].whole)


def touched(size: int, device: torch.device) -> torch.Tensor:
    """So many bytes that are there: the CPU gives zeros out without taking memory for them."""
    return torch.empty(size, dtype=torch.uint8, device=device).fill_(1)


def weight_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Of all parameters that it updates, this rank's part of sharded ones."""
    return sum(_bytes(each) for group in optimizer.param_groups for each in group["params"])


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes that its state will take and does not take yet; 0 once it has stepped.

    Found by a step of an optimizer of the same class, with the same settings, on a small parameter; what
    cannot be made so counts as Adam's, two numbers for each weight, and that is told.
    """
    if optimizer.state:
        return 0
    probe = torch.nn.Parameter(torch.zeros(16, 16))
    probe.grad = torch.ones_like(probe)
    try:
        with torch.random.fork_rng(devices=[]):
            small = type(optimizer)([probe], **_settings(optimizer))
            small.step()
    except Exception as error:  # a class of the user's may want anything
        log.event("batch-size", optimizer=type(optimizer).__name__, state="as Adam's", why=error)
        return 2 * weight_bytes(optimizer)
    state = sum(_bytes(each) for each in small.state[probe].values() if isinstance(each, torch.Tensor))
    return round(weight_bytes(optimizer) * state / _bytes(probe))


def _settings(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Its defaults that its class takes: AdamW's hold what only Adam, its base, does (torch 2.15)."""
    takes = inspect.signature(type(optimizer)).parameters
    return {name: value for name, value in optimizer.defaults.items() if name in takes}


def _bytes(tensor: torch.Tensor) -> int:
    here = local(tensor)
    return here.numel() * here.element_size()

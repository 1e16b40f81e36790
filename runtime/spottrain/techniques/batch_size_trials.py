"""Finds the largest micro-batch that fits by trials before training, or the next smaller one after an error.

    def batch_of(size):
        return collate([dataset[i] for i in range(size)])

    memory = memory_of(device)
    trial = Trial(model, optimizer, loss_of=loss_of, batch_of=batch_of, share=64, memory=memory)
    size = agreed(find(trial, 64), world, device)

The global batch stays the same, and so does the training: only the number of micro-batches changes. With
FSDP2 all ranks try at once, with `memory=MemoryOfAllRanks(memory, world)`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch

from spottrain.core import log
from spottrain.core.device import to_device
from spottrain.distributed import process_group
from spottrain.distributed.dtensor import any_sharded
from spottrain.distributed.world import World
from spottrain.errors import ConfigurationError, RunError
from spottrain.techniques import accumulation
from spottrain.techniques.dry_run import local_bytes, rehearsal, release
from spottrain.techniques.memory import StepMemory
from spottrain.techniques.precision import Precision

HEAD_ROOM: Final = 0.1
"""Share of the memory that stays free: for fragmentation, longer samples, NCCL and evaluation."""
OUT_OF_MEMORY: Final = re.compile(
    r"DefaultCPUAllocator: (can't allocate memory|not enough memory)|CUDA error: out of memory"
    r"|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_(ALLOC|INTERNAL_ERROR_(HOST|DEVICE)_ALLOCATION)_FAILED"
)
"""Messages of a RuntimeError that mean out of memory (torch 2.15); CUDA's allocator has its own class."""
SMALLER_WAYS: Final = (
    "use activation checkpointing (all), precision bf16, an optimizer with less state, more GPUs "
    "with a sharded model (spottrain.shard), a smaller model, or shorter samples"
)


class MemoryExceeded(MemoryError):
    """A trial used more memory than allowed, or was predicted to."""


class OutOfMemoryTogether(Exception):
    """A rank ran out of memory in a trial of all ranks. It cannot try another size: the others wait for it.

    Not a MemoryError: `fits` must not take it for a size that is merely too large.
    """

    def __init__(self, size: int) -> None:
        super().__init__(
            f"a trial with {size} samples ran out of memory while other ranks waited for this one: "
            "set microBatchSize to auto, which restarts with smaller batches, or set "
            "activationCheckpointing to a policy other than auto"
        )
        self.size = size


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` means out of memory, so that a smaller batch may help."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and OUT_OF_MEMORY.search(str(error)) is not None


def divisors(share: int) -> list[int]:
    """Returns the possible micro-batch sizes for a rank's `share` of the global batch, in rising order."""
    return [size for size in range(1, share + 1) if share % size == 0]


def find(trial: Callable[[int], None], share: int, *, largest: int | None = None) -> int:
    """Finds the largest divisor of `share` that `trial` can run without running out of memory.

    The search goes up from 1 over the divisors in growing strides, then bisects. So there are few trials that
    are far too large and may kill the process.

    Args:
        trial: runs a step with micro-batches of the given size. Errors other than out of memory propagate.
        share: samples of one optimizer step on this rank.
        largest: upper limit of the sizes; None: `share`.

    Returns:
        The micro-batch size in samples.

    Raises:
        ConfigurationError: not even the smallest size fits, or `share` is below 1.
    """
    if share < 1:
        raise ConfigurationError(
            f"one rank's share of the global batch is {share}: it must be at least 1; raise the global "
            "batch size, or use fewer ranks"
        )
    sizes = [size for size in divisors(share) if largest is None or size <= largest]
    good, fitted = _first_that_runs(trial, sizes)
    if not fitted:
        least = "one sample" if sizes[good] == 1 else f"{sizes[good]} samples"
        raise ConfigurationError(f"a micro-batch of {least} does not fit into memory: {SMALLER_WAYS}")
    tried = [str(sizes[good])]
    bad, stride = len(sizes), 2
    while good + 1 < bad:
        at = min(good + stride, len(sizes) - 1) if bad == len(sizes) else (good + bad) // 2
        if fits(trial, sizes[at]):
            good, stride = at, stride * 2
            tried.append(str(sizes[at]))
        else:
            bad = at
            tried.append(f"{sizes[at]} too large")
    log.event("batch-size", micro_batch_size=sizes[good], share=share, tried=", ".join(tried))
    return sizes[good]


def _first_that_runs(trial: Callable[[int], None], sizes: list[int]) -> tuple[int, bool]:
    """Returns the index of the first size that the model supports, and whether it fits into memory.

    For example, batch norm fails with one sample. If no size works, the error of the last one is raised.
    """
    for at, size in enumerate(sizes):
        try:
            return at, fits(trial, size)
        except Exception as error:
            if size == sizes[-1] or isinstance(error, RunError | OutOfMemoryTogether):
                raise
            log.event("batch-size", left_out=size, why=f"{type(error).__name__}: {error}")
    raise AssertionError("the size 1 is always tried")


def fits(trial: Callable[[int], None], size: int) -> bool:
    """Whether a trial of `size` runs without running out of memory; frees its memory if it does not."""
    try:
        trial(size)
        return True
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    release()  # outside of `except`: the traceback and the tensors of its frames are gone
    return False


def smaller(size: int, share: int) -> int:
    """Returns the next smaller divisor of `share`; raises ConfigurationError if there is none."""
    below = [each for each in divisors(share) if each < size]
    if not below:
        raise ConfigurationError(
            f"micro-batches of {size} samples do not fit into memory, and no smaller size divides the "
            f"rank's share of the global batch: {SMALLER_WAYS}"
        )
    return below[-1]


def agreed(size: int, world: World, device: torch.device) -> int:
    """Returns the smallest number of all ranks: their GPUs may differ, or be shared. All must call it."""
    return round(process_group.earliest(float(size), world, device))


class _Peaks(NamedTuple):
    """Peaks of one trial, in bytes."""

    growing: int
    """During the passes; it grows with the size."""
    whole: int
    """Including the optimizer's step."""


class MemoryOfAllRanks:
    """Memory of all ranks: the smallest limit and the largest peak, so that all ranks judge a trial alike.

    For models whose passes are collectives (FSDP2). All ranks try the same size at the same time. A rank that
    runs out of memory leaves the others waiting, so `fails_softly` is False. The constructor and `peak` are
    collectives: all ranks must call them in the same order.
    """

    fails_softly = False

    def __init__(self, own: StepMemory, world: World) -> None:
        self._own, self._world, self.device = own, world, own.device
        self.limit = agreed(own.limit, world, own.device)

    def begin(self) -> None:
        self._own.begin()

    def peak(self) -> int:
        return -agreed(-self._own.peak(), self._world, self.device)


class Trial:
    """Measures the memory of one optimizer step for a micro-batch size; leaves no trace in the training.

    If exceeding the limit would kill the process, sizes that are predicted to exceed it are not tried. Then
    the trial starts small and doubles; a line through the two largest sizes predicts the next one.

    Memory for the optimizer is reserved: `state_bytes`, and for its step temporary tensors as large as the
    weights, as torch's foreach optimizers make.

    Args:
        model: not wrapped by DDP or torch.compile: a trial must not wait for other ranks. For FSDP2 use
            `MemoryOfAllRanks`.
        optimizer: optimizer of the model; it is not stepped.
        loss_of: (model, batch) -> scalar tensor.
        batch_of: size -> a batch of so many samples, not from the training's loader. If all ranks try
            together, it must be the same on all of them.
        share: samples of one optimizer step on this rank. With several micro-batches, the second pass runs
            while the gradients of the first exist.
        memory: measures the peak, and knows the limit.
        precision: number format of the passes; None: fp32.

    Raises:
        ConfigurationError: the model is sharded by FSDP2, and `memory` is not `MemoryOfAllRanks`.
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
    ) -> None:
        self._together = isinstance(memory, MemoryOfAllRanks)
        if not self._together and any_sharded(model):
            raise ConfigurationError(
                "a trial of a model sharded by FSDP2 involves all ranks: pass "
                "memory=MemoryOfAllRanks(memory_of(device), world) on all of them, or set "
                "microBatchSize to a number"
            )
        self.model, self.optimizer = model, optimizer
        self.loss_of, self.batch_of = loss_of, batch_of
        self.share, self.memory = share, memory
        self.precision = precision or Precision(name="fp32")
        self._state = state_bytes(optimizer)
        self._allowed = int(memory.limit * (1 - HEAD_ROOM))
        self._peaks: dict[int, dict[int, _Peaks]] = {1: {}, 2: {}}
        """By number of passes (a second pass runs beside gradients), then by micro-batch size."""

    def __call__(self, size: int) -> None:
        """Tries a step with micro-batches of `size` samples.

        Raises:
            MemoryExceeded: it used more memory than allowed, or is predicted to.
            OutOfMemoryTogether: this rank ran out of memory in a trial of all ranks.
            torch.OutOfMemoryError: the device ran out of memory; on a CPU a RuntimeError.
        """
        known = self._peaks[self._passes(size)]
        if not self.memory.fails_softly:
            self._climb(size, known)
        if size not in known:
            known[size] = self._measure(size, self._passes(size))
        self._require(size, known)

    def peak(self, size: int) -> int:
        """Returns the peak in bytes of a size that was tried, including all that the process held."""
        return self._peaks[self._passes(size)][size].whole

    def _passes(self, size: int) -> int:
        return 1 if size == self.share else 2

    def _climb(self, size: int, known: dict[int, _Peaks]) -> None:
        """Tries doubling sizes up to `size`: a prediction from far below may be wrong."""
        at = 2 * max(known, default=0) or 1
        while at < size:
            self._require_foreseen(size, known)
            try:
                known[at] = self._measure(at, self._passes(size))
            except Exception as error:
                if known or is_out_of_memory(error) or isinstance(error, RunError | OutOfMemoryTogether):
                    raise
                # The model may not support so few samples, see `_first_that_runs`.
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
        state = _touched(self._state, device)
        for number in range(1, passes + 1):
            with accumulation.sync(self.model, last=number == passes):
                with self.precision.autocast(device):
                    loss = self.loss_of(self.model, to_device(self.batch_of(size), device))
                loss.backward()  # type: ignore[no-untyped-call]
            del loss
        growing = self.memory.peak()
        del state
        # During the optimizer's step its state exists, but no activations. Either peak may be the larger.
        held = _touched(self._state + weight_bytes(self.optimizer), device)
        whole = self.memory.peak()
        del held
        return _Peaks(growing=growing, whole=whole)

    def _require(self, size: int, known: dict[int, _Peaks]) -> None:
        if (peak := known[size].whole) > self._allowed:
            raise MemoryExceeded(f"{size} samples need {peak:,} bytes, and {self._allowed:,} are allowed")

    def _require_foreseen(self, size: int, known: dict[int, _Peaks]) -> None:
        if (foreseen := _foreseen(size, known)) > self._allowed:
            raise MemoryExceeded(
                f"{size} samples would need about {foreseen:,} bytes, and {self._allowed:,} are allowed"
            )


def _foreseen(size: int, known: dict[int, _Peaks]) -> int:
    """Predicts the peak in bytes by a line through the two largest tried sizes; 0 with fewer than two."""
    tried = sorted(known)[-2:]
    if len(tried) < 2 or size <= tried[1]:
        return 0
    low, high = tried
    less, more = known[low].growing, known[high].growing
    return max(more + (more - less) * (size - high) // (high - low), known[high].whole)


def _touched(size: int, device: torch.device) -> torch.Tensor:
    """Allocates `size` bytes and writes them: on a CPU untouched memory is not resident."""
    return torch.empty(size, dtype=torch.uint8, device=device).fill_(1)


def weight_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Returns the bytes of the optimizer's parameters; of sharded ones only this rank's part."""
    return sum(local_bytes(each) for group in optimizer.param_groups for each in group["params"])


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Estimates the bytes that the optimizer's state still has to allocate; 0 once it has stepped.

    Steps an optimizer of the same class and settings on a small parameter. If that fails, it logs this, and
    assumes Adam's state: two numbers per weight.
    """
    if optimizer.state:
        return 0
    probe = torch.nn.Parameter(torch.zeros(16, 16))
    probe.grad = torch.ones_like(probe)
    try:
        with torch.random.fork_rng(devices=[]):
            # Not all defaults are arguments: AdamW's include some of its base's (torch 2.15).
            accepted = inspect.signature(type(optimizer)).parameters
            settings = {name: value for name, value in optimizer.defaults.items() if name in accepted}
            small = type(optimizer)([probe], **settings)
            small.step()
    except Exception as error:  # a user's class may need other arguments
        log.event("batch-size", optimizer=type(optimizer).__name__, state="as Adam's", why=error)
        return 2 * weight_bytes(optimizer)
    state = sum(local_bytes(each) for each in small.state[probe].values() if isinstance(each, torch.Tensor))
    return round(weight_bytes(optimizer) * state / local_bytes(probe))

"""Finds a micro-batch size and a policy of activation checkpointing that fit into memory, if set to `auto`.

Before the first step, trial steps go up from small micro-batches to a rank's share of the global batch, until
one takes too much memory. All ranks try the same size at the same time, and the fullest rank decides. The
global batch size stays the same, and so does the learning rate. In a custom loop, `find_batch_size` does the
same as `Trainer`:

    found = find_batch_size(model, optimizer, dataset, loss, global_batch_size=256)
    size, windows = found.micro_batch_size, found.accumulation
    loader = spottrain.data.loader(dataset, batch_size=size, accumulation=windows, shuffle=True)
"""

from __future__ import annotations

import ctypes
import math
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal

import torch

from spottrain.contract import Reason
from spottrain.core import log
from spottrain.core.container import CGROUPS, memory_limit
from spottrain.core.device import to_device
from spottrain.core.training_settings import AUTO, ActivationCheckpointing
from spottrain.core.training_settings import activation_checkpointing as policy_of
from spottrain.data.dataloader import Collate
from spottrain.data.source import Batches, Source
from spottrain.data.source import source as source_of
from spottrain.distributed import process_group
from spottrain.distributed.dtensor import any_sharded
from spottrain.distributed.world import World
from spottrain.errors import ConfigurationError, RunError, TrainingFailed
from spottrain.techniques import accumulation
from spottrain.techniques.activation_checkpointing import STEPS, apply, described
from spottrain.techniques.dry_run import local_bytes, rehearsal, release
from spottrain.techniques.precision import Precision

Loss = Callable[[torch.nn.Module, Any], torch.Tensor]
HEAD_ROOM: Final = 0.1
"""Share of the memory that stays free: for fragmentation, longer samples, NCCL and evaluation."""
SELF: Final = Path("/proc/self")
OUT_OF_MEMORY: Final = re.compile(
    r"DefaultCPUAllocator: (can't allocate memory|not enough memory)|CUDA error: out of memory"
    r"|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_(ALLOC|INTERNAL_ERROR_(HOST|DEVICE)_ALLOCATION)_FAILED"
)
"""Messages of a RuntimeError that mean out of memory (torch 2.15); CUDA's allocator has its own class."""
SMALLER_WAYS: Final = (
    "use activation checkpointing (all), precision bf16, an optimizer with less state, more GPUs "
    "with a sharded model (spottrain.shard), a smaller model, or shorter samples"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` means out of memory, so that a smaller batch may help."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and OUT_OF_MEMORY.search(str(error)) is not None


class StepMemory:
    """Peak of a GPU's memory reserved by torch's allocator, or of the process' resident memory on a CPU.

    Args:
        device: a GPU, of which other processes' memory is left out; or a CPU.
        ranks: ranks in this container (`World.local_size`), which share the limit of a CPU.
        cgroups: folder of the container's limit.
        process: folder of this process under /proc.
    """

    def __init__(
        self, device: torch.device, *, ranks: int = 1, cgroups: Path = CGROUPS, process: Path = SELF
    ) -> None:
        self.device, self._process = device, process
        self.fails_softly = device.type == "cuda"
        """Whether exceeding the limit raises an exception; else the process is killed."""
        if self.fails_softly:
            limit = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
        else:
            physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            limit = min(memory_limit(cgroups, process / "cgroup") or physical, physical) // ranks
        self.limit = limit
        """Bytes that this process may use."""

    def begin(self) -> None:
        """Resets the peak. If that fails, the earlier one counts too, which only makes sizes smaller."""
        if self.fails_softly:
            torch.cuda.empty_cache()  # the peak is of reserved memory, which includes cached blocks
            torch.cuda.reset_peak_memory_stats(device=self.device)
            return
        try:
            # Returns freed blocks to the system, else a smaller trial would seem as large as the one before.
            # Only glibc has it.
            ctypes.CDLL(None).malloc_trim(0)
            (self._process / "clear_refs").write_text("5")
        except (OSError, AttributeError) as error:
            log.event("batch-size", peak="of all trials so far", why=error)

    def peak(self) -> int:
        """Returns the peak in bytes since `begin`, including all that the process held before."""
        if self.fails_softly:
            return int(torch.cuda.max_memory_reserved(self.device))
        status = (self._process / "status").read_text(errors="replace")
        found = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
        return int(found[1]) * 1024 if found else 0


def sizes_up_to(most: int) -> list[int]:
    """Returns divisors of `most`, rising up to it: each is the largest that is at most half of the next."""
    found = [most]
    while found[0] > 1:
        found.insert(0, next(size for size in range(found[0] // 2, 0, -1) if most % size == 0))
    return found


def foreseen(size: int, used: dict[int, float]) -> float:
    """Predicts what a size takes, by a line through the two largest that were tried; 0 without two."""
    if len(used) < 2:
        return 0.0
    (low, less), (high, more) = list(used.items())[-2:]
    return more + (more - less) * (size - high) / (high - low)


def weight_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Returns the bytes of the optimizer's parameters; of sharded ones only this rank's part."""
    return sum(local_bytes(each) for group in optimizer.param_groups for each in group["params"])


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Estimates the bytes that the optimizer's state still has to allocate; 0 once it has stepped.

    Steps a copy of it on a small parameter. If that fails, it logs this, and assumes Adam's state: two
    numbers per weight.
    """
    if optimizer.state:
        return 0
    probe = torch.nn.Parameter(torch.zeros(16, 16))
    probe.grad = torch.ones_like(probe)
    small = copy(optimizer)
    small.state, small.param_groups = defaultdict(dict), [optimizer.param_groups[0] | {"params": [probe]}]
    try:
        with torch.random.fork_rng(devices=[]):
            small.step()
    except Exception as error:  # a user's class may have other attributes
        log.event("batch-size", optimizer=type(optimizer).__name__, state="as Adam's", why=error)
        return 2 * weight_bytes(optimizer)
    state = sum(local_bytes(each) for each in small.state[probe].values() if isinstance(each, torch.Tensor))
    return round(weight_bytes(optimizer) * state / local_bytes(probe))


@dataclass(eq=False)
class MemoryFit:
    """Memory fit of one training.

    Raises:
        ConfigurationError: trials are needed, and the data are not a map-style dataset.
    """

    micro_batch_size: int | str | None
    """auto: found by trials."""
    policy: ActivationCheckpointing
    """Policy of activation checkpointing; after `fit` the one that was applied."""
    _: KW_ONLY
    model: torch.nn.Module
    """Not wrapped by DDP or torch.compile."""
    optimizer: torch.optim.Optimizer
    """It is not stepped. Trials reserve memory for its state, and for temporary tensors as large as the
    weights, which torch's foreach optimizers make."""
    loss_of: Loss
    """(model, batch) -> the mean loss over the batch."""
    source: Source
    precision: Precision
    device: torch.device
    world: World
    saved_size: int | None = None
    """Micro-batch size of the previous attempt: it is kept if it fits, so that sums keep their order."""

    def __post_init__(self) -> None:
        self._sized = self.micro_batch_size == AUTO
        self._tries = self._sized or self.policy.policy == AUTO
        self._batches = self.source if isinstance(self.source, Batches) else None
        if self._tries and self._batches is None:
            raise ConfigurationError(
                "microBatchSize auto and activationCheckpointing auto run trials, which need a "
                "map-style train_dataset: set a size and a policy, or pass a dataset instead of a "
                "loader"
            )

    def fit(self) -> None:
        """Finds and applies policy and size, before compilation. All ranks must call it.

        The policy is the one with the least recomputation that lets the micro-batch fit: one of the given
        size, else the largest.

        Raises:
            ConfigurationError: nothing fits.
        """
        if self._batches is None or not self._tries:
            apply(self.model, self.policy)
            return
        saved, share = self.saved_size, self._share
        most = self._batches.plan.micro_batch_size
        if self._sized:
            most = saved if saved is not None and share % saved == 0 else share
        memory = StepMemory(self.device, ranks=self.world.local_size)
        found, chooses = None, self.policy.policy == AUTO
        for policy in STEPS if chooses else (self.policy,):
            self.policy = policy
            apply(self.model, policy)
            found = self.largest(sizes_up_to(most), memory)
            if found == most:
                break
        if found is None or not (self._sized or found == most):
            size = "one sample" if self._sized else f"{most} samples"
            ways = SMALLER_WAYS if self._sized else "set microBatchSize to auto or a smaller number"
            raise ConfigurationError(f"a micro-batch of {size} does not fit into memory: {ways}")
        if self._sized:
            self._batches.plan = replace(self._batches.plan, micro_batch_size=found)
        if chooses:
            log.event("activation-checkpointing", wanted=AUTO, chosen=described(self.policy))

    # --- trials: steps that all ranks make together, and that leave no trace ------------------------------
    def largest(self, sizes: Sequence[int], memory: StepMemory) -> int | None:
        """Returns the largest of the rising sizes that fits on all ranks; None if the first does not.

        A size that the model does not support is left out, such as one sample with batch norm; if it
        supports none, the error of the last one is raised.
        """
        fitted, used = None, dict[int, float]()
        for size in sizes:
            if (self._together or not memory.fails_softly) and foreseen(size, used) > 1 - HEAD_ROOM:
                break  # the trial would end the process
            try:
                used[size] = self.used(size, memory)
            except Exception as error:
                if isinstance(error, RunError) or used or size == sizes[-1]:
                    raise
                log.event("batch-size", left_out=size, why=f"{type(error).__name__}: {error}")
                continue
            if used[size] > 1 - HEAD_ROOM:
                break
            fitted = size
        tried = [f"{n} {f'takes {of:.0%}' if of < math.inf else 'is too large'}" for n, of in used.items()]
        log.event("batch-size", micro_batch_size=fitted, share=self._share, tried=", ".join(tried))
        return fitted

    def used(self, size: int, memory: StepMemory) -> float:
        """Returns the share of its memory that a step of this size takes on the fullest rank.

        It is infinite if a rank runs out of memory. Raises TrainingFailed if others wait for this rank then.
        """
        peak = math.inf
        try:
            with rehearsal(self.model):
                peak = self._peak(size, memory)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if self._together:
                raise TrainingFailed(
                    f"a trial with {size} samples ran out of memory while other ranks waited for this one: "
                    "set microBatchSize to a number below that, and activationCheckpointing to a policy "
                    "other than auto",
                    reason=Reason.OUT_OF_MEMORY,
                ) from error
        if peak == math.inf:
            release()  # outside of `except`: the traceback and the tensors of its frames are gone
        return -process_group.earliest(-peak / memory.limit, self.world, self.device)

    def _peak(self, size: int, memory: StepMemory) -> int:
        """With several micro-batches, the second pass runs while the gradients of the first exist."""
        passes = 1 if size == self._share else 2
        assert self._batches is not None
        memory.begin()
        # Written, because on a CPU untouched memory is not resident.
        reserved = torch.empty(self._reserved, dtype=torch.uint8, device=self.device).fill_(1)
        for number in range(1, passes + 1):
            with accumulation.sync(self.model, last=number == passes):
                with self.precision.autocast(self.device):
                    loss = self.loss_of(self.model, to_device(self._batches.sample(size), self.device))
                loss.backward()  # type: ignore[no-untyped-call]
            del loss
        del reserved
        return memory.peak()

    @cached_property
    def _reserved(self) -> int:
        """Bytes of the optimizer's state, and of its temporary tensors."""
        return state_bytes(self.optimizer) + weight_bytes(self.optimizer)

    @property
    def _together(self) -> bool:
        """Whether a rank that runs out of memory leaves the others waiting in a collective.

        The forward pass is one, even without DDP, of a sharded model and of batch norm over all ranks.
        """
        batch_norm = (isinstance(each, torch.nn.SyncBatchNorm) for each in self.model.modules())
        return self.world.distributed and (any_sharded(self.model) or any(batch_norm))

    # --- what was found -----------------------------------------------------------------------------------
    @property
    def size(self) -> int | None:
        """Samples of a micro-batch, if found by trial; else None."""
        return self._batches.plan.micro_batch_size if self._sized and self._batches is not None else None

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Raises TrainingFailed for running out of memory in the block: it says which number to set."""
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise TrainingFailed(self._too_large(), reason=Reason.OUT_OF_MEMORY) from error

    def _too_large(self) -> str:
        if self._batches is None:
            fix = f"make the batches of train_dataset smaller, or {SMALLER_WAYS}"
            return f"the training ran out of memory: {fix}"
        micro = self._batches.plan.micro_batch_size
        smaller = [size for size in sizes_up_to(self._share) if size < micro]
        fix = f"set microBatchSize to {smaller[-1]}, or {SMALLER_WAYS}" if smaller else SMALLER_WAYS
        return f"the training ran out of memory with micro-batches of {micro} samples: {fix}"

    @property
    def _share(self) -> int:
        assert self._batches is not None
        return self._batches.plan.global_batch_size // self.world.size


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """Result of `find_batch_size`; the same on all ranks."""

    micro_batch_size: int
    """Samples of one forward pass on one rank."""
    accumulation: int
    """Forward passes per rank in an optimizer step."""
    policy: ActivationCheckpointing
    """Policy of activation checkpointing; it is already applied to the model."""


def find_batch_size(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    dataset: Any,
    loss: Loss,
    *,
    global_batch_size: int,
    micro_batch_size: int | Literal["auto"] | None = AUTO,
    checkpointing: Any = "none",
    precision: Precision | None = None,
    collate_fn: Collate | None = None,
    world: World | None = None,
) -> Fit:
    """Finds the largest micro-batch that fits, with `checkpointing="auto"` also the least recomputation.

    All ranks must call it. The trials leave no trace in weights, buffers, gradients or random state. A later
    attempt on another machine may find another size. Then gradients are summed in another order, over the
    same samples.

    Args:
        model: on its device, before DDP and torch.compile.
        optimizer: optimizer of the model.
        dataset: map-style dataset; its first samples are tried.
        loss: (model, batch) -> scalar tensor.
        global_batch_size: samples of one optimizer step over all ranks.
        micro_batch_size: samples per rank and forward pass; "auto": found by trials; None: the rank's share
            of a step at once.
        checkpointing: policy of activation checkpointing, as `activation_checkpointing.apply` takes it, or
            "auto". It is applied to the model.
        precision: number format, such as `Amp(...).precision`; None: fp32.
        collate_fn: makes a batch of a list of samples; None: torch's `default_collate`.
        world: rank and number of ranks; None: from the environment.

    Returns:
        Micro-batch size, accumulation and policy.

    Raises:
        ConfigurationError: nothing fits, or an argument is not valid.
    """
    world = World.from_env(os.environ) if world is None else world
    share = global_batch_size // world.size
    device = next(model.parameters()).device
    process_group.join(world, device)
    size = None if micro_batch_size is None or micro_batch_size == AUTO else int(micro_batch_size)
    batches = source_of(
        dataset,
        world,
        global_batch_size=global_batch_size,
        micro_batch_size=size,
        collate_fn=collate_fn,
    )
    memory_fit = MemoryFit(
        micro_batch_size,
        policy_of(checkpointing),
        model=model,
        optimizer=optimizer,
        loss_of=loss,
        source=batches,
        precision=precision or Precision(name="fp32"),
        device=device,
        world=world,
    )
    memory_fit.fit()
    found = memory_fit.size or size or share
    return Fit(micro_batch_size=found, accumulation=share // found, policy=memory_fit.policy)

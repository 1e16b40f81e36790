"""Finds a micro-batch size and a policy of activation checkpointing that fit into memory, if set to `auto`.

The global batch size stays the same, and so does the learning rate. In a custom loop, `find_batch_size` does
the same as `Trainer`:

    found = find_batch_size(model, optimizer, dataset, loss, global_batch_size=256)
    size, windows = found.micro_batch_size, found.accumulation
    loader = spottrain.data.loader(dataset, batch_size=size, accumulation=windows, shuffle=True)

After running out of memory, a single rank goes on with smaller micro-batches. Several ranks all start again,
with the record of `OOMHistory`: docs/adr/0010-out-of-memory.md.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch.utils.data import default_collate

from spottrain.contract import out_of_memory_key, out_of_memory_policy_key
from spottrain.core import log
from spottrain.core.training_settings import Settings
from spottrain.core.training_settings import activation_checkpointing as checked_policy
from spottrain.core.training_spec import AUTO, ActivationCheckpointing
from spottrain.data import Batches, Source
from spottrain.data.dataloader import Collate, request, seeded
from spottrain.data.source import source as source_of
from spottrain.distributed import process_group
from spottrain.distributed.dtensor import any_sharded
from spottrain.distributed.world import World
from spottrain.errors import ConfigurationError, OutOfMemory, RunError, StoreError
from spottrain.storage.base import AlreadyExists, Store
from spottrain.techniques.activation_checkpointing import STEPS, Policy, apply, least
from spottrain.techniques.batch_size_trials import (
    SMALLER_WAYS,
    MemoryOfAllRanks,
    OutOfMemoryTogether,
    Trial,
    agreed,
    find,
    fits,
    is_out_of_memory,
    smaller,
)
from spottrain.techniques.dry_run import release
from spottrain.techniques.memory import StepMemory, memory_of
from spottrain.techniques.precision import Precision

GROWN: Final = 1.1
"""Factor on the earlier memory limit below which a change is due to other processes on the device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OOMHistory:
    """Records in the store what ran out of memory in a job, for its next start.

    By then the processes, and maybe the pod, are gone. There is one object per size or policy, written once,
    in any order, by any rank. HEAD is not used: only rank 0 writes it.
    """

    store: Store | None
    """None without a checkpoint URI; then nothing is recorded."""
    job_uid: str

    def note(self, size: int, **facts: Any) -> bool:
        """Records a micro-batch size. Returns whether the next start will find it.

        facts: further fields of the object, for human readers.
        """
        return self._note(out_of_memory_key(self._job, size), size, microBatchSize=size, **facts)

    def note_policy(self, policy: str, **facts: Any) -> bool:
        """The same for a policy of activation checkpointing."""
        return self._note(out_of_memory_policy_key(self._job, policy), policy, policy=policy, **facts)

    def least(self) -> int | None:
        """Returns the smallest size that was too large; None if none is recorded. Raises StoreError."""
        names = (key.rpartition("/")[2].removesuffix(".json") for key in self._keys())
        return min((int(name) for name in names if name.isdecimal()), default=None)

    def failed_policies(self) -> int:
        """Returns how many of `STEPS`, from the first on, the next start leaves out. Raises StoreError."""
        recorded = self._keys()
        keys = [out_of_memory_policy_key(self._job, str(policy)) for policy in STEPS[:-1]]
        return max((number for number, key in enumerate(keys, 1) if key in recorded), default=0)

    def _note(self, key: str, what: object, **facts: Any) -> bool:
        if self.store is None:
            return False
        body = json.dumps({"jobUID": self.job_uid, **facts}).encode()
        try:
            with contextlib.suppress(AlreadyExists):  # another rank wrote it in the same step
                self.store.put_if_absent(key, body)
            return key in self._keys()
        except StoreError as error:
            log.event("batch-size", too_large=what, kept=False, why=error)
            return False

    def _keys(self) -> list[str]:
        return [] if self.store is None else list(self.store.list(out_of_memory_key(self._job, 0)))

    @property
    def _job(self) -> str:
        """The job's part of the key: a hash, because a UID may contain any character of a file name."""
        return hashlib.sha256(self.job_uid.encode()).hexdigest()[:16]


def policy_of(wanted: ActivationCheckpointing) -> Policy:
    match wanted.policy:
        case "every":
            return Policy(every=wanted.every or 2)
        case "classes":
            return Policy(every=1, classes=wanted.classes)
        case word:
            return Policy.of(word)


class MemoryFit:
    """Memory fit of one training. `loss_of(model, batch)` returns the mean loss over the batch."""

    def __init__(
        self,
        settings: Settings,
        *,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_of: Callable[[torch.nn.Module, Any], torch.Tensor],
        source: Source,
        precision: Precision,
        device: torch.device,
        world: World,
        oom_history: OOMHistory,
    ) -> None:
        self._model, self._optimizer, self._loss_of = model, optimizer, loss_of
        self._precision, self._device, self._world = precision, device, world
        self._oom_history = oom_history
        self.policy = policy_of(settings.activation_checkpointing)
        self._sized = settings.micro_batch_size == AUTO
        self._exact = settings.deterministic
        self.saved_size: int | None = None
        """Micro-batch size of the previous attempt. It is kept if it fits, to keep the order of sums."""
        self.memory_limit: int | None = None
        """Memory limit in bytes of the rank with the least, if the size is found by trial."""
        self.saved_memory_limit: int | None = None
        self._fitted = False
        self._tried: Policy | None = None
        """The policy on trial."""
        self._batches = source if isinstance(source, Batches) else None
        if (self._sized or self.policy.auto) and self._batches is None:
            raise ConfigurationError(
                "microBatchSize auto and activationCheckpointing auto run trials, which need a "
                "map-style train_dataset: set a size and a policy, or pass a dataset instead of a "
                "loader"
            )

    def fit(self) -> None:
        """Finds and applies policy and size, before compilation. All ranks must call it.

        Raises:
            ConfigurationError: nothing fits.
            StoreError: the record of earlier failures cannot be read.
        """
        most = self._most() if self._sized else None
        if self.policy.auto:
            self.policy = self._least_recomputation(most)
        apply(self._model, self.policy)
        if self._batches is not None and most is not None:
            self._batches.resized(self._largest(most))
        self._fitted = True

    @property
    def size(self) -> int | None:
        """Samples of a micro-batch, if found by trial; else None."""
        return self._batches.plan.micro_batch_size if self._sized and self._batches is not None else None

    def lacks_memory(self, error: BaseException) -> bool:
        """Whether `shrink` may help after `error` in a step. If not, this process cannot go on.

        False with several ranks: the others wait in a collective, see `out_of_memory`.
        """
        if self._batches is None or not is_out_of_memory(error):
            return False
        if self._sized:
            return not self._world.distributed
        micro = self._batches.plan.micro_batch_size
        log.event("advice", about="memory", micro_batch_size=micro, text=SMALLER_WAYS)
        return False

    def shrink(self) -> None:
        """Changes to the next smaller micro-batch size. Raises ConfigurationError if there is none."""
        assert self._batches is not None
        micro = self._batches.plan.micro_batch_size
        less = smaller(micro, self._share)
        log.event("batch-size", micro_batch_size=less, was=micro, why="a step ran out of memory")
        release()
        self._batches.resized(less)

    def out_of_memory(self, error: BaseException, step: int) -> RunError | None:
        """Records an error of memory that ends one of several ranks, so that all start again with less.

        Args:
            error: raised in a step, or in a trial of all ranks.
            step: optimizer steps done.

        Returns:
            The error to end with: OutOfMemory, or ConfigurationError if there is no smaller size. None if
            `error` is another one, the size is given, or it cannot be recorded.
        """
        together = isinstance(error, OutOfMemoryTogether)
        if together and self._tried is not None and self._tried != STEPS[-1]:
            return self._without(self._tried)
        if self._batches is None or not self._sized or not self._world.distributed:
            return None
        if isinstance(error, OutOfMemoryTogether):
            return self._below(error.size, step)
        in_step = self._fitted and is_out_of_memory(error)
        return self._below(self._batches.plan.micro_batch_size, step) if in_step else None

    def sample(self, size: int, *, start: int = 0, apart: int = 1) -> Any:
        """Returns a collated batch of `size` samples, on the host, without moving the loader's position.

        It takes every `apart`th sample from index `start` on.
        """
        assert self._batches is not None
        count, collate = len(self._batches.dataset), self._batches.collate_fn or default_collate
        numbers = [(start + number * apart) % count for number in range(size)]
        with seeded(request(self._batches.plan.seed, 0, numbers).seed):
            return collate([self._batches.dataset[number] for number in numbers])

    # --- inside -------------------------------------------------------------------------------------
    def _without(self, policy: Policy) -> RunError | None:
        """Records a policy whose trial ran out of memory, so that it is not tried again."""
        rank = self._world.rank
        if self._oom_history.note_policy(str(policy), rank=rank, ranks=self._world.size):
            return OutOfMemory(
                f"rank {rank} ran out of memory in a trial of activation checkpointing {policy}; the next "
                "attempt tries policies that recompute more"
            )
        text = (
            "the policy could not be stored for the next attempt (no checkpoint URI, or the store "
            "failed): set activationCheckpointing to a policy other than auto"
        )
        log.event("advice", about="memory", policy=policy, text=text)
        return None

    def _below(self, size: int, step: int) -> RunError | None:
        """Records a size that ran out of memory, so that the next attempt uses a smaller one."""
        try:
            less = smaller(size, self._share)
        except ConfigurationError as nothing:
            return nothing
        rank, ranks = self._world.rank, self._world.size
        if self._oom_history.note(size, rank=rank, ranks=ranks, share=self._share, step=step):
            log.event("batch-size", micro_batch_size=less, was=size, why="a step ran out of memory")
            return OutOfMemory(
                f"rank {rank} ran out of memory with micro-batches of {size} samples at step {step + 1}; "
                f"the next attempt resumes from the last checkpoint with at most {less}"
            )
        text = (
            "the size could not be stored for the next attempt (no checkpoint URI, or the store "
            f"failed): set microBatchSize to {less} or less"
        )
        log.event("advice", about="memory", micro_batch_size=size, text=text)
        return None

    @property
    def _share(self) -> int:
        assert self._batches is not None
        return self._batches.plan.global_batch_size // self._world.size

    def _most(self) -> int:
        """Returns the largest size that has not run out of memory in this job. All ranks must call it."""
        known = self._oom_history.least() if self._world.first else None
        too_large = process_group.earliest(float(known or math.inf), self._world, self._device)
        if too_large > self._share:
            return self._share
        most = smaller(round(too_large), self._share)
        log.event(
            "batch-size", most=most, why=f"a step of this job ran out of memory with {round(too_large)}"
        )
        return most

    def _untried(self) -> tuple[Policy, ...]:
        """Returns policies whose trials have not run out of memory in this job. All ranks must call it."""
        failed = float(self._oom_history.failed_policies()) if self._world.first else math.inf
        return STEPS[round(process_group.earliest(failed, self._world, self._device)) :]

    def _least_recomputation(self, most: int | None) -> Policy:
        """Returns the policy with the least recomputation that lets the micro-batch fit.

        The micro-batch has the given size, else the largest allowed one. With a sharded model each trial
        starts at one sample, so this order is safe there too.
        """
        assert self._batches is not None
        size = most or self._batches.plan.micro_batch_size

        def suffices(policy: Policy) -> bool:
            self._tried = policy
            apply(self._model, policy)
            return self._fits_everywhere(self._trial(), size)

        found = least(suffices, self._untried())
        self._tried = None
        if found is None and not self._sized:
            raise ConfigurationError(
                f"micro-batches of {size} samples do not fit into memory even if all blocks are "
                "recomputed: set microBatchSize to auto"
            )
        return found or STEPS[-1]

    def _largest(self, most: int) -> int:
        """Returns the previous attempt's size, or the largest one that fits on all ranks."""
        trial, saved, share = self._trial(), self.saved_size, self._share
        limit = self.memory_limit = agreed(trial.memory.limit, self._world, self._device)
        grown = self.saved_memory_limit is not None and limit > GROWN * self.saved_memory_limit
        keep = saved is not None and share % saved == 0 and saved <= most and (self._exact or not grown)
        if saved is not None and keep and self._fits_everywhere(trial, saved):
            log.event("batch-size", micro_batch_size=saved, share=share, source="the checkpoint")
            return saved
        return agreed(find(trial, share, largest=most), self._world, self._device)

    def _fits_everywhere(self, trial: Trial, size: int) -> bool:
        """Whether the size fits on all ranks."""
        return agreed(int(fits(trial, size)), self._world, self._device) == 1

    def _trial(self) -> Trial:
        memory: StepMemory = memory_of(self._device, ranks=self._world.local_size)
        if self._world.distributed and any(map(_waits_for_others, self._model.modules())):
            memory = MemoryOfAllRanks(memory, self._world)
        return Trial(
            self._model,
            self._optimizer,
            loss_of=self._loss_of,
            batch_of=self.sample,
            share=self._share,
            memory=memory,
            precision=self._precision,
        )


def _waits_for_others(module: torch.nn.Module) -> bool:
    """Whether its forward pass is a collective even without DDP."""
    return any_sharded(module, recurse=False) or isinstance(module, torch.nn.SyncBatchNorm)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """Result of `find_batch_size`; the same on all ranks."""

    micro_batch_size: int
    """Samples of one forward pass on one rank."""
    accumulation: int
    """Forward passes per rank in an optimizer step."""
    policy: Policy
    """Policy of activation checkpointing; it is already applied to the model."""


def find_batch_size(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    dataset: Any,
    loss: Callable[[torch.nn.Module, Any], torch.Tensor],
    *,
    global_batch_size: int,
    micro_batch_size: int | Literal["auto"] | None = AUTO,
    checkpointing: Policy | str | int | None = "none",
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
        checkpointing: policy of activation checkpointing, its name, or k for every k-th block; None: none.
            It is applied to the model.
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
    given = isinstance(checkpointing, Policy)
    settings = Settings(
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        activation_checkpointing=checked_policy("none" if given else checkpointing),
    )
    batches = source_of(
        dataset,
        world,
        global_batch_size=global_batch_size,
        micro_batch_size=size,
        seed=0,
        shuffle=False,
        drop_last=False,
        steps_per_epoch=None,
        num_workers=0,
        collate_fn=collate_fn,
        pin_memory=False,
    )
    memory_fit = MemoryFit(
        settings,
        model=model,
        optimizer=optimizer,
        loss_of=loss,
        source=batches,
        precision=precision or Precision(name="fp32"),
        device=device,
        world=world,
        oom_history=OOMHistory(store=None, job_uid=""),  # a custom loop ends when it runs out of memory
    )
    if isinstance(checkpointing, Policy):
        memory_fit.policy = checkpointing
    memory_fit.fit()
    found = memory_fit.size or size or share
    return Fit(micro_batch_size=found, accumulation=share // found, policy=memory_fit.policy)

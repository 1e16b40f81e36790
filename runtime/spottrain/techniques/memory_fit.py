"""Finds a micro-batch size and a policy of activation checkpointing that fit into memory, if set to `auto`.

Use it after the restore and before compilation. The global batch size stays the same, and so does the
learning rate. After running out of memory, a single rank goes on with smaller micro-batches. Several ranks
all start again, with the record of `oom_history`: docs/adr/0010-out-of-memory.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.utils.data import default_collate

from spottrain.core import log
from spottrain.core.training_settings import Settings
from spottrain.core.training_spec import AUTO, ActivationCheckpointing
from spottrain.data import Batches, Source
from spottrain.data.dataloader import request, seeded
from spottrain.distributed import process_group
from spottrain.distributed.dtensor import any_sharded
from spottrain.distributed.world import World
from spottrain.errors import ConfigurationError, OutOfMemory, RunError
from spottrain.techniques import activation_checkpointing, batch_size_trials
from spottrain.techniques.activation_checkpointing import Policy
from spottrain.techniques.dry_run import release
from spottrain.techniques.memory import StepMemory, memory_of
from spottrain.techniques.oom_history import OOMHistory
from spottrain.techniques.precision import Precision

GROWN: Final = 1.1
"""Factor on the earlier memory limit below which a change is due to other processes on the device."""


def _waits_for_others(module: torch.nn.Module) -> bool:
    """Whether its forward pass is a collective even without DDP."""
    return any_sharded(module, recurse=False) or isinstance(module, torch.nn.SyncBatchNorm)


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
        """Finds and applies policy and size. All ranks must call it.

        Raises:
            ConfigurationError: nothing fits.
            StoreError: the record of earlier failures cannot be read.
        """
        most = self._most() if self._sized else None
        if self.policy.auto:
            self.policy = self._least(most)
        activation_checkpointing.apply(self._model, self.policy)
        if self._batches is not None and most is not None:
            self._batches.resized(self._largest(self._share, most))
        self._fitted = True

    @property
    def size(self) -> int | None:
        """Samples of a micro-batch, if found by trial; else None."""
        return self._batches.plan.micro_batch_size if self._sized and self._batches is not None else None

    @property
    def samples(self) -> bool:
        """Whether `sample` can be called."""
        return self._batches is not None

    def lacks_memory(self, error: BaseException) -> bool:
        """Whether `shrink` may help after `error` in a step. If not, this process cannot go on.

        False with several ranks: the others wait in a collective, see `out_of_memory`.
        """
        if self._batches is None or not batch_size_trials.is_out_of_memory(error):
            return False
        if self._sized:
            return not self._world.distributed
        micro = self._batches.plan.micro_batch_size
        log.event("advice", about="memory", micro_batch_size=micro, text=batch_size_trials.SMALLER_WAYS)
        return False

    def out_of_memory(self, error: BaseException, step: int) -> RunError | None:
        """Records an error of memory that ends one of several ranks, so that all start again with less.

        Args:
            error: raised in a step, or in a trial of all ranks.
            step: optimizer steps done.

        Returns:
            The error to end with: OutOfMemory, or ConfigurationError if there is no smaller size. None if
            `error` is another one, the size is given, or it cannot be recorded.
        """
        if (policy := self._too_much(error)) is not None:
            return self._without(policy)
        size = self._too_large(error)
        if size is None:
            return None
        try:
            smaller = batch_size_trials.smaller(size, self._share)
        except ConfigurationError as nothing:
            return nothing
        rank = self._world.rank
        if not self._oom_history.note(size, rank=rank, ranks=self._world.size, share=self._share, step=step):
            text = (
                "the size could not be stored for the next attempt (no checkpoint URI, or the store "
                f"failed): set microBatchSize to {smaller} or less"
            )
            log.event("advice", about="memory", micro_batch_size=size, text=text)
            return None
        log.event("batch-size", micro_batch_size=smaller, was=size, why="a step ran out of memory")
        return OutOfMemory(
            f"rank {rank} ran out of memory with micro-batches of {size} samples at step {step + 1}; "
            f"the next attempt resumes from the last checkpoint with at most {smaller}"
        )

    def shrink(self) -> None:
        """Changes to the next smaller micro-batch size. Raises ConfigurationError if there is none."""
        assert self._batches is not None
        micro = self._batches.plan.micro_batch_size
        smaller = batch_size_trials.smaller(micro, self._share)
        log.event("batch-size", micro_batch_size=smaller, was=micro, why="a step ran out of memory")
        release(self._device)
        self._batches.resized(smaller)

    # --- inside -------------------------------------------------------------------------------------
    def _too_much(self, error: BaseException) -> Policy | None:
        """Returns the policy whose trial of all ranks ran out of memory, if there is another one to try."""
        tried = self._tried if isinstance(error, batch_size_trials.OutOfMemoryTogether) else None
        return None if tried == activation_checkpointing.STEPS[-1] else tried

    def _without(self, policy: Policy) -> RunError | None:
        if not self._oom_history.note_policy(str(policy), rank=self._world.rank, ranks=self._world.size):
            text = (
                "the policy could not be stored for the next attempt (no checkpoint URI, or the store "
                "failed): set activationCheckpointing to a policy other than auto"
            )
            log.event("advice", about="memory", policy=policy, text=text)
            return None
        return OutOfMemory(
            f"rank {self._world.rank} ran out of memory in a trial of activation checkpointing "
            f"{policy}; the next attempt tries policies that recompute more"
        )

    def _untried(self) -> list[Policy]:
        """Returns policies whose trials have not run out of memory in this job. All ranks must call it."""
        known = self._oom_history.policies() if self._world.first else set()
        last = max(
            (i + 1 for i, each in enumerate(activation_checkpointing.STEPS) if str(each) in known), default=0
        )
        first = process_group.earliest(
            float(last) if self._world.first else math.inf, self._world, self._device
        )
        return list(
            activation_checkpointing.STEPS[min(round(first), len(activation_checkpointing.STEPS) - 1) :]
        )

    def _too_large(self, error: BaseException) -> int | None:
        """Returns the micro-batch size that one of several ranks has just run out of memory with."""
        if self._batches is None or not self._sized or not self._world.distributed:
            return None
        if isinstance(error, batch_size_trials.OutOfMemoryTogether):
            return error.size
        known = self._fitted and batch_size_trials.is_out_of_memory(error)  # before it, not a step
        return self._batches.plan.micro_batch_size if known else None

    def _most(self) -> int:
        """Returns the largest size that has not run out of memory in this job. All ranks must call it."""
        known = self._oom_history.least() if self._world.first else None
        least = process_group.earliest(float(known or math.inf), self._world, self._device)
        if least > self._share:
            return self._share
        most = batch_size_trials.smaller(round(least), self._share)
        log.event("batch-size", most=most, why=f"a step of this job ran out of memory with {round(least)}")
        return most

    @property
    def _share(self) -> int:
        assert self._batches is not None
        return self._batches.plan.global_batch_size // self._world.size

    def _least(self, most: int | None) -> Policy:
        """Returns the policy with the least recomputation that lets the micro-batch fit.

        The micro-batch has the given size, else the largest allowed one. With a sharded model each trial
        starts at one sample, so this order is safe there too.
        """
        assert self._batches is not None
        size = most or self._batches.plan.micro_batch_size

        def fits(policy: Policy) -> bool:
            self._tried = policy
            activation_checkpointing.apply(self._model, policy)
            trial = self._trial()
            mine = batch_size_trials.fits(trial, size, trial.clear)
            return batch_size_trials.agreed(int(mine), self._world, self._device) == 1

        found = activation_checkpointing.least(fits, self._untried())
        self._tried = None
        if found is None and not self._sized:
            raise ConfigurationError(
                f"micro-batches of {size} samples do not fit into memory even if all blocks are "
                "recomputed: set microBatchSize to auto"
            )
        return found or Policy(every=1)

    def _largest(self, share: int, most: int) -> int:
        trial = self._trial()
        self.memory_limit = batch_size_trials.agreed(trial.memory.limit, self._world, self._device)
        allowed = self.saved_size is not None and share % self.saved_size == 0 and self.saved_size <= most
        if self.saved_size is not None and allowed and not self._grown:
            mine = batch_size_trials.fits(trial, self.saved_size, trial.clear)
            if batch_size_trials.agreed(int(mine), self._world, self._device):
                log.event(
                    "batch-size", micro_batch_size=self.saved_size, share=share, source="the checkpoint"
                )
                return self.saved_size
        found = batch_size_trials.find(trial, share, largest=most, clear=trial.clear)
        return batch_size_trials.agreed(found, self._world, self._device)

    @property
    def _grown(self) -> bool:
        """Whether there is more memory than in the previous attempt, and the order of sums may change."""
        if self._exact or self.memory_limit is None or self.saved_memory_limit is None:
            return False
        return self.memory_limit > GROWN * self.saved_memory_limit

    def _trial(self) -> batch_size_trials.Trial:
        memory: StepMemory = memory_of(self._device, ranks=self._world.local_size)
        if self._world.distributed and any(map(_waits_for_others, self._model.modules())):
            memory = batch_size_trials.MemoryOfAllRanks(memory, self._world)
        return batch_size_trials.Trial(
            self._model,
            self._optimizer,
            loss_of=self._loss_of,
            batch_of=self.sample,
            share=self._share,
            memory=memory,
            precision=self._precision,
        )

    def sample(self, size: int, *, start: int = 0, apart: int = 1) -> Any:
        """Returns a collated batch of `size` samples, on the host, without moving the loader's position.

        It takes every `apart`th sample from index `start` on.
        """
        assert self._batches is not None
        count, collate = len(self._batches.dataset), self._batches.collate_fn or default_collate
        numbers = [(start + number * apart) % count for number in range(size)]
        with seeded(request(self._batches.plan.seed, 0, numbers).seed):
            return collate([self._batches.dataset[number] for number in numbers])

"""Has a step fit into memory: the size of micro-batches and what is recomputed, where they are `auto`.

Called by `trainer` when the state is restored, before anything is compiled. The global batch stays what it
is, so the learning rate does too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import default_collate

from spottrain import log
from spottrain.checkpoint.dtensor import is_sharded
from spottrain.data import Batches, Source
from spottrain.data.fetch import request, seeded
from spottrain.errors import ConfigurationError
from spottrain.levers import activations, batchsize
from spottrain.levers.activations import Policy
from spottrain.levers.memory import memory_of
from spottrain.levers.precision import Precision
from spottrain.levers.rehearsing import release
from spottrain.ranks.world import World
from spottrain.settings import Settings
from spottrain.training import AUTO, ActivationCheckpointing


def policy_of(wanted: ActivationCheckpointing) -> Policy:
    match wanted.policy:
        case "every":
            return Policy(every=wanted.every or 2)
        case "classes":
            return Policy(every=1, classes=wanted.classes)
        case word:
            return Policy.of(word)


class Fitting:
    """Of one training. `loss_of(model, batch)`: the mean over the batch."""

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
    ) -> None:
        self._model, self._optimizer, self._loss_of = model, optimizer, loss_of
        self._precision, self._device, self._world = precision, device, world
        self.policy = policy_of(settings.activation_checkpointing)
        self._sized = settings.micro_batch_size == AUTO
        self.before: int | None = None
        """Samples of a micro-batch in the attempt before, whose order of sums is kept where it fits."""
        self._batches = source if isinstance(source, Batches) else None
        if (self._sized or self.policy.auto) and self._batches is None:
            raise ConfigurationError(
                "microBatchSize auto and activationCheckpointing auto try batches of their own, which takes "
                "a map-style train_set: give a size and a policy, or a dataset in place of the loader"
            )

    def fit(self) -> None:
        """All ranks must call it. Raises ConfigurationError where nothing fits."""
        if self.policy.auto:
            self.policy = self._least()
        activations.apply(self._model, self.policy)
        if self._sized and self._batches is not None:
            self._batches.resized(self._largest(self._share))

    @property
    def size(self) -> int | None:
        """Samples of a micro-batch, where they are found by trial."""
        return self._batches.plan.micro_batch_size if self._sized and self._batches is not None else None

    @property
    def samples(self) -> bool:
        """Whether `sample` can be called."""
        return self._batches is not None

    def lacks_memory(self, error: BaseException) -> bool:
        """After an error in a step: whether `shrink` is worth a try. Else it is the run's end.

        With several ranks the others wait in a collective, so there a rank cannot go on by itself.
        """
        if self._batches is None or not batchsize.is_out_of_memory(error):
            return False
        if self._sized and not self._world.distributed:
            return True
        micro = self._batches.plan.micro_batch_size
        log.event("advice", about="memory", micro_batch_size=micro, text=batchsize.SMALLER_WAYS)
        return False

    def shrink(self) -> None:
        """Smaller micro-batches from here on. Raises ConfigurationError where there are none."""
        assert self._batches is not None
        micro = self._batches.plan.micro_batch_size
        smaller = batchsize.smaller(micro, self._share)
        log.event("batch-size", micro_batch_size=smaller, was=micro, why="a step ran out of memory")
        release(self._device)
        self._batches.resized(smaller)

    # --- inside -------------------------------------------------------------------------------------
    @property
    def _share(self) -> int:
        assert self._batches is not None
        return self._batches.plan.batch_size // self._world.size

    def _least(self) -> Policy:
        """The least that lets the micro-batch fit: its size where one is given, else the rank's share."""
        assert self._batches is not None
        size = self._share if self._sized else self._batches.plan.micro_batch_size

        def fits(policy: Policy) -> bool:
            activations.apply(self._model, policy)
            trial = self._trial()
            mine = batchsize.fits(trial, size, trial.clear)
            return batchsize.agreed(int(mine), self._world, self._device) == 1

        found = activations.least(fits)
        if found is None and not self._sized:
            raise ConfigurationError(
                f"micro-batches of {size} do not fit even with all blocks recomputed: set microBatchSize auto"
            )
        return found or Policy(every=1)

    def _largest(self, share: int) -> int:
        trial = self._trial()
        if self.before is not None and share % self.before == 0:
            mine = batchsize.fits(trial, self.before, trial.clear)
            if batchsize.agreed(int(mine), self._world, self._device):
                log.event("batch-size", micro_batch_size=self.before, share=share, source="the checkpoint")
                return self.before
        return batchsize.agreed(batchsize.find(trial, share, clear=trial.clear), self._world, self._device)

    def _trial(self) -> batchsize.Trial:
        if any(is_sharded(parameter) for parameter in self._model.parameters()):
            raise ConfigurationError(
                "microBatchSize auto and activationCheckpointing auto cannot try a sharded model, whose "
                "ranks wait for each other where one runs out of memory: give a size and a policy"
            )
        return batchsize.Trial(
            self._model,
            self._optimizer,
            loss_of=self._loss_of,
            batch_of=self.sample,
            share=self._share,
            memory=memory_of(self._device, ranks=self._world.local_size),
            precision=self._precision,
        )

    def sample(self, size: int) -> Any:
        """A batch of the first samples of the set, on the host; the loader's position stays."""
        assert self._batches is not None
        count, collate = len(self._batches.dataset), self._batches.collate or default_collate
        numbers = [number % count for number in range(size)]
        with seeded(request(self._batches.plan.seed, 0, numbers).seed):
            return collate([self._batches.dataset[number] for number in numbers])

"""What the diagnostics ask a `Trainer`: its settings, and the work of one step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from spottrain.core import log
from spottrain.core.device import to_device
from spottrain.core.training_settings import Settings
from spottrain.data.dataloader import cores
from spottrain.data.source import Batches
from spottrain.diagnostics.bottleneck import InUse
from spottrain.diagnostics.flops import Work, counted
from spottrain.distributed.dtensor import any_sharded
from spottrain.techniques.dry_run import rehearsal, release
from spottrain.techniques.precision import Precision, facts_of


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerPhases:
    """The steps of a Trainer, as a `diagnostics.monitor.Phases`. `loss_of`: see `Trainer.loss_of`."""

    model: torch.nn.Module
    loss_of: Callable[[torch.nn.Module, Any], torch.Tensor]
    batches: Any
    settings: Settings
    precision: Precision
    device: torch.device
    interval_auto: bool
    local_ranks: int

    def work(self) -> Work:
        """Returns the work of an optimizer step. Repeats one micro-batch, and then restores all state.

        It uses the model without DDP and torch.compile, outside of a training step. A counted training step
        would run uncompiled, and results would no longer be the same bit for bit.
        """
        source = self.batches
        if not isinstance(source, Batches) or self.settings.deterministic or any_sharded(self.model):
            return Work()  # a forward pass may change hidden state of the model
        try:
            return self._counted(source)
        except Exception as error:  # out of memory, a kernel without a formula, a loss that counts its calls
            why = f"{type(error).__name__}: {error}"
        log.event("flops-not-counted", why=why, next="MFU and the compute bottleneck are not reported")
        release()
        return Work()

    def _counted(self, source: Batches) -> Work:
        plan = source.plan
        apart = max(1, len(source.dataset) // plan.micro_batch_size)  # all lengths of a sorted set
        batch = to_device(source.sample(plan.micro_batch_size, apart=apart), self.device)
        with rehearsal(self.model), counted(self.device) as work:
            with self.precision.autocast(self.device):
                loss = self.loss_of(self.model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
        return work.times(plan.accumulation)

    def in_use(self) -> InUse:
        settings, source = self.settings, self.batches
        ours = source if isinstance(source, Batches) else None
        return InUse(
            workers=source.num_workers,
            prefetch=None if ours is None else ours.prefetch_factor or 2,  # torch's default
            pin_memory=None if ours is None else ours.pin_memory,
            own_loader=ours is None,
            precision=self.precision.name,
            compile=settings.compile,
            sharded=any_sharded(self.model),
            whole_share=ours is not None and ours.plan.accumulation == 1,
            drop_last=settings.drop_last,
            interval_auto=self.interval_auto,
            cuda=self.device.type == "cuda",
            bf16=facts_of(self.device).bf16,
            cores=max(1, int(cores(local_ranks=self.local_ranks))),
        )

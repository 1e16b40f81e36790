"""What the diagnostics ask a `Trainer`: its settings, and the work of one step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spottrain.core import log
from spottrain.core.device import to_device
from spottrain.data.dataloader import cores
from spottrain.data.source import Batches
from spottrain.diagnostics.bottleneck import InUse
from spottrain.diagnostics.flops import Work, counted
from spottrain.distributed.dtensor import any_sharded
from spottrain.techniques.dry_run import rehearsal, release
from spottrain.techniques.precision import facts_of

if TYPE_CHECKING:
    from spottrain.training.trainer import Trainer


class TrainerPhases:
    """A Trainer's loop, as a `diagnostics.monitor.Phases`."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._sharded = any_sharded(trainer.model)

    def work(self) -> Work:
        """Returns the work of an optimizer step. Repeats one micro-batch, and then restores all state.

        It uses the model without DDP and torch.compile, outside of a training step. A counted training step
        would run uncompiled, and results would no longer be the same bit for bit.
        """
        source = self._trainer.batches
        if not isinstance(source, Batches) or self._trainer.settings.deterministic or self._sharded:
            return Work()  # a forward pass may change hidden state of the model
        try:
            return self._counted(source)
        except Exception as error:  # out of memory, a kernel without a formula, a loss that counts its calls
            why = f"{type(error).__name__}: {error}"
        log.event("flops-not-counted", why=why, next="MFU and the compute bottleneck are not reported")
        release()
        return Work()

    def _counted(self, source: Batches) -> Work:
        plan, trainer = source.plan, self._trainer
        apart = max(1, len(source.dataset) // plan.micro_batch_size)  # all lengths of a sorted set
        batch = to_device(source.sample(plan.micro_batch_size, apart=apart), trainer.device)
        with rehearsal(trainer.model), counted(trainer.device) as work:
            with trainer.precision.autocast(trainer.device):
                loss = trainer.loss_of(trainer.model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
        return work.times(plan.accumulation)

    def in_use(self) -> InUse:
        settings, source, device = self._trainer.settings, self._trainer.batches, self._trainer.device
        session = self._trainer.session
        ours = source if isinstance(source, Batches) else None
        return InUse(
            workers=source.num_workers,
            prefetch=None if ours is None else ours.prefetch_factor or 2,  # torch's default
            pin_memory=None if ours is None else ours.pin_memory,
            own_loader=ours is None,
            precision=self._trainer.precision.name,
            compile=settings.compile,
            sharded=self._sharded,
            whole_share=ours is not None and ours.plan.accumulation == 1,
            drop_last=settings.drop_last,
            interval_auto=session.run.interval.auto,
            cuda=device.type == "cuda",
            bf16=facts_of(device).bf16,
            cores=max(1, int(cores(local_ranks=session.world.local_size))),
        )

"""Diagnostics of a `Trainer`'s run: time split, bottleneck, loader memory, and a profile if requested.

Results go to the log, the progress board and the store. Collectives run at fixed step numbers, so that all
ranks take part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from spottrain.core import log
from spottrain.core.device import to_device
from spottrain.core.training_settings import Settings
from spottrain.core.training_spec import AUTO
from spottrain.data import Batches, Source
from spottrain.data.worker_count import cores
from spottrain.diagnostics import loop_watch, profiler
from spottrain.diagnostics.bottleneck import InUse
from spottrain.diagnostics.flops import Work, counted
from spottrain.diagnostics.gpu_monitor import sampled
from spottrain.diagnostics.hardware import machine
from spottrain.diagnostics.loader_memory import watched
from spottrain.distributed.dtensor import any_sharded
from spottrain.lifecycle.session import Session
from spottrain.lifecycle.worker_signals import worker_pids
from spottrain.techniques import activation_checkpointing
from spottrain.techniques.dry_run import rehearsal, release
from spottrain.techniques.memory import memory_of
from spottrain.techniques.memory_fit import MemoryFit
from spottrain.techniques.precision import Precision, facts_of

EVERY: Final = 64
"""Steps between two diagnoses."""
SETTLED: Final = 2
"""Steps after which memory has reached its peak: the first one allocates the optimizer's state."""


class TrainerMonitor:
    """Monitors one attempt, from its first step on."""

    def __init__(
        self,
        settings: Settings,
        session: Session,
        *,
        model: torch.nn.Module,
        loss_of: Callable[[torch.nn.Module, Any], torch.Tensor],
        source: Source,
        memory_fit: MemoryFit,
        precision: Precision,
        device: torch.device,
        start: int,
        total_steps: int,
    ) -> None:
        self._settings, self._session = settings, session
        self._model, self._loss_of, self._source, self._memory_fit = model, loss_of, source, memory_fit
        self._precision, self._device = precision, device
        self._sharded = any_sharded(model)
        self._watch = loop_watch.Watch(
            device,
            precision=precision.name,
            use=self._in_use(),
            world=session.world,
            sampler=sampled(device, session.board),
        )
        self.timer = self._watch.timer
        self._steps = 0
        self._profiler = profiler.of_run(
            session,
            settings.profile,
            start=start,
            total_steps=total_steps,
            device=device,
            facts=self._watch.alone,
        )
        self._memory = watched(session.world, session.board, worker_pids)

    def step_done(self) -> None:
        """Counts an optimizer step, and diagnoses the run every EVERY steps."""
        self._watch.step_done()
        was_on = self._profiler.on
        self._profiler.step()
        if was_on and not self._profiler.on:
            self.timer.restart()  # writing the trace took seconds
        self._steps += 1
        if self._steps == SETTLED:
            self._advise_on_recomputation()
        if self._steps % EVERY == 0:
            self._look()

    def _advise_on_recomputation(self) -> None:
        wanted = self._settings.activation_checkpointing.policy
        if wanted in ("none", AUTO) or self._settings.micro_batch_size == AUTO:
            return
        memory = memory_of(self._device, ranks=self._session.world.local_size)
        if text := activation_checkpointing.needless(peak=memory.peak(), limit=memory.limit):
            log.event("advice", about="activations", text=text)

    def close(self) -> None:
        """Ends all monitors, and logs the time split of the attempt."""
        if self._memory is not None:
            self._memory.close()
        self._profiler.close()
        self._watch.close()
        shares = self.timer.whole()
        if shares.steps and self._session.world.first:
            parts = {name: f"{share:.3f}" for name, share in shares.shares.items()}
            log.event("time", steps=shares.steps, step_seconds=shares.step_seconds, **parts)

    def _look(self) -> None:
        if self._watch.work is None:
            self._watch.work = self._count()
        self._watch.use = self._in_use()
        self._watch.look()
        found = self._watch.figures
        self._session.board.update(
            shares=found.shares.shares if found.shares.steps else {},
            mfu=found.mfu,
            flops_per_step=None if found.step_flops is None else float(found.step_flops),
            verdict="" if found.verdict is None else str(found.verdict.name),
        )
        self.timer.restart()

    def _count(self) -> Work:
        """Returns the work of an optimizer step. It repeats one micro-batch, and then restores all state.

        It uses the model without DDP and torch.compile, outside of a training step. A counted training step
        would run uncompiled, and results would no longer be the same bit for bit.
        """
        if not isinstance(self._source, Batches) or self._settings.deterministic or self._sharded:
            return Work()  # a forward pass may change hidden state of the model
        try:
            return self._counted(self._source)
        except Exception as error:  # out of memory, a kernel without a formula, a loss that counts its calls
            why = f"{type(error).__name__}: {error}"
        log.event("work-not-counted", why=why, next="no MFU, and no verdict on what binds the work itself")
        release(self._device)
        return Work()

    def _counted(self, source: Batches) -> Work:
        plan = source.plan
        apart = max(1, len(source.dataset) // plan.micro_batch_size)  # all lengths of a sorted set
        batch = to_device(self._memory_fit.sample(plan.micro_batch_size, apart=apart), self._device)
        with rehearsal(self._model), counted(machine(self._device, self._precision.name)) as work:
            with self._precision.autocast(self._device):
                loss = self._loss_of(self._model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
        return work.times(plan.accumulation)

    def _in_use(self) -> InUse:
        settings, source = self._settings, self._source
        ours = source if isinstance(source, Batches) else None
        return InUse(
            workers=source.workers,
            prefetch=None if ours is None else ours.prefetch_factor or 2,  # torch's default
            pin_memory=None if ours is None else ours.pin_memory,
            own_loader=ours is None,
            precision=self._precision.name,
            compile=settings.compile,
            compile_mode=settings.compile_mode,
            gradient_compression=settings.gradient_compression,
            sharded=self._sharded,
            whole_share=ours is not None and ours.plan.accumulation == 1,
            drop_last=settings.drop_last,
            interval_auto=self._session.run.interval.auto,
            cuda=self._device.type == "cuda",
            bf16=facts_of(self._device).bf16,
            cores=max(1, int(cores(local_ranks=self._session.world.local_size))),
        )

"""`EvaluationSchedule`: when to evaluate, what to save as the best checkpoint, and when to stop early."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from spottrain.core import log
from spottrain.distributed import process_group
from spottrain.lifecycle.coordinator import Coordinator
from spottrain.lifecycle.session import Session
from spottrain.techniques.early_stopping import EarlyStopping
from spottrain.techniques.ema import EMA
from spottrain.training.best_checkpoint import Best
from spottrain.training.evaluation import Evaluation


class EvaluationSchedule:
    """Evaluates every `every` optimizer steps, and at the end.

    `evaluation`: None without an evaluation set; then nothing is evaluated. `ema`: evaluated in place of the
    weights. `on_evaluation`: called with the step and the means of each evaluation.
    """

    def __init__(
        self,
        evaluation: Evaluation | None,
        *,
        model: torch.nn.Module,
        every: int,
        total_steps: int,
        stopping: EarlyStopping | None,
        ema: EMA | None,
        session: Session,
        on_evaluation: Callable[[int, dict[str, float]], None],
    ) -> None:
        self.evaluation, self.stopping, self.ema = evaluation, stopping, ema
        self.every, self.total_steps = every, total_steps
        self.best = Best()
        self.evaluated = 0
        """Step of the last complete evaluation; one that a stop cut short is repeated."""
        self.interrupted = False
        """Whether a stop cut an evaluation short on all ranks."""
        self._model, self._session, self._on_evaluation = model, session, on_evaluation
        if stopping is not None:
            doubt = stopping.doubt(evaluations=math.ceil(total_steps / every), total_steps=total_steps)
            if doubt is not None:
                log.event("advice", about="early-stopping", text=doubt)

    @property
    def stop_reason(self) -> str:
        """Why training ends before its last step; "" if it does not."""
        return (self.stopping.reason or "") if self.stopping is not None else ""

    def require(self) -> None:
        """Raises ConfigurationError if the evaluation lacks the metric of early stopping, by one batch.

        Call it on all ranks before the first step of each attempt: both may differ from the last attempt.
        """
        stopping, evaluation = self.stopping, self.evaluation
        if stopping is not None and evaluation is not None:
            names = ["loss"] if stopping.metric == "loss" else evaluation.names(self._model)
            stopping.require(evaluates=True, metrics=names)

    def due(self, step: int) -> bool:
        due = step % self.every == 0 or step == self.total_steps
        return self.evaluation is not None and step > 0 and due and self.evaluated != step

    def evaluate(self, step: int, coordinator: Coordinator) -> bool:
        """Evaluates if due. Returns whether it did, even if a stop cut it short."""
        if self.evaluation is None or not self.due(step):
            return False
        self._session.board.update(state="Evaluating")
        began = time.perf_counter()
        process_group.give_buffers(self._model, self._session.world)
        # The uncompiled model: its batches have other shapes, and a compilation here could outlast a notice.
        with nullcontext() if self.ema is None else self.ema.applied():
            values = self.evaluation.run(self._model, lambda: self._session.preemption.stopping)
        self.interrupted = values is None and self._session.world.distributed
        if self.interrupted:  # all ranks stop here, also those without a request of their own
            self._session.preemption.stop_by(self.evaluation.deadline, "another rank")
        if values is not None:
            self._note(step, values, coordinator, began)
        self._session.board.update(state="Training")
        return True

    def _note(self, step: int, values: dict[str, float], coordinator: Coordinator, began: float) -> None:
        self.evaluated = step
        if self.stopping is not None:  # before the save of the best, which holds its state
            self.stopping.note(step, values)
        self._note_best(values["loss"], step, coordinator)
        shown = {f"eval_{name}": f"{value:.9g}" for name, value in values.items()}
        if self._session.world.first:
            log.event("evaluated", step=step, **shown, seconds=time.perf_counter() - began)
        self._on_evaluation(step, {f"eval_{name}": value for name, value in values.items()})

    def _note_best(self, loss: float, step: int, coordinator: Coordinator) -> None:
        """Saves the best so far, unless an upload is under way: then the last best one stays."""
        wanted = self.best.note(loss) and self._session.run.keep_best and step < self.total_steps
        if not wanted:
            return
        assert self.evaluation is not None
        busy = torch.tensor(float(coordinator.busy), device=self.evaluation.device)
        if not float(process_group.total(busy, self._session.world)):
            self.best.keep(loss, lambda: coordinator.save(best=True))

    # --- state --------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Plain values, the same on all ranks."""
        return {
            "best": self.best.loss,
            "best_kept": self.best.kept,
            "evaluated": self.evaluated,
            "stopping": None if self.stopping is None else self.stopping.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best = Best(loss=state["best"], kept=state["best_kept"])
        self.evaluated = state["evaluated"]
        saved = state.get("stopping")  # missing in older checkpoints
        if self.stopping is not None and saved is not None:
            self.stopping.load_state_dict(saved)

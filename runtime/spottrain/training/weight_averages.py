"""Averages (`techniques.EMA`) in a custom loop: which become the final weights, and when they are updated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from spottrain.checkpoint import plain_state
from spottrain.core import log
from spottrain.techniques.ema import EMA


def final_weights(model: torch.nn.Module, emas: Mapping[str, EMA], *, tell: bool) -> dict[str, Any]:
    """Returns the final weights by name: the average if there is a usable one, as in `Trainer`.

    A ModuleDict counts as several models, some of which may have an average. All ranks must call it: each
    returns its part of sharded weights.
    """
    weights = plain_state.model_state(model)
    averages: dict[int, torch.Tensor] = {}
    for name, ema in emas.items():
        found = ema.by_weight()
        if not found.keys() & _ids(model):
            continue  # an average of something else
        others = [
            each for each, other in emas.items() if other is not ema and found.keys() & other.by_weight()
        ]
        why = _why_not(model, ema, found, others)
        averages |= {} if why else found
        if tell and why:
            text = f"the final weights are not the average {name}, but the raw ones: {why}"
            log.event("advice", about="ema", text=text)
        elif tell:
            log.event("ema", final="the average", of=name)
    return {name: averages.get(id(value), value) for name, value in weights.items()}


def _why_not(model: torch.nn.Module, ema: EMA, found: Mapping[int, Any], others: list[str]) -> str:
    """Returns why the average does not become the final weights; "" if it does."""
    if others:
        return f"{' and '.join(others)} averages the same; give the Run one of them, or ship it by copy_to"
    if not ema.updated:
        return "it was never updated; call ema.update(run.global_step + 1) before run.step_completed()"
    if not found.keys() <= _ids(model) or any(
        found.keys() & _ids(part) and not _ids(part, trained=True) <= found.keys() for part in _parts(model)
    ):
        return "it is of a part of the model, and with the raw rest it is no model that was trained"
    return ""


def _parts(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    yield from model.values() if isinstance(model, torch.nn.ModuleDict) else (model,)


def _ids(model: torch.nn.Module, *, trained: bool = False) -> set[int]:
    return {id(parameter) for parameter in model.parameters() if parameter.requires_grad or not trained}


class AveragePosition:
    """Warns of averages that are updated after `step_completed`, or with the number of the previous step.

    A save inside `step_completed` then lacks the update, so a resume is not exact.
    """

    def __init__(self, emas: Mapping[str, EMA]) -> None:
        self._emas = dict(emas)
        self._before: dict[str, int] = {}

    def counted(self, step: int) -> None:
        """Checks the averages within `step_completed`.

        A single missing update may be a step that fp16 skipped; but such an update does not come later.
        """
        for name, ema in list(self._emas.items()):
            if step % ema.every:
                continue
            if ema.updated == step - ema.every and self._before.get(name) == step - 2 * ema.every:
                del self._emas[name]  # logged once
                text = f"{name} is a step behind, so a resume is not exact: call update(run.global_step + 1)"
                log.event("advice", about="ema", text=f"{text} before run.step_completed()")
            self._before[name] = ema.updated

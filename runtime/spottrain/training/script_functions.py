"""Checks what a script gives as its loss, and what the functions return that it gives to `Trainer`:
`loss_fn`, `metrics`, `loss_weight`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from spottrain.errors import ConfigurationError


def checked_loss(loss_fn: Callable[[Any, Any], Any]) -> Callable[[Any, Any], torch.Tensor]:
    """Returns a function that raises ConfigurationError unless the loss is one number with a gradient."""

    def loss(model: Any, batch: Any) -> torch.Tensor:
        found = loss_fn(model, batch)
        what = "Trainer(loss_fn=...) returned"
        if not isinstance(found, torch.Tensor):
            raise ConfigurationError(
                f"{what} {_named(found)}: return a tensor with one number, the mean loss of the batch"
            )
        if found.numel() != 1 or not found.is_floating_point():
            kind = str(found.dtype).removeprefix("torch.")
            raise ConfigurationError(
                f"{what} a tensor of shape {tuple(found.shape)} ({kind}): return one number, the mean loss "
                "of the batch, such as loss.mean()"
            )
        if torch.is_grad_enabled() and not found.requires_grad:
            raise ConfigurationError(
                f"{what} a tensor without a gradient: compute it by the model it is given, without item(), "
                "detach() or no_grad(), and leave some parameters trainable"
            )
        return found.reshape(()) if found.dim() else found

    return loss


def checked_metrics(metrics: Callable[[Any, Any], Any]) -> Callable[[Any, Any], dict[str, torch.Tensor]]:
    """Returns a function that raises ConfigurationError unless `metrics` returns numbers by name."""

    def numbers(model: Any, batch: Any) -> dict[str, torch.Tensor]:
        found = metrics(model, batch)
        what = "Trainer(metrics=...) returned"
        if not isinstance(found, Mapping):
            raise ConfigurationError(
                f"{what} {_named(found)}: return a dict of names and numbers, such as {{'accuracy': 0.9}}"
            )
        if "loss" in found:
            raise ConfigurationError(
                f"{what} a 'loss', which an evaluation has already: give it another name"
            )
        return {str(name): _number(value, f"{what} for {name!r}") for name, value in found.items()}

    return numbers


def _number(value: Any, what: str) -> torch.Tensor:
    try:
        found = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigurationError(
            f"{what} {_named(value)}: give one number, its mean over the batch"
        ) from error
    if found.numel() != 1:
        raise ConfigurationError(
            f"{what} shape {tuple(found.shape)}: give one number, its mean over the batch"
        )
    return found.reshape(())


def checked_weight(loss_weight: Callable[[Any], Any]) -> Callable[[Any], float]:
    """Returns a function that raises ConfigurationError unless `loss_weight` returns a number."""

    def weight(batch: Any) -> float:
        found = loss_weight(batch)
        try:
            return float(found)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigurationError(
                f"Trainer(loss_weight=...) returned {_named(found)}: return how many items, such as tokens, "
                "the mean loss of the batch covers"
            ) from error

    return weight


def number_of_loss(loss: Any) -> float:
    """Returns the loss that a loop gives to its Run. Raises ConfigurationError if it is not one number."""
    if isinstance(loss, torch.Tensor) and loss.numel() != 1:
        raise ConfigurationError(
            f"run.step_completed(loss=...) has shape {tuple(loss.shape)}; give one number, such as its mean"
        )
    try:
        return float(loss)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"run.step_completed(loss=...) is a {type(loss).__name__}; give one number, or None"
        ) from error


def _named(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return "None (is a `return` missing?)" if value is None else f"a {type(value).__name__}"

"""Models that safetensors refuses: which of them Hugging Face's libraries can still be made to save."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from spottrain.checkpoint import final_weights, plain_state
from spottrain.checkpoint.final_files import has_adapter
from spottrain.errors import ConfigurationError


def save_shared_tensors(trainer: Any) -> None:
    """Makes a Trainer save a model in which parameters share memory, which safetensors refuses."""
    usual = functools.partial(type(trainer)._save, trainer)

    def save(output_dir: str | None = None, state_dict: Mapping[str, Any] | None = None) -> None:
        usual(output_dir, state_dict=_separate(trainer.model) if state_dict is None else state_dict)

    vars(trainer)["_save"] = save


def _separate(model: torch.nn.Module) -> dict[str, Any] | None:
    """Returns the model's state with a copy of each undeclared tensor that shares memory with one before it.

    None if there is none: then the library does it right by itself, as it does for adapters.
    """
    if has_adapter(model):
        return None
    declared = getattr(plain_state.plain(model), "all_tied_weights_keys", None) or {}
    seen: set[tuple[torch.device, int]] = set()
    separate, copied = {}, False
    for name, value in model.state_dict().items():
        if type(value) in (torch.Tensor, torch.nn.Parameter) and value.numel() and name not in declared:
            memory = (value.device, value.untyped_storage().data_ptr())
            if memory in seen or not value.is_contiguous():
                value, copied = value.clone(memory_format=torch.contiguous_format), True
            seen.add(memory)
        separate[name] = value
    return separate if copied else None


def require_tensors(model: torch.nn.Module) -> None:
    """Raises ConfigurationError if safetensors cannot hold the model's state dict."""
    for name, value in plain_state.model_state(model).items():
        if not isinstance(value, torch.Tensor):
            raise ConfigurationError(
                f"the model cannot be saved: its state_dict() has {name}, a {type(value).__name__}, and a "
                "safetensors file holds tensors only; keep it out of get_extra_state(), or make it a buffer"
            )
    final_weights.require_storable(plain_state.model_state(model))

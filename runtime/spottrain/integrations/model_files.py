"""Files of a model as Hugging Face's libraries write and read them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from spottrain.checkpoint import final_weights, plain_state
from spottrain.errors import ConfigurationError


def write_description(model: torch.nn.Module, processing: Any, folder: Path) -> None:
    """Writes what `from_pretrained` needs beside the weights: configuration, adapter, tokenizer.

    A model that is no model of transformers or PEFT has none.

    Args:
        processing: tokenizer, image processor or the like; None if there is none.
        folder: of its own.
    """
    inner: Any = plain_state.plain(model)
    if has_adapter(inner):
        inner.save_pretrained(folder)  # the adapter alone
    elif _is_of(inner, "PreTrainedModel"):
        inner.config.architectures = [type(inner).__name__.removeprefix("FSDP")]  # of FSDP2
        inner.config.dtype = str(inner.dtype).removeprefix("torch.")
        inner.config.save_pretrained(folder)
        if inner.can_generate():
            inner.generation_config.save_pretrained(folder)
    if hasattr(processing, "save_pretrained"):
        processing.save_pretrained(folder)


def save_shared_tensors(trainer: Any) -> None:
    """Makes a Trainer save a model in which parameters share memory, which safetensors refuses."""
    usual = functools.partial(type(trainer)._save, trainer)

    def save(output_dir: str | None = None, state_dict: Mapping[str, Any] | None = None) -> None:
        usual(output_dir, state_dict=_separate(trainer.model) if state_dict is None else state_dict)

    vars(trainer)["_save"] = save


def shares_tensors(model: torch.nn.Module) -> bool:
    """Whether parameters share memory although the model's class does not declare them as tied."""
    return _separate(model) is not None


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


def has_adapter(model: Any) -> bool:
    """Whether it is trained by an adapter of PEFT, which is saved without the rest."""
    model = plain_state.plain(model)
    return _is_of(model, "PeftModel") or getattr(model, "_hf_peft_config_loaded", False)


def _is_of(model: torch.nn.Module, name: str) -> bool:
    """Whether a class of that name is among its classes; the library may not be installed."""
    return any(each.__name__ == name for each in type(model).__mro__)

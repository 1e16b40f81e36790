"""Files of a model as Hugging Face's libraries write and read them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from spottrain.checkpoint import plain_state
from spottrain.checkpoint.layout import SAFETENSORS
from spottrain.errors import ConfigurationError


def write_description(model: torch.nn.Module, processing: Any, folder: Path) -> None:
    """Writes what `from_pretrained` needs beside the weights: configuration, adapter, tokenizer.

    A model that is no model of transformers or PEFT has none.

    Args:
        processing: tokenizer, image processor or the like; None if there is none.
        folder: of its own.
    """
    inner: Any = plain_state.plain(model)
    if _has_adapter(inner):
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
    """Makes a Trainer save a plain module in which parameters are tied, which safetensors refuses.

    Raises ConfigurationError if the module cannot be saved for another reason.
    """
    usual = functools.partial(type(trainer)._save, trainer)

    def save(output_dir: str | None = None, state_dict: Mapping[str, Any] | None = None) -> None:
        if state_dict is None and is_plain(trainer.model):
            state_dict = _separate(trainer.model.state_dict())
        usual(output_dir, state_dict=state_dict)

    vars(trainer)["_save"] = save


def is_plain(model: torch.nn.Module) -> bool:
    """Whether the Trainer saves its state dict by safetensors, and not by `save_pretrained`."""
    inner = plain_state.plain(model)
    return not (_is_of(inner, "PreTrainedModel") or _is_of(inner, "PeftModel"))


def require_storable(model: torch.nn.Module) -> None:
    """Raises ConfigurationError if safetensors cannot hold the state dict of a plain module."""
    for name, value in model.state_dict().items() if is_plain(model) else ():
        if not isinstance(value, torch.Tensor):
            raise ConfigurationError(
                f"the Trainer cannot save the model: its state_dict() has {name}, a {type(value).__name__}, "
                "and a safetensors file holds tensors only; keep it out of get_extra_state(), or make it a "
                "buffer"
            )
        if value.dtype not in SAFETENSORS:
            raise ConfigurationError(
                f"the Trainer cannot save the model: its {name} has dtype {value.dtype}, which a safetensors "
                "file cannot hold; convert it (complex64, float64), or keep it out of state_dict()"
            )


def shares_tensors(model: torch.nn.Module) -> bool:
    """Whether names of a plain module's state dict share memory."""
    state = model.state_dict() if is_plain(model) else {}
    return any(value is not state[name] for name, value in _separate(state).items())


def _separate(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the state with a copy in place of each tensor that shares memory with one before it."""
    seen: set[tuple[torch.device, int]] = set()
    separate = {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.numel():
            memory = (value.device, value.untyped_storage().data_ptr())
            if memory in seen or not value.is_contiguous():
                value = value.clone(memory_format=torch.contiguous_format)
            seen.add(memory)
        separate[name] = value
    return separate


def _has_adapter(model: Any) -> bool:
    return _is_of(model, "PeftModel") or getattr(model, "_hf_peft_config_loaded", False)


def _is_of(model: torch.nn.Module, name: str) -> bool:
    """Whether a class of that name is among its classes; the library may not be installed."""
    return any(each.__name__ == name for each in type(model).__mro__)

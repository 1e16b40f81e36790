"""What `from_pretrained` of Hugging Face's libraries needs beside the weights of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from spottrain.checkpoint import plain_state
from spottrain.core import log
from spottrain.distributed.dtensor import is_sharded


def write_description(model: torch.nn.Module, processing: Any, folder: Path) -> None:
    """Writes configuration, adapter, tokenizer. A model that is no model of transformers or PEFT has none.

    The parts of a sharded adapter are on other ranks, so it is left out. What the library refuses to save,
    such as a contradictory generation configuration, is logged: the training is not lost for it.

    Args:
        processing: tokenizer, image processor or the like; None if there is none.
        folder: of its own.
    """
    inner: Any = plain_state.plain(model)
    parts: list[Any] = [processing]
    if has_adapter(inner):
        parts += [] if any(map(is_sharded, inner.parameters())) else [inner]  # saves the adapter alone
    elif _is_of(inner, "PreTrainedModel"):
        inner.config.architectures = [type(inner).__name__.removeprefix("FSDP")]  # of FSDP2
        inner.config.dtype = str(inner.dtype).removeprefix("torch.")
        parts += [inner.config, inner.generation_config if inner.can_generate() else None]
    for part in parts:
        if hasattr(part, "save_pretrained"):
            _save(part, folder)


def _save(part: Any, folder: Path) -> None:
    try:
        part.save_pretrained(folder)
    except Exception as error:  # whatever the library, or a class of the script, raises
        text = (
            f"{type(part).__name__} is not stored beside the final weights: {type(error).__name__}: {error}"
        )
        log.event("advice", about="final-weights", text=text)


def has_adapter(model: Any) -> bool:
    """Whether it is trained by an adapter of PEFT, which is saved without the rest."""
    model = plain_state.plain(model)
    return _is_of(model, "PeftModel") or getattr(model, "_hf_peft_config_loaded", False)


def _is_of(model: torch.nn.Module, name: str) -> bool:
    """Whether a class of that name is among its classes; the library may not be installed."""
    return any(each.__name__ == name for each in type(model).__mro__)

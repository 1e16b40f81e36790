"""The batch that `Run.ahead` has drawn last, in the form in which a checkpoint keeps it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from spottrain.errors import ConfigurationError

_TENSOR: Final = "tensor of a batch"


def map_items(value: Any, change: Callable[[Any], Any]) -> Any:
    """Returns a mapping, list or tuple with each item changed, and any other value as it is."""
    if isinstance(value, Mapping):
        return {key: change(item) for key, item in value.items()}
    if isinstance(value, list):
        return [change(item) for item in value]
    return tuple(change(item) for item in value) if isinstance(value, tuple) else value


def with_devices(value: Any) -> Any:
    """Returns a batch in checkpoint form: each tensor with its device type.

    Raises ConfigurationError if a container in it would come back as one of another type.
    """
    if isinstance(value, torch.Tensor):
        return {_TENSOR: value.detach(), "device": value.device.type}
    if isinstance(value, Mapping | list | tuple) and type(value) not in (dict, list, tuple):
        raise ConfigurationError(
            "run.ahead(...) keeps the batch that is drawn ahead in the checkpoint, and a "
            f"{type(value).__name__} in it would come back as another type: draw dicts, lists and "
            "tuples, such as dict(batch), or give run.ahead a loader of spottrain.data, of which it "
            "keeps the position alone"
        )
    return map_items(value, with_devices)


def onto_devices(value: Any) -> Any:
    """Reverses `with_devices`: each tensor goes to this rank's device of its type."""
    if isinstance(value, Mapping) and _TENSOR in value:
        return value[_TENSOR].to(value["device"])
    return map_items(value, onto_devices)

"""SHA-256 of each part of a training state: of the live one, by `script.py`, and of a stored one, by `judge`.

A part is plain JSON (see `spottrain.checkpoint.tree`) in which each tensor stands as its own digest. What
may differ without harm is left out: seconds of training, which checkpoint was kept as the best.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

Leaf = Callable[[int], str]
"""The digest of a tensor, by the number that the tree gives it."""
BUFFERS: Final = ("running_mean", "running_var", "num_batches_tracked")
"""Under DDP these are the first rank's, and handed to the others at the next forward pass."""


def tensor_digest(dtype: str, shape: Sequence[int], body: bytes | memoryview) -> str:
    return hashlib.sha256(f"{dtype}{list(shape)}".encode() + bytes(body)).hexdigest()


def shared_parts(plain: Mapping[str, Any], leaf: Leaf) -> dict[str, str]:
    """Of what all ranks have in common."""
    model, objects = plain["model"], plain["objects"]
    buffers = {name: value for name, value in model.items() if name.endswith(BUFFERS)}
    others = {
        "optimizer": plain["optimizers"],
        "schedule": objects.get("scheduler"),
        "scaler": objects.get("scaler"),
        "data": plain["progress"]["data"],
    }
    return {
        "parameters": digest({name: value for name, value in model.items() if name not in buffers}, leaf),
        "buffers": digest(buffers, leaf),
        **{name: digest(value, leaf) for name, value in others.items()},
    }


def own_parts(plain: Mapping[str, Any], leaf: Leaf) -> dict[str, str]:
    """Of one rank."""
    return {"random": digest(plain["random"], leaf), "stream": digest(plain["data"], leaf)}


def digest(plain: Any, leaf: Leaf) -> str:
    return hashlib.sha256(json.dumps(_settled(plain, leaf), sort_keys=True).encode()).hexdigest()


def _settled(plain: Any, leaf: Leaf) -> Any:
    if isinstance(plain, list):
        return [_settled(item, leaf) for item in plain]
    if not isinstance(plain, dict):
        return plain
    if "$tensor" in plain:
        return leaf(plain["$tensor"])
    return {key: _settled(item, leaf) for key, item in plain.items()}

"""What `Trainer` is given, looked at before anything is done with it. A mistake is a ConfigurationError."""

from __future__ import annotations

import torch

from spottrain.core.training_settings import require_whole
from spottrain.errors import ConfigurationError


def require_kinds(model: object, optimizer: object) -> None:
    for name, value, kind in (
        ("model", model, torch.nn.Module),
        ("optimizer", optimizer, torch.optim.Optimizer),
    ):
        if not isinstance(value, kind) and not (name == "optimizer" and isinstance(value, str)):
            raise ConfigurationError(
                f"Trainer({name}=...) is a {type(value).__name__}: give it a torch {kind.__name__}"
            )


def require_own_parameters(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    own = {id(parameter) for parameter in model.parameters()}
    given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not any(id(parameter) in own for parameter in given):
        raise ConfigurationError(
            "Trainer(optimizer=...) has none of the model's parameters, so it would train nothing: make it "
            "from model.parameters() of this very model, after spottrain.shard(model) where that is called"
        )


def require_positive(**arguments: int | None) -> None:
    for name, value in arguments.items():
        if value is None:
            continue
        require_whole(name, value)
        if value < 1:
            raise ConfigurationError(f"Trainer({name}={value}): must be at least 1")

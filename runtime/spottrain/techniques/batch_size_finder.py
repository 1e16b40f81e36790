"""Auto batch size for custom loops: one call for `microBatchSize: auto` and `activationCheckpointing: auto`.

It does the same as `Trainer` (see `memory_fit`).

    found = find_batch_size(model, optimizer, dataset, loss, global_batch_size=256)
    size, windows = found.micro_batch_size, found.accumulation
    loader = spottrain.data.loader(dataset, batch_size=size, accumulation=windows, shuffle=True)
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from spottrain.core.training_settings import Settings, activation_checkpointing
from spottrain.core.training_spec import AUTO
from spottrain.data.dataloader import Collate
from spottrain.data.source import source
from spottrain.distributed import process_group
from spottrain.distributed.world import World
from spottrain.techniques.activation_checkpointing import Policy
from spottrain.techniques.memory_fit import MemoryFit
from spottrain.techniques.oom_history import OOMHistory
from spottrain.techniques.precision import Precision


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """Result of `find_batch_size`; the same on all ranks."""

    micro_batch_size: int
    """Samples of one forward pass on one rank."""
    accumulation: int
    """Forward passes per rank in an optimizer step."""
    policy: Policy
    """Policy of activation checkpointing; it is already applied to the model."""


def find_batch_size(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    dataset: Any,
    loss: Callable[[torch.nn.Module, Any], torch.Tensor],
    *,
    global_batch_size: int,
    micro_batch_size: int | Literal["auto"] | None = AUTO,
    checkpointing: Policy | str | int | None = "none",
    precision: Precision | None = None,
    collate_fn: Collate | None = None,
    world: World | None = None,
) -> Fit:
    """Finds the largest micro-batch that fits, with `checkpointing="auto"` also the least recomputation.

    All ranks must call it. The trials leave no trace in weights, buffers, gradients or random state. A later
    attempt on another machine may find another size. Then gradients are summed in another order, over the
    same samples.

    Args:
        model: on its device, before DDP and torch.compile.
        optimizer: optimizer of the model.
        dataset: map-style dataset; its first samples are tried.
        loss: (model, batch) -> scalar tensor.
        global_batch_size: samples of one optimizer step over all ranks.
        micro_batch_size: samples per rank and forward pass; "auto": found by trials; None: the rank's share
            of a step at once.
        checkpointing: policy of activation checkpointing, its name, or k for every k-th block; None: none.
            It is applied to the model.
        precision: number format, such as `Amp(...).precision`; None: fp32.
        collate_fn: makes a batch of a list of samples; None: torch's `default_collate`.
        world: rank and number of ranks; None: from the environment.

    Returns:
        Micro-batch size, accumulation and policy.

    Raises:
        ConfigurationError: nothing fits, or an argument is not valid.
    """
    world = World.from_env(os.environ) if world is None else world
    share = global_batch_size // world.size
    device = next(model.parameters()).device
    process_group.join(world, device)
    sized, given = micro_batch_size == AUTO, isinstance(checkpointing, Policy)
    size = None if micro_batch_size is None or sized else int(micro_batch_size)
    settings = Settings(
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        activation_checkpointing=activation_checkpointing("none" if given else checkpointing),
    )
    batches = source(
        dataset,
        world,
        global_batch_size=global_batch_size,
        micro_batch_size=size,
        seed=0,
        shuffle=False,
        drop_last=False,
        steps_per_epoch=None,
        num_workers=0,
        collate_fn=collate_fn,
        pin_memory=False,
    )
    memory_fit = MemoryFit(
        settings,
        model=model,
        optimizer=optimizer,
        loss_of=loss,
        source=batches,
        precision=precision or Precision(name="fp32"),
        device=device,
        world=world,
        oom_history=OOMHistory(store=None, job_uid=""),  # a custom loop ends when it runs out of memory
    )
    if isinstance(checkpointing, Policy):
        memory_fit.policy = checkpointing
    memory_fit.fit()
    found = memory_fit.size or size or share
    return Fit(micro_batch_size=found, accumulation=share // found, policy=memory_fit.policy)

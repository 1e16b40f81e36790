"""Data-parallel training: DDP for a plain model, FSDP2 for a model that `shard` was called on.

The parameters of a sharded model are DTensors, so its optimizer must be made after `shard`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from spottrain.checkpoint import outside_parameters
from spottrain.checkpoint.plain_state import replica
from spottrain.distributed.dtensor import any_sharded, is_sharded, local
from spottrain.distributed.process_group import broadcast_from_rank0, default_device, give_buffers, join
from spottrain.distributed.world import World
from spottrain.errors import ConfigurationError
from spottrain.lifecycle.session import current


def shard(
    model: torch.nn.Module,
    layers: Iterable[type[torch.nn.Module]] = (),
    *,
    mp_policy: Any = None,
    reshard_after_forward: bool | int | None = None,
) -> torch.nn.Module:
    """Shards `model` in place over all ranks with FSDP2, on this rank's device. One rank: does nothing.

    Call it before you create the optimizer, because it replaces the parameters:

        model = spottrain.shard(GPT(), layers=[Block])
        optimizer = torch.optim.AdamW(model.parameters())

    Args:
        model: a plain torch module.
        layers: classes of the blocks that are gathered one at a time, such as those of a transformer.
        mp_policy: as of torch's `fully_shard`, such as MixedPrecisionPolicy(param_dtype=torch.bfloat16).
        reshard_after_forward: as of torch's `fully_shard`.

    Returns:
        `model`. Of other options of `fully_shard` call that yourself: `Trainer` takes the model as it is.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard  # lazy: slow to import

    world = current().world
    if not world.distributed:
        return model
    device = torch.device(default_device(world) or "cpu")
    join(world, device)
    mesh = init_device_mesh(device.type, (world.size,))
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": reshard_after_forward}
    if mp_policy is not None:
        options["mp_policy"] = mp_policy
    model.to(device)
    kinds = tuple(layers)
    for module in model.modules():
        if kinds and isinstance(module, kinds):
            fully_shard(module, **options)
    fully_shard(model, **options)
    return model


class Replica:
    """The model of this rank: `outer` is the one to call, wrapped in DDP if needed; `module` the plain one.

    `given`: the model as the script has wrapped it, whose DDP and torch.compile stay as they are. `options`:
    further keyword arguments of DDP.

    Extra modules (`outside_parameters.ModelWithExtras`) are not part of DDP or FSDP2. The methods here
    average their gradients, and copy rank 0's parameters and buffers to all ranks.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        given: torch.nn.Module,
        world: World,
        device: torch.device,
        *,
        deterministic: bool,
        options: Mapping[str, Any],
    ) -> None:
        self.module = outside_parameters.inner(model)
        self.outer = given
        self._world, self._others = world, outside_parameters.others(model)
        for parameter in self._beside():
            broadcast_from_rank0(parameter.detach(), world)
        if world.distributed and not any_sharded(self.module) and replica(given) is None:
            # After the first step DDP reorders its buckets by use. With three or more ranks, sums then differ
            # from those right after a resume; find_unused_parameters prevents the reordering.
            ours: dict[str, Any] = {
                "device_ids": [device] if device.type == "cuda" else None,
                "gradient_as_bucket_view": True,
                "find_unused_parameters": deterministic and world.size > 2,
            }
            try:
                self.outer = DistributedDataParallel(given, **ours | dict(options))
            except TypeError as error:
                raise ConfigurationError(
                    f"Trainer(ddp_options=...): {error}; give keyword arguments of DistributedDataParallel"
                ) from error

    def _beside(self) -> list[torch.nn.Parameter]:
        return [parameter for module in self._others for parameter in module.parameters()]

    def give_buffers(self) -> None:
        """Copies rank 0's buffers of the extra modules to all ranks, as DDP does for the model."""
        for module in self._others:
            give_buffers(module, self._world)

    def average_gradients(self) -> None:
        """Averages gradients of the extra modules over ranks, after the last backward pass of a step."""
        if not self._world.distributed:
            return
        for parameter in (each for each in self._beside() if each.requires_grad):
            if parameter.grad is None:  # not used in this rank's part of the batch
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(self._world.size)


def clip(parameters: Iterable[torch.nn.Parameter], most: float) -> None:
    """Scales all gradients so that their total norm is at most `most`. Supports FSDP2 among plain ones."""
    every = list(parameters)
    sharded = [each for each in every if is_sharded(each)]
    if not sharded or len(sharded) == len(every):
        torch.nn.utils.clip_grad_norm_(every, most)
        return
    whole = [each for each in every if not is_sharded(each)]
    norms = [
        torch.nn.utils.get_total_norm([p.grad for p in of if p.grad is not None]) for of in (sharded, whole)
    ]
    norm = torch.linalg.vector_norm(
        torch.stack([each.full_tensor() if is_sharded(each) else each for each in norms])
    )
    factor = torch.clamp(most / (norm + 1e-6), max=1.0)
    for gradient in (each.grad for each in every if each.grad is not None):
        local(gradient).mul_(factor.to(local(gradient).device))

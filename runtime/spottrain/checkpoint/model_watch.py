"""Refuses changes of model and optimizers during the training that no resume could bring back.

A resume runs the script up to its loop and then loads the checkpoint. Parameters that the loop puts into the
model later, and an optimizer that the loop makes later, do not exist then.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch.nn.parameter import UninitializedParameter
from torch.optim.optimizer import register_optimizer_step_pre_hook

from spottrain.checkpoint import outside_parameters
from spottrain.checkpoint.plain_state import clean, parameters_of, plain
from spottrain.distributed.dtensor import any_sharded
from spottrain.errors import ConfigurationError

SHOWN: Final = 3
Form = tuple[int, torch.dtype, torch.Size] | None
"""Identity, dtype and shape of a parameter; None under FSDP, which replaces parameters by itself."""


class ModelWatch:
    """Looks in `require_unchanged`, which each save calls, and before the steps of other optimizers.

    Modules and optimizers are given by name, as they are before the loop. `replicas`: whether DDP wraps them.
    `regroups`: whether parameter groups may change, because a resume rebuilds them (`load_optimizer`).
    `over`: whether the training is done, so that an export may change the model.
    """

    def __init__(
        self,
        modules: Mapping[str, torch.nn.Module],
        optimizers: Mapping[str, torch.optim.Optimizer],
        *,
        replicas: bool,
        regroups: bool,
        over: Callable[[], bool],
    ) -> None:
        self._modules = {name: plain(module) for name, module in modules.items()}
        self._optimizers, self._over, self._regroups = list(optimizers.values()), over, regroups
        self._by_fsdp = any(
            any_sharded(part, recurse=False) or type(part).__name__ == "FullyShardedDataParallel"
            for module in self._modules.values()
            for part in module.modules()
        )
        named = self._named()
        self._parameters = {id(each): each for each in named.values()}
        for name, each in named.items():
            if isinstance(each, UninitializedParameter):
                raise ConfigurationError(
                    f"{name} has no shape yet, so no checkpoint could be loaded into it: call the model with "
                    "one batch before the Run or the Trainer is made"
                )
        self._forms, self._loose, self._groups = self._forms_now(), self._loose_now(), self._groups_now()
        self._not_averaged = [each for each in named.values() if replicas and not each.requires_grad]
        own = weakref.ref(self)  # the hook is torch's, of all optimizers of this process

        def before_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
            if not torch.compiler.is_compiling() and (watch := own()) is not None and not watch._over():
                watch._require_known(optimizer)

        weakref.finalize(self, register_optimizer_step_pre_hook(before_step).remove)

    def require_unchanged(self) -> None:
        """Raises ConfigurationError if the model has other parameters, or the optimizers train others."""
        if self._over():
            return
        if self._groups_now() != self._groups and not self._regroups:
            raise ConfigurationError(
                "the parameter groups of the optimizer have changed since the training began, and a script "
                "that resumes does not have them: make all of them before the loop, with requires_grad=False "
                "for what is trained later"
            )
        forms = self._forms_now()
        found = [f"{name} is gone" for name in self._forms if name not in forms]
        found += [f"{name} is new" for name in forms if name not in self._forms]
        found += [
            f"{name} is another tensor, or has another type"
            for name, form in forms.items()
            if form != self._forms.get(name, form)
        ]
        if found:
            more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
            raise ConfigurationError(
                f"the parameters of the model have changed since the training began: "
                f"{', '.join(found[:SHOWN])}{more}. A script that resumes makes the model as it was then, "
                "and could not load the checkpoint. Change the model before the loop, and in the loop only "
                "values: for pruning prune.identity(module, 'weight') before, and "
                "module.weight_mask.copy_(mask) in it"
            )
        now = self._loose_now()
        if changed := [(self._loose | now)[each] for each in self._loose.keys() ^ now.keys()]:
            raise ConfigurationError(
                "the optimizers have changed since the training began: "
                f"{outside_parameters.describe(changed)} is not a parameter of the model, so a script that "
                "resumes could not find it. Keep it in an optimizer from before the loop to its end, with "
                "requires_grad=False while it is not trained"
            )
        if late := [each for each in self._not_averaged if each.requires_grad]:
            raise ConfigurationError(
                f"{outside_parameters.describe(late)} is trained now, and was not when "
                "DistributedDataParallel took the model, which therefore does not average its gradients: "
                "each rank would train other weights. Freeze parameters after that, and give "
                "DistributedDataParallel find_unused_parameters=True"
            )

    def _require_known(self, optimizer: torch.optim.Optimizer) -> None:
        if any(optimizer is each or optimizer.state is each.state for each in self._optimizers):
            return
        if any(id(each) in self._parameters for each in parameters_of(optimizer)):
            raise ConfigurationError(
                f"{type(optimizer).__name__} trains parameters of the model and was not given to the "
                "training, so its state would not be saved. Make every optimizer before the loop and give "
                "them all: Run(optimizer={'first': first, 'second': second}). To change a setting in the "
                "loop, write it into optimizer.param_groups"
            )

    # --- what is there now ------------------------------------------------------------------------------
    def _named(self) -> dict[str, torch.nn.Parameter]:
        return {
            clean(f"{root}.{name}"): each
            for root, module in self._modules.items()
            for name, each in module.named_parameters()
        }

    def _forms_now(self) -> dict[str, Form]:
        named = self._named()
        if self._by_fsdp:
            return dict.fromkeys(named)
        return {name: (id(each), each.dtype, each.shape) for name, each in named.items()}

    def _loose_now(self) -> dict[int, torch.nn.Parameter]:
        """Returns what the optimizers train beside the parameters that the model had when the loop began."""
        found = (each for optimizer in self._optimizers for each in parameters_of(optimizer))
        return {id(each): each for each in found if id(each) not in self._parameters}

    def _groups_now(self) -> list[int]:
        return [len(group["params"]) for each in self._optimizers for group in each.param_groups]

"""Refuses changes of model and optimizers during the training that no resume could bring back.

A resume runs the script up to its loop and then loads the checkpoint. Parameters that the loop puts into the
model later, and an optimizer that the loop makes later, do not exist then.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import UninitializedParameter
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from spottrain.checkpoint import outside_parameters
from spottrain.checkpoint.plain_state import clean, parameters_of, plain
from spottrain.core import log
from spottrain.distributed.dtensor import any_sharded
from spottrain.errors import ConfigurationError

SHOWN: Final = 3
Form = tuple[int, torch.dtype, torch.Size] | None
"""Identity, dtype and shape of a parameter; None under FSDP, which replaces parameters by itself."""


class ModelWatch:
    """Looks before each step of any optimizer, and in `require_unchanged`.

    Modules and optimizers are given by name, as they are before the loop. `replicas`: whether DDP wraps them.
    `regroups`: whether parameter groups may change, because a resume rebuilds them (`load_optimizer`).
    `over`: whether the training is done, so that an export may change the model. `failed` is called with an
    error before it is raised.
    """

    def __init__(
        self,
        modules: Mapping[str, torch.nn.Module],
        optimizers: Mapping[str, torch.optim.Optimizer],
        *,
        replicas: bool,
        regroups: bool,
        over: Callable[[], bool],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._modules = {name: plain(module) for name, module in modules.items()}
        self._optimizers, self._over, self._failed = dict(optimizers), over, failed
        self._regroups = regroups
        self._parts = {id(part): part for module in self._modules.values() for part in module.modules()}
        self._by_fsdp = any(
            any_sharded(part, recurse=False) or type(part).__name__ == "FullyShardedDataParallel"
            for part in self._parts.values()
        )
        _require_initialized(self._modules)
        self._parameters = {
            id(each): each for module in self._modules.values() for each in module.parameters()
        }
        self._forms, self._loose, self._groups = self._forms_now(), self._loose_now(), self._groups_now()
        self._not_averaged = [
            each for each in self._parameters.values() if replicas and not each.requires_grad
        ]
        self._hooks = {id(each) for each in self._hooks_now()}
        self._schedulers: list[LRScheduler] | None = None
        """Those that there were at the first step."""
        self._references: dict[int, int] = {}
        """Most references to each optimizer so far: a new scheduler is one more."""
        self._registered = False
        """Whether a module or a parameter was put into the model since the last look."""
        own = weakref.ref(self)  # the hooks are torch's, of all modules and optimizers of this process

        def registered(module: torch.nn.Module, *_: Any) -> None:
            if (watch := own()) is not None and id(module) in watch._parts:
                watch._registered = True

        def step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if not torch.compiler.is_compiling() and (watch := own()) is not None and not watch._over():
                watch._before_step(optimizer)

        for handle in (
            register_module_parameter_registration_hook(registered),
            register_module_module_registration_hook(registered),
            register_optimizer_step_pre_hook(step),
        ):
            weakref.finalize(self, handle.remove)

    def require_unchanged(self) -> None:
        """Raises ConfigurationError if the model has other parameters, or the optimizers train others."""
        if self._over():
            return
        self._registered, groups, forms = False, self._groups_now(), self._forms_now()
        if groups != self._groups and not self._regroups:
            self._refuse(
                "the parameter groups of the optimizer have changed since the training began, and a script "
                "that resumes does not have them: make all of them before the loop, with requires_grad=False "
                "for what is trained later"
            )
        self._groups = groups
        found = [f"{name} is gone" for name in self._forms if name not in forms]
        found += [f"{name} is new" for name in forms if name not in self._forms]
        found += [
            f"{name} is another tensor, or has another type"
            for name, form in forms.items()
            if form != self._forms.get(name, form)
        ]
        if found:
            more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
            self._refuse(
                f"the parameters of the model have changed since the training began: "
                f"{', '.join(found[:SHOWN])}{more}. A script that resumes makes the model as it was then, "
                "and could not load the checkpoint. Change the model before the loop, and in the loop only "
                "values: for pruning prune.identity(module, 'weight') before, and "
                "module.weight_mask.copy_(mask) in it"
            )
        self._tell_hooks()
        now = self._loose_now()
        if changed := [(self._loose | now)[each] for each in self._loose.keys() ^ now.keys()]:
            self._refuse(
                "the optimizers have changed since the training began: "
                f"{outside_parameters.describe(changed)} is not a parameter of the model, so a script that "
                "resumes could not find it. Keep it in an optimizer from before the loop to its end, with "
                "requires_grad=False while it is not trained"
            )

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        known = self._optimizers.values()
        if not any(optimizer is each or optimizer.state is each.state for each in known):
            self._require_no_part(optimizer)
            return
        if self._registered or self._groups != self._groups_now():
            self.require_unchanged()
        if (references := sys.getrefcount(optimizer)) > self._references.get(id(optimizer), 0):
            self._references[id(optimizer)] = references
            self._require_no_new_scheduler()
        late = [each for each in self._not_averaged if each.requires_grad and each.grad is not None]
        if late:
            self._refuse(
                f"{outside_parameters.describe(late)} is trained now, and was not when "
                "DistributedDataParallel took the model, which therefore does not average its gradients: "
                "each rank would train other weights. Freeze parameters after that, and give "
                "DistributedDataParallel find_unused_parameters=True"
            )

    def _require_no_part(self, optimizer: torch.optim.Optimizer) -> None:
        trained = (each for group in optimizer.param_groups for each in group["params"])
        if any(id(each) in self._parameters for each in trained):
            self._refuse(
                f"{type(optimizer).__name__} trains parameters of the model and was not given to the "
                "training, so its state would not be saved. Make every optimizer before the loop and give "
                "them all: Run(optimizer={'first': first, 'second': second}). To change a setting in the "
                "loop, write it into optimizer.param_groups"
            )

    def _require_no_new_scheduler(self) -> None:
        known = self._optimizers.values()
        found = [each for each in gc.get_objects() if issubclass(type(each), LRScheduler)]
        ours = [each for each in found if any(getattr(each, "optimizer", None) is one for one in known)]
        before = self._schedulers = ours if self._schedulers is None else self._schedulers
        for each in ours:
            if not any(each is one for one in before):
                self._refuse(
                    f"a {type(each).__name__} was made for the optimizer since the training began, and its "
                    "state would not be saved. Make every scheduler before the loop and give them all: "
                    "Run(scheduler={'first': first, 'second': second}), or one SequentialLR"
                )

    def _tell_hooks(self) -> None:
        new = [each for each in self._hooks_now() if id(each) not in self._hooks]
        if new:
            self._hooks |= set(map(id, new))
            names = ", ".join(sorted({getattr(each, "__qualname__", type(each).__name__) for each in new}))
            text = (
                f"hooks were put on the model since the training began ({names}), and a script "
                "that resumes does not have them: if they change what the model computes, put them on before "
                "the loop"
            )
            log.event("advice", about="model", text=text)

    def _refuse(self, text: str) -> None:
        error = ConfigurationError(text)
        self._failed(error)
        raise error

    # --- what is there now ------------------------------------------------------------------------------
    def _forms_now(self) -> dict[str, Form]:
        named = {
            clean(f"{root}.{name}"): each
            for root, module in self._modules.items()
            for name, each in module.named_parameters()
        }
        if self._by_fsdp:
            return dict.fromkeys(named)
        return {name: (id(each), each.dtype, each.shape) for name, each in named.items()}

    def _hooks_now(self) -> list[Any]:
        """Returns the script's hooks. Those of torch and spottrain come and go."""
        found = [
            each
            for part in self._parts.values()
            for hooks in (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks)
            for each in hooks.values()
        ]
        for parameter in self._parameters.values():
            for hooks in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks):
                found += (hooks or {}).values()
        return [each for each in found if _package(each) not in ("torch", "spottrain")]

    def _loose_now(self) -> dict[int, torch.nn.Parameter]:
        """Returns what the optimizers train beside the parameters that the model had when the loop began."""
        found = (each for optimizer in self._optimizers.values() for each in parameters_of(optimizer))
        return {id(each): each for each in found if id(each) not in self._parameters}

    def _groups_now(self) -> list[int]:
        return [len(group["params"]) for each in self._optimizers.values() for group in each.param_groups]


def _package(hook: Any) -> str:
    return str(getattr(hook, "__module__", "")).partition(".")[0]


def _require_initialized(modules: Mapping[str, torch.nn.Module]) -> None:
    lazy = [
        f"{root}.{name}"
        for root, module in modules.items()
        for name, each in module.named_parameters()
        if isinstance(each, UninitializedParameter)
    ]
    if lazy:
        raise ConfigurationError(
            f"{lazy[0]} has no shape yet, so no checkpoint could be loaded into it: call the model with one "
            "batch before the Run or the Trainer is made"
        )

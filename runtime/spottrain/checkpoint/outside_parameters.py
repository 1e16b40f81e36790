"""Parameters that an optimizer trains and the model does not own, such as those of a loss with weights.

The rule is the same for all loops: what is trained is saved and restored, or the run is refused before its
first step. `Trainer` and `Run` save such parameters, with a module given by `extra=` as a whole. Hugging
Face, Lightning and Accelerate write their own checkpoints, which leave them out: there they are refused.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import torch

from spottrain.checkpoint.plain_state import INNER, clean, plain
from spottrain.distributed.dtensor import is_sharded
from spottrain.errors import ConfigurationError

EXTRA: Final = "extra"
"""What the names of the parameters of further modules begin with."""
LOOSE: Final = "loose"
"""The same of parameters that belong to no module that the loop knows."""
SHOWN: Final = 5
"""Parameters that an error names; of more it says how many."""


class ModelWithExtras(torch.nn.Module):
    """A model and what else is trained with it, as one module for saving, averaging and evaluating.

    The model's tensors keep their plain names; those of the others begin with EXTRA or LOOSE. Whatever is
    asked of it that it does not have itself is the model's.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        extra: Mapping[str, torch.nn.Module],
        loose: Mapping[str, torch.nn.Parameter],
    ) -> None:
        super().__init__()
        self.add_module(INNER, model)
        if extra:
            self.add_module(EXTRA, torch.nn.ModuleDict(dict(extra)))
        if loose:
            self.add_module(LOOSE, torch.nn.ParameterDict(dict(loose)))
        own = {clean(name) for name in model.state_dict()}
        if taken := sorted(own & {clean(name) for other in self.others for name in _names_in(self, other)}):
            raise ConfigurationError(
                f"Trainer(extra=...): the model has a {taken[0]} itself; name the module in extra differently"
            )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__(INNER), name)

    def forward(self, *args: Any, **more: Any) -> Any:
        return inner(self)(*args, **more)

    @property
    def others(self) -> list[torch.nn.Module]:
        """All but the model."""
        return [child for name, child in self.named_children() if name != INNER]


def _names_in(whole: torch.nn.Module, part: torch.nn.Module) -> list[str]:
    prefix = next(name for name, child in whole.named_children() if child is part)
    return [f"{prefix}.{name}" for name in part.state_dict()]


def together(
    model: torch.nn.Module,
    extra: Mapping[str, torch.nn.Module],
    loose: Mapping[str, torch.nn.Parameter],
) -> torch.nn.Module:
    """The model itself where there is nothing else."""
    return ModelWithExtras(model, extra, loose) if extra or loose else model


def inner(model: torch.nn.Module) -> torch.nn.Module:
    """The model alone."""
    return getattr(model, INNER) if isinstance(model, ModelWithExtras) else model


def others(model: torch.nn.Module) -> list[torch.nn.Module]:
    """What is trained with the model, and neither DDP nor FSDP2 knows of."""
    return model.others if isinstance(model, ModelWithExtras) else []


def beside(model: torch.nn.Module) -> list[str]:
    """Names, in its state, of what is not the model's own."""
    own = {clean(name) for name in inner(model).state_dict()}
    return sorted({clean(name) for name in model.state_dict()} - own)


# --- what the optimizers have ---------------------------------------------------------------------------
def loose(
    optimizers: Mapping[str, torch.optim.Optimizer], modules: Iterable[torch.nn.Module]
) -> dict[str, torch.nn.Parameter]:
    """Parameters of the optimizers that none of the modules has: by the optimizer's name and their number."""
    known = {id(parameter) for module in modules for parameter in module.parameters()}
    return {
        f"{name}.{number}": parameter
        for name, optimizer in optimizers.items()
        for number, parameter in enumerate(_parameters(optimizer))
        if id(parameter) not in known
    }


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def require_owned(
    optimizers: Iterable[torch.optim.Optimizer], modules: Iterable[torch.nn.Module], what_to_do: str
) -> None:
    """For loops whose checkpoints hold the modules alone. Raises ConfigurationError."""
    named = {str(number): each for number, each in enumerate(optimizers)}
    # FSDP1 and the like train flat copies of what the modules have.
    found = [each for each in loose(named, modules).values() if not hasattr(each, "_is_flat_param")]
    if found:
        raise ConfigurationError(
            f"the optimizer trains {describe(found)}, which no module of the checkpoint has: after an "
            f"interruption it would begin anew, and the final weights would lack it. {what_to_do}"
        )


def require_no_other_state(
    found: Iterable[torch.Tensor], modules: Iterable[torch.nn.Module], what_to_do: str
) -> None:
    """Where parameters are saved by themselves: the module that they belong to must have nothing else.

    Modules that have the model inside are not looked at: what else they hold may be anything. Raises
    ConfigurationError.
    """
    wanted = {id(each) for each in found}
    inside = {id(part) for module in modules for part in module.modules()}
    known = {id(buffer) for module in modules for buffer in module.buffers()}
    for module in _all_modules() if wanted else ():
        parts = {id(part) for part in module.modules()}
        if parts & inside or not wanted & {id(each) for each in module.parameters()}:
            continue
        saved = module.state_dict(keep_vars=True)
        lost = [name for name, buffer in module.named_buffers() if name in saved and id(buffer) not in known]
        if lost:
            raise ConfigurationError(
                f"the optimizer trains {describe(found)}, and the {type(module).__name__} that this belongs "
                f"to has buffers too ({', '.join(lost[:SHOWN])}), which would not be saved. {what_to_do}"
            )


def describe(found: Iterable[torch.Tensor]) -> str:
    """Parameters as an error names them: by the class of their module where there is one."""
    given = list(found)
    owners = {
        id(parameter): f"{type(module).__name__}.{name}"
        for module in _all_modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and not isinstance(module, torch.nn.ParameterDict | torch.nn.ParameterList)
    }
    words = [f"{owners.get(id(each), 'a parameter')} of shape {tuple(each.shape)}" for each in given[:SHOWN]]
    more = f" and {len(given) - SHOWN} more" if len(given) > SHOWN else ""
    return ", ".join(words) + more


def _all_modules() -> list[torch.nn.Module]:
    """Of this process."""
    return [
        each for each in gc.get_objects() if isinstance(each, torch.nn.Module) and "_modules" in vars(each)
    ]


def require_of(scheduler: Any, optimizers: Iterable[torch.optim.Optimizer], where: str) -> None:
    """A torch scheduler of an optimizer that the loop does not know. Raises ConfigurationError."""
    of = getattr(scheduler, "optimizer", None)
    if not isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler) or of is None:
        return
    if not any(of is each for each in optimizers):
        raise ConfigurationError(
            f"{where} is a {type(scheduler).__name__} of an optimizer that is not given here, whose state "
            "would not be saved: give that optimizer too, or make the scheduler of the one that is given"
        )


# --- what a Trainer is given ------------------------------------------------------------------------------
def of_trainer(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | str,
    extra: Any,
    functions: Mapping[str, Callable[..., Any] | None],
) -> torch.nn.Module:
    """The model with all that is trained beside it. functions: loss and metrics, by their argument's name;
    one that is a module, or a method of one, is saved as well. Raises ConfigurationError.
    """
    own = plain(model)
    modules = _extra(extra) | _callables(own, functions, () if extra is None else extra.values())
    if isinstance(optimizer, str):
        return together(own, modules, {})
    known = [own, *modules.values()]
    found = {name.rpartition(".")[2]: each for name, each in loose({"": optimizer}, known).items()}
    if len(found) == len(_parameters(optimizer)):
        return together(own, modules, {})  # all of them: `require_own_parameters` says what is wrong
    to_do = "Give the module to the Trainer: extra={'loss': module}"
    if odd := [each for each in found.values() if not isinstance(each, torch.nn.Parameter)]:
        raise ConfigurationError(
            f"Trainer(optimizer=...) trains {describe(odd)}, a plain tensor: make it a torch.nn.Parameter"
        )
    require_no_other_state(found.values(), known, to_do)
    return together(own, modules, found)


def _extra(given: Any) -> dict[str, torch.nn.Module]:
    named = {} if given is None else given
    if not isinstance(named, Mapping) or not all(
        isinstance(each, torch.nn.Module) for each in named.values()
    ):
        raise ConfigurationError(
            f"Trainer(extra=...) is {given!r:.80}: give it a dict of names and torch modules, such as "
            "extra={'loss': loss}"
        )
    return {name: plain(each) for name, each in named.items()}


def _callables(
    model: torch.nn.Module,
    functions: Mapping[str, Callable[..., Any] | None],
    given: Iterable[torch.nn.Module],
) -> dict[str, torch.nn.Module]:
    """Loss and metrics that are modules with a state, or methods of such."""
    found: dict[str, torch.nn.Module] = {}
    known = {id(part) for module in (model, *given) for part in module.modules()}
    for name, function in functions.items():
        module = function if isinstance(function, torch.nn.Module) else getattr(function, "__self__", None)
        if not isinstance(module, torch.nn.Module) or not module.state_dict():
            continue
        parts = {id(part) for part in module.modules()}
        if not parts & known:  # else it is saved already, or has the model inside
            found[name] = module
            known |= parts
    return found


def groups(model: torch.nn.Module) -> Any:
    """The parameters of an optimizer over all of it: FSDP2's in a group of their own, for torch's kernels
    take no mixture."""
    every = list(model.parameters())
    sharded = [each for each in every if is_sharded(each)]
    if not sharded or len(sharded) == len(every):
        return every
    return [{"params": sharded}, {"params": [each for each in every if not is_sharded(each)]}]


def require_unmixed(optimizer: torch.optim.Optimizer) -> None:
    """Raises ConfigurationError."""
    for number, group in enumerate(optimizer.param_groups):
        if len({is_sharded(each) for each in group["params"]}) > 1:
            raise ConfigurationError(
                f"Trainer(optimizer=...): parameter group {number} has parameters that spottrain.shard has "
                "sharded and others that it has not, which torch's optimizers cannot step together: put "
                "the others into a parameter group of their own"
            )

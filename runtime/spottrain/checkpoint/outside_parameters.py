"""Parameters that an optimizer trains but the model does not own, such as those of a loss with weights.

One rule holds for all loops: trained parameters are saved and restored, or the run is refused before its
first step. `Trainer` and `Run` save such parameters, and each module given by `extra=` as a whole. Hugging
Face and Lightning write their own checkpoints, which omit such parameters, so a run is refused.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import torch

from spottrain.checkpoint.plain_state import INNER, clean, parameters_of, plain
from spottrain.distributed.dtensor import is_sharded
from spottrain.errors import ConfigurationError

EXTRA: Final = "extra"
"""Name prefix of the parameters of extra modules."""
LOOSE: Final = "loose"
"""Name prefix of parameters that belong to no module known to the loop."""
SHOWN: Final = 5
"""Number of parameters that an error lists; it only counts the rest."""


class ModelWithExtras(torch.nn.Module):
    """Wraps a model and everything trained with it as one module for saving, averaging and evaluating.

    The model's tensors keep their plain names. The names of the others begin with EXTRA or LOOSE.
    Missing attributes are looked up on the model.
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
        others = {clean(name) for name in self.state_dict() if not name.startswith(f"{INNER}.")}
        if taken := sorted(own & others):
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


def inner(model: torch.nn.Module) -> torch.nn.Module:
    """Returns the model without the wrapper."""
    return getattr(model, INNER) if isinstance(model, ModelWithExtras) else model


def others(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Returns the modules trained with the model that neither DDP nor FSDP2 covers."""
    if not isinstance(model, ModelWithExtras):
        return []
    return [child for name, child in model.named_children() if name != INNER]


def beside(model: torch.nn.Module) -> list[str]:
    """Returns the state dict names of tensors that do not belong to the model itself."""
    own = {clean(name) for name in inner(model).state_dict()}
    return sorted({clean(name) for name in model.state_dict()} - own)


# --- parameters of the optimizers -----------------------------------------------------------------------
def loose(
    optimizers: Mapping[str, torch.optim.Optimizer], modules: Iterable[torch.nn.Module]
) -> dict[str, torch.nn.Parameter]:
    """Returns the optimizers' parameters that no module has, as `<optimizer name>.<number>: parameter`."""
    known = {id(parameter) for module in modules for parameter in module.parameters()}
    return {
        f"{name}.{number}": parameter
        for name, optimizer in optimizers.items()
        for number, parameter in enumerate(parameters_of(optimizer))
        if id(parameter) not in known
    }


def require_owned(
    optimizers: Iterable[torch.optim.Optimizer], modules: Iterable[torch.nn.Module], what_to_do: str
) -> None:
    """Raises ConfigurationError if an optimizer trains a parameter that none of the modules has.

    For loops whose checkpoints hold only the modules.
    """
    named = {str(number): each for number, each in enumerate(optimizers)}
    # FSDP1 and similar wrappers train flat copies of the modules' parameters.
    found = [each for each in loose(named, modules).values() if not hasattr(each, "_is_flat_param")]
    if found:
        raise ConfigurationError(
            f"the optimizer trains {describe(found)}, which no module of the checkpoint has: after an "
            f"interruption it would begin from its first values, and the final weights would lack it. "
            f"{what_to_do}"
        )


def describe(found: Iterable[torch.Tensor]) -> str:
    """Returns the parameters as text for an error: name of the module's class, attribute, shape."""
    given = list(found)
    owners = {
        id(parameter): f"{type(module).__name__}.{name}"
        for module in gc.get_objects()  # not isinstance: a proxy may refer to what is gone
        if issubclass(type(module), torch.nn.Module) and "_parameters" in vars(module)
        for name, parameter in module._parameters.items()
        if not isinstance(module, torch.nn.ParameterDict | torch.nn.ParameterList)
    }
    words = [f"{owners.get(id(each), 'a parameter')} of shape {tuple(each.shape)}" for each in given[:SHOWN]]
    more = f" and {len(given) - SHOWN} more" if len(given) > SHOWN else ""
    return ", ".join(words) + more


def require_of(scheduler: Any, optimizers: Iterable[torch.optim.Optimizer], where: str) -> None:
    """Raises ConfigurationError if a torch scheduler belongs to an optimizer unknown to the loop."""
    of = getattr(scheduler, "optimizer", None)
    of = getattr(of, "optimizer", of)  # unwraps Accelerate's optimizer
    if not isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler) or of is None:
        return
    if not any(of is each for each in optimizers):
        raise ConfigurationError(
            f"{where} is a {type(scheduler).__name__} of an optimizer that is not given here, whose state "
            "would not be saved: give that optimizer too, or make the scheduler of the one that is given"
        )


# --- arguments of a Trainer -------------------------------------------------------------------------------
def of_trainer(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | str,
    extra: Any,
    functions: Mapping[str, Callable[..., Any] | None],
) -> torch.nn.Module:
    """Wraps the model with everything trained beside it. Raises ConfigurationError.

    `functions`: loss and metrics by argument name; modules and methods of modules among them are saved too.
    """
    own = plain(model)
    modules = _extra(extra) | _callables(own, functions, () if extra is None else extra.values())
    found = {} if isinstance(optimizer, str) else _loose_of(optimizer, [own, *modules.values()])
    return ModelWithExtras(own, modules, found) if modules or found else own


def _loose_of(
    optimizer: torch.optim.Optimizer, known: list[torch.nn.Module]
) -> dict[str, torch.nn.Parameter]:
    found = {name.removeprefix("."): each for name, each in loose({"": optimizer}, known).items()}
    if len(found) == len(parameters_of(optimizer)):
        return {}  # none is the model's: `require_own_parameters` raises the error
    if odd := [each for each in found.values() if not isinstance(each, torch.nn.Parameter)]:
        raise ConfigurationError(
            f"Trainer(optimizer=...) trains {describe(odd)}, a plain tensor: make it a torch.nn.Parameter"
        )
    return found


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
    """Returns the modules with state behind loss and metrics, given as modules or as bound methods."""
    found: dict[str, torch.nn.Module] = {}
    known = {id(part) for module in (model, *given) for part in module.modules()}
    for name, function in functions.items():
        module = function if isinstance(function, torch.nn.Module) else getattr(function, "__self__", None)
        if not isinstance(module, torch.nn.Module) or not module.state_dict():
            continue
        parts = {id(part) for part in module.modules()}
        if not parts & known:  # otherwise it is already saved, or it contains the model
            found[name] = module
            known |= parts
    return found


def groups(model: torch.nn.Module) -> Any:
    """Returns the optimizer parameters for the whole model, with FSDP2's in a separate group.

    torch's optimizer kernels cannot mix DTensors and plain tensors in one group.
    """
    every = list(model.parameters())
    sharded = [each for each in every if is_sharded(each)]
    if not sharded or len(sharded) == len(every):
        return every
    return [{"params": sharded}, {"params": [each for each in every if not is_sharded(each)]}]


def require_unmixed(optimizer: torch.optim.Optimizer) -> None:
    """Raises ConfigurationError if a parameter group mixes FSDP2-sharded and other parameters."""
    for number, group in enumerate(optimizer.param_groups):
        if len({is_sharded(each) for each in group["params"]}) > 1:
            raise ConfigurationError(
                f"Trainer(optimizer=...): parameter group {number} has parameters that spottrain.shard has "
                "sharded and others that it has not, which torch's optimizers cannot step together: put "
                "the others into a parameter group of their own"
            )

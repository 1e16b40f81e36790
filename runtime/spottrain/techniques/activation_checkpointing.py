"""Activation checkpointing: a block stores only its input and recomputes the rest in the backward pass.

    from spottrain.techniques.activation_checkpointing import apply

    apply(model, 2)     # every 2nd block; before DDP, fully_shard or torch.compile, once for each model

It trades computation for memory: one more forward pass of the checkpointed blocks, so at most +33 % FLOPs.
The share of a step depends on the rest of the model. Counted on GPT-2 (12 layers, batch 1 x 128): +23.1 % for
all blocks, +11.6 % for every 2nd, +7.7 % for every 3rd, as its head over 50257 tokens is not recomputed.
With a vocabulary of 256: +33.3, +16.6 and +11.1 %.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Final

import torch
from torch.utils.checkpoint import checkpoint

from spottrain.checkpoint.plain_state import clean, plain
from spottrain.core import log
from spottrain.core.training_settings import ActivationCheckpointing
from spottrain.core.training_settings import activation_checkpointing as policy_of
from spottrain.errors import ConfigurationError

SWITCHED: Final = "_spottrain_checkpointing"
"""Attribute that marks a transformers model whose own checkpointing was enabled here."""


STEPS: Final = tuple(map(policy_of, ("none", 3, 2, "all")))
"""Policies that `auto` tries, in this order: the least recomputation first."""


def described(policy: ActivationCheckpointing) -> str:
    """Returns the policy as a word for the log, such as every-2."""
    return {"every": f"every-{policy.every}", "classes": ",".join(policy.classes)}.get(
        policy.policy, policy.policy
    )


class Recomputed:
    """Replaces the `forward` of a block, as an attribute of the instance.

    There is no wrapper module, so state names, `isinstance`, hooks and FSDP2, which replaces the class, keep
    working. It is an object, not a closure, so that it is pickled and deep-copied with its block. The
    recomputation uses the random state of the first pass, and leaves running statistics unchanged.
    """

    def __init__(self, block: torch.nn.Module, inner: Callable[..., Any] | None) -> None:
        self.block = block
        self.inner = inner
        """The instance's earlier `forward` attribute; None: the class's `forward` at the time of the call."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self.inner or type(self.block).forward.__get__(self.block)
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        options: dict[str, Any] = {"use_reentrant": False}
        if not torch.compiler.is_compiling():  # with a context_fn it would not recompute (torch 2.15)
            # Contexts of the forward pass and of its recomputation.
            options["context_fn"] = lambda: (nullcontext(), _statistics_kept(self.block))
        return checkpoint(forward, *args, **options, **kwargs)


@contextmanager
def _statistics_kept(module: torch.nn.Module) -> Iterator[None]:
    """Sends updates of running statistics to copies, so that they are updated once per step.

    Autograd would notice if old values were written back in place.
    """
    tracking = [each for each in module.modules() if each.training and _tracks(each)]
    held = [(each, dict(each._buffers)) for each in tracking]
    for each, buffers in held:
        each._buffers.update({name: b if b is None else b.clone() for name, b in buffers.items()})
    try:
        yield
    finally:
        for each, buffers in held:
            each._buffers.update(buffers)


def _tracks(module: torch.nn.Module) -> bool:
    """Whether it is a batch norm or instance norm with running statistics."""
    return bool(getattr(module, "track_running_stats", False))


# --- which modules ----------------------------------------------------------------------------------------
def blocks(model: torch.nn.Module, classes: Iterable[str] = ()) -> dict[str, torch.nn.Module]:
    """Finds the model's blocks.

    Without `classes`, it takes the classes that occur at least twice in one ModuleList or Sequential, and
    chooses the one with the most parameters. Its instances in all such containers are the blocks, so a
    ResNet's stages count together. Plain torch.nn layers do not count: a Linear keeps its input anyway.
    With `classes`, all instances of classes of these names are blocks, except those inside another block.

    Returns:
        The blocks by name, in the order of registration.

    Raises:
        ConfigurationError: no module of the model has a class of that name.
    """
    inner = plain(model)
    wanted = tuple(classes)
    if not wanted:
        return _outermost(_repeated(inner))
    named = {clean(name): module for name, module in inner.named_modules() if name}
    # With the bases, because `fully_shard` turns a Block into an FSDPBlock.
    there = {name: {kind.__name__ for kind in type(module).__mro__} for name, module in named.items()}
    for each in wanted:
        if not any(each in names for names in there.values()):
            have = ", ".join(sorted({type(module).__name__ for module in named.values()}))
            raise ConfigurationError(
                f"activation checkpointing: the model has no module of class {each}; its classes are {have}"
            )
    return _outermost({name: named[name] for name, names in there.items() if names & set(wanted)})


def _repeated(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    found: dict[type[torch.nn.Module], dict[str, torch.nn.Module]] = {}
    for place, container in model.named_modules():
        if not isinstance(container, torch.nn.ModuleList | torch.nn.Sequential):
            continue
        kinds = Counter(type(child) for child in container)
        for name, child in container.named_children():
            plain_layer = type(child).__module__.startswith("torch.nn.") and not [*child.children()]
            if kinds[type(child)] > 1 and not plain_layer:
                found.setdefault(type(child), {})[f"{place}.{name}" if place else name] = child

    def size(named: dict[str, torch.nn.Module]) -> int:
        return sum({id(p): p.numel() for module in named.values() for p in module.parameters()}.values())

    return max(found.values(), key=size, default={})


def _outermost(named: dict[str, torch.nn.Module]) -> dict[str, torch.nn.Module]:
    """Drops blocks inside another block: they would be computed a third time."""
    return {
        clean(name): module
        for name, module in named.items()
        if not any(name.startswith(f"{other}.") for other in named if other != name)
    }


# --- switching --------------------------------------------------------------------------------------------
def apply(model: torch.nn.Module, policy: Any) -> tuple[str, ...]:
    """Checkpoints the blocks that `policy` selects, and undoes any earlier `apply`.

    A transformers model uses its own checkpointing, unless classes are named: that also disables the
    key-value cache. It acts in training mode only; ours acts whenever gradients are computed. A transformers
    model with batch norm uses ours, as its own would update the running statistics twice in a step.

    Args:
        model: wrapped or not; call it before DDP, `fully_shard` and torch.compile.
        policy: as `Trainer(activation_checkpointing=...)`: none, all, a number k for every k-th block, or a
            list of classes or their names; not `auto`, which needs trials (`find_batch_size`).

    Returns:
        Names of the checkpointed blocks. What was done is also logged.

    Raises:
        ConfigurationError: the policy is `auto` or not known, or no module has one of its classes.
    """
    wanted = policy_of(policy)
    if wanted.policy == "auto":
        raise ConfigurationError(
            "apply() does not accept the policy auto, which needs trials: call "
            "find_batch_size(checkpointing='auto'), or pass one of none, 2, all"
        )
    inner = plain(model)
    remove(inner)
    if wanted.policy == "none":
        return ()
    found, by, every = None, "transformers", wanted.every or 1
    if not wanted.classes and _has_switch(inner) and not any(map(_tracks, inner.modules())):
        found = _switch(inner, every)
    if found is None:
        found, by = blocks(inner, wanted.classes), "spottrain"
        for module in list(found.values())[::every]:
            module.forward = Recomputed(module, vars(module).get("forward"))
    chosen = tuple(found)[::every]
    log.event("activation-checkpointing", policy=described(wanted), blocks=len(chosen), of=len(found), by=by)
    if not found:
        log.event(
            "advice",
            about="activations",
            text="no repeated blocks were found in a ModuleList or Sequential, so nothing is recomputed: "
            "name the classes of the blocks",
        )
    return chosen


def remove(model: torch.nn.Module) -> None:
    """Undoes what `apply` did."""
    inner = plain(model)
    for module in inner.modules():
        ours = vars(module).get("forward")
        if isinstance(ours, Recomputed):
            del module.forward
            if ours.inner is not None:
                module.forward = ours.inner
    if vars(inner).pop(SWITCHED, False):  # not one that the script switched on itself
        _call_switch(inner, "disable")


def _has_switch(model: torch.nn.Module) -> bool:
    """Whether it is a transformers model with checkpointing. Tests attributes: the package is optional."""
    named = any(hasattr(model, f"{kind}_checkpointing_enable") for kind in ("activation", "gradient"))
    return named and bool(getattr(model, "supports_gradient_checkpointing", False))


def _call_switch(model: Any, word: str, *args: Any, **kwargs: Any) -> None:
    """transformers 5 renamed gradient_checkpointing to activation_checkpointing; 6 drops the old name."""
    new = f"activation_checkpointing_{word}"
    getattr(model, new if hasattr(model, new) else f"gradient_checkpointing_{word}")(*args, **kwargs)


def _switch(model: torch.nn.Module, every: int) -> dict[str, torch.nn.Module] | None:
    """Has the model checkpoint every k-th block itself.

    Returns its blocks by name; None, and nothing is done, if it cannot.
    """
    # Only flags of inner modules count: those are read by the layers. The whole model is not a block.
    flagged = {
        clean(name): module
        for name, module in model.named_modules()
        if name and hasattr(type(module), "gradient_checkpointing")
    }
    if every > 1 and not flagged:
        return None
    _call_switch(model, "enable", {"use_reentrant": False})
    setattr(model, SWITCHED, True)
    found = _outermost(flagged) or blocks(model)
    for number, block in enumerate(found.values()) if every > 1 else ():
        block.gradient_checkpointing = number % every == 0  # type: ignore[assignment]
    return found

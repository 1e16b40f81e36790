"""Activation checkpointing: a block keeps its input alone and computes the rest again in the backward pass.

    from spottrain.techniques.activation_checkpointing import Policy, apply

    apply(model, Policy.of("every-2"))     # before DDP, fully_shard or torch.compile, once for each model

Less memory for more computation: a forward pass of the checkpointed blocks once more, so +33 % at most. How
much of a step that is depends on what else there is: counted on GPT-2 (12 layers, batch 1 x 128) +23.1 %
where all blocks do it, +11.6 % for every other one and +7.7 % for every third, for its head over 50257 words
is not recomputed; with 256 words +33.3, +16.6, +11.1 % (`bench/levers.py --flops`). Called by `trainer`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch.utils.checkpoint import checkpoint

from spottrain.checkpoint.plain_state import clean, plain
from spottrain.core import log
from spottrain.errors import ConfigurationError

SMALL: Final = 0.25
"""Below this share of the memory of weights, gradients and optimizer, activations are not worth the time."""
ROOMY: Final = 0.7
"""Below this share of the device's memory in use at the peak, memory is no constraint."""

MORE: Final = 4
"""Times the memory at the peak that a step takes at most without checkpointing: 3.1 was measured for all the
blocks of a GPT-2 of 12 layers, on a CPU (bench/RESULTS.md)."""

SWITCHED: Final = "_spottrain_checkpointing"
"""Attribute of a model of transformers whose switch was turned on here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """Which blocks are checkpointed."""

    every: int = 0
    """Each so-many-th block, the first included: 1 all, 2 every other one; 0 none."""
    classes: tuple[str, ...] = ()
    """Names of classes, all instances of which are blocks; empty: the blocks are found."""
    auto: bool = False
    """Whether a trial is to say which `every` it takes; see `least`."""

    @classmethod
    def of(cls, wanted: str | Iterable[str | type[torch.nn.Module]]) -> Policy:
        """From none, all, every-K, auto, or the names of classes, with commas or as a list.

        Raises ConfigurationError for what is none of these.
        """
        if not isinstance(wanted, str):
            return cls(
                every=1, classes=tuple(each if isinstance(each, str) else each.__name__ for each in wanted)
            )
        if wanted in ("none", "all", "auto"):
            return cls(every=int(wanted == "all"), auto=wanted == "auto")
        if (every := re.fullmatch(r"every-([1-9]\d*)", wanted)) is not None:
            return cls(every=int(every[1]))
        names = tuple(name.strip() for name in wanted.split(","))
        if not all(name.isidentifier() for name in names):
            raise ConfigurationError(
                f"activation checkpointing {wanted!r} is not known: use none, all, every-K (as every-2), "
                "auto, or the names of the model's block classes, with commas between them"
            )
        return cls(every=1, classes=names)

    def __str__(self) -> str:
        if self.auto or not self.every:
            return "auto" if self.auto else "none"
        words = "all" if self.every == 1 else f"every-{self.every}"
        return words if not self.classes else f"{words} of {','.join(self.classes)}"


STEPS: Final = (Policy(), Policy(every=3), Policy(every=2), Policy(every=1))
"""What `auto` tries, in this order: the least recomputation first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Applied:
    """What `apply` did."""

    policy: Policy
    modules: tuple[str, ...]
    """Names of the checkpointed ones."""
    of: int
    """Blocks that there are."""
    by: str = "spottrain"
    """transformers, where the model's own switch was used."""


class Recomputed:
    """The `forward` of a block, as an attribute of the instance.

    So no module is put in between: names of the state stay, `isinstance` holds, and FSDP2, which replaces the
    class, and hooks, which run outside of `forward`, work as before: FSDP2's gathers the weights for the
    recomputation too. An instance of a class rather than a closure, for that is pickled and deep-copied with
    its block. The random state is that of the first time, so dropout draws the same; and the running
    statistics of batch norm stay as the first time left them.
    """

    def __init__(self, block: torch.nn.Module, inner: Callable[..., Any] | None) -> None:
        self.block = block
        self.inner = inner
        """What was there as an attribute before; None: the class's `forward`, whichever that becomes."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self.inner or type(self.block).forward.__get__(self.block)
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, **_once(self.block), **kwargs)


# --- running statistics -----------------------------------------------------------------------------------
def _once(module: torch.nn.Module) -> dict[str, Any]:
    """Options of torch's checkpoint that have the running statistics in `module` updated once in a step.

    Not where torch.compile traces: its graph updates a buffer once, and with contexts of ours it would not
    recompute (torch 2.15).
    """
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": True}
    if torch.compiler.is_compiling():
        return options
    return options | {"context_fn": partial(_contexts, module)}


def _contexts(module: torch.nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Around the forward pass, and around its recomputation."""
    return nullcontext(), _statistics_kept(module)


@contextmanager
def _statistics_kept(module: torch.nn.Module) -> Iterator[None]:
    """Updates inside go to copies. To write old values back would be seen by autograd, which holds them."""
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
    """Batch norm, synchronised or not, and instance norm that is told to."""
    return bool(getattr(module, "track_running_stats", False))


# --- which modules ----------------------------------------------------------------------------------------
def blocks(model: torch.nn.Module, classes: Iterable[str] = ()) -> dict[str, torch.nn.Module]:
    """The model's blocks by name, in the order of registration.

    Without `classes`: of the classes that occur at least twice in one ModuleList or Sequential the one with
    the most parameters, all of whose instances in such containers are blocks (so a ResNet's stages count
    together). Layers of torch.nn that have no parts are none: a Linear keeps its input in any case.
    With `classes`: all instances of these; inside of another block they are not counted again. Raises
    ConfigurationError for a name that no module's class has.
    """
    inner = plain(model)
    wanted = tuple(classes)
    if not wanted:
        return _outermost(_repeated(inner))
    named = {clean(name): module for name, module in inner.named_modules() if name}
    there = {name: _class_names(module) for name, module in named.items()}
    for each in wanted:
        if not any(each in names for names in there.values()):
            have = ", ".join(sorted({type(module).__name__ for module in named.values()}))
            raise ConfigurationError(
                f"activation checkpointing: no module of the model is a {each}; its classes are {have}"
            )
    return _outermost({name: named[name] for name, names in there.items() if names & set(wanted)})


def _class_names(module: torch.nn.Module) -> set[str]:
    """The bases too: `fully_shard` makes an FSDPBlock of a Block."""
    return {kind.__name__ for kind in type(module).__mro__}


def _repeated(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    found: dict[type[torch.nn.Module], dict[str, torch.nn.Module]] = {}
    for place, container in model.named_modules():
        if not isinstance(container, torch.nn.ModuleList | torch.nn.Sequential):
            continue
        kinds = Counter(type(child) for child in container)
        for name, child in container.named_children():
            if kinds[type(child)] > 1 and not _is_plain_layer(child):
                found.setdefault(type(child), {})[f"{place}.{name}" if place else name] = child
    return max(found.values(), key=lambda named: _size(named.values()), default={})


def _is_plain_layer(module: torch.nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.") and not any(True for _ in module.children())


def _size(modules: Iterable[torch.nn.Module]) -> int:
    each = {id(parameter): parameter.numel() for module in modules for parameter in module.parameters()}
    return sum(each.values())


def _outermost(named: dict[str, torch.nn.Module]) -> dict[str, torch.nn.Module]:
    """Without those inside of another: they would be computed a third time."""
    return {
        clean(name): module
        for name, module in named.items()
        if not any(name.startswith(f"{other}.") for other in named if other != name)
    }


# --- switching --------------------------------------------------------------------------------------------
def apply(model: torch.nn.Module, policy: Policy) -> Applied:
    """Checkpoints the blocks that `policy` says, and those alone, whatever was applied before.

    A model of transformers is switched by its own switch unless classes are named: it also keeps the cache of
    keys and values out of the way. It checkpoints in training mode alone, ours wherever gradients are taken.
    One with batch norm is not: by that switch its running statistics would be updated twice in a step.
    Says what was done. Raises ConfigurationError, for `auto` too: that takes a trial, see `least`.
    """
    if policy.auto:
        raise ConfigurationError(
            "activation checkpointing auto needs a trial of what fits: pass its outcome, "
            "apply(model, least(fits)), or name a policy: none, every-2, all"
        )
    inner = plain(model)
    remove(inner)
    if policy.every and not policy.classes and _has_switch(inner) and not any(map(_tracks, inner.modules())):
        applied = _switch(inner, policy)
    else:
        applied = _patch(inner, policy)
    if policy.every:
        log.event("checkpointing", policy=policy, blocks=len(applied.modules), of=applied.of, by=applied.by)
    if policy.every and not applied.of:
        log.event(
            "advice",
            about="activations",
            text="no repeated blocks were found in a ModuleList or Sequential, so nothing is recomputed: "
            "name the classes of the blocks",
        )
    return applied


def _patch(model: torch.nn.Module, policy: Policy) -> Applied:
    found = blocks(model, policy.classes)
    chosen = {n: m for i, (n, m) in enumerate(found.items()) if policy.every and i % policy.every == 0}
    for module in chosen.values():
        module.forward = Recomputed(module, vars(module).get("forward"))
    return Applied(policy=policy, modules=tuple(chosen), of=len(found))


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
    """Of transformers; asked by its attributes, for that package may be absent."""
    named = any(hasattr(model, f"{kind}_checkpointing_enable") for kind in ("activation", "gradient"))
    return named and bool(getattr(model, "supports_gradient_checkpointing", False))


def _call_switch(model: Any, word: str, *args: Any, **kwargs: Any) -> None:
    """transformers 5 calls it activation_checkpointing and warns of the name before, which it drops in 6."""
    new = f"activation_checkpointing_{word}"
    getattr(model, new if hasattr(model, new) else f"gradient_checkpointing_{word}")(*args, **kwargs)


def _switch(model: torch.nn.Module, policy: Policy) -> Applied:
    _call_switch(model, "enable", {"use_reentrant": False})
    setattr(model, SWITCHED, True)
    # A flag that a layer has for itself is read by the layer; one of the whole model is no block's.
    flagged = {
        clean(name): module
        for name, module in model.named_modules()
        if name and hasattr(type(module), "gradient_checkpointing")
    }
    found = _outermost(flagged) or blocks(model)
    chosen = [name for i, name in enumerate(found) if i % policy.every == 0]
    if policy.every > 1:
        if not flagged:
            remove(model)
            return _patch(model, policy)
        for name, module in found.items():
            module.gradient_checkpointing = name in chosen  # type: ignore[assignment]
    return Applied(policy=policy, modules=tuple(chosen), of=len(found), by="transformers")


# --- how much it takes, and whether it pays -----------------------------------------------------------------
def least(fits: Callable[[Policy], bool], steps: Iterable[Policy] = STEPS) -> Policy | None:
    """For `auto`: the first of none, every-3, every-2, all that fits; None where even all is too much.

    `fits` applies the policy and tries a step; whoever calls this applies the one that is returned.
    """
    for policy in steps:
        if fits(policy):
            log.event("checkpointing", wanted="auto", chosen=policy)
            return policy
    return None


def saved_bytes(forward: Callable[[], Any], model: torch.nn.Module) -> int:
    """Bytes that `forward()` keeps for the backward pass, the model's weights and buffers left out.

    Each storage counts once. What a checkpointed block keeps is its input. Called with a forward pass alone:
    a backward pass inside would add what it computes again. On any device.
    """
    own = {each.untyped_storage().data_ptr() for each in [*model.parameters(), *model.buffers()]}
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = forward()  # held to the end: an address that is given back could be counted as another's
    del result
    return sum(kept.values())


def doubt(*, activations: int, state: int, peak: int, limit: int) -> str | None:
    """Why checkpointing buys nothing here, as a sentence; None where it may pay. All in bytes.

    activations: as of `saved_bytes`, without checkpointing. state: weights, gradients and optimizer.
    peak, limit: memory in use at most, without checkpointing, and what there is.
    """
    if peak < ROOMY * limit:
        return (
            f"memory is not the constraint: a step without activation checkpointing needs {peak / limit:.0%} "
            "of it; leave it off, or raise the micro-batch size"
        )
    if activations < SMALL * state:
        return (
            f"activations take {activations:,} bytes, weights and optimizer {state:,}: recomputing them "
            "saves little; shard the model (spottrain.shard) or choose an optimizer with less state"
        )
    return None


def needless(*, peak: int, limit: int) -> str | None:
    """Why checkpointing that is on buys nothing, as a sentence, by the memory in use at most, or None.

    Both in bytes. Without a pass that has none: that might not fit, and checkpointing is there because of it.
    """
    if MORE * peak >= ROOMY * limit:
        return None
    return (
        f"memory is not the constraint: with activation checkpointing {peak / limit:.0%} of it are used, and "
        f"without it hardly {MORE} times that: leave it off, or raise the micro-batch size"
    )


def advise(*, activations: int, state: int, peak: int, limit: int) -> None:
    """Says `doubt`, where there is one."""
    if (sentence := doubt(activations=activations, state=state, peak=peak, limit=limit)) is not None:
        log.event("advice", about="activations", text=sentence)

"""Runs a step that leaves no trace, to compile the model or to test what fits into memory."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from spottrain.checkpoint.plain_state import plain
from spottrain.checkpoint.plain_values import SCALARS
from spottrain.core.device import Boundary
from spottrain.distributed.dtensor import is_sharded, local
from spottrain.errors import ConfigurationError

MAX_FROZEN: Final = 4
"""Frozen weights are copied if they take at most this multiple of the trained weights' bytes. A teacher that
a forward pass updates is as large as its student; an adapter's frozen base is larger, and never written."""
SAMPLE: Final = 64
"""Elements that are compared per weight, at least, if it has as many."""


@contextmanager
def rehearsal(model: torch.nn.Module) -> Iterator[None]:
    """Context for forward and backward passes that leave no trace.

    On exit it restores random state, buffers, gradients, `requires_grad`, and the modules' attributes that
    are numbers, strings or switches such as the training mode, also after an error, which propagates.
    Trained weights and the optimizer's state are not copied, to save memory: do not call
    `optimizer.step()`. Frozen weights, such as a teacher's that the forward pass updates (MoCo, BYOL), are
    restored from a copy on the CPU. They are not copied if they are many times larger than the trained ones,
    as under an adapter. Take data from `dataset[i]`: the training's loader would move its position.

    Raises:
        ConfigurationError: a pass changed weights that were not copied, as far as a sample of each shows.
    """
    inner = plain(model)
    before = Boundary(inner.modules())
    numbers = [
        (attributes, {name: each for name, each in attributes.items() if type(each) in SCALARS})
        for attributes in map(vars, inner.modules())
    ]
    weights = _Weights(inner)
    gradients = [(each, each.grad, each.requires_grad) for each in inner.parameters()]
    for parameter, *_ in gradients:
        parameter.grad = None  # else a backward pass adds to it in place
    try:
        with torch.enable_grad():
            yield
        weights.require_unwritten()
    finally:
        _reshard(inner)  # first, because it drops gradients
        for parameter, gradient, trained in gradients:
            parameter.grad = gradient
            parameter.requires_grad_(trained)
        weights.restore()
        for attributes, own in numbers:
            attributes.update(own)
        before.restore()


class _Weights:
    """Copies of the weights that a forward pass may write, and samples of all others to detect writes.

    Version counters do not work: torch rewrites an LSTM's weights, unchanged, to make them contiguous.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        named = dict(model.named_parameters())
        frozen = {name: each for name, each in named.items() if not each.requires_grad}
        trained = sum(local_bytes(each) for name, each in named.items() if name not in frozen)
        few = sum(map(local_bytes, frozen.values())) <= MAX_FROZEN * trained
        copied = frozen if few else {}
        self._copies = [(e, e.data, local(e).detach().to("cpu", copy=True)) for e in copied.values()]
        self._samples = [(n, each, _sample(each)) for n, each in named.items() if n not in copied]

    def restore(self) -> None:
        for parameter, data, copy in self._copies:
            if not is_sharded(parameter):
                parameter.data = data  # it may have been reassigned
            local(data).copy_(copy)

    def require_unwritten(self) -> None:
        written = [name for name, each, sample in self._samples if not torch.equal(_sample(each), sample)]
        if written:
            raise ConfigurationError(
                f"forward or backward passes change the model's weights ({written[0]}), so a trial "
                "step cannot be undone: set fixed sizes and policies instead of auto and turn "
                "compile off, or keep what the passes change in buffers, or in frozen weights under "
                "no_grad"
            )


def local_bytes(tensor: torch.Tensor) -> int:
    """Returns the bytes of this rank's part."""
    here = local(tensor)
    return here.numel() * here.element_size()


def _sample(parameter: torch.Tensor) -> torch.Tensor:
    """Returns a sample of the elements as bytes, so that NaN equals itself."""
    here = local(parameter).detach().reshape(-1)
    return here[:: max(1, here.numel() // SAMPLE)].clone().view(torch.uint8)


def _reshard(model: torch.nn.Module) -> None:
    """Resets FSDP2's modules to their state between steps, and frees gathered weights.

    It is not a collective. Without it, the pass after a failed one would begin midway (torch 2.15).
    """
    sharded: list[Any] = [module for module in model.modules() if hasattr(module, "reset_iter_state")]
    for module in sharded:
        with contextlib.suppress(RuntimeError, AttributeError):  # not a root, or no pass has reached it yet
            module.reset_iter_state()


def release() -> None:
    """Frees unreferenced memory after a step that did not fit. Call it outside of the `except` block.

    Inside, the traceback still references the frames and their tensors.
    """
    gc.collect()  # autograd graphs and modules have cycles
    torch.cuda.empty_cache()  # does nothing without a GPU

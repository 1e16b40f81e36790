"""A step that leaves no trace: to compile, or see what fits. Called by `compiling`, `batchsize`, `watch`."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from spottrain.checkpoint.plain_state import plain
from spottrain.core.device import Boundary
from spottrain.distributed.dtensor import is_sharded, local
from spottrain.errors import ConfigurationError

MOST_FROZEN: Final = 4
"""Of the bytes of the trained weights: up to so much in frozen ones is copied. A teacher that a forward pass
moves is about as large as its student; the frozen base of an adapter is much larger, and is never written."""

SAMPLE: Final = 64
"""Numbers of each weight, at the least where it has as many."""


@contextmanager
def rehearsal(model: torch.nn.Module) -> Iterator[None]:
    """What is done inside changes neither random state, buffers, gradients nor the mode of the modules.

    Forward and backward passes are what it is for. Weights that are trained and the optimizer's state are
    not copied, because there may be no room for it: call no `optimizer.step()`. Frozen weights, such as those
    of a teacher that follows in the forward pass (MoCo, BYOL), are put back from a copy on the CPU; where
    they are many times the trained ones, as under an adapter, they are not copied. Data that are drawn inside
    must come from `dataset[i]`, not from the loader of the training, whose position would move.

    An error, such as one of memory, passes through after all is as it was. Raises ConfigurationError where a
    pass has changed weights of which there is no copy, as far as a sample of each shows.
    """
    inner = plain(model)
    before = Boundary([buffer for buffer in inner.buffers() if buffer is not None])
    buffers = [(module, dict(module._buffers)) for module in inner.modules()]
    modes = [(module, module.training) for module in inner.modules()]
    weights = _Weights(inner)
    gradients = [(parameter, parameter.grad) for parameter in inner.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None  # else a backward pass would add to it in place
    try:
        with torch.enable_grad():
            yield
        weights.require_unwritten()
    finally:
        _reshard(inner)  # first, for it drops gradients
        for parameter, gradient in gradients:
            parameter.grad = gradient
        weights.restore()
        for module, training in modes:
            module.training = training
        for module, own in buffers:
            module._buffers.update(own)  # one that was assigned anew, not written in place
        before.restore()


class _Weights:
    """Copies of those that a forward pass may write, and a few numbers of all others, by which a write shows.

    Not their versions: torch itself writes weights, unchanged, where it moves those of an LSTM together.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        named = dict(model.named_parameters())
        frozen = {name: each for name, each in named.items() if not each.requires_grad}
        trained = sum(_bytes(each) for name, each in named.items() if name not in frozen)
        few = sum(map(_bytes, frozen.values())) <= MOST_FROZEN * trained
        self._copies = [(each, each.data, _copy(each)) for each in frozen.values() if few]
        self._samples = [(n, each, _sample(each)) for n, each in named.items() if not (few and n in frozen)]

    def restore(self) -> None:
        for parameter, data, copy in self._copies:
            if not is_sharded(parameter):
                parameter.data = data  # one that was assigned anew
            local(data).copy_(copy)

    def require_unwritten(self) -> None:
        written = [name for name, each, sample in self._samples if not torch.equal(_sample(each), sample)]
        if written:
            raise ConfigurationError(
                f"a forward or backward pass changes weights of the model by itself ({written[0]}), so no "
                "step can be tried without a trace: give sizes and policies in place of auto, no compile; or "
                "keep what the pass changes in buffers, or under no_grad in frozen weights"
            )


def _copy(parameter: torch.Tensor) -> torch.Tensor:
    return local(parameter).detach().to("cpu", copy=True)


def _bytes(parameter: torch.Tensor) -> int:
    here = local(parameter)
    return here.numel() * here.element_size()


def _sample(parameter: torch.Tensor) -> torch.Tensor:
    """Bytes, for a NaN is equal to itself there."""
    here = local(parameter).detach().reshape(-1)
    return here[:: max(1, here.numel() // SAMPLE)].clone().view(torch.uint8)


def _reshard(model: torch.nn.Module) -> None:
    """FSDP2's modules as between two steps, whole weights given back, wherever a pass has ended.

    No rank waits for another in it. A forward pass that failed leaves its root in the middle of one, and
    the next would begin there (torch 2.15).
    """
    sharded: list[Any] = [module for module in model.modules() if hasattr(module, "reset_iter_state")]
    for module in sharded:
        with contextlib.suppress(
            RuntimeError, AttributeError
        ):  # it is no root, or no pass has come there yet
            module.reset_iter_state()


def release(device: torch.device) -> None:
    """Gives memory back that nothing holds: after a step that did not fit, outside of its `except`.

    Inside, the traceback still holds the frames, and they the tensors.
    """
    gc.collect()  # autograd graphs and modules have cycles
    if device.type == "cuda":
        torch.cuda.empty_cache()

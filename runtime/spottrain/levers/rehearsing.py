"""A step that leaves no trace: to compile, or to see what fits. Called by `compiling`, `batchsize`."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from spottrain.checkpoint.modelstate import plain
from spottrain.device import Boundary


@contextmanager
def rehearsal(model: torch.nn.Module) -> Iterator[None]:
    """What is done inside changes neither random state, buffers, gradients nor the mode of the modules.

    Forward and backward passes are what it is for. Weights and the optimizer's state are not copied, because
    there may be no room for it: call no `optimizer.step()`. Data that are drawn inside must come from
    `dataset[i]`, not from the loader of the training, whose position would move. An error, such as one of
    memory, passes through after all is as it was.
    """
    inner = plain(model)
    before = Boundary([buffer for buffer in inner.buffers() if buffer is not None])
    buffers = [(module, dict(module._buffers)) for module in inner.modules()]
    modes = [(module, module.training) for module in inner.modules()]
    gradients = [(parameter, parameter.grad) for parameter in inner.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None  # else a backward pass would add to it in place
    try:
        with torch.enable_grad():
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module, training in modes:
            module.training = training
        for module, own in buffers:
            module._buffers.update(own)  # one that was assigned anew, not written in place
        before.restore()


def release(device: torch.device) -> None:
    """Gives memory back that nothing holds: after a step that did not fit, outside of its `except`.

    Inside, the traceback still holds the frames, and they the tensors.
    """
    gc.collect()  # autograd graphs and modules have cycles
    if device.type == "cuda":
        torch.cuda.empty_cache()

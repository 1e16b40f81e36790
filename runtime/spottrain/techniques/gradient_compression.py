"""Gradient compression between ranks, by torch's communication hooks for DDP.

    compressed = gradient_compression.attach(ddp, "powerSGD", start_step=1000)
    ...                                  # `state_dict` and `own_state_dict` go into the checkpoint

Kinds: none, bf16 (half the bytes of fp32; sums over many ranks lose precision), powerSGD (Vogels et al. 2019,
arXiv:1905.13727: approximates each matrix by two thin ones, and adds the error to the next step's gradient).
It pays only if the exchange is the bottleneck, as with slow links between nodes; hardly ever with NVLink.

Facts of torch 2.15 behind the design of this module:
- PowerSGDState stores errors and Qs by bucket number, and DDP rebuilds its buckets after the first backward
  pass, in the order in which gradients arrived. So this module stores them by parameter name, and lays them
  out for the current buckets. It also draws the first Qs by name, so a run that starts to compress right
  after a resume has the same ones.
- An infinite gradient stays in the error forever. fp16 with a loss scale is refused, because there infinite
  gradients are expected, and the scale of old errors changes.
- torch's own state must not compress the first two iterations of a process (`start_powerSGD_iter`). A state
  by name may, so a resumed run compresses from its first step.
- The hook starts its second and third collective in the callback of the previous one. gloo runs callbacks on
  its own threads, so with several buckets ranks start collectives in different orders, which ended a process
  by gloo::EnforceNotMet. So with gloo it waits for each bucket.
- Sums over three or more ranks depend on the bucket layout. Bit-exact resume then needs
  find_unused_parameters=True, which `training.data_parallel.Replica` sets in deterministic mode.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from spottrain.checkpoint import plain_state
from spottrain.core import log
from spottrain.core.training_spec import POWER_SGD_FP16
from spottrain.errors import ConfigurationError

KINDS: Final = ("none", "bf16", "powerSGD")
START_STEP: Final = 1000
"""torch's default. The first steps suffer most from inexact gradients, and may not recover later."""


class Compression:
    """Result of `attach`, and its state: one part is the same on all ranks, the other is each rank's own.

    If ranks differ in the first part, they deadlock. So a new rank must load it too.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def state_dict(self) -> dict[str, Any]:
        """Returns the part that is the same on all ranks: tensors and plain values. Call between steps."""
        return {"kind": self.kind}

    def own_state_dict(self) -> dict[str, Any]:
        """Returns this rank's own part: tensors by parameter name."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any], own: Mapping[str, Any] | None) -> None:
        """Restores the state. A state of another kind is ignored, and `event=override` logged.

        Args:
            state: the part that is the same on all ranks.
            own: this rank's own part; None: this rank did not exist at the save.
        """
        if state["kind"] != self.kind:
            log.event("override", setting="compression", checkpoint=state["kind"], script=self.kind)


class PowerSGD(Compression):
    """torch's powerSGD hook, with its state stored by parameter name."""

    def __init__(
        self, names: Mapping[int, str], *, matrix_rank: int, start_step: int, min_compression_rate: float
    ) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hooks  # imports numpy

        super().__init__("powerSGD")
        self._run = hooks.powerSGD_hook
        self._torch = hooks.PowerSGDState(
            process_group=None,
            matrix_approximation_rank=matrix_rank,
            start_powerSGD_iter=start_step,
            min_compression_rate=min_compression_rate,
        )
        self._matrix_rank = matrix_rank
        self._names = names
        """Names by the `id` of the parameter."""
        self._layout: dict[int, list[torch.Tensor]] = {}
        """Parameters of each bucket, as torch's dictionaries are laid out now."""
        self._errors: dict[str, torch.Tensor] = {}
        """Errors not laid out in buckets: 1-D tensors by parameter name."""
        self._qs: dict[str, torch.Tensor] = {}

    def hook(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """The communication hook for DDP: reduces the gradients of one bucket."""
        if self._torch.iter >= self._torch.start_powerSGD_iter:
            self._lay_out(bucket)
        found: torch.futures.Future[torch.Tensor] = self._run(self._torch, bucket)
        if not (bucket.buffer().is_cuda and "nccl" in dist.get_backend_config()):
            found.wait()
        return found

    # --- buckets ------------------------------------------------------------------------------------
    def _lay_out(self, bucket: Any) -> None:
        number, parameters = bucket.index(), bucket.parameters()
        known = self._layout.get(number)
        if known is not None and [id(p) for p in known] == [id(p) for p in parameters]:
            return
        if known is not None:  # DDP has rebuilt its buckets: the layout is of the old ones
            self._take_up()
        like, inside = bucket.buffer(), self._compressed(parameters)
        self._torch.error_dict[number] = torch.cat([self._error(p, like) for p in parameters])
        qs = [self._q(p, like) for p in inside]
        self._torch.q_memory_dict[number] = torch.cat(qs) if qs else like.new_empty(0)
        self._torch.p_memory_dict[number] = like.new_empty(sum(self._thin(p)[0] for p in inside))
        self._layout[number] = list(parameters)

    def _take_up(self) -> None:
        """Moves the state from torch's dictionaries into ours, by name."""
        laid = self._torch
        for number, parameters in self._layout.items():
            inside = self._compressed(parameters)
            self._errors |= self._split(laid.error_dict[number], parameters, [p.numel() for p in parameters])
            self._qs |= self._split(laid.q_memory_dict[number], inside, [self._thin(p)[1] for p in inside])
        for each in (laid.error_dict, laid.q_memory_dict, laid.p_memory_dict, self._layout):
            each.clear()

    def _split(
        self, flat: torch.Tensor, parameters: list[torch.Tensor], sizes: list[int]
    ) -> dict[str, torch.Tensor]:
        pieces = zip(parameters, torch.split(flat, sizes), strict=True)
        return {self._names[id(p)]: piece.clone() for p, piece in pieces}

    def _error(self, parameter: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        kept = self._errors.pop(self._names[id(parameter)], None)
        return like.new_zeros(parameter.numel()) if kept is None else kept.to(like)

    def _q(self, parameter: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Returns Q; a new one is drawn with a seed from the name, equal on all ranks and in each attempt."""
        name = self._names[id(parameter)]
        kept = self._qs.pop(name, None)
        if kept is None:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            kept = torch.randn(self._thin(parameter)[1], generator=generator)
        return kept.to(like)

    def _compressed(self, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the parameters that torch's hook compresses, in the order of its Qs: grouped by shape."""
        by_shape: dict[tuple[int, int], list[torch.Tensor]] = {}
        for parameter in parameters:
            shape = _matrix(parameter)
            if sum(self._thin(parameter)) * self._torch.min_compression_rate < math.prod(shape):
                by_shape.setdefault(shape, []).append(parameter)
        return [parameter for alike in by_shape.values() for parameter in alike]

    def _thin(self, parameter: torch.Tensor) -> tuple[int, int]:
        """Returns the elements of P and Q, the two thin matrices."""
        n, m = _matrix(parameter)
        rank = min(n, m, self._matrix_rank)
        return n * rank, m * rank

    # --- state --------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        self._take_up()
        step, qs = int(self._torch.iter), dict(self._qs)
        return {"kind": self.kind, "step": step, "matrix_rank": self._matrix_rank, "qs": qs}

    def own_state_dict(self) -> dict[str, Any]:
        self._take_up()
        return {"errors": dict(self._errors)}

    def load_state_dict(self, state: Mapping[str, Any], own: Mapping[str, Any] | None) -> None:
        """A new rank starts without errors; errors of removed ranks are lost. Qs of another matrix rank are
        drawn again."""
        if state["kind"] != self.kind:
            return super().load_state_dict(state, own)
        self._take_up()
        self._torch.iter = int(state["step"])
        self._errors = _clones(own["errors"]) if own else {}
        if own is None and self._torch.iter > self._torch.start_powerSGD_iter:
            log.event("new-rank", why="the checkpoint has no error feedback of this rank; it starts at zero")
        same = state["matrix_rank"] == self._matrix_rank
        self._qs = _clones(state["qs"]) if same else {}
        if not same:
            was, now = state["matrix_rank"], self._matrix_rank
            log.event("override", setting="powerSGD.matrixRank", checkpoint=was, script=now)


def _clones(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def start(total_steps: int, warmup_steps: int = 0) -> int:
    """Returns the optimizer step at which powerSGD starts: torch's default, or earlier in a short run.

    warmup_steps: optimizer steps of the learning rate's warm-up.
    """
    return max(2, warmup_steps, min(START_STEP, total_steps // 10))


def attach(
    model: torch.nn.Module,
    kind: str = "none",
    *,
    matrix_rank: int = 1,
    start_step: int = START_STEP,
    min_compression_rate: float = 2.0,
    precision: str | None = None,
    around: Callable[[Any], Any] = lambda hook: hook,
) -> Compression:
    """Makes DDP compress the gradients that it exchanges.

    Call it before the first forward pass, and before a state is loaded.

    Args:
        model: wrapped by DDP, and maybe compiled.
        kind: "none", "bf16" or "powerSGD".
        matrix_rank: columns of powerSGD's thin matrices; 1 to 4 are usual, 32 for some language models.
        start_step: first optimizer step that powerSGD compresses: at least 2, and not within the warm-up.
            About a tenth of the run is a good start.
        min_compression_rate: a matrix is compressed only if it gets smaller by this factor.
        precision: name of the training's number format (`Amp(...).precision.name`); powerSGD refuses fp16.
            None with powerSGD: an advice is logged.
        around: wraps torch's hook before it is registered, such as `diagnostics.step_timer.StepTimer.timed`.

    Returns:
        The compression, whose state belongs into the checkpoint.

    Raises:
        ConfigurationError: an argument is not valid, or the model is not wrapped by DDP.
    """
    if kind not in KINDS:
        raise ConfigurationError(f"the gradient compression {kind!r} is not known: use {', '.join(KINDS)}")
    if kind == "none":
        return Compression("none")
    _require_valid(kind, matrix_rank, start_step, min_compression_rate, precision)
    ddp: Any = getattr(model, "_orig_mod", model)
    if not _useful(ddp, kind):
        return Compression("none")
    if ddp._comm_hooks:
        raise ConfigurationError(
            f"gradient compression {kind!r}: the DistributedDataParallel has a communication hook already, "
            "and it takes one: leave one of the two out"
        )
    if kind == "bf16":
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

        ddp.register_comm_hook(None, around(bf16_compress_hook))
        log.event("compression", kind=kind)
        return Compression("bf16")
    if precision is None:
        text = (
            "powerSGD does not work with fp16, which precision auto may choose: pass "
            "attach(precision=amp.precision.name)"
        )
        log.event("advice", about="compression", text=text)
    power = PowerSGD(
        {id(p): plain_state.clean(name) for name, p in ddp.module.named_parameters()},
        matrix_rank=matrix_rank,
        start_step=start_step,
        min_compression_rate=min_compression_rate,
    )
    # A lambda: torch checks annotations of a hook, and here they would be strings.
    ddp.register_comm_hook(None, around(lambda _, bucket: power.hook(bucket)))
    log.event("compression", kind=kind, from_step=start_step)
    return power


def _useful(model: torch.nn.Module, kind: str) -> bool:
    """Whether there are gradients to exchange. Raises ConfigurationError if the model is not a DDP model."""
    if isinstance(model, DistributedDataParallel):
        if dist.get_world_size(model.process_group) > 1:
            return True
    elif hasattr(model, "set_requires_gradient_sync"):
        raise ConfigurationError(
            f"gradient compression {kind} needs DDP, but the model is sharded by FSDP2, which has no "
            "communication hooks: leave it out, or reduce in bf16 by FSDP2's "
            "MixedPrecisionPolicy(reduce_dtype=...)"
        )
    elif dist.is_initialized() and dist.get_world_size() > 1:
        raise ConfigurationError(
            f"gradient compression {kind} needs a model wrapped by DDP, not a {type(model).__name__}: "
            "call it after DistributedDataParallel(model)"
        )
    why = f"gradient compression {kind} has no effect: with one rank, no gradients are exchanged"
    log.event("advice", about="compression", why=why, fix="leave it out")
    return False


def _require_valid(kind: str, matrix_rank: int, start_step: int, rate: float, precision: str | None) -> None:
    if kind == "powerSGD" and precision == "fp16":
        raise ConfigurationError(POWER_SGD_FP16)
    for name, value, least in (("matrix_rank", matrix_rank, 1), ("start_step", start_step, 2)):
        if value < least:
            raise ConfigurationError(f"gradient compression {kind}: {name}={value} must be at least {least}")
    if not rate > 0:
        raise ConfigurationError(f"gradient compression {kind}: min_compression_rate={rate} must be above 0")


def _matrix(parameter: torch.Tensor) -> tuple[int, int]:
    """Returns rows and columns of the parameter as the hook reshapes it."""
    rows = parameter.shape[0] if parameter.dim() else 1
    return rows, parameter.numel() // max(1, rows)

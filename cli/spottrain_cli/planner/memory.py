"""What one GPU holds during training, and the largest micro-batch that fits.

    state         weights, gradients, optimizer: with FSDP divided by the ranks
    activations   what the forward pass keeps for the backward pass, per sample
    reserve       CUDA context, allocator's fragments, NCCL's buffers

Activations follow Korthikanti et al. 2022 (arXiv:2205.05198, section 4), counted in elements so that other
precisions than 16 bit and a gated MLP are right too, with two corrections for PyTorch's autocast: LayerNorm
and the residual stream stay in fp32, and the loss is computed in fp32 from logits of all tokens. Attention is
`scaled_dot_product_attention`, which keeps no s x s matrix; `attention="math"` counts one that does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from spottrain.errors import ConfigurationError

from spottrain_cli.planner.transformer import Transformer

ELEMENT: Final = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of an activation by `training.precision`; bf16 and fp16 are autocast over fp32 weights."""
OPTIMIZERS: Final = {"adamw": 8, "adam": 8, "sgd-momentum": 4, "sgd": 0}
"""Bytes of state per parameter, in fp32."""
MODES: Final = ("plain", "checkpointed", "fsdp", "fsdp checkpointed")
"""From the fastest to the smallest. Checkpointed: each layer is computed again in the backward pass."""
USABLE: Final = 0.92
"""Share of the GPU's memory that PyTorch can use, beside fragments: an assumption."""
RESERVE: Final = 1.5e9
"""Bytes of the CUDA context, cuBLAS workspaces and NCCL buffers: an assumption."""


def modes(ranks: int) -> tuple[str, ...]:
    """Returns the modes that so many GPUs can use: a single one has nothing to shard over."""
    return MODES if ranks > 1 else MODES[:2]


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes on one GPU."""

    weights: float
    gradients: float
    optimizer: float
    working: float
    """Casts of the weights to 16 bit, or with FSDP the layers that are gathered at one time."""
    per_sample: float
    """Activations and logits of one sample."""
    recomputed: float = 0.0
    """Per sample: the one layer whose activations exist at a time, if checkpointed."""

    @property
    def fixed(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.working

    def total(self, micro_batch: int) -> float:
        return self.fixed + micro_batch * (self.per_sample + self.recomputed) + RESERVE

    def largest_micro_batch(self, gpu_bytes: float) -> int:
        """Returns the largest micro-batch that fits; 0 if none does."""
        free = USABLE * gpu_bytes - self.fixed - RESERVE
        return max(0, int(free // (self.per_sample + self.recomputed)))


def state_bytes(precision: str, optimizer: str) -> tuple[int, int, int]:
    """Returns bytes per parameter of weights, gradients and optimizer. Raises ConfigurationError."""
    _require(precision in ELEMENT, "precision", precision, ELEMENT)
    _require(optimizer in OPTIMIZERS, "optimizer", optimizer, OPTIMIZERS)
    return 4, 4, OPTIMIZERS[optimizer]


def estimate(
    model: Transformer,
    *,
    precision: str = "bf16",
    optimizer: str = "adamw",
    mode: str = "plain",
    ranks: int = 1,
    accumulates: bool = False,
    attention: str = "fused",
) -> Memory:
    """Returns what one of `ranks` GPUs holds. Raises ConfigurationError.

    Args:
        model: shape of the transformer.
        precision: fp32, bf16 or fp16, as `training.precision`.
        optimizer: one of OPTIMIZERS.
        mode: one of MODES. Without "fsdp" every rank holds all of the state (DDP).
        ranks: GPUs that FSDP divides the state among.
        accumulates: whether a step has several micro-batches; FSDP then keeps whole gradients until the last.
        attention: "fused" or "math".
    """
    _require(mode in MODES, "mode", mode, MODES)
    _require(attention in ("fused", "math"), "attention", attention, ("fused", "math"))
    weights, gradients, state = state_bytes(precision, optimizer)
    element, parameters = ELEMENT[precision], model.parameters
    cast = element if element < 4 else 0
    sharded, checkpointed = mode.startswith("fsdp"), mode.endswith("checkpointed")
    parts = ranks if sharded else 1
    gathered = 2 * model.parameters_per_layer * (weights + cast)  # a layer, and the next one fetched ahead
    layer = layer_bytes(model, element, attention)
    kept = model.sequence * model.hidden * 4 if checkpointed else layer
    return Memory(
        weights=weights * parameters / parts,
        gradients=gradients * parameters / (1 if accumulates else parts),
        optimizer=state * parameters / parts,
        working=gathered if sharded else cast * parameters,
        per_sample=model.layers * kept + head_bytes(model, element),
        recomputed=layer if checkpointed else 0.0,
    )


def layer_bytes(model: Transformer, element: int, attention: str = "fused") -> float:
    """Returns the bytes that one layer keeps of one sample."""
    hidden, mlp = model.hidden, model.mlp_width
    norms = 2 * (4 + element) * hidden  # input in fp32 and output, of two norms
    attended = element * (2 * hidden + 2 * model.key_value_width)  # q, k, v; input of the output layer
    inner = element * (4 if model.gated else 2) * mlp
    if model.gated and element < 4:
        inner += element * hidden  # autocast casts the MLP's input once for each of the two matrices
    masks = 2 * hidden if model.dropout else 0
    per_token = norms + attended + inner + masks
    if attention == "math":
        scores = element * (2 if model.dropout else 1) + (1 if model.dropout else 0)
        per_token += scores * model.heads * model.sequence
    return model.sequence * per_token


def head_bytes(model: Transformer, element: int) -> float:
    """Returns the bytes of one sample's last norm, logits, and the loss's fp32 copies at their peak."""
    logits = (element if element < 4 else 0) + 4 + 4  # as computed, in fp32, and its gradient
    return model.sequence * (model.hidden * (4 + element) + model.vocabulary * logits)


def _require(ok: bool, name: str, value: str, known: Iterable[str]) -> None:
    if not ok:
        raise ConfigurationError(f"{name} {value!r} is not known: use {', '.join(known)}")

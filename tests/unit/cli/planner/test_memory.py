"""What the planner estimates beside what PyTorch keeps for the backward pass of a real transformer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from spottrain_cli.planner import memory
from spottrain_cli.planner.transformer import MODELS, Transformer
from torch import nn

from tests.support.sentences import Told

HIDDEN, HEADS, LENGTH, WIDTH, SAMPLES = 128, 4, 256, 512, 2


class Layer(nn.Module):
    def __init__(self, *, gated: bool, math: bool) -> None:
        super().__init__()
        self.math = math
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.gate = nn.Linear(HIDDEN, WIDTH) if gated else None
        self.up, self.down = nn.Linear(HIDDEN, WIDTH), nn.Linear(WIDTH, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:2], HEADS, HIDDEN // HEADS)
        q, k, v = (each.view(shape).transpose(1, 2) for each in self.qkv(self.norm1(x)).chunk(3, -1))
        if self.math:
            seen = (q @ k.transpose(-1, -2) * shape[-1] ** -0.5).softmax(-1) @ v
        else:
            seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(x.shape))
        inner = self.norm2(x)
        wide: torch.Tensor = self.up(inner)
        out: torch.Tensor = self.down(F.gelu(wide) if self.gate is None else F.silu(self.gate(inner)) * wide)
        return x + out


def kept(model: nn.Module, precision: str) -> float:
    """Bytes per sample that autograd keeps, each storage once, without the parameters."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    found: dict[int, int] = {}
    alive: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        alive.append(tensor)  # else another one may get its address
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    x = torch.randn(SAMPLES, LENGTH, HIDDEN, requires_grad=True)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), autocast:
        model(x)
    return sum(found.values()) / SAMPLES


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("gated", [False, True], ids=["gelu", "gated"])
@pytest.mark.parametrize("attention", ["fused", "math"])
def test_a_layer_keeps_what_is_estimated(precision: str, gated: bool, attention: str) -> None:
    shape = Transformer(
        layers=1, hidden=HIDDEN, heads=HEADS, vocabulary=1, sequence=LENGTH, feed_forward=WIDTH, gated=gated
    )
    estimated = memory.layer_bytes(shape, memory.ELEMENT[precision], attention)
    layers = [Layer(gated=gated, math=attention == "math") for _ in range(2)]
    one, two = (kept(nn.Sequential(*layers[:count]), precision) for count in (1, 2))
    casts = 2 * sum(each.numel() for each in layers[1].parameters()) / SAMPLES if precision == "bf16" else 0
    assert two - one - casts == pytest.approx(estimated, rel=0.02)


def test_known_models_have_the_parameters_that_their_papers_count() -> None:
    counted = {name: model.parameters for name, model in MODELS.items()}
    assert counted["gpt2"] == 124_439_808
    assert counted["llama-2-7b"] == 6_738_415_616
    assert counted["llama-3-8b"] == 8_030_261_248
    assert counted["llama-3-70b"] == 70_553_706_496
    assert counted["bert-base"] == 109_514_298, (
        "with the head of masked-language training, without the pooler"
    )


def test_sharding_divides_the_state_and_accumulation_keeps_whole_gradients() -> None:
    model = MODELS["llama-2-7b"]
    plain = memory.estimate(model)
    assert plain.weights + plain.gradients + plain.optimizer == 16 * model.parameters
    sharded = memory.estimate(model, mode="fsdp", ranks=8)
    assert 8 * (sharded.weights + sharded.gradients + sharded.optimizer) == 16 * model.parameters
    assert memory.estimate(model, mode="fsdp", ranks=8, accumulates=True).gradients == 4 * model.parameters
    assert plain.largest_micro_batch(80e9) == 0 < sharded.largest_micro_batch(80e9)


def test_checkpointing_keeps_one_layer_and_the_inputs_of_all() -> None:
    model = MODELS["gpt2"]
    plain, less = memory.estimate(model), memory.estimate(model, mode="checkpointed")
    head = memory.head_bytes(
        model, 2
    )  # of GPT-2's 50,257 logits, which are more than all layers checkpointed
    assert less.per_sample - head < (plain.per_sample - head) / 8
    assert less.recomputed == memory.layer_bytes(model, 2)
    assert less.largest_micro_batch(24e9) > 1.5 * plain.largest_micro_batch(24e9)


@pytest.mark.parametrize(
    "given", [{"precision": "fp8"}, {"optimizer": "lion"}, {"mode": "zero"}, {"attention": "ring"}], ids=str
)
def test_what_is_not_known_is_refused(given: dict[str, Any], told: Told) -> None:
    told(lambda: memory.estimate(MODELS["gpt2"], **given))

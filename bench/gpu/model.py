"""GPT-2's shape (124M parameters), as nanoGPT trains it: the same model for both sides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    name: str
    vocabulary: int
    context: int
    width: int
    layers: int
    heads: int


GPT_124M: Final = Shape(name="GPT 124M", vocabulary=50304, context=1024, width=768, layers=12, heads=12)
"""The vocabulary is GPT-2's, rounded up to a multiple of 64."""
SMALL: Final = Shape(name="GPT small", vocabulary=256, context=64, width=64, layers=2, heads=2)


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.norm1, self.norm2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, time, width) -> the same."""
        batch, time, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, time, width))
        grown: torch.Tensor = F.gelu(self.up(self.norm2(x)))
        done: torch.Tensor = x + self.down(grown)
        return done


class GPT(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.places = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width, bias=False)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.head.weight = self.tokens.weight  # tied

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, time) -> (batch, time, vocabulary) logits."""
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class Windows(torch.utils.data.Dataset[torch.Tensor]):
    """Random tokens, fixed by a seed: what they say does not change how fast they are trained on."""

    def __init__(self, shape: Shape, count: int) -> None:
        generator = torch.Generator().manual_seed(1)
        size = (count, shape.context + 1)
        self.rows = torch.randint(0, shape.vocabulary, size, generator=generator, dtype=torch.int32)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index].long()


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), batch[:, 1:].reshape(-1))

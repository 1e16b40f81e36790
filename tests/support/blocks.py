"""A small model of residual blocks, in which activation checkpointing finds something to recompute."""

from __future__ import annotations

import torch


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = torch.nn.Linear(8, 32)
        self.narrow = torch.nn.Linear(32, 8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        inside: torch.Tensor = self.narrow(self.wide(x).relu())
        return x + inside if mask is None else x + inside * mask


class Net(torch.nn.Module):
    """Hands its blocks a mask too, where there is one."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(depth))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) if mask is None else block(x, mask)
        return x

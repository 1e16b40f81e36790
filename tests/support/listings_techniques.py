"""What the articles' listings on precision and activation checkpointing do, told again in few lines.

Used by tests/runs/test_listings_techniques.py alone. Only the behaviour is the articles', none of the text.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.utils.checkpoint import checkpoint

# --- 002: a scaler that depends on a name that is not there ---------------------------------------------
SCALER_BY_TYPE: Final = """\
def begin():
    scaler = torch.amp.GradScaler("cpu", enabled=(dtype == torch.float16))
    return scaler, torch.autocast("cpu", dtype=torch.bfloat16)
"""
"""As text, for no checker lets it pass: `dtype` is defined nowhere, and autocast does not ask for it."""


def begin_by_type(**names: Any) -> tuple[torch.amp.GradScaler, torch.autocast]:
    """The listing's two lines, with whatever else the script may define."""
    there: dict[str, Any] = {"torch": torch, **names}
    exec(SCALER_BY_TYPE, there)
    begun: tuple[torch.amp.GradScaler, torch.autocast] = there["begin"]()
    return begun


# --- 001: a mixed-precision loop that knows no scheduler ------------------------------------------------
class ByItself:
    """Takes model, optimizer and a type: forward, backward, clip, step. A scheduler has no place in it."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> None:
        self.model, self.optimizer, self.dtype = model, optimizer, dtype
        self.scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)

    def train_step(self, x: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=self.dtype):
            loss = self.model(x).float().square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()


# --- 002: a wrapper around every other block ------------------------------------------------------------
class Wrapped(torch.nn.Module):
    """A module in between, whose forward knows one argument."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=False)


def wrap_every_other(blocks: torch.nn.ModuleList) -> None:
    for number in range(0, len(blocks), 2):
        blocks[number] = Wrapped(blocks[number])


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

"""A small GPT that learns Python from the source of the standard library it runs on: real text, no download.

spottrain run examples/gpt_stdlib.py            # Ctrl-C saves, the same command goes on

2000 steps on a GPU, 100 on a CPU, which take half a minute there.
"""

import os
import sysconfig
from pathlib import Path

import spottrain
import torch
import torch.nn.functional as F
from torch import nn

CONTEXT, WIDTH, LAYERS, HEADS, BYTES = 128, 128, 4, 4, 256


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, time, width) -> the same."""
        heads = self.qkv(self.norm1(x)).view(*x.shape[:2], HEADS, 3 * WIDTH // HEADS).transpose(1, 2)
        q, k, v = heads.chunk(3, dim=-1)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.out(seen)
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(BYTES, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, BYTES, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.head.weight = self.tokens.weight  # tied

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, time) of bytes -> (batch, time, 256) logits of the next byte."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.places(places))))


class Windows(torch.utils.data.Dataset):
    """Windows of CONTEXT + 1 bytes, side by side."""

    def __init__(self, text: torch.Tensor) -> None:
        self.rows = text[: len(text) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index].long()


# --- from here on: what a training script has to say -------------------------------------------------
def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.reshape(-1, BYTES), batch[:, 1:].reshape(-1))


spottrain.seed(1)
files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
text = torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8)
cut = len(text) * 9 // 10
model = GPT()

trainer = spottrain.Trainer(
    model=model,
    optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
    train_dataset=Windows(text[:cut]),
    eval_dataset=Windows(text[-128 * (CONTEXT + 1) :]),
    loss_fn=loss,
    max_steps=int(os.environ.get("STEPS", "2000" if torch.cuda.is_available() else "100")),
    global_batch_size=32,
    warmup_steps=20,
    clip_grad_norm=1.0,
    eval_every=250,
    log_every=1,
    deterministic=True,
)
result = trainer.fit()
print(f"loss {result.loss:.3f}, evaluation {result.best:.3f}, weights {result.output_uri or 'not stored'}")

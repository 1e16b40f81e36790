"""A loop of nanoGPT's shape: random batches from a generator, each drawn while the one before it is computed.

Gradient accumulation, a cosine schedule by hand, an evaluation every EVAL_EVERY steps. The text is the source
of Python's argparse, byte by byte.
"""

import argparse
import math
import os
from collections.abc import Iterator
from pathlib import Path

import spottrain
import torch
from torch import nn
from torch.nn.functional import cross_entropy

MAX_STEPS = int(os.environ.get("MAX_STEPS", "240"))
ACCUMULATION, BATCH, BLOCK, WIDTH = 4, 4, 32, 32
EVAL_EVERY, WARMUP, LEARNING_RATE = 50, 20, 3e-3

torch.manual_seed(1)
text = torch.tensor(list(Path(argparse.__file__).read_bytes())) % 128
split = {"train": text[: len(text) * 9 // 10], "val": text[len(text) * 9 // 10 :]}


def batches(name: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    while True:
        starts = torch.randint(len(split[name]) - BLOCK, (BATCH,)).tolist()
        x = torch.stack([split[name][i : i + BLOCK] for i in starts])
        yield x, torch.stack([split[name][i + 1 : i + 1 + BLOCK] for i in starts])


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(128, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.1, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 128)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(BLOCK)
        h = self.tokens(x) + self.places.weight
        for block in self.blocks:
            h = block(h, src_mask=mask, is_causal=True)
        return cross_entropy(self.head(h).flatten(0, 1), y.flatten())


def rate(step: int) -> float:
    if step < WARMUP:
        return LEARNING_RATE * (step + 1) / WARMUP
    return LEARNING_RATE * (0.55 + 0.45 * math.cos(math.pi * (step - WARMUP) / (MAX_STEPS - WARMUP)))


@torch.no_grad()
def estimate_loss(name: str) -> float:
    model.eval()
    drawn = batches(name)
    losses = [float(model(*next(drawn))) for _ in range(5)]
    model.train()
    return sum(losses) / len(losses)


model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
run = spottrain.Run(model=model, optimizer=optimizer, max_steps=MAX_STEPS)
stream = run.ahead(batches("train"))
x, y = next(stream)
step = run.global_step
while step < MAX_STEPS:
    for group in optimizer.param_groups:
        group["lr"] = rate(step)
    if step % EVAL_EVERY == 0:
        print(f"step {step} val loss {estimate_loss('val'):.4f}", flush=True)
    for _ in range(ACCUMULATION):
        loss = model(x, y)
        x, y = next(stream)  # while the GPU works
        (loss / ACCUMULATION).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    run.step_completed(loss=loss)
    step += 1

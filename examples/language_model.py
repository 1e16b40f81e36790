"""A language model: an LSTM reads a text in windows, and its hidden state is carried from one to the next.

Truncated backpropagation, gradient clipping, a learning rate that falls when the validation loss does not.
The text is the source of Python's argparse, byte by byte.
"""

import argparse
import os
from pathlib import Path

import spottrain
import torch
from torch import nn
from torch.nn.functional import cross_entropy

EPOCHS = int(os.environ.get("EPOCHS", "6"))
BATCH, WINDOW, WIDTH = 32, 24, 64

torch.manual_seed(1)
text = torch.tensor(list(Path(argparse.__file__).read_bytes())) % 128
columns = text[: len(text) // BATCH * BATCH].view(BATCH, -1).t()  # BATCH texts, read side by side
train, held_out = columns[:-300], columns[-300:]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(WIDTH, 128)

    def forward(self, x: torch.Tensor, hidden: tuple) -> tuple[torch.Tensor, tuple]:
        output, hidden = self.lstm(self.dropout(self.embedding(x)), hidden)
        return self.head(self.dropout(output)), hidden


def validate() -> float:
    model.eval()
    with torch.no_grad():
        output, _ = model(held_out[:-1], (torch.zeros(1, BATCH, WIDTH), torch.zeros(1, BATCH, WIDTH)))
    return float(cross_entropy(output.flatten(0, 1), held_out[1:].flatten()))


model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=8.0)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.25, patience=0, threshold=0.05)
hidden = (torch.zeros(1, BATCH, WIDTH), torch.zeros(1, BATCH, WIDTH))
run = spottrain.Run(model=model, optimizer=optimizer, scheduler=scheduler, extra={"hidden": hidden})

for epoch in run.epochs(EPOCHS):
    model.train()
    for start in range(run.epoch_step * WINDOW, len(train) - 1, WINDOW):
        x, y = train[start : start + WINDOW][: len(train) - 1 - start], train[start + 1 : start + 1 + WINDOW]
        output, last = model(x, hidden)
        loss = cross_entropy(output.flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        for kept, new in zip(hidden, last, strict=True):
            kept.copy_(new.detach())
        run.step_completed(loss=loss)
    for kept in hidden:
        kept.zero_()  # the next epoch begins with the text
    found = validate()
    scheduler.step(found)
    print(f"epoch {epoch} validation loss {found:.4f} lr {optimizer.param_groups[0]['lr']:.4f}", flush=True)

"""Handwritten digits, 8 x 8 pixels: Flatten, Dense 128 with ReLU, Dense 10, Adam, batches of 32, 5 epochs.

digits.csv.gz is the test set of UCI's "Optical Recognition of Handwritten Digits" (E. Alpaydin, C. Kaynak;
CC BY 4.0) as scikit-learn ships it: 1,797 rows of 64 pixels (0 to 16) and the digit.
"""

from pathlib import Path

import numpy as np
import spottrain
import torch
from torch import nn

spottrain.seed(1)
file = Path(__file__).with_name("digits.csv.gz")
rows = torch.from_numpy(np.loadtxt(file, delimiter=",", dtype=np.float32))
images, digits = rows[:, :64].reshape(-1, 8, 8) / 16, rows[:, 64].long()
held_out = torch.utils.data.TensorDataset(images[-297:], digits[-297:])
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def accuracy(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"accuracy": (model(batch[0]).argmax(1) == batch[1]).float().mean()}


spottrain.Trainer(
    model=model,
    optimizer=torch.optim.Adam(model.parameters()),
    train_dataset=torch.utils.data.TensorDataset(images[:-297], digits[:-297]),
    eval_dataset=held_out,
    loss_fn=loss,
    metrics=accuracy,
    epochs=5,
    global_batch_size=32,
    schedule="constant",
).fit()

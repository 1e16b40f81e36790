"""Image classification: a convolutional network, random augmentation, validation, a step schedule.

The images are the handwritten digits of digits.csv.gz (see digits.py).
"""

import os
from pathlib import Path

import numpy as np
import spottrain
import torch
from torch import nn
from torch.nn.functional import cross_entropy

EPOCHS = int(os.environ.get("EPOCHS", "20"))

torch.manual_seed(1)
rows = torch.from_numpy(
    np.loadtxt(Path(__file__).with_name("digits.csv.gz"), delimiter=",", dtype=np.float32)
)
images, labels = rows[:, :64].reshape(-1, 1, 8, 8) / 16, rows[:, 64].long()
held_out_images, held_out_labels = images[-297:], labels[-297:]


class Augmented(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """The training images, each moved by up to one pixel and a little noisy whenever it is read."""

    def __len__(self) -> int:
        return len(images) - 297

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        down, right = torch.randint(-1, 2, (2,)).tolist()
        moved = torch.roll(images[i], (down, right), (1, 2))
        return moved + 0.05 * torch.randn_like(moved), labels[i]


model = nn.Sequential(
    nn.Conv2d(1, 32, 3, padding=1),
    nn.BatchNorm2d(32),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Dropout(0.25),
    nn.Linear(512, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=8, gamma=0.3)
loader = spottrain.data.loader(Augmented(), batch_size=32, shuffle=True)
run = spottrain.Run(model=model, optimizer=optimizer, scheduler=scheduler, data=loader)

for epoch in run.epochs(EPOCHS):
    model.train()
    for x, y in loader:
        loss = cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.step_completed(loss=loss)
    scheduler.step()
    model.eval()
    with torch.no_grad():
        right = (model(held_out_images).argmax(1) == held_out_labels).float().mean()
    print(f"epoch {epoch} accuracy {right:.4f} lr {scheduler.get_last_lr()[0]:.4f}", flush=True)

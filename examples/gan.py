"""A GAN: two networks, two optimizers, and one noise vector from which it shows its progress.

It learns the handwritten digits of digits.csv.gz (see digits.py).
"""

import os
from pathlib import Path

import numpy as np
import spottrain
import torch
from torch import nn
from torch.nn.functional import softplus

EPOCHS = int(os.environ.get("EPOCHS", "15"))

torch.manual_seed(1)
rows = np.loadtxt(Path(__file__).with_name("digits.csv.gz"), delimiter=",", dtype=np.float32)
images = torch.from_numpy(rows)[:, :64] / 8 - 1

G = nn.Sequential(
    nn.Linear(16, 128),
    nn.BatchNorm1d(128),
    nn.ReLU(),
    nn.Linear(128, 128),
    nn.ReLU(),
    nn.Linear(128, 64),
    nn.Tanh(),
)
D = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(128, 1))
opt_g = torch.optim.Adam(G.parameters(), lr=1e-3, betas=(0.5, 0.999))
opt_d = torch.optim.Adam(D.parameters(), lr=1e-3, betas=(0.5, 0.999))
z = torch.randn(64, 16)  # the same in all epochs
loader = spottrain.data.loader(images, batch_size=32, shuffle=True)
run = spottrain.Run(model={"G": G, "D": D}, optimizer={"G": opt_g, "D": opt_d}, data=loader, extra={"z": z})

for epoch in run.epochs(EPOCHS):
    for real in loader:
        fake = G(torch.randn(len(real), 16))
        loss_d = (softplus(-D(real)) + softplus(D(fake.detach()))).mean()
        opt_d.zero_grad()
        loss_d.backward()
        opt_d.step()

        loss_g = softplus(-D(fake)).mean()
        opt_g.zero_grad()
        loss_g.backward()
        opt_g.step()
        run.step_completed(loss=loss_g)
    G.eval()
    with torch.no_grad():
        shown = G(z)
    G.train()
    print(f"epoch {epoch} brightness {shown.mean():.4f} spread {shown.std(0).mean():.4f}", flush=True)

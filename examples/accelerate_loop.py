"""A loop around Accelerate's Accelerator, for one or several processes."""

import os

import spottrain.integrations.accelerate
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

EPOCHS = int(os.environ.get("EPOCHS", "10"))


class Sums(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Eight numbers, noisy each time they are read, and their sum."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(8, generator=torch.Generator().manual_seed(i))
        return x + 0.01 * torch.randn(8), x.sum()


set_seed(1)
accelerator = Accelerator(cpu=not torch.cuda.is_available())
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer = accelerator.prepare(model, optimizer)
loader = spottrain.data.loader(Sums(), batch_size=32, shuffle=True)
run = spottrain.integrations.accelerate.AccelerateRun(accelerator, data=loader)
for _ in run.epochs(EPOCHS):
    for x, y in loader:
        x, y = x.to(accelerator.device), y.to(accelerator.device)
        loss = torch.nn.functional.mse_loss(model(x).squeeze(-1), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        run.step_completed(loss=loss)

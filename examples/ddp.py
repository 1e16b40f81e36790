"""DistributedDataParallel: each process trains on its share of the data.

A plain command starts one pod with two processes, or one process in each of two pods; see the manifests.
"""

import os

import spottrain
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

EPOCHS = int(os.environ.get("EPOCHS", "10"))

dist.init_process_group()
device = (
    torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
)
torch.manual_seed(1)
x = torch.randn(4096, 16)
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))
model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)).to(device))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
loader = spottrain.data.loader(dataset, batch_size=32, shuffle=True)
run = spottrain.Run(model=model, optimizer=optimizer, data=loader)

for epoch in run.epochs(EPOCHS):
    for inputs, targets in loader:
        loss = nn.functional.mse_loss(model(inputs.to(device)), targets.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.step_completed(loss=loss)
    if dist.get_rank() == 0:
        print(f"epoch {epoch} is done", flush=True)

dist.destroy_process_group()

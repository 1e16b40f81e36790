"""FSDP2: the weights, gradients and optimizer state of a transformer are sharded over the processes."""

import os

import spottrain
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

EPOCHS = int(os.environ.get("EPOCHS", "4"))

dist.init_process_group()
device = (
    torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
)
torch.manual_seed(1)
numbers = torch.randint(10, (1024, 12))
dataset = TensorDataset(numbers, numbers.cumsum(1) % 10)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 32)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 2, 64, 0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], x.device)
        h = self.embedding(x)
        for layer in self.layers:
            h = layer(h, src_mask=mask, is_causal=True)
        return self.head(h)


model = Model().to(device)
for layer in model.layers:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.7)
loader = spottrain.data.loader(dataset, batch_size=16, shuffle=True)
run = spottrain.Run(model=model, optimizer=optimizer, scheduler=scheduler, data=loader)

for epoch in run.epochs(EPOCHS):
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x.to(device)).flatten(0, 1), y.to(device).flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        run.step_completed(loss=loss)
    scheduler.step()
    if dist.get_rank() == 0:
        print(f"epoch {epoch} is done, lr {scheduler.get_last_lr()[0]:.2e}", flush=True)

dist.destroy_process_group()

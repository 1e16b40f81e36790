"""A training loop of one's own, kept from being lost by the lines with `run`.

spottrain run --checkpoint checkpoints/own examples/own_loop.py            # Ctrl-C saves; again: goes on
spottrain run --nproc 2 --checkpoint checkpoints/own examples/own_loop.py  # the same by DDP
"""

import os

import spottrain
import torch
import torch.distributed as dist

STEPS = int(os.environ.get("STEPS", "2000"))


class Sums(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Eight numbers, noisy each time they are read, and their sum."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(8, generator=torch.Generator().manual_seed(i))
        return x + 0.01 * torch.randn(8), x.sum()


def main() -> None:
    spottrain.seed(1)
    model: torch.nn.Module = torch.nn.Sequential(
        torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)
    )
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group()
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    loader = spottrain.data.loader(Sums(), batch_size=32, shuffle=True)

    run = spottrain.Run(
        model=model, optimizer=optimizer, scheduler=scheduler, data=loader, max_steps=STEPS, log_every=100
    )
    for x, y in run.batches(loader):
        loss = torch.nn.functional.mse_loss(model(x).squeeze(-1), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        run.step_completed(loss=loss)
    run.finish()


if __name__ == "__main__":
    main()

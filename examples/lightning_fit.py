"""Lightning's Trainer, unchanged: spottrain run attaches to it.

spottrain run --checkpoint checkpoints/lightning examples/lightning_fit.py   # Ctrl-C saves; again: goes on
"""

import os

import lightning.pytorch as L
import torch

STEPS = int(os.environ.get("STEPS", "2000"))


class Sums(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Eight numbers, noisy each time they are read, and their sum."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(8, generator=torch.Generator().manual_seed(i))
        return x + 0.01 * torch.randn(8), x.sum()


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.inner(batch[0]).squeeze(-1), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    L.seed_everything(1)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = L.Trainer(
        max_steps=STEPS,
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        enable_checkpointing=False,  # when to save is decided by --interval
        log_every_n_steps=100,
        logger=False,
        enable_progress_bar=False,
    )
    loader = torch.utils.data.DataLoader(Sums(), batch_size=32, shuffle=True)
    trainer.fit(Model(), loader)


if __name__ == "__main__":
    main()

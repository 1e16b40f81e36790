"""The training of scenes with a custom loop: `spottrain.Run`, epochs, a schedule by epoch, validation by a
plain DataLoader with a worker of its own. Run by `spottrain run` in a pod (`pod.py`).

After each epoch it writes a line into `epochs`: what a resume must neither skip nor do otherwise.
"""

from __future__ import annotations

import time
from typing import Any

import spottrain
import torch
from spottrain.checkpoint.tree import Flattened
from spottrain.lifecycle.session import current

from tests.chaos import digests
from tests.chaos.training import ORDER, TELLER, Augmented, Model, leaf_of, watch_store

spottrain.seed(3)


class Held(Augmented):
    """What validation reads, in a worker."""

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(4, generator=torch.Generator().manual_seed(1000 + i))
        return x, x.sum()


model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.8)
loader = spottrain.data.loader(Augmented(), batch_size=ORDER.batch, num_workers=ORDER.workers, shuffle=True)
validation = torch.utils.data.DataLoader(
    Held(), batch_size=28, num_workers=1, generator=torch.Generator().manual_seed(0)
)
session = current()
if session.store is not None:
    watch_store(session.store, lambda: session.board.facts.step)  # before the run claims HEAD
run = spottrain.Run(model=model, optimizer=optimizer, scheduler=scheduler, data=loader)
last_loss: float = float("nan")


def record(name: str = "states") -> None:
    shared, own = Flattened(run._shared()), Flattened(run._own())
    TELLER.write(
        name,
        {
            "step": run.global_step,
            "at": time.monotonic(),
            "loss": last_loss.hex(),
            "best": None,
            **digests.shared_parts(shared.plain, leaf_of(shared)),
            **digests.own_parts(own.plain, leaf_of(own)),
        },
    )


def train(batch: Any) -> torch.Tensor:
    time.sleep(ORDER.pause)
    TELLER.reached("micro-step", run.global_step)
    loss = torch.nn.functional.mse_loss(model(batch[0]), batch[1])
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    optimizer.step()
    return loss


def validate() -> float:
    model.eval()
    total = torch.zeros(())
    with torch.no_grad():
        for x, y in validation:
            TELLER.reached("evaluation", run.global_step)
            total += torch.nn.functional.mse_loss(model(x), y)
    model.train()
    return float(total)


STEPS_PER_EPOCH = -(-len(Augmented()) // ORDER.batch)
record()
for epoch in run.epochs(ORDER.steps // STEPS_PER_EPOCH):
    for batch in loader:
        loss = train(batch)
        last_loss = float(loss)
        if (run.global_step + 1) % STEPS_PER_EPOCH == 0:
            TELLER.reached("epoch's last step", run.global_step)
        run.step_completed(loss=loss)
        record()
        TELLER.arm_loader(run.global_step)
        TELLER.reached("step", run.global_step)
    scheduler.step()
    TELLER.write(
        "epochs",
        {"epoch": epoch, "step": run.global_step, "rate": scheduler.get_last_lr(), "loss": validate().hex()},
    )
record("finished")  # finish() saves what the work after the last epoch has changed
run.finish()

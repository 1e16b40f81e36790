"""The training of most scenes: a tiny `Trainer`. Run by `spottrain run` in a pod (`pod.py`).

It rings a bell at the points of its order (`order.py`).
"""

from __future__ import annotations

import threading
import time
from typing import Any

import spottrain
import torch
from spottrain.checkpoint.tree import Flattened
from spottrain.lifecycle.session import current

from tests.chaos import digests
from tests.chaos.training import ORDER, TELLER, Augmented, Model, leaf_of, watch_store

spottrain.seed(3)


class Watched(spottrain.Trainer):
    """Records the state wherever a checkpoint of it could be made."""

    def _evaluate(self) -> None:
        super()._evaluate()
        if self.evaluations.due(self.step):  # a stop has cut it short
            return
        state = self.checkpoint_state()
        shared, own = Flattened(state.shared()), Flattened(state.own())
        TELLER.write(
            "states",
            {
                "step": self.step,
                "at": time.monotonic(),
                "loss": float(self.last_loss).hex(),
                "best": shared.plain["progress"]["best"],
                **digests.shared_parts(shared.plain, leaf_of(shared)),
                **digests.own_parts(own.plain, leaf_of(own)),
            },
        )
        TELLER.arm_loader(self.step)
        TELLER.reached("step", self.step)


def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    time.sleep(ORDER.pause)
    if not model.training:
        TELLER.reached("evaluation", trainer.step)
    else:
        TELLER.reached("micro-step", trainer.step)
        if trainer.settings.compile and TELLER.awaits("compile"):
            threading.Timer(0.3, TELLER.reached, ["compile"]).start()  # by then it is at it
    return torch.nn.functional.mse_loss(model(batch[0]).float(), batch[1])


model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
trainer = Watched(
    model=model,
    optimizer=optimizer,
    train_dataset=Augmented(),
    eval_dataset=Augmented() if ORDER.evaluation else None,
    eval_every=9,
    loss_fn=loss,
    max_steps=ORDER.steps,
    global_batch_size=ORDER.batch,
    micro_batch_size=ORDER.micro,
    schedule=(
        torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 20)
        if ORDER.stateful_schedule
        else "cosine"
    ),
    clip_grad_norm=1.0,
    log_every=10,
    num_workers=ORDER.workers,
    drop_last=ORDER.drop_last,
    deterministic=True,
)
trainer.scaler.set_growth_interval(7)  # so that its state changes within the run
if current().store is not None:
    watch_store(current().store, lambda: trainer.step)
trainer.fit()

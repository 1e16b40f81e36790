"""The training of every scene: tiny, random wherever a resume could go wrong, and recorded at every step.

Run by `spottrain run` in a process of `zygote.py`. It rings a bell at the points of its order, and writes
the digests of the whole state after each step, and each write of HEAD, beside the store.
"""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import spottrain
import torch
from spottrain import trainerstate
from spottrain.checkpoint.tree import Flattened
from spottrain.process.session import current

from tests.chaos import digests
from tests.chaos.order import Order, Teller, step_of

ORDER = Order.from_env(os.environ)
TELLER = Teller(ORDER, int(os.environ.get("RANK", "0")))
if TELLER.awaits("upload"):
    root = Path(__file__).parents[2]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), str(root)])
TELLER.reached("import")
spottrain.seed(3)


class Augmented(torch.utils.data.Dataset[Any]):
    """The last batch of an epoch is a smaller one."""

    def __len__(self) -> int:
        return 56

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        TELLER.fetched()
        x = torch.randn(4, generator=torch.Generator().manual_seed(i))
        return x + 0.01 * torch.randn(4), x.sum()


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 16)
        self.norm = torch.nn.BatchNorm1d(16)
        self.drop = torch.nn.Dropout(0.1)
        self.last = torch.nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.drop(self.norm(self.first(x)).relu())).squeeze(-1)


class Watched(spottrain.Trainer):
    """Records the state wherever a checkpoint of it could be made."""

    def _judge(self) -> None:
        super()._judge()
        if self.judge.due(self.step):  # a stop has cut it short
            return
        state = trainerstate.of(self)
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


def leaf_of(tree: Flattened) -> digests.Leaf:
    def leaf(number: int) -> str:
        tensor = tree.leaves[number].tensor
        body = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return digests.tensor_digest(str(tensor.dtype).removeprefix("torch."), tensor.shape, body)

    return leaf


def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    time.sleep(ORDER.pause)
    if not model.training:
        TELLER.reached("evaluation", trainer.step)
    else:
        TELLER.reached("micro-step", trainer.step)
        if trainer.settings.compile and TELLER.awaits("compile"):
            threading.Timer(0.3, TELLER.reached, ["compile"]).start()  # by then it is at it
    return torch.nn.functional.mse_loss(model(batch[0]).float(), batch[1])


# --- the store, as far as it is asked by this process -------------------------------------------------
def watch_store(store: Any) -> None:
    """Writes down each write of HEAD, and tells of the points between the parts of a commit."""
    kind = type(store)
    put_if_absent, put_if_match, delete = kind.put_if_absent, kind.put_if_match, kind.delete

    def absent(self: Any, key: str, body: bytes) -> Any:
        if key == "HEAD":
            return head(key, "", body, lambda: put_if_absent(self, key, body))
        if not key.endswith("manifest.json"):
            return put_if_absent(self, key, body)
        TELLER.reached("before manifest", step_of(key))
        answer = put_if_absent(self, key, body)
        TELLER.reached("before HEAD", step_of(key))
        return answer

    def match(self: Any, key: str, body: bytes, etag: str) -> Any:
        if key == "HEAD":
            return head(key, etag, body, lambda: put_if_match(self, key, body, etag))
        return put_if_match(self, key, body, etag)

    def removed(self: Any, keys: Any) -> None:
        if any(key.endswith("manifest.json") for key in keys):
            TELLER.reached("pruning", trainer.step)
        delete(self, keys)

    kind.put_if_absent, kind.put_if_match, kind.delete = absent, match, removed


def head(key: str, etag: str, body: bytes, put: Any) -> Any:
    text = bytes(body).decode()
    state = json.loads(text)["state"]
    TELLER.write("heads", {"at": time.monotonic(), "match": etag, "body": text})
    if state != "active":
        TELLER.reached("release", trainer.step)
    try:
        answer = put()
    except Exception as error:
        TELLER.write("heads", {"at": time.monotonic(), "match": etag, "error": type(error).__name__})
        raise
    TELLER.write("heads", {"at": time.monotonic(), "match": etag, "etag": answer})
    TELLER.reached("after release" if state != "active" else "after HEAD", trainer.step)
    return answer


model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
trainer = Watched(
    model=model,
    optimizer=optimizer,
    train_set=Augmented(),
    eval_set=Augmented() if ORDER.evaluation else None,
    eval_every=9,
    loss=loss,
    max_steps=ORDER.steps,
    batch_size=ORDER.batch,
    micro_batch_size=ORDER.micro,
    schedule=(
        torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 20)
        if ORDER.stateful_schedule
        else "cosine"
    ),
    clip_grad_norm=1.0,
    log_every=10,
    workers=ORDER.workers,
    drop_last=ORDER.drop_last,
    deterministic=True,
)
trainer.scaler.set_growth_interval(7)  # so that its state changes within the run
if current().store is not None:
    watch_store(current().store)
trainer.fit()

"""`Run` goes on with a checkpoint of `Trainer`, and the reverse, bit for bit."""

from __future__ import annotations

import pytest

from tests.runs.conftest import Lab

SCRIPT = """\
import os, time
import torch, spottrain
from spottrain.techniques.ema import EMA

spottrain.seed(3)


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, i):
        x = torch.randn(4, generator=torch.Generator().manual_seed(i))
        return x, x.sum()


def loss_of(model, batch):
    time.sleep(float(os.environ.get("PAUSE", "0")))
    return torch.nn.functional.mse_loss(model(batch[0]).squeeze(-1), batch[1])


parts = torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), *parts)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)


def trainer():
    spottrain.Trainer(
        model=model, optimizer=optimizer, train_dataset=Numbers(), loss_fn=loss_of, max_steps=24,
        global_batch_size=8, ema_decay=0.9, schedule="cosine", warmup_steps=3, log_every=1,
    ).fit()


def run():
    loader = spottrain.data.loader(Numbers(), batch_size=8, shuffle=True)
    scheduler = spottrain.techniques.lr_schedule(optimizer, "cosine", warmup_steps=3, total_steps=24)
    ema = EMA(model, decay=0.9)
    run = spottrain.Run(
        model=model, optimizer=optimizer, scheduler=scheduler, data=loader, extra={"ema": ema}, max_steps=24,
        log_every=1,
    )
    for batch in run.batches(loader):
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        ema.update(run.global_step + 1)
        run.step_completed(loss=loss)
    run.finish()


{"trainer": trainer, "run": run}[os.environ["LOOP"]]()
"""


@pytest.mark.parametrize("first", ["trainer", "run"])
def test_one_loop_goes_on_where_the_other_was(lab: Lab, first: str) -> None:
    second = {"trainer": "run", "run": "trainer"}[first]
    plain = lab.run(SCRIPT, at="plain", attempt=1, env={"LOOP": first}).done()
    stopped = lab.run(SCRIPT, attempt=1, env={"LOOP": first, "PAUSE": "0.1"}).until(" step=9/").stopped()
    rest = lab.run(SCRIPT, attempt=2, env={"LOOP": second}).done()
    assert min(rest.losses) == max(stopped.losses) + 1
    assert stopped.losses | rest.losses == plain.losses and rest.digest == plain.digest

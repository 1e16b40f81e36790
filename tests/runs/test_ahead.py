"""Batches that are drawn before they are used, and plain values in `extra`, over a stop and a resume."""

from __future__ import annotations

import pytest
from spottrain.contract import ExitCode

from tests.runs.conftest import Lab
from tests.support.heavy import sample

# The loop of karpathy's nanoGPT (train.py), with a small model, without what it does about files and GPUs.
NANO = """\
import os, signal
import torch, spottrain

spottrain.seed(1337)
torch.use_deterministic_algorithms(True)
STOP = int(os.environ.get("STOP", "0"))
gradient_accumulation_steps, batch_size, block_size = 3, 4, 8
eval_interval, eval_iters, max_iters = 5, 2, 18
train_data, val_data = torch.arange(500) % 17, torch.arange(400) % 13


class GPT(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Sequential(
            torch.nn.Embedding(17, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 17)
        )

    def forward(self, idx, targets):
        logits = self.inner(idx)
        return logits, torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def get_batch(split):
    data = train_data if split == "train" else val_data
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([data[i : i + block_size] for i in ix])
    y = torch.stack([data[i + 1 : i + 1 + block_size] for i in ix])
    return x, y


model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)


@torch.no_grad()
def estimate_loss():
    model.eval()
    found = {}
    for split in ("train", "val"):
        found[split] = sum(float(model(*get_batch(split))[1]) for _ in range(eval_iters))
    model.train()
    return found


run = spottrain.Run(model=model, optimizer=optimizer, max_steps=max_iters, log_every=1)
BATCHES
X, Y = next(batches)  # fetch the very first batch
while True:
    if run.global_step % eval_interval == 0:
        losses = estimate_loss()
        print("estimated", run.global_step, losses, flush=True)
    for micro_step in range(gradient_accumulation_steps):
        run.poll()
        logits, loss = model(X, Y)
        loss = loss / gradient_accumulation_steps
        # immediately async prefetch next batch while model is doing the forward pass on the GPU
        X, Y = next(batches)
        loss.backward()
        if run.global_step + 1 == STOP and micro_step == int(os.environ.get("STOP_IN", "2")):
            os.kill(os.getpid(), signal.SIGTERM)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if not run.step_completed(loss=loss):
        break
run.finish()
"""
DRAWN = 'batches = run.ahead(lambda: get_batch("train"))'
SOURCES = {
    "a function": DRAWN,
    "an iterator": (
        "def drawn():\n    while True:\n        yield get_batch('train')\n\nbatches = run.ahead(drawn())"
    ),
}


def _estimated(*logs: str) -> list[str]:
    return [line for log in logs for line in log.splitlines() if line.startswith("estimated ")]


@pytest.mark.parametrize(
    ("source", "step", "inside"),
    sample(
        [(source, *when) for source in SOURCES for when in ((8, "2"), (10, "2"), (9, "0"))],
        ("an iterator", 9, "0"),
    ),
)
def test_a_batch_that_was_drawn_and_not_used_comes_first_in_the_next_attempt(
    lab: Lab, others: Lab, source: str, step: int, inside: str
) -> None:
    """Step 10 ends where an evaluation draws numbers too; step 9 is dropped after its first micro-batch."""
    script = NANO.replace("BATCHES", SOURCES[source])
    plain = others.alone(script)
    first = lab.run(script, attempt=1, interval="1h", env={"STOP": str(step), "STOP_IN": inside}).ends(
        ExitCode.INTERRUPTED
    )
    assert first.message.durableStep == (step if inside == "2" else step - 1)
    second = lab.run(script, attempt=2, interval="1h").done()
    assert first.losses | second.losses == plain.losses
    assert _estimated(first.log, second.log) == _estimated(plain.log)
    assert second.digest == plain.digest


@pytest.mark.parametrize(
    "kind", ["collections.UserDict(x=x, y=x)", "collections.namedtuple('Pair', 'x y')(x, x)"]
)
def test_a_batch_that_would_come_back_as_another_type_is_refused_before_its_first_step(
    lab: Lab, kind: str
) -> None:
    script = f"import collections, torch\n{NANO.replace('BATCHES', DRAWN)}".replace(
        "batches = run.ahead(", f"x = torch.ones(1)\nbatches = run.ahead(lambda: {kind}) or run.ahead("
    )
    run = lab.run(script).ends(ExitCode.BAD_CONFIGURATION)
    assert not run.losses and "would come back as another type" in run.message.message


PLAIN = """\
import collections, os, random, signal
import numpy, torch, spottrain

spottrain.seed(3)
STOP = int(os.environ.get("STOP", "0"))
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
seen = {"samples": 0, "sums": torch.zeros(2), "by": {}}
recent = collections.deque(maxlen=3)
counts = numpy.zeros(2)
dice, coins = random.Random(5), torch.Generator().manual_seed(6)
cards, old = numpy.random.default_rng(7), numpy.random.RandomState(8)
mean = torch.zeros(())
run = spottrain.Run(
    model=model,
    optimizer=optimizer,
    extra={
        "best": float("inf"), "name": "none", "seen": seen, "recent": recent, "counts": counts,
        "nothing": None, "mean": mean, "dice": dice, "coins": coins, "cards": cards, "old": old,
    },
    max_steps=12,
    log_every=1,
)
while not run.done:
    x = torch.rand(4, 2, generator=coins) + dice.random() + cards.random() + old.rand()
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    seen["samples"] += len(x)
    seen["sums"] += x.sum(0)
    seen["by"][str(run.global_step)] = float(loss)
    recent.append(float(loss))
    counts[run.global_step % 2] += 1
    mean.lerp_(loss.detach(), 0.1)
    if float(loss) < run.extra["best"]:
        run.extra["best"], run.extra["name"] = float(loss), f"step {run.global_step}"
    if run.global_step + 1 == STOP:
        os.kill(os.getpid(), signal.SIGTERM)
    run.step_completed(loss=loss)
run.finish()
print("AT THE END", dict(run.extra) | {name: None for name in ("dice", "coins", "cards", "old")})
"""


def _end(log: str) -> str:
    return log.split("AT THE END", 1)[1].split("\n")[0]


def test_plain_values_and_generators_in_extra_go_on_where_they_were(lab: Lab, others: Lab) -> None:
    plain = others.alone(PLAIN)
    first = lab.run(PLAIN, attempt=1, interval="1h", env={"STOP": "7"}).ends(ExitCode.INTERRUPTED)
    second = lab.run(PLAIN, attempt=2, interval="1h").done()
    assert first.losses | second.losses == plain.losses
    assert _end(second.log) == _end(plain.log)


def test_a_value_of_another_kind_or_shape_is_refused(lab: Lab) -> None:
    lab.run(PLAIN, attempt=1, interval="1h", env={"STOP": "7"}).ends(ExitCode.INTERRUPTED)
    other = lab.run(PLAIN.replace("mean = torch.zeros(())", "mean = torch.zeros(3)"), attempt=2).ends(
        ExitCode.BAD_CONFIGURATION
    )
    assert "its extra.mean does not fit (it is a shape () there and a tensor of shape (3,) here)" in (
        other.message.message
    )

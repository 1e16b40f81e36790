"""What an optimizer trains and the model does not own is saved and goes on, or the run is refused at once."""

from __future__ import annotations

import json

import pytest
import spottrain
from spottrain.checkpoint.final_weights import digest
from spottrain.contract import ExitCode

from tests.runs.conftest import Lab
from tests.runs.launched import Run
from tests.support.command import checkpoints as main
from tests.support.heavy import sample

SCRIPT = """\
import os, time
import torch, spottrain

spottrain.seed(3)
CASE, RANK = os.environ["CASE"], int(os.environ.get("RANK", "0"))


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, i):
        x = torch.randn(4, generator=torch.Generator().manual_seed(i))
        return x, x.sum()


class Loss(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((3,), 1.0 + RANK))  # DDP would give all ranks rank 0's
        if "buffer" in CASE:
            self.register_buffer("seen", torch.zeros(()))

    def forward(self, model, batch):
        time.sleep(float(os.environ.get("PAUSE", "0")))
        if "buffer" in CASE and model.training:
            self.seen += batch[0].abs().sum()
        scale = 1 + (self.seen / (1 + self.seen) if "buffer" in CASE else 0)
        return ((model(batch[0]) @ self.weight - batch[1]) ** 2).mean() * scale


model, loss = torch.nn.Linear(4, 3), Loss()
if "SHARD" in os.environ:
    model = spottrain.shard(model)
extra = None
if "module" in CASE:
    function, extra = (lambda model, batch: loss(model, batch)), {"head": loss}
elif "loss itself" in CASE:
    function = loss
elif "method" in CASE:
    function = loss.forward
else:
    function = lambda model, batch: loss(model, batch)
trained = [{"params": list(model.parameters())}, {"params": list(loss.parameters())}]
given = {"optimizer": torch.optim.AdamW(trained, lr=0.05)}
if "named" in CASE:
    given = {"optimizer": "adamw", "learning_rate": 0.05}
trainer = spottrain.Trainer(
    model=model, **given, train_dataset=Numbers(), eval_dataset=Numbers(), loss_fn=function,
    extra=extra, max_steps=24,
    global_batch_size=8, micro_batch_size=2, log_every=1, clip_grad_norm=0.5, deterministic=True,
)
trainer.fit()
"""

FINAL = {
    "loose": "loose.2",
    "module": "extra.head.weight",
    "module, buffer": "extra.head.weight",
    "loss itself, buffer": "extra.loss.weight",
    "method": "extra.loss.weight",
    "module, named": "extra.head.weight",
}
"""Where the weights of the loss are then."""


def begin(lab: Lab, case: str, at: str, attempt: int, ranks: int, **more: str) -> list[Run]:
    training = json.dumps({"emaDecay": 0.9} if "buffer" in case else {})
    env = {"CASE": case} | more
    if ranks == 1:
        return [lab.run(SCRIPT, at=at, attempt=attempt, training=training, env=env)]
    return lab.ranks(ranks, SCRIPT, at=at, attempt=attempt, training=training, env=env)


def ends(runs: list[Run], code: ExitCode) -> Run:
    assert [run.end() for run in runs] == [code] * len(runs), "\n".join(run.log for run in runs)
    return runs[0]


def compare(lab: Lab, case: str, ranks: int = 1, **more: str) -> Run:
    """Interrupted and gone on against uninterrupted; the log of the latter."""
    plain = ends(begin(lab, case, "plain", 1, ranks, **more), ExitCode.DONE)
    first = begin(lab, case, "store", 1, ranks, PAUSE="0.01", **more)
    first[0].until(" step=9/")
    first[-1].send()
    ends(first, ExitCode.INTERRUPTED)
    second = ends(begin(lab, case, "store", 2, ranks, **more), ExitCode.DONE)
    assert second.losses and min(second.losses) > 9
    assert first[0].losses | second.losses == plain.losses
    assert second.digest == plain.digest
    final = lab.folder / "store" / "final" / "model.safetensors"
    beside, name = FINAL[case].rsplit(".", 1)
    found = spottrain.load_weights(final, beside)[name]
    assert found.shape == (3,) and not bool((found == 1).any()), "trained"
    assert set(spottrain.load_weights(final)) == {"weight", "bias"}, "what the model's load_state_dict takes"
    return plain


@pytest.mark.parametrize("case", sample(FINAL, "module, buffer", "method"))
def test_the_weights_of_a_loss_are_saved_and_go_on(lab: Lab, case: str) -> None:
    compare(lab, case)


@pytest.mark.heavy
@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
@pytest.mark.parametrize("case", ["loose", "module, buffer", "module, named"])
def test_two_ranks_train_the_same_weights_of_a_loss_as_one(lab: Lab, case: str, kind: str) -> None:
    plain = compare(lab, case, ranks=2, **({"SHARD": "1"} if kind == "FSDP2" else {}))
    if "buffer" in case:
        return  # as with DDP's buffers, each rank counts its own part of the batch
    alone = ends(begin(lab, case, "alone", 1, 1), ExitCode.DONE)
    shown = [[float(run.losses[n].split("=")[1]) for n in sorted(run.losses)] for run in (plain, alone)]
    assert shown[0] == pytest.approx(shown[1], rel=1e-3)


def test_the_digest_of_what_is_left_covers_the_loss(lab: Lab) -> None:
    run = ends(begin(lab, "module", "store", 1, 1), ExitCode.DONE)
    final = lab.folder / "store" / "final" / "model.safetensors"
    both = spottrain.load_weights(final) | {
        f"extra.head.{name}": each for name, each in spottrain.load_weights(final, "extra.head").items()
    }
    assert digest(both) == run.digest
    downloaded = lab.folder / "downloaded"
    assert main(["download", str(lab.folder / "store"), "--to", str(downloaded)]) == 0
    assert spottrain.load_weights(downloaded).keys() == {"weight", "bias"}
    assert digest(spottrain.load_weights(downloaded, "extra.head")) == digest(
        spottrain.load_weights(final, "extra.head")
    )


GUARD = """\
import os, time
import torch, spottrain

spottrain.seed(3)
model, loss, temperature = torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Parameter(torch.ones(()))
average = torch.optim.swa_utils.AveragedModel(model)
parameters = [*model.parameters(), *loss.parameters(), temperature]
optimizer = torch.optim.AdamW(parameters, lr=0.05)
run = spottrain.Run(
    model=model, optimizer=optimizer, extra={"loss": loss, "average": average}, max_steps=16, log_every=1
)
while not run.done:
    time.sleep(float(os.environ.get("PAUSE", "0")))
    x = torch.randn(8, 4)
    value = (loss(model(x)) * temperature - x[:, :3]).square().mean()
    value.backward()
    optimizer.step()
    optimizer.zero_grad()
    average.update_parameters(model)
    run.step_completed(loss=value)
run.finish()
"""


def test_what_a_guard_trains_beside_the_model_goes_on_and_is_left_with_the_final_weights(lab: Lab) -> None:
    plain = ends([lab.run(GUARD, at="plain", attempt=1)], ExitCode.DONE)
    first = lab.run(GUARD, attempt=1, env={"PAUSE": "0.05"}).until(" step=6/")
    ends([first.send()], ExitCode.INTERRUPTED)
    second = ends([lab.run(GUARD, attempt=2)], ExitCode.DONE)
    assert first.losses | second.losses == plain.losses
    assert second.digest == plain.digest
    final = lab.folder / "store" / "final"
    assert spottrain.load_weights(final).keys() == {"weight", "bias"}
    assert {"weight", "bias", "running_mean"} < spottrain.load_weights(final, "extra.loss").keys()
    assert spottrain.load_weights(final, "loose.main")["4"].item() != 1, "trained"
    assert not spottrain.load_weights(final, "extra.average"), "nobody trains it"

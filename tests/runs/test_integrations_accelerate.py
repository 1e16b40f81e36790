"""A loop around Accelerate under `AccelerateRun`: the real library, real processes, a tiny model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import spottrain
from spottrain.checkpoint.final_weights import digest
from spottrain.contract import ExitCode, Outcome
from spottrain.core.profile_window import profile_key

from tests.runs.conftest import (
    LOADS,
    Lab,
    begins_as_if_the_script_loaded_the_weights,
    two_ranks_stop_at_one_step_and_go_on_bit_by_bit,
)
from tests.runs.launched import Run
from tests.support.zygote import Zygote

pytest.importorskip("accelerate")

HEAD = """\
import os, time
import torch, spottrain
from accelerate import Accelerator
from spottrain.integrations.accelerate import AccelerateRun

spottrain.seed(1)
PAUSE = float(os.environ.get("PAUSE", "0"))


class Noisy(torch.utils.data.Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, i):
        x = torch.randn(4, generator=torch.Generator().manual_seed(i))
        return x + 0.01 * torch.randn(4), x.sum()


class Average:  # registered for checkpointing
    value = 0.0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = torch.nn.Sequential(
    torch.nn.Linear(4, int(os.environ.get("WIDTH", "16"))), torch.nn.Dropout(0.1), torch.nn.LazyLinear(1)
)
model(torch.zeros(1, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
"""

SCRIPT = (
    HEAD
    + """\
loader = spottrain.data.loader(Noisy(), batch_size=4, accumulation=2, shuffle=True)
model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
average = Average()
accelerator.register_for_checkpointing(average)

run = AccelerateRun(accelerator, data=loader, max_steps=18, log_every=1)
for x, y in run.batches(loader):
    run.poll()
    time.sleep(PAUSE)
    with accelerator.accumulate(model):
        loss = torch.nn.functional.mse_loss(model(x).squeeze(-1), y)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    if accelerator.sync_gradients:
        average.value += 0.1 * (float(loss.detach()) - average.value)
        run.step_completed(loss=loss)
run.finish()
print(f"average={average.value:.9g}")
"""
)


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    zygote = Zygote()
    zygote.preload("accelerate")
    yield zygote
    zygote.close()


def test_an_interrupted_loop_ends_with_the_weights_of_one_that_was_not(lab: Lab) -> None:
    plain = lab.run(SCRIPT, at="plain", attempt=1).done()
    first = lab.run(SCRIPT, attempt=1, env={"PAUSE": "0.05"}).until("step=7/").stopped()
    assert first.message.outcome is Outcome.INTERRUPTED
    assert first.message.durableStep == first.message.step and first.message.totalSteps == 18
    second = lab.run(SCRIPT, attempt=2, interval="3steps", env={"PAUSE": "0.05"})
    second.until("event=committed").until(f"step={min(second.losses) + 5}/")
    second.killed()
    third = lab.run(SCRIPT, attempt=3).done()
    assert first.losses | second.losses | third.losses == plain.losses
    assert third.digest == plain.digest and _average(third) == _average(plain)
    assert digest(spottrain.load_weights(lab.folder / "store/final/model.safetensors")) == plain.digest
    assert not list(lab.folder.glob(".spottrain-*")), "nothing is left on the disk"


def test_a_stop_between_two_micro_batches_does_not_move_accelerates_count_of_them(lab: Lab) -> None:
    script = SCRIPT.replace(
        "        accelerator.backward(loss)\n",
        "        accelerator.backward(loss)\n"
        "        if os.environ.get('STOP') == str(run.global_step) and not accelerator.sync_gradients:\n"
        "            os.kill(os.getpid(), 15)\n",
    )
    plain = lab.run(script, at="plain", attempt=1).done()
    first = lab.run(script, attempt=1, env={"STOP": "9"}).ends(ExitCode.INTERRUPTED)
    second = lab.run(script, attempt=2).done()
    assert max(first.losses) == 9 and first.losses | second.losses == plain.losses
    assert second.digest == plain.digest


def test_it_begins_from_another_runs_weights_once(lab: Lab) -> None:
    loading = SCRIPT.replace("\noptimizer =", f"\nmodel.{LOADS}\noptimizer =", 1)
    begins_as_if_the_script_loaded_the_weights(lab, SCRIPT, loading)


EPOCHS = (
    HEAD.replace("import os, time", "import os, signal, time")
    + """\
STOP = int(os.environ.get("STOP", "0"))
model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
MAKE
for epoch in run.epochs(3):
    for x, y in PASS:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(x).squeeze(-1), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            if run.global_step + 1 == STOP:
                os.kill(os.getpid(), signal.SIGTERM)
            run.step_completed(loss=loss)
    scheduler.step()
    print("after", epoch, run.global_step, scheduler.get_last_lr(), float(torch.rand(())), flush=True)
run.finish()
"""
)
LOADERS = {
    "ours": (
        "loader = spottrain.data.loader(Noisy(), batch_size=4, accumulation=2, shuffle=True)\n"
        "run = AccelerateRun(accelerator, data=loader, log_every=1)\n",
        "loader",
    ),
    "prepared": (
        "loader = accelerator.prepare(torch.utils.data.DataLoader(\n"
        "    [(torch.full((4,), i / 48), torch.tensor(i / 10)) for i in range(48)], batch_size=4,\n"
        "    generator=torch.Generator(),\n"
        "))\n"
        "run = AccelerateRun(accelerator, log_every=1)\n",
        "accelerator.skip_first_batches(loader, run.epoch_step * 2)",
    ),
}


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("step", [8, 12])
def test_work_after_an_epoch_is_done_by_the_next_attempt(
    lab: Lab, others: Lab, loader: str, step: int
) -> None:
    """An epoch has six steps."""
    make, passing = LOADERS[loader]
    script = EPOCHS.replace("MAKE\n", make).replace("PASS", passing)
    plain = others.alone(script)
    assert max(plain.losses) == 18
    first = lab.run(script, attempt=1, interval="1h", env={"STOP": str(step)}).ends(ExitCode.INTERRUPTED)
    second = lab.run(script, attempt=2, interval="1h").done()
    assert first.losses | second.losses == plain.losses and second.digest == plain.digest
    assert _after(first, second) == _after(plain)


def _after(*runs: Run) -> list[str]:
    return [line for run in runs for line in run.log.splitlines() if line.startswith("after ")]


def test_a_checkpoint_of_another_model_is_refused(lab: Lab) -> None:
    lab.run(SCRIPT, attempt=1, env={"PAUSE": "0.05"}).until("step=3/").stopped()
    again = lab.run(SCRIPT, attempt=2, env={"WIDTH": "8"}).ends(ExitCode.BAD_CONFIGURATION)
    assert "does not match this training" in again.message.message


def test_a_checkpoint_of_another_interface_is_refused(lab: Lab) -> None:
    lab.run(SCRIPT, attempt=1, env={"PAUSE": "0.05"}).until("step=3/").stopped()
    again = lab.run(HEAD + "spottrain.Run(model=model, optimizer=optimizer)\n", attempt=2).ends(
        ExitCode.BAD_CONFIGURATION
    )
    assert "is of kind folder, but this script resumes from kind state" in again.message.message


def test_the_manifest_ends_it_profiles_it_and_what_is_not_taken_is_told(lab: Lab) -> None:
    training = '{"maxSteps": 6, "emaDecay": 0.9, "profile": {"wait": 1, "warmup": 1, "active": 2}}'
    run = lab.run(SCRIPT, training=training).done()
    assert "event=override setting=max_steps manifest=6 script=18" in run.log and "step=6/6" in run.log
    assert "about=training fields=emaDecay " in run.log
    assert run.message.ignoredSettings == "emaDecay"
    assert len(list((lab.folder / "store" / profile_key(1, 0, "")).iterdir())) == 2


def test_two_ranks_stop_and_go_on(lab: Lab) -> None:
    two_ranks_stop_at_one_step_and_go_on_bit_by_bit(lab, SCRIPT, {})


BAD = {
    "nothing prepared": ("AccelerateRun(accelerator)\n", "AccelerateRun(accelerator) has no model yet"),
    "a prepared loader": (
        "model, loader = accelerator.prepare(model, torch.utils.data.DataLoader(Noisy()))\n"
        "AccelerateRun(accelerator, data=loader)\n",
        "AccelerateRun(data=...) is a loader that Accelerate has prepared",
    ),
    "weights that are not stored": (
        "loss = torch.nn.Bilinear(4, 1, 1)\n"
        "optimizer.add_param_group({'params': loss.parameters()})\n"
        "model, optimizer = accelerator.prepare(model, optimizer)\n"
        "AccelerateRun(accelerator)\n",
        "trains Bilinear.weight of shape (1, 4, 1), Bilinear.bias of shape (1,), which no module",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence(lab: Lab, case: str) -> None:
    code, says = BAD[case]
    run = lab.run(HEAD + code).ends(ExitCode.BAD_CONFIGURATION)
    assert says in run.message.message


def _average(run: Run) -> str:
    return run.log.rsplit("average=", 1)[1].split()[0]

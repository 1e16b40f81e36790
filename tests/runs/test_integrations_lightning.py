"""Lightning's Trainer under `LightningCallback`: the real library, real processes, a tiny model."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import spottrain
from spottrain.checkpoint.final_weights import digest
from spottrain.contract import ExitCode, Outcome, Reason
from spottrain.core.profile_window import profile_key

from tests.runs.conftest import (
    LOADS,
    Lab,
    begins_as_if_the_script_loaded_the_weights,
    two_ranks_stop_at_one_step_and_go_on_bit_by_bit,
    weights_that_could_not_be_left_are_left_by_the_next_attempt,
)
from tests.runs.launched import Run
from tests.support.zygote import Zygote

pytest.importorskip("lightning")

HEAD = """\
import os, time, warnings
import torch, spottrain
import lightning.pytorch as L
from spottrain.integrations.lightning import LightningCallback

spottrain.seed(1)
PAUSE = float(os.environ.get("PAUSE", "0"))


class Noisy(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, i):
        x = torch.randn(4, generator=torch.Generator().manual_seed(i))
        return x + 0.01 * torch.randn(4), x.sum()


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Sequential(
            torch.nn.Linear(4, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1)
        )

    def training_step(self, batch, batch_idx):
        time.sleep(PAUSE)
        return torch.nn.functional.mse_loss(self.inner(batch[0]).squeeze(-1), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("v", torch.nn.functional.mse_loss(self.inner(batch[0]).squeeze(-1), batch[1]))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 5), "interval": "step"}]


def trainer(*callbacks, **arguments):
    usual = dict(
        max_steps=18,
        accumulate_grad_batches=2,
        accelerator="cpu",
        deterministic=True,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=1,
    )
    return L.Trainer(callbacks=list(callbacks), **usual | arguments)


loader = spottrain.data.loader(
    Noisy(), batch_size=4, accumulation=2, num_workers=int(os.environ.get("WORKERS", "0")), shuffle=True
)
"""

SCRIPT = (
    HEAD
    + """\
held_out = torch.utils.data.DataLoader(Noisy(), batch_size=8)
spot = LightningCallback(log_every=1)
theirs = trainer(spot, **eval(os.environ.get("ARGUMENTS", "{}")))
theirs.fit(Model(), loader, held_out, ckpt_path=spot.resume())
print("after fit")
"""
)


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    zygote = Zygote()
    zygote.preload("lightning.pytorch")
    yield zygote
    zygote.close()


def test_it_begins_from_another_runs_weights_once(lab: Lab) -> None:
    loading = SCRIPT.replace("theirs.fit(Model()", f"model = Model()\nmodel.{LOADS}\ntheirs.fit(model")
    begins_as_if_the_script_loaded_the_weights(lab, SCRIPT, loading)


def test_our_loader_tells_how_long_it_was_waited_for_and_a_validation_is_productive(lab: Lab) -> None:
    slow = SCRIPT.replace(
        "        x = torch.randn(4, gen", "        time.sleep(0.02)\n        x = torch.randn(4, gen"
    )
    split = lab.run(slow, attempt=1, interval="4steps").done().message.timeSplit
    assert split is not None
    assert split.dataWait >= (17 * 8 - 4) * 0.02, (
        "but for the first step, and the batch that was fetched ahead"
    )
    assert split.productive >= 3 * 40 * 0.02, "three epochs end before the last step"
    assert split.checkpointStall > 0 and split.unsaved == 0


@pytest.mark.parametrize("workers", ["0", "2"])
def test_an_interrupted_training_ends_with_the_weights_of_one_that_was_not(lab: Lab, workers: str) -> None:
    env = {"WORKERS": workers}
    plain = lab.run(SCRIPT, at="plain", attempt=1, env=env).done()
    first = lab.run(SCRIPT, attempt=1, env=env | {"PAUSE": "0.05"}).until("step=7/").stopped()
    assert first.message.outcome is Outcome.INTERRUPTED
    assert first.message.durableStep == first.message.step and first.message.totalSteps == 18
    second = lab.run(SCRIPT, attempt=2, interval="3steps", env=env | {"PAUSE": "0.05"})
    second.until("event=committed").until(f"step={min(second.losses) + 5}/")
    second.killed()
    third = lab.run(SCRIPT, attempt=3, env=env).done()
    assert first.losses | second.losses | third.losses == plain.losses
    assert third.digest == plain.digest
    assert digest(spottrain.load_weights(lab.folder / "store/final/model.safetensors")) == plain.digest
    assert not list(lab.folder.glob(".spottrain-*")), "nothing is left on the disk"


def test_a_checkpoint_at_the_very_end_of_an_epoch_goes_on_with_the_next(lab: Lab) -> None:
    env = {"ARGUMENTS": "dict(max_epochs=4, max_steps=-1)"}
    plain = lab.run(SCRIPT, at="plain", attempt=1, env=env).done()
    assert max(plain.losses) == 20
    first = lab.run(SCRIPT, attempt=1, interval="5steps", env=env | {"PAUSE": "0.05"})
    first.until("committed step=5").killed()
    second = lab.run(SCRIPT, attempt=2, env=env).done()
    assert min(second.losses) == 6
    assert first.losses | second.losses == plain.losses and second.digest == plain.digest


ENDS = HEAD.replace(
    """    def training_step(self, batch, batch_idx):
        time.sleep(PAUSE)
""",
    """    def training_step(self, batch, batch_idx):
        if self.global_step + 1 == STOP:
            os.kill(os.getpid(), signal.SIGTERM)
""",
).replace("import os, time, warnings", "import os, signal, time, warnings").replace(
    "class Model(",
    "STOP, HOLD = (int(os.environ.get(name, '0')) for name in ('STOP', 'HOLD'))\n\n\nclass Model(",
).replace(
    """    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 5), "interval": "step"}]
""",
    """    def on_validation_start(self):
        if HOLD and self.global_step == HOLD:
            print("holding", flush=True)
            time.sleep(60)  # until the test kills it

    def told(self, what):
        rates = [f"{group['lr']:.9g}" for group in self.trainer.optimizers[0].param_groups]
        print(what, self.current_epoch, self.global_step, *rates, flush=True)

    def on_validation_epoch_end(self):
        if not self.trainer.sanity_checking:
            self.told(f"validated {float(self.trainer.callback_metrics['v']):.9g}")

    def on_train_epoch_start(self):
        self.told("began")

    def on_train_epoch_end(self):
        self.told("ended")
        torch.rand(1)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        steps = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=1e9)
        return [optimizer], [steps, {"scheduler": plateau, "monitor": "v"}]
""",
).replace("accumulate_grad_batches=2", "accumulate_grad_batches=1").replace(
    "batch_size=4, accumulation=2", "batch_size=8"
) + SCRIPT.removeprefix(HEAD)
MANUAL = ENDS.replace(
    "        self.inner = ", "        self.automatic_optimization = False\n        self.inner = "
).replace(
    """        return torch.nn.functional.mse_loss(self.inner(batch[0]).squeeze(-1), batch[1])
""",
    """        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(self.inner(batch[0]).squeeze(-1), batch[1])
        self.manual_backward(loss)
        optimizer.step()
        if self.trainer.is_last_batch:
            self.lr_schedulers()[0].step()
        return loss
""",
)
WITHOUT = ENDS.replace(', {"scheduler": plateau, "monitor": "v"}', "")
KINDS = {
    "automatic": (ENDS, ""),
    "manual": (MANUAL, ""),
    "twice an epoch": (ENDS, "val_check_interval=2"),
    "every second epoch": (WITHOUT, "check_val_every_n_epoch=2"),
    "no validation": (WITHOUT, "limit_val_batches=0"),
    "torch's loader": (
        ENDS.replace(
            "held_out = ", "loader = torch.utils.data.DataLoader(Noisy(), batch_size=8)\nheld_out = "
        ).replace("x + 0.01 * torch.randn(4)", "x"),
        "",
    ),
}


def _hooks(*runs: Run) -> list[str]:
    words = ("validated ", "began ", "ended ")
    return [line for run in runs for line in run.log.splitlines() if line.startswith(words)]


def _ends(lab: Lab, kind: str, **more: str) -> tuple[str, dict[str, str]]:
    script, arguments = KINDS[kind]
    return script, {"ARGUMENTS": f"dict(max_epochs=4, max_steps=-1, {arguments})"} | more


@pytest.mark.parametrize(
    ("kind", "step"),
    [
        ("automatic", 10),
        ("automatic", 12),
        ("automatic", 20),
        ("manual", 10),
        ("manual", 12),
        ("twice an epoch", 10),
        ("twice an epoch", 12),
        ("twice an epoch", 14),
        ("every second epoch", 5),
        ("every second epoch", 10),
        ("no validation", 10),
        ("torch's loader", 10),
    ],
)
def test_what_follows_a_step_that_was_stopped_at_is_done_by_the_next_attempt(
    lab: Lab, others: Lab, kind: str, step: int
) -> None:
    script, env = _ends(lab, kind)
    plain = others.alone(script, env)
    assert max(plain.losses) == 20
    first = lab.run(script, attempt=1, interval="1h", env=env | {"STOP": str(step)}).ends(
        ExitCode.INTERRUPTED
    )
    assert first.message.durableStep == step
    second = lab.run(script, attempt=2, interval="1h", env=env).done()
    assert first.losses | second.losses == plain.losses
    assert _hooks(first, second) == _hooks(plain)
    assert second.digest == plain.digest


@pytest.mark.parametrize("kind", ["automatic", "manual"])
def test_a_kill_in_a_validation_has_it_done_again(lab: Lab, others: Lab, kind: str) -> None:
    script, env = _ends(lab, kind)
    plain = others.alone(script, env)
    first = lab.run(script, attempt=1, interval="10steps", env=env | {"HOLD": "10"})
    first.until("committed step=10 ").until("holding").killed()
    second = lab.run(script, attempt=2, interval="1h", env=env).done()
    assert first.losses | second.losses == plain.losses
    assert _hooks(first, second) == _hooks(plain)
    assert second.digest == plain.digest


def test_weights_that_could_not_be_left_are_left_by_the_next_attempt(lab: Lab) -> None:
    weights_that_could_not_be_left_are_left_by_the_next_attempt(lab, SCRIPT)


def test_the_manifest_ends_it_profiles_it_and_what_is_not_taken_is_told(lab: Lab) -> None:
    training = {"maxSteps": 6, "emaDecay": 0.9, "profile": {"wait": 1, "warmup": 1, "active": 2}}
    env = {"ARGUMENTS": "dict(max_epochs=1, max_steps=-1)"}
    seen = SCRIPT.replace(
        "        optimizer = torch.optim.AdamW",
        '        print("expected", self.trainer.estimated_stepping_batches)\n'
        "        optimizer = torch.optim.AdamW",
    )
    run = lab.run(seen, training=json.dumps(training), env=env).done()
    assert "event=override setting=max_steps manifest=6" in run.log and "step=6/6" in run.log
    assert "expected 6\n" in run.log, "before the module makes its schedule; an epoch has 5 steps"
    assert "about=training fields=emaDecay " in run.log
    assert run.message.ignoredSettings == "emaDecay"
    assert len(list((lab.folder / "store" / profile_key(1, 0, "")).iterdir())) == 2


def test_a_window_past_the_end_is_refused_before_the_first_step(lab: Lab) -> None:
    run = lab.run(SCRIPT, training='{"profile": {"wait": 100}}').ends(ExitCode.BAD_CONFIGURATION)
    assert not run.losses and "maxSteps to at least 105" in run.message.message
    assert json.loads((lab.folder / "store" / "HEAD").read_text())["state"] == "released"


def test_a_training_that_lightnings_early_stopping_ends_is_done_for_it(lab: Lab) -> None:
    stopping = SCRIPT.replace(
        "theirs = trainer(spot, ",
        'theirs = trainer(L.pytorch.callbacks.EarlyStopping("v", patience=1, min_delta=1e9), spot, ',
    ).replace("import lightning.pytorch as L", "import lightning as L")
    run = lab.run(stopping).done()
    assert (run.message.outcome, run.message.reason) == (Outcome.DONE, Reason.EARLY_STOPPED)
    assert run.message.step == 10, "after the second epoch of 5 steps"
    assert "Monitored metric v did not improve" in run.message.message


def test_two_ranks_stop_and_go_on(lab: Lab) -> None:
    two_ranks_stop_at_one_step_and_go_on_bit_by_bit(
        lab, SCRIPT, {"ARGUMENTS": "dict(devices=2, strategy='ddp')"}
    )


BAD = {
    "no resume": (
        "trainer(LightningCallback()).fit(Model(), loader)\n",
        "LightningCallback.resume() was not called",
    ),
    "other processes": (
        "spot = LightningCallback()\n"
        "spot.resume()\n"
        "spot.setup(type('Trainer', (), {'world_size': 2})(), Model(), 'fit')\n",
        "Lightning trains with 2 process(es), and spottrain knows of 1",
    ),
    "weights that are not stored": (
        "loss = torch.nn.Bilinear(4, 1, 1)\n"
        "class Both(Model):\n"
        "    def configure_optimizers(self):\n"
        "        return torch.optim.AdamW([*self.parameters(), *loss.parameters()])\n"
        "spot = LightningCallback()\n"
        "trainer(spot).fit(Both(), loader, ckpt_path=spot.resume())\n",
        "trains Bilinear.weight of shape (1, 4, 1), Bilinear.bias of shape (1,), which no module",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence(lab: Lab, case: str) -> None:
    code, says = BAD[case]
    run = lab.run(HEAD + code).ends(ExitCode.BAD_CONFIGURATION)
    assert says in run.message.message

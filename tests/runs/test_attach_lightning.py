"""Scripts with Lightning's Trainer that know nothing of spottrain, under `spottrain run`."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator

import pytest
from spottrain.contract import Env, ExitCode, Outcome, Reason

from tests.runs.conftest import (
    LOADS,
    Lab,
    Start,
    begins_as_if_the_script_loaded_the_weights,
    two_ranks_stop_at_one_step_and_go_on_bit_by_bit,
)
from tests.runs.launched import OURS, Run
from tests.support.zygote import Zygote

pytest.importorskip("lightning")

HEAD = """\
import os, signal, time
import torch
import lightning.pytorch as L

L.seed_everything(1)
PAUSE, STOP = (float(os.environ.get(name, "0")) for name in ("PAUSE", "STOP"))


class Sums(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, i):
        x = torch.randn(4, generator=torch.Generator().manual_seed(i))
        return x + 0.01 * torch.randn(4), x.sum()


class Model(L.LightningModule):
    def __init__(self, kind=tuple):
        super().__init__()
        self.save_hyperparameters()  # a class, which torch.load refuses unless it is told to trust the file
        self.inner = torch.nn.Sequential(
            torch.nn.Linear(4, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1)
        )
        self.lr = 1e-2

    def training_step(self, batch, batch_idx):
        time.sleep(PAUSE)
        if self.global_step + 1 == STOP:
            os.kill(os.getpid(), signal.SIGTERM)
        return torch.nn.functional.mse_loss(self.inner(batch[0]).squeeze(-1), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("v", torch.nn.functional.mse_loss(self.inner(batch[0]).squeeze(-1), batch[1]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def trainer(*callbacks, **arguments):
    usual = dict(
        max_epochs=4,
        accelerator="cpu",
        deterministic=True,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
    )
    return L.Trainer(callbacks=list(callbacks), **usual | arguments)


loader = torch.utils.data.DataLoader(
    Sums(), batch_size=8, shuffle=True, num_workers=int(os.environ.get("WORKERS", "0"))
)
held_out = torch.utils.data.DataLoader(Sums(), batch_size=8)
theirs = trainer(*eval(os.environ.get("CALLBACKS", "[]")), **eval(os.environ.get("ARGUMENTS", "{}")))
"""
SCRIPT = (
    HEAD
    + """\
theirs.fit(Model(), loader, held_out, **eval(os.environ.get("FIT", "{}")))
print("after fit", theirs.global_step, flush=True)
time.sleep(float(os.environ.get("REST", "0")))
theirs.validate(Model(), held_out, verbose=False)
print("validated", flush=True)
"""
)
BEST = SCRIPT.replace(
    "theirs.validate(Model(), held_out, verbose=False)",
    "theirs.validate(best := Model(), held_out, ckpt_path='best', weights_only=False)\n"
    "print('best', [float(each.detach().sum()) for each in best.parameters()], flush=True)",
)


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    zygote = Zygote()
    zygote.preload("lightning.pytorch")
    yield zygote
    zygote.close()


def test_it_begins_from_another_runs_weights_once(lab: Lab) -> None:
    loading = SCRIPT.replace(
        "theirs.fit(Model()", f"import spottrain\nmodel = Model()\nmodel.{LOADS}\ntheirs.fit(model"
    )
    begins_as_if_the_script_loaded_the_weights(lab, SCRIPT, loading)


def test_two_ranks_begin_from_another_runs_weights(lab: Lab) -> None:
    loading = SCRIPT.replace(
        "theirs.fit(Model()", f"import spottrain\nmodel = Model()\nmodel.{LOADS}\ntheirs.fit(model"
    )
    env = {"ARGUMENTS": "dict(devices=2, strategy='ddp')"}
    begins_as_if_the_script_loaded_the_weights(lab, SCRIPT, loading, stop_at=5, nproc=2, env=env)


def test_a_checkpoint_of_lightning_gives_its_weights(lab: Lab) -> None:
    script = SCRIPT.replace("        self.save_hyperparameters()", "        # self.save_hyperparameters()")
    lab.run(script, at="base", attempt=1, env={"STOP": "7"}).ends(ExitCode.INTERRUPTED)
    entry = json.loads((lab.folder / "base/HEAD").read_text())["checkpoints"][0]
    run = lab.run(script, attempt=1, env={Env.INIT_FROM: str(lab.folder / "base")}).done()
    assert f"step={entry['step']} tensors=9" in run.log
    lab.run(SCRIPT, at="other", attempt=1, env={"STOP": "7"}).ends(ExitCode.INTERRUPTED)
    env: dict[str, str] = {Env.INIT_FROM: str(lab.folder / "other")}
    refused = lab.run(SCRIPT, at="new", attempt=1, env=env).ends(ExitCode.BAD_CONFIGURATION)
    assert "lightning.ckpt cannot be read by torch.load(weights_only=True)" in refused.message.message


def told(run: Run) -> list[str]:
    """What a run of `BEST` printed of the best checkpoint's weights."""
    return [line for line in run.log.splitlines() if line.startswith("best ")]


@pytest.mark.parametrize(
    ("workers", "step"), [("0", 1), ("0", 3), ("0", 5), ("0", 7), ("0", 10), ("0", 14), ("2", 7), ("2", 10)]
)
def test_an_unchanged_script_goes_on_exactly_in_an_epoch_and_at_its_end(
    lab: Lab, others: Lab, workers: str, step: int
) -> None:
    env = {"WORKERS": workers}
    plain = others.alone(SCRIPT, env)
    assert max(plain.losses) == 20
    first = lab.run(SCRIPT, attempt=1, interval="1h", env=env | {"STOP": str(step)})
    first.ends(ExitCode.INTERRUPTED)
    nothing_done = step == 1 and first.message.step == 0  # it ended before its first optimizer step
    assert first.message.durableStep == (None if nothing_done else step)
    second = lab.run(SCRIPT, attempt=2, interval="1h", env=env).done()
    assert first.losses | second.losses == plain.losses and second.digest == plain.digest
    assert second.log.count("event=attached") == 1
    assert "library=lightning version=2.6.6 what=Trainer.fit off=--no-auto-attach" in second.log


GENERATOR = "generator=torch.Generator().manual_seed(3)"
DRAWN = f"torch.utils.data.RandomSampler(Sums(), replacement=True, num_samples=40, {GENERATOR})"


@pytest.mark.parametrize("step", [7, 10])
@pytest.mark.parametrize(
    "order",
    [
        f"batch_size=8, shuffle=True, {GENERATOR}",
        f"batch_size=8, sampler={DRAWN}",
        f"batch_sampler=torch.utils.data.BatchSampler({DRAWN}, 8, False)",
    ],
)
def test_the_generators_of_a_loader_go_on(lab: Lab, others: Lab, order: str, step: int) -> None:
    """In the first case the validations draw from the same generator."""
    script = SCRIPT.replace("batch_size=8, shuffle=True", order).replace(
        "held_out = torch.utils.data.DataLoader(Sums(), batch_size=8)",
        "held_out = torch.utils.data.DataLoader(Sums(), batch_size=8, generator=loader.generator)",
    )
    plain = others.alone(script, {})
    lab.run(script, attempt=1, interval="1h", env={"STOP": str(step)}).ends(ExitCode.INTERRUPTED)
    second = lab.run(script, attempt=2, interval="1h").done()
    assert second.losses == {each: loss for each, loss in plain.losses.items() if each > step}
    assert second.digest == plain.digest


def test_persistent_workers_keep_the_order_of_the_samples(lab: Lab, others: Lab) -> None:
    script = SCRIPT.replace("shuffle=True", "shuffle=True, persistent_workers=True").replace(
        "x + 0.01 * torch.randn(4)", "x"
    )
    env = {"WORKERS": "2"}
    plain = others.alone(script, env)
    lab.run(script, attempt=1, interval="1h", env=env | {"STOP": "7"}).ends(ExitCode.INTERRUPTED)
    second = lab.run(script, attempt=2, interval="1h", env=env).done()
    assert second.digest == plain.digest
    assert second.log.count('event=advice about=attach text="persistent_workers=True') == 1


def test_a_stop_and_a_kill_are_gone_on_from(lab: Lab, others: Lab) -> None:
    plain = others.alone(SCRIPT, {"WORKERS": "0"})
    first = lab.run(SCRIPT, attempt=1, env={"PAUSE": "0.05"}).until("step=7/").stopped()
    assert first.message.durableStep == first.message.step and first.message.totalSteps == 20
    second = lab.run(SCRIPT, attempt=2, interval="3steps", env={"PAUSE": "0.05"})
    second.until("event=committed").until(f"step={min(second.losses) + 5}/").killed()
    third = lab.run(SCRIPT, attempt=3).done()
    assert first.losses | second.losses | third.losses == plain.losses
    assert third.digest == plain.digest
    assert "validated" in third.log and not list(lab.folder.glob(".spottrain-*"))


def test_a_stop_after_the_training_has_the_rest_of_the_script_run_again(lab: Lab, others: Lab) -> None:
    env = {Env.GRACE_SECONDS: "4", "REST": "60"}
    first = lab.run(SCRIPT, attempt=1, env=env).until("after fit 20").stopped()
    assert first.message.outcome is Outcome.INTERRUPTED and first.message.durableStep == 20
    assert json.loads((lab.folder / "store/HEAD").read_text())["state"] == "released"
    second = lab.run(SCRIPT, attempt=2).done()
    assert not second.losses and "after fit 20" in second.log and "validated" in second.log
    assert second.digest == others.alone(SCRIPT, {"WORKERS": "0"}).digest
    assert json.loads((lab.folder / "store/HEAD").read_text())["state"] == "done"


def test_early_stopping_ends_it_again_after_an_interruption_of_the_rest(lab: Lab) -> None:
    env = {"CALLBACKS": "[L.callbacks.EarlyStopping('v', patience=1, min_delta=1e9)]"}
    first = lab.run(SCRIPT, attempt=1, env=env | {"REST": "60"}).until("after fit 10").killed()
    second = lab.run(SCRIPT, attempt=2, env=env).done()
    assert not second.losses and "after fit 10" in second.log
    assert second.digest == first.digest and second.message.reason == Reason.EARLY_STOPPED


SLOW_TEST = "Model.test_step = lambda self, batch, i: print('testing', flush=True) or time.sleep(0.1)\n"
AFTER_FIT = {
    "test": SLOW_TEST + "theirs.test(Model(), torch.utils.data.DataLoader(range(200)))\nprint('the rest')\n",
    "second fit": "PAUSE = 0.1\nprint('testing', flush=True)\ntrainer(max_epochs=99).fit(Model(), loader)\n",
}


@pytest.mark.parametrize("what", AFTER_FIT)
def test_lightnings_own_exit_at_a_stop_after_the_training_does_not_make_the_job_done(
    lab: Lab, what: str
) -> None:
    run = lab.run(SCRIPT + AFTER_FIT[what], attempt=1).until("testing")
    time.sleep(1)  # so that it is in Lightning's loop
    lost = what == "second fit"
    run.send().ends(ExitCode.INTERRUPTED_LOST if lost else ExitCode.INTERRUPTED)
    assert "between the end of the training" in run.message.message and "the rest" not in run.log
    assert json.loads((lab.folder / "store/HEAD").read_text())["state"] == "released"


def test_a_second_stage_does_not_go_on_from_the_checkpoint_of_the_first(lab: Lab) -> None:
    lab.run(SCRIPT, attempt=1, env={"REST": "60"}).until("after fit 20").killed()
    second = {"ARGUMENTS": "dict(default_root_dir='stage2')"}
    run = lab.run(SCRIPT, attempt=2, env=second).ends(ExitCode.BAD_CONFIGURATION)
    assert "folder stage2" in run.message.message and "one checkpoint URI for each" in run.message.message


@pytest.mark.parametrize(
    ("folder", "where", "arguments"),
    [
        ("kept", "dirpath='kept', ", "{}"),
        # The logger of each attempt on this disk has a folder of its own: version_0, version_1, ...
        ("lightning_logs", "", "dict(logger=L.loggers.CSVLogger('.'))"),
    ],
)
def test_the_best_checkpoint_of_the_script_is_on_a_new_pod_too(
    lab: Lab, others: Lab, folder: str, where: str, arguments: str
) -> None:
    """`v` falls, so with mode="max" the first epoch is the best."""
    kept = f"[L.callbacks.ModelCheckpoint({where}monitor='v', mode='max')]"
    env = {"CALLBACKS": kept, "WORKERS": "0", "ARGUMENTS": arguments}
    plain = others.alone(BEST, env)
    lab.run(BEST, attempt=1, interval="1h", env=env | {"STOP": "12"}).ends(ExitCode.INTERRUPTED)
    shutil.rmtree(lab.folder / folder)
    second = lab.run(BEST, attempt=2, interval="1h", env=env | {"REST": "60"})
    second.until("after fit 20").killed()
    third = lab.run(BEST, attempt=3, interval="1h", env=env).done()  # on the same disk
    assert not third.losses and third.digest == second.digest == plain.digest
    assert told(plain) and told(third) == told(plain)
    for run in (second, third):  # what comes after the training are words of Lightning on its own file
        assert "dirpath has changed" not in run.log.split("after fit 20")[0]
    assert not list(lab.folder.glob(".spottrain-best*"))


def test_the_last_checkpoint_of_the_script_is_on_a_new_pod_too(lab: Lab, others: Lab) -> None:
    """Lightning's own ModelCheckpoint has no monitor: its best checkpoint is the last one."""
    env = {"WORKERS": "0"}
    plain = others.alone(BEST, env)
    lab.run(BEST, attempt=1, interval="1h", env=env | {"REST": "60"}).until("after fit 20").killed()
    shutil.rmtree(lab.folder / "checkpoints")
    second = lab.run(BEST, attempt=2, env=env).done()
    assert not second.losses and told(plain) and told(second) == told(plain)


@pytest.mark.parametrize(
    ("strategy", "sentence"),
    [
        ("ddp", "Lightning trains with 2 process(es), and spottrain knows of 1"),
        (
            "ddp_spawn",
            "ddp_spawn, ddp_fork and ddp_notebook start their processes by themselves (here by spawn)",
        ),
        ("ddp_notebook", "start their processes by themselves (here by fork)"),
    ],
)
def test_processes_that_lightning_would_start_are_refused_before_the_claim(
    lab: Lab, strategy: str, sentence: str
) -> None:
    env = {"ARGUMENTS": f"dict(devices=2, strategy={strategy!r})"}
    run = lab.run(SCRIPT, env=env).ends(ExitCode.BAD_CONFIGURATION)
    assert sentence in run.message.message and "--no-auto-attach" in run.message.message
    assert not (lab.folder / "store/HEAD").exists()


def test_a_script_with_both_names_of_the_library_is_refused(start: Start) -> None:
    both = "import pytorch_lightning\n" + SCRIPT.replace(
        "return L.Trainer(", "return pytorch_lightning.Trainer("
    )
    run = start(both, *OURS, "train.py").ends(ExitCode.BAD_CONFIGURATION, 300)
    assert "both lightning.pytorch and pytorch_lightning" in run.message.message


def test_the_scripts_own_checkpoint_counts_for_the_first_start(lab: Lab) -> None:
    saving = {"ARGUMENTS": "dict(max_epochs=2)", Env.AUTO_ATTACH: "false"}
    own = SCRIPT + "theirs.save_checkpoint('own.ckpt')\n"
    lab.run(own, env=saving).done()
    env = {"FIT": "dict(ckpt_path='own.ckpt', weights_only=False)"}
    first = lab.run(SCRIPT, attempt=1, interval="1h", env=env | {"STOP": "15"}).ends(ExitCode.INTERRUPTED)
    assert min(first.losses) == 11
    second = lab.run(SCRIPT, attempt=2, env=env).done()
    assert min(second.losses) == 16
    assert "event=override setting=ckpt_path" in second.log and "script=own.ckpt" in second.log


def test_what_the_tuner_and_a_try_out_train_is_left_alone(lab: Lab) -> None:
    tuned = SCRIPT.replace("        self.save_hyperparameters()", "        # nothing more").replace(
        "theirs.fit(",
        "trainer(fast_dev_run=True).fit(Model(), loader, held_out)\n"
        "L.tuner.Tuner(theirs).lr_find(Model(), loader, num_training=5)\n"
        "theirs.fit(",
    )
    run = lab.run(tuned).done()
    assert run.message.step == 20 and run.log.count("event=attached") == 1
    assert "fast_dev_run runs one batch as a check" in run.log


def test_the_switch_turns_it_off(lab: Lab) -> None:
    run = lab.run(SCRIPT, env={Env.AUTO_ATTACH: "false"}).done()
    assert run.message.outcome is Outcome.UNTRAINED and "event=attached" not in run.log


def test_two_ranks_stop_and_go_on(lab: Lab) -> None:
    env = {"ARGUMENTS": "dict(devices=2, strategy='ddp', max_epochs=4)"}
    two_ranks_stop_at_one_step_and_go_on_bit_by_bit(lab, SCRIPT, env)


@pytest.mark.parametrize("name", ["lightning.pytorch", "pytorch_lightning"])
def test_a_fresh_process_is_attached_to_when_it_imports_the_library(start: Start, name: str) -> None:
    run = start(SCRIPT.replace("lightning.pytorch", name), *OURS, "train.py").done(300)
    library = "pytorch-lightning" if name == "pytorch_lightning" else "lightning"
    assert run.message.step == 20 and f"event=attached library={library} " in run.log

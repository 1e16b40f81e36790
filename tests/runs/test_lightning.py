"""Lightning's Trainer: in a script that knows nothing of spottrain, and with `LightningCallback`."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import pytest
from spottrain.contract import Env, ExitCode, Outcome, Reason, profile_key

from tests.runs import foreign
from tests.runs.conftest import Lab, Start, weights_that_could_not_be_left_are_left_by_the_next_attempt
from tests.runs.foreign import LOADS, Vehicle, stopped_at
from tests.runs.launched import OURS, Run
from tests.support.heavy import sample

pytest.importorskip("lightning")

HEAD = """\
import os, signal, time
import torch
import lightning.pytorch as L

L.seed_everything(1)
REST = float(os.environ.get("REST", "0"))
STOP, HOLD, VALIDATING, WORKERS = (
    int(os.environ.get(name, "0")) for name in ("STOP", "HOLD", "VALIDATING", "WORKERS")
)


class Noisy(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, i):
        x = torch.randn(4, generator=torch.Generator().manual_seed(i))
        return x + 0.01 * torch.randn(4), x.sum()


def hold():
    print("holding", flush=True)
    time.sleep(60)  # until the test kills it


class Model(L.LightningModule):
    def __init__(self, kind=tuple):
        super().__init__()
        self.save_hyperparameters()  # a class, which torch.load refuses unless it is told to trust the file
        self.inner = torch.nn.Sequential(
            torch.nn.Linear(4, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1)
        )
        self.lr = 1e-2

    def training_step(self, batch, batch_idx):
        if self.global_step + 1 == STOP and os.environ.get("RANK", "1") == "1":
            os.kill(os.getpid(), signal.SIGTERM)
        if 0 < STOP <= self.global_step and "RANK" in os.environ:
            time.sleep(0.1)  # ranks agree on their last step beside the steps, which are short here
        if self.global_step + 1 == HOLD:
            hold()
        return torch.nn.functional.mse_loss(self.inner(batch[0]).squeeze(-1), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("v", torch.nn.functional.mse_loss(self.inner(batch[0]).squeeze(-1), batch[1]))

    def on_validation_start(self):
        if self.global_step == VALIDATING > 0:
            os.kill(os.getpid(), signal.SIGTERM) if "STOPS_IN_IT" in os.environ else hold()

    def told(self, what):
        rates = [f"{group['lr']:.9g}" for group in self.trainer.optimizers[0].param_groups]
        print(what, self.current_epoch, self.global_step, *rates, flush=True)

    def on_validation_epoch_end(self):
        if self.trainer.training:
            self.told(f"validated {float(self.trainer.callback_metrics['v']):.9g}")

    def on_train_epoch_start(self):
        self.told("began")

    def on_train_epoch_end(self):
        self.told("ended")
        torch.rand(1)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        steps = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=1e9)
        return [optimizer], eval(os.environ.get("SCHEDULERS", "[]"))


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


given = eval(os.environ.get("CALLBACKS", "[]")), eval(os.environ.get("ARGUMENTS", "{}"))
held_out = torch.utils.data.DataLoader(Noisy(), batch_size=8)
"""
SCRIPT = (
    HEAD
    + """\
loader = torch.utils.data.DataLoader(Noisy(), batch_size=8, shuffle=True, num_workers=WORKERS)
theirs = trainer(*given[0], **given[1])
theirs.fit(Model(), loader, held_out, **eval(os.environ.get("FIT", "{}")))
print("after fit", theirs.global_step, flush=True)
time.sleep(REST)
theirs.validate(Model(), held_out, verbose=False)
print("measured", flush=True)
"""
)
BEST = SCRIPT.replace(
    "theirs.validate(Model(), held_out, verbose=False)",
    "theirs.validate(best := Model(), held_out, ckpt_path='best', weights_only=False)\n"
    "print('best', [float(each.detach().sum()) for each in best.parameters()], flush=True)",
)
PLAIN = HEAD.replace("        self.save_hyperparameters()", "        # self.save_hyperparameters()")
WITH = (
    PLAIN
    + """\
import spottrain
from spottrain.integrations.lightning import LightningCallback

spottrain.seed(1)
usual = dict(enable_checkpointing=False, use_distributed_sampler=False, num_sanity_val_steps=1)
spot = LightningCallback(log_every=1)
"""
)
CALLBACK = (
    WITH
    + """\
loader = spottrain.data.loader(Noisy(), batch_size=8, num_workers=WORKERS, shuffle=True)
theirs = trainer(*given[0], spot, **usual | given[1])
theirs.fit(Model(), loader, held_out, ckpt_path=spot.resume())
print("after fit")
"""
)
ACCUMULATING = CALLBACK.replace("batch_size=8, num_w", "batch_size=4, accumulation=2, num_w")
THEIRS = Vehicle(
    script=SCRIPT,
    loading=SCRIPT.replace(
        "theirs.fit(Model()", f"import spottrain\nmodel = Model()\nmodel.{LOADS}\ntheirs.fit(model"
    ),
    steps=20,
    ranks={"ARGUMENTS": "dict(devices=2, strategy='ddp')"},
)
OWN = Vehicle(
    script=ACCUMULATING,
    steps=18,
    env={
        "ARGUMENTS": "dict(max_steps=18, accumulate_grad_batches=2)",
        "SCHEDULERS": "[dict(scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 5), interval='step')]",
    },
)

zygote = foreign.preloading("lightning.pytorch")
base = foreign.base_of(SCRIPT)


# --- the table: what each vehicle does ------------------------------------------------------------------
def test_an_unchanged_script_begins_from_other_weights_and_goes_on_bit_for_bit(lab: Lab, base: Path) -> None:
    last = foreign.begins_from_other_weights_and_goes_on(lab, THEIRS, base)
    assert "measured" in last.log and last.log.count("event=attached") == 1
    assert "library=lightning version=2.6.6 what=Trainer.fit off=--no-auto-attach" in last.log


@pytest.mark.heavy
@pytest.mark.parametrize("workers", sample("20", "2"))
def test_the_callback_goes_on_bit_for_bit(lab: Lab, others: Lab, workers: str) -> None:
    env = {"WORKERS": workers}
    plain = others.alone(OWN.script, {**OWN.env, **env})
    last = foreign.stopped_and_killed(lab, OWN, plain, env)
    assert "after fit" in last.log and "event=attached" not in last.log


@pytest.mark.heavy
def test_two_ranks_begin_from_other_weights_and_go_on(lab: Lab, base: Path) -> None:
    foreign.two_ranks_begin_from_other_weights_and_go_on(lab, THEIRS, base)


def test_weights_that_could_not_be_left_are_left_by_the_next_attempt(lab: Lab) -> None:
    weights_that_could_not_be_left_are_left_by_the_next_attempt(lab, CALLBACK)


# --- checkpoints of the script's own ---------------------------------------------------
def test_the_scripts_own_checkpoint_counts_for_the_first_start(lab: Lab) -> None:
    saving = {"ARGUMENTS": "dict(max_epochs=2)", Env.AUTO_ATTACH: "false"}
    left_alone = lab.run(SCRIPT + "theirs.save_checkpoint('own.ckpt')\n", env=saving).done()
    assert left_alone.message.outcome is Outcome.UNTRAINED and "event=attached" not in left_alone.log
    env = {"FIT": "dict(ckpt_path='own.ckpt', weights_only=False)"}
    first = stopped_at(lab, SCRIPT, 15, env=env)
    assert min(first.losses) == 11
    second = lab.run(SCRIPT, attempt=2, env=env).done()
    assert min(second.losses) == 16
    assert "event=override setting=ckpt_path" in second.log and "script=own.ckpt" in second.log


# --- where it was: loaders, epochs, generators -------------------------------------------------------------
@pytest.mark.parametrize(
    ("workers", "step"),
    sample(
        [*itertools.product("0", (1, 3, 5, 7, 10, 14)), ("2", 7), ("2", 10)],
        *[("0", 1), ("0", 5), ("2", 7)],
    ),
)
def test_an_unchanged_script_goes_on_exactly_in_an_epoch_and_at_its_end(
    lab: Lab, others: Lab, workers: str, step: int
) -> None:
    env = {"WORKERS": workers}
    plain = others.alone(SCRIPT, env)
    assert max(plain.losses) == 20
    first = stopped_at(lab, SCRIPT, step, env=env)
    nothing_done = step == 1 and first.message.step == 0  # it ended before its first optimizer step
    assert first.message.durableStep == (None if nothing_done else step)
    second = lab.run(SCRIPT, attempt=2, interval="1h", env=env).done()
    assert first.losses | second.losses == plain.losses and second.digest == plain.digest


GENERATOR = "generator=torch.Generator().manual_seed(3)"
DRAWN = f"torch.utils.data.RandomSampler(Noisy(), replacement=True, num_samples=40, {GENERATOR})"
ORDERS = {
    "the loader's": f"batch_size=8, shuffle=True, {GENERATOR}",
    "a sampler's": f"batch_size=8, sampler={DRAWN}",
    "a batch sampler's": f"batch_sampler=torch.utils.data.BatchSampler({DRAWN}, 8, False)",
}


@pytest.mark.parametrize(
    ("order", "step"),
    sample(itertools.product(ORDERS, (7, 10)), ("the loader's", 10), ("a batch sampler's", 7)),
)
def test_the_generators_of_a_loader_go_on(lab: Lab, others: Lab, order: str, step: int) -> None:
    """In the first case the validations draw from the same generator."""
    script = SCRIPT.replace("batch_size=8, shuffle=True", ORDERS[order]).replace(
        "theirs = trainer(",
        "held_out = torch.utils.data.DataLoader(Noisy(), batch_size=8, generator=loader.generator)\n"
        "theirs = trainer(",
    )
    plain = others.alone(script, {})
    stopped_at(lab, script, step, env={})
    second = lab.run(script, attempt=2, interval="1h").done()
    assert second.losses == {each: loss for each, loss in plain.losses.items() if each > step}
    assert second.digest == plain.digest


STREAM = """\
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return map(Noisy().__getitem__, torch.randperm(40).tolist())


"""


@pytest.mark.parametrize("step", sample([7, 10], 7))
def test_a_stream_goes_on_though_lightning_reads_a_batch_ahead(lab: Lab, others: Lab, step: int) -> None:
    script = SCRIPT.replace("def hold():", f"{STREAM}def hold():", 1)
    script = script.replace("Noisy(), batch_size=8, shuffle=True", "Stream(), batch_size=8")
    plain = others.alone(script, {})
    first = stopped_at(lab, script, step, env={})
    second = lab.run(script, attempt=2, interval="1h").done()
    assert first.losses | second.losses == plain.losses and second.digest == plain.digest


@pytest.mark.heavy
def test_persistent_workers_keep_the_order_of_the_samples(lab: Lab, others: Lab) -> None:
    script = SCRIPT.replace("shuffle=True", "shuffle=True, persistent_workers=True").replace(
        "x + 0.01 * torch.randn(4)", "x"
    )
    env = {"WORKERS": "2"}
    plain = others.alone(script, env)
    stopped_at(lab, script, 7, env=env)
    second = lab.run(script, attempt=2, interval="1h", env=env).done()
    assert second.digest == plain.digest
    assert second.log.count('event=advice about=attach text="persistent_workers=True') == 1


# --- the rest of the script -------------------------------------------------------------------------------
@pytest.mark.heavy
def test_a_stop_after_the_training_has_the_rest_of_the_script_run_again(lab: Lab, base: Path) -> None:
    env = {Env.GRACE_SECONDS: "4", "REST": "60"}
    first = lab.run(SCRIPT, attempt=1, env=env).until("after fit 20").stopped()
    assert first.message.outcome is Outcome.INTERRUPTED and first.message.durableStep == 20
    assert lab.head["state"] == "released"
    second = lab.run(SCRIPT, attempt=2).done()
    assert not second.losses and "after fit 20" in second.log and "measured" in second.log
    assert second.digest == first.digest and lab.head["state"] == "done"


def test_early_stopping_ends_it_again_after_an_interruption_of_the_rest(lab: Lab) -> None:
    env = {"CALLBACKS": "[L.callbacks.EarlyStopping('v', patience=1, min_delta=1e9)]"}
    first = lab.run(SCRIPT, attempt=1, env=env | {"REST": "60"}).until("after fit 10").killed()
    second = lab.run(SCRIPT, attempt=2, env=env).done()
    assert not second.losses and "after fit 10" in second.log
    assert second.digest == first.digest and second.message.reason == Reason.EARLY_STOPPED
    assert second.message.step == 10 and "Monitored metric v did not improve" in second.message.message


SLOW_TEST = "Model.test_step = lambda self, batch, i: print('testing', flush=True) or time.sleep(0.1)\n"
AFTER_FIT = {
    "test": (SLOW_TEST + "theirs.test(Model(), torch.utils.data.DataLoader(range(200)))\n", "testing"),
    "second fit": ("trainer(max_epochs=9999).fit(Model(), loader)\n", "began 5 "),
}


@pytest.mark.parametrize("what", AFTER_FIT)
def test_lightnings_own_exit_at_a_stop_after_the_training_does_not_make_the_job_done(
    lab: Lab, what: str
) -> None:
    rest, begun = AFTER_FIT[what]
    run = lab.run(SCRIPT + rest + "print('the rest')\n", attempt=1).until(begun)
    run.send().ends(ExitCode.INTERRUPTED_LOST if what == "second fit" else ExitCode.INTERRUPTED)
    assert "between the end of the training" in run.message.message and "the rest" not in run.log
    assert lab.head["state"] == "released"


def test_a_second_stage_does_not_go_on_from_the_checkpoint_of_the_first(lab: Lab) -> None:
    stopped_at(lab, SCRIPT, 2, env={})
    second = {"ARGUMENTS": "dict(default_root_dir='stage2')"}
    run = lab.run(SCRIPT, attempt=2, env=second).ends(ExitCode.BAD_CONFIGURATION)
    assert "folder stage2" in run.message.message and "one checkpoint URI for each" in run.message.message


LOGGED = ("lightning_logs", "", "dict(logger=L.loggers.CSVLogger('.'))")
"""The logger of each attempt on this disk has a folder of its own: version_0, version_1, ..."""


def told(run: Run) -> list[str]:
    """What a run of `BEST` printed of the best checkpoint's weights."""
    return [line for line in run.log.splitlines() if line.startswith("best ")]


@pytest.mark.parametrize(
    ("folder", "where", "arguments"),
    sample([LOGGED, ("kept", "dirpath='kept', ", "{}")], LOGGED),
)
def test_the_best_checkpoint_of_the_script_is_on_a_new_pod_too(
    lab: Lab, others: Lab, folder: str, where: str, arguments: str
) -> None:
    """`v` falls, so with mode="max" the first epoch is the best."""
    kept = f"[L.callbacks.ModelCheckpoint({where}monitor='v', mode='max')]"
    env = {"CALLBACKS": kept, "ARGUMENTS": arguments}
    plain = others.alone(BEST, env)
    stopped_at(lab, BEST, 12, env=env)
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
    plain = others.alone(BEST)
    lab.run(BEST, attempt=1, interval="1h", env={"REST": "60"}).until("after fit 20").killed()
    shutil.rmtree(lab.folder / "checkpoints")
    second = lab.run(BEST, attempt=2).done()
    assert not second.losses and told(plain) and told(second) == told(plain)


# --- what is attached to, and what is not -------------------------------------------------------------------
@pytest.mark.parametrize(
    ("strategy", "says"),
    [("ddp", "spottrain knows of 1"), ("ddp_spawn", "(here by spawn)"), ("ddp_notebook", "(here by fork)")],
)
def test_processes_that_lightning_would_start_are_refused_before_the_claim(
    lab: Lab, strategy: str, says: str
) -> None:
    env = {"ARGUMENTS": f"dict(devices=2, strategy={strategy!r})"}
    run = lab.run(SCRIPT, env=env).ends(ExitCode.BAD_CONFIGURATION)
    assert says in run.message.message and "--no-auto-attach" in run.message.message
    assert not (lab.folder / "store/HEAD").exists()


def test_a_script_with_both_names_of_the_library_is_refused(lab: Lab) -> None:
    both = "import pytorch_lightning\n" + SCRIPT.replace(
        "return L.Trainer(", "return pytorch_lightning.Trainer("
    )
    run = lab.run(both).ends(ExitCode.BAD_CONFIGURATION)
    assert "both lightning.pytorch and pytorch_lightning" in run.message.message


def test_what_the_tuner_and_a_try_out_train_is_left_alone(lab: Lab) -> None:
    tuned = SCRIPT.replace(HEAD, PLAIN).replace(
        "theirs.fit(",
        "trainer(fast_dev_run=True).fit(Model(), loader, held_out)\n"
        "L.tuner.Tuner(theirs).lr_find(Model(), loader, num_training=5)\n"
        "theirs.fit(",
    )
    run = lab.run(tuned).done()
    assert run.message.step == 20 and run.log.count("event=attached") == 1
    assert "fast_dev_run runs one batch as a check" in run.log


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["pytorch_lightning", "lightning.pytorch"])
def test_a_fresh_process_is_attached_to_when_it_imports_the_library(start: Start, name: str) -> None:
    run = start(SCRIPT.replace("lightning.pytorch", name), *OURS, "train.py").done(300)
    library = "pytorch-lightning" if name == "pytorch_lightning" else "lightning"
    assert run.message.step == 20 and f"event=attached library={library} " in run.log


# --- the callback -------------------------------------------------------------------------------------------
def test_our_loader_tells_how_long_it_was_waited_for_and_a_validation_is_productive(lab: Lab) -> None:
    slow = ACCUMULATING.replace(
        "        x = torch.randn(4, gen", "        time.sleep(0.005)\n        x = torch.randn(4, gen"
    )
    split = lab.run(slow, attempt=1, interval="4steps", env=dict(OWN.env)).done().message.timeSplit
    assert split is not None
    assert split.dataWait >= (17 * 8 - 4) * 0.005, (
        "but for the first step, and the batch that was fetched ahead"
    )
    assert split.productive >= 3 * 40 * 0.005, "three epochs end before the last step"
    assert split.checkpointStall > 0 and split.unsaved == 0


MANUAL = CALLBACK.replace(
    "        self.inner = ", "        self.automatic_optimization = False\n        self.inner = "
).replace(
    """\
            hold()
        return torch.nn.functional.mse_loss(self.inner(batch[0]).squeeze(-1), batch[1])
""",
    """\
            hold()
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(self.inner(batch[0]).squeeze(-1), batch[1])
        self.manual_backward(loss)
        optimizer.step()
        if self.trainer.is_last_batch:
            self.lr_schedulers()[0].step()
        return loss
""",
    1,
)
PLATEAU = "[steps, dict(scheduler=plateau, monitor='v')]"
KINDS = {
    "automatic": (CALLBACK, "", PLATEAU),
    "manual": (MANUAL, "", PLATEAU),
    "twice an epoch": (CALLBACK, "val_check_interval=2", PLATEAU),
    "every second epoch": (CALLBACK, "check_val_every_n_epoch=2", "[steps]"),
    "no validation": (CALLBACK, "limit_val_batches=0", "[steps]"),
    "torch's loader": (
        CALLBACK.replace(
            "theirs = trainer(",
            "loader = torch.utils.data.DataLoader(Noisy(), batch_size=8)\ntheirs = trainer(",
        ).replace("x + 0.01 * torch.randn(4)", "x"),
        "",
        PLATEAU,
    ),
}


def _hooks(*runs: Run) -> list[str]:
    words = ("validated ", "began ", "ended ")
    return [line for run in runs for line in run.log.splitlines() if line.startswith(words)]


def _ends(kind: str) -> tuple[str, dict[str, str]]:
    script, arguments, schedulers = KINDS[kind]
    return script, {"ARGUMENTS": f"dict({arguments})", "SCHEDULERS": schedulers}


@pytest.mark.parametrize(
    ("kind", "step"),
    sample(
        [
            *itertools.product(KINDS, (10,)),
            *itertools.product(["automatic", "manual", "twice an epoch"], (12,)),
            *[("automatic", 20), ("twice an epoch", 14), ("every second epoch", 5)],
        ],
        *[("automatic", 20), ("twice an epoch", 12), ("every second epoch", 10)],
    ),
)
def test_what_follows_a_step_that_was_stopped_at_is_done_by_the_next_attempt(
    lab: Lab, others: Lab, kind: str, step: int
) -> None:
    script, env = _ends(kind)
    plain = others.alone(script, env)
    assert max(plain.losses) == 20
    first = stopped_at(lab, script, step, env=env)
    assert first.message.durableStep == step
    second = lab.run(script, attempt=2, interval="1h", env=env).done()
    assert first.losses | second.losses == plain.losses
    assert _hooks(first, second) == _hooks(plain)
    assert second.digest == plain.digest


@pytest.mark.parametrize("kind", sample(["automatic", "manual"], "automatic"))
def test_a_kill_in_a_validation_has_it_done_again(lab: Lab, others: Lab, kind: str) -> None:
    script, env = _ends(kind)
    plain = others.alone(script, env)
    first = lab.run(script, attempt=1, interval="10steps", env=env | {"VALIDATING": "10"})
    first.until("committed step=10 ").until("holding").killed()
    second = lab.run(script, attempt=2, interval="1h", env=env).done()
    assert first.losses | second.losses == plain.losses
    assert _hooks(first, second) == _hooks(plain)
    assert second.digest == plain.digest


@pytest.mark.parametrize(
    ("kind", "step"),
    sample(
        [
            *[("automatic", 10), ("automatic", 20), ("manual", 10), ("every second epoch", 10)],
            *[("twice an epoch", 12), ("twice an epoch", 14)],
        ],
        ("automatic", 10),
    ),
)
def test_a_stop_in_a_validation_saves_the_step_before_and_the_next_attempt_validates(
    lab: Lab, others: Lab, kind: str, step: int
) -> None:
    script, env = _ends(kind)
    plain = others.alone(script, env)
    stops = {"VALIDATING": str(step), "STOPS_IN_IT": "1"}
    first = lab.run(script, attempt=1, interval="1h", env=env | stops).ends(ExitCode.INTERRUPTED)
    assert first.message.step == first.message.durableStep == step
    second = lab.run(script, attempt=2, interval="1h", env=env).done()
    assert first.losses | second.losses == plain.losses
    assert _hooks(first, second) == _hooks(plain)
    assert second.digest == plain.digest


def test_the_manifest_ends_it_profiles_it_and_what_is_not_taken_is_told(lab: Lab) -> None:
    training = {"maxSteps": 6, "emaDecay": 0.9, "profile": {"wait": 1, "warmup": 1, "active": 2}}
    seen = CALLBACK.replace(
        "        optimizer = torch.optim.AdamW",
        '        print("expected", self.trainer.estimated_stepping_batches)\n'
        "        optimizer = torch.optim.AdamW",
    )
    run = lab.run(seen, training=json.dumps(training), env={"ARGUMENTS": "dict(max_epochs=1)"}).done()
    assert "event=override setting=max_steps manifest=6" in run.log and "step=6/6" in run.log
    assert "expected 6\n" in run.log, "before the module makes its schedule; an epoch has 5 steps"
    assert "about=training fields=emaDecay " in run.log
    assert run.message.ignoredSettings == "emaDecay"
    assert len(list((lab.folder / "store" / profile_key(1, 0, "")).iterdir())) == 2


BAD = {
    "no resume": ("trainer(spot).fit(Model(), held_out)\n", "LightningCallback.resume() was not called"),
    "other processes": (
        "spot.resume()\nspot.setup(type('Trainer', (), {'world_size': 2})(), Model(), 'fit')\n",
        "spottrain knows of 1",
    ),
    "weights that are not stored": (
        "loss = torch.nn.Bilinear(4, 1, 1)\n"
        "class Both(Model):\n"
        "    def configure_optimizers(self):\n"
        "        return torch.optim.AdamW([*self.parameters(), *loss.parameters()])\n"
        "trainer(spot).fit(Both(), held_out, ckpt_path=spot.resume())\n",
        "Bilinear.weight of shape (1, 4, 1)",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence(lab: Lab, case: str) -> None:
    code, says = BAD[case]
    assert says in lab.run(WITH + code).ends(ExitCode.BAD_CONFIGURATION).message.message

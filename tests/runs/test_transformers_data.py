"""Hugging Face's Trainer resumes at its position in the data, whatever the loader and its sampler draw."""

from __future__ import annotations

import pytest
from spottrain.contract import ExitCode

from tests.runs import foreign
from tests.runs.conftest import Lab
from tests.runs.foreign import stopped_at

pytest.importorskip("transformers")

DATA = """\
import os, random, shutil, signal, time
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data import RandomSampler, Sampler, WeightedRandomSampler
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

SIZE = 20


def item(i, noisy):
    x = torch.tensor([i / SIZE, 1.0]) + noisy * torch.rand(())
    return {"x": x, "i": i, "input_ids": [0] * (i % 7 + 1)}


class Numbers(Dataset):
    noisy = False

    def __len__(self):
        return SIZE

    def __getitem__(self, i):
        if i >= SIZE:
            raise IndexError
        return item(i, self.noisy)


class Noisy(Numbers):
    noisy = True


class Stream(IterableDataset):
    shuffled = noisy = False

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        for i in torch.randperm(SIZE).tolist() if self.shuffled else range(SIZE):
            if worker is None or i % worker.num_workers == worker.id:
                yield item(i, self.noisy)


class Shuffled(Stream):
    shuffled = noisy = True


class Sized(Stream):
    def __len__(self):
        return SIZE


class OfPython(Sampler):
    def __init__(self):
        self.dice = random.Random(3)

    def __len__(self):
        return SIZE

    def __iter__(self):
        return iter(self.dice.sample(range(SIZE), SIZE))


class AsItGoes(Sampler):
    def __init__(self):
        pass

    def __len__(self):
        return SIZE

    def __iter__(self):
        return (int(torch.randint(SIZE, ())) for _ in range(SIZE))


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(2, 8)
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 8))
        self.layers[2].weight = self.layers[0].weight  # safetensors does not store tied parameters

    def forward(self, x, i):
        return {"loss": (self.layers(self.first(x)).mean(-1) - i / SIZE).square().mean()}


def collate(items):
    return {"x": torch.stack([each["x"] for each in items]), "i": torch.tensor([each["i"] for each in items])}


def masked(items):
    batch = collate(items)
    return batch | {"x": batch["x"] * (torch.rand(batch["x"].shape) > 0.2)}


class Fine(Trainer):
    sampler = loader = None

    def _get_train_sampler(self, dataset=None):
        return self.sampler() if self.sampler else super()._get_train_sampler(dataset)

    def get_train_dataloader(self):
        return self.loader() if self.loader else super().get_train_dataloader()

    def compute_loss(self, model, inputs, return_outputs=False, **_):
        loss = model(**inputs)["loss"]
        self.seen.append((inputs["i"].tolist(), inputs["x"].sum().item(), loss.item()))
        return loss


def trainer(data=Numbers, sampler=None, loader=None, collator=collate, **arguments):
    set_seed(1)
    usual = dict(
        output_dir="output",
        max_steps=16,
        per_device_train_batch_size=4,
        learning_rate=0.1,
        save_strategy="no",
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        remove_unused_columns=False,
    )
    arguments = TrainingArguments(**usual | arguments)
    made = Fine(model=Net(), args=arguments, train_dataset=data(), data_collator=collator)
    made.seen, made.sampler, made.loader = [], sampler, loader
    return made


def weighted():
    return WeightedRandomSampler([1.0] * SIZE, SIZE)
"""

# --- the position alone, in one process -------------------------------------------------------------------
CASES = (
    DATA
    + """\
from spottrain.integrations.transformers import TrainerPosition, _save_shared_tensors


class Followed(TrainerCallback):
    def __init__(self, position, stop, early):
        self.position, self.stop, self.early, self.saved = position, stop, early, None

    def on_epoch_begin(self, args, state, control, train_dataloader=None, **_):
        self.position.begin_epoch(train_dataloader)

    def on_step_begin(self, *_, **__):
        self.position.go_on()

    def on_step_end(self, args, state, control, **_):
        self.position.step_over()
        control.should_epoch_stop = state.global_step == self.early
        if state.global_step == self.stop:
            control.should_save = control.should_training_stop = True

    def on_epoch_end(self, *_, **__):
        self.position.go_on()

    def on_save(self, args, state, control, **_):
        self.saved = self.saved or self.position.state_after(epoch_stops=control.should_epoch_stop)


def trained(stop=0, saved=None, after=0, early=0, **case):
    made, position = trainer(logging_strategy="no", **case), TrainerPosition()
    position.follow(made)
    position.load(saved)
    followed = Followed(position, stop, early)
    made.add_callback(followed)
    _save_shared_tensors(made)
    made.train(resume_from_checkpoint=f"output/checkpoint-{after}" if saved else None)
    return made, followed.saved


two = dict(gradient_accumulation_steps=2)
generator = lambda: RandomSampler(range(SIZE), generator=torch.Generator().manual_seed(5))
unprepared = lambda: DataLoader(Noisy(), 4, sampler=weighted(), collate_fn=collate)
workers = dict(dataloader_num_workers=2)
LIGHT = {
    "shuffled": two,
    "weighted, masked": dict(sampler=weighted, collator=masked) | two,
    "a generator of Python": dict(sampler=OfPython),
    "drawn one by one": dict(sampler=AsItGoes),
    "by length": dict(train_sampling_strategy="group_by_length") | two,
    "stream": dict(data=Stream) | two,
    "shuffled stream": dict(data=Shuffled),
    "a callback ends an epoch": dict(early=3, num_train_epochs=4, max_steps=-1),
    "workers": dict(sampler=weighted) | workers,
}
HEAVY = {
    "a generator of torch": dict(sampler=generator, accelerator_config={"use_seedable_sampler": False}),
    "not seedable": dict(accelerator_config={"use_seedable_sampler": False}),
    "noisy": dict(data=Noisy),
    "sized stream": dict(data=Sized),
    "workers that stay": dict(sampler=weighted, dataloader_persistent_workers=True) | workers,
    "stream, workers": dict(data=Shuffled) | workers,
    "not prepared": dict(loader=unprepared),
    "rebalanced": dict(train_sampling_strategy="batch_rebalance") | two,
}
for name, case in (LIGHT | HEAVY if os.environ.get("ALL") else LIGHT).items():
    plain = trained(**case)[0]
    for stop in (2, 5, 8) if os.environ.get("ALL") else (8,):
        shutil.rmtree("output", ignore_errors=True)
        first, saved = trained(stop=stop, **case)
        second = trained(saved=saved, after=stop, **case)[0]
        used = len(plain.seen) - len(second.seen)
        equal = plain.seen == first.seen[:used] + second.seen
        equal = equal and all(map(torch.equal, plain.model.parameters(), second.model.parameters()))
        print("resumed", name, stop, "as if undisturbed" if equal else "with OTHER data", flush=True)
"""
)

zygote = foreign.preloading("transformers.trainer", "accelerate")


@pytest.mark.parametrize("which", ["", pytest.param("all", marks=pytest.mark.heavy)])
def test_the_rest_of_the_data_is_that_of_an_undisturbed_training(lab: Lab, which: str) -> None:
    found = lab.run(CASES, env={"ALL": which}).done(300).log
    resumed = [line for line in found.splitlines() if line.startswith("resumed ")]
    assert len(resumed) == (51 if which else 9)
    assert [line for line in resumed if not line.endswith("as if undisturbed")] == []


# --- a notice -----------------------------------------------------------------------------------------------
SCRIPT = (
    DATA
    + """\
class Told(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, **_):
        if state.global_step + 1 == int(os.environ.get("STOP", "0")):
            os.kill(os.getpid(), signal.SIGTERM)
        if 0 < int(os.environ.get("SLOW", "0")) <= state.global_step:
            time.sleep(0.1)  # ranks agree on their last step beside the steps, which are short here


theirs = trainer(**eval(os.environ["DATA"]))
theirs.add_callback(Told())
theirs.train()
"""
)
ATTACHED = {
    "a stream that is shorter than the training": "dict(data=Stream, max_steps=12)",
    "a sampler that draws from the global random state": "dict(sampler=weighted, collator=masked)",
}


@pytest.mark.parametrize("what", ATTACHED)
def test_a_notice_changes_neither_data_nor_weights_of_an_unchanged_script(
    lab: Lab, others: Lab, what: str
) -> None:
    """The model is a plain module with tied parameters."""
    env = {"DATA": ATTACHED[what]}
    plain = others.alone(SCRIPT, env)
    first = stopped_at(lab, SCRIPT, 8, env=env)
    assert first.message.durableStep == 8
    second = lab.run(SCRIPT, attempt=2, interval="1h", env=env).done()
    assert first.losses | second.losses == plain.losses and second.digest == plain.digest


@pytest.mark.heavy
def test_two_ranks_go_on_with_batches_that_the_first_one_reads_for_both(lab: Lab) -> None:
    arguments = "accelerator_config={'dispatch_batches': True}, ddp_backend='gloo', max_steps=6"
    env = {"DATA": f"dict(sampler=weighted, per_device_train_batch_size=2, {arguments})"}
    plain = lab.run(SCRIPT, nproc=2, at="plain", attempt=1, env=env).done(300)
    first = lab.run(SCRIPT, nproc=2, attempt=1, env=env | {"STOP": "2", "SLOW": "2"})
    first.ends(ExitCode.INTERRUPTED, 300)
    second = lab.run(SCRIPT, nproc=2, attempt=2, env=env).done(300)
    assert first.message.durableStep in range(1, 6) and second.digest == plain.digest


def test_a_skip_that_the_script_switches_off_is_advised_before_anything_is_lost(lab: Lab) -> None:
    env = {"DATA": "dict(ignore_data_skip=True, max_steps=2)"}
    assert "ignore_data_skip=True) begins an epoch's data again" in lab.run(SCRIPT, env=env).done().log


def test_a_loader_that_the_trainer_cannot_skip_in_is_refused_before_its_first_step(lab: Lab) -> None:
    loader = "type('Pairs', (), {'__iter__': lambda self: iter([]), '__len__': lambda self: 5})"
    run = lab.run(SCRIPT, env={"DATA": f"dict(loader={loader})"}).ends(ExitCode.BAD_CONFIGURATION)
    assert "the Trainer's loader is a Pairs" in run.message.message

"""What a training with libraries of Hugging Face leaves in `final/`, and models that they cannot save."""

from __future__ import annotations

import json

import pytest
from spottrain.contract import ExitCode

from tests.runs import foreign
from tests.runs.conftest import Lab
from tests.support.command import checkpoints

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

zygote = foreign.preloading("transformers.trainer", "transformers.models.gpt2", "accelerate")

HEAD = """\
import os
import torch, spottrain
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

spottrain.seed(1)
NAMES = dict(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)


class Text(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        tokens = torch.arange(i, i + 8)
        return {"input_ids": tokens % 16, "labels": tokens % 16}


def trained(model, **more):
    arguments = TrainingArguments(
        output_dir="output",
        max_steps=2,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    global trainer
    trainer = Trainer(model=model, args=arguments, train_dataset=Text(), **more)
    trainer.train()
    return model


def read_back(model):
    loaded = GPT2LMHeadModel.from_pretrained("store/final")
    here, there = model.state_dict(), loaded.state_dict()
    same = here.keys() == there.keys() and all(torch.equal(here[name], there[name]) for name in here)
    print("read back", same and loaded.lm_head.weight is loaded.transformer.wte.weight, flush=True)
"""
TOKENIZER = """\
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast, default_data_collator
words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="a")
model = GPT2LMHeadModel(GPT2Config(**NAMES))
read_back(trained(model, processing_class=tokenizer, data_collator=default_data_collator))
print("tokens", AutoTokenizer.from_pretrained("store/final")("b").input_ids, flush=True)
"""
IN_PARTS = """\
import spottrain.training.engine
spottrain.training.engine.most_bytes = lambda known: 1000
model = trained(GPT2LMHeadModel(GPT2Config(**NAMES)))
if os.environ["RANK"] == "0":
    read_back(model)
"""
TIED_BY_HAND = """\
model = GPT2LMHeadModel(GPT2Config(**NAMES | {"n_layer": 2}))
first, second = model.transformer.h
second.mlp.c_fc.weight = first.mlp.c_fc.weight  # which the class does not declare
read_back(trained(model))
"""
ACCELERATE = """\
from accelerate import Accelerator
from spottrain.integrations.accelerate import AccelerateRun
accelerator = Accelerator(cpu=True)
model = GPT2LMHeadModel(GPT2Config(**NAMES))
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
run = AccelerateRun(accelerator, max_steps=2)
while not run.done:
    words = torch.randint(16, (2, 8))
    accelerator.backward(model(words, labels=words).loss)
    optimizer.step()
    run.step_completed()
run.finish()
read_back(model)
"""
OWN_LOOP = """\
model = GPT2LMHeadModel(GPT2Config(**NAMES))
optimizer = torch.optim.AdamW(model.parameters())
run = spottrain.Run(model=model, optimizer=optimizer, max_steps=2)
while not run.done:
    words = torch.randint(16, (2, 8))
    model(words, labels=words).loss.backward()
    optimizer.step()
    run.step_completed()
run.finish()
read_back(model)
"""
CONTRADICTION = """\
def contradict(config):
    model = GPT2LMHeadModel(config)
    model.generation_config.temperature = 0.5  # without do_sample
    return model


"""


def test_from_pretrained_reads_the_final_model_and_its_tokenizer(lab: Lab) -> None:
    log = lab.run(HEAD + TOKENIZER).done().log
    assert "read back True" in log and "tokens [1]" in log
    config = json.loads((lab.folder / "store/final/config.json").read_text())
    assert config["architectures"] == ["GPT2LMHeadModel"] and config["dtype"] == "float32"
    assert not list((lab.folder / "output").glob(".spottrain-*")), "nothing is left behind"


def test_from_pretrained_reads_a_model_in_several_files_of_two_ranks(lab: Lab) -> None:
    script = HEAD.replace("use_cpu=True", "use_cpu=True, ddp_backend='gloo'") + IN_PARTS
    assert "read back True" in lab.run(script, nproc=2).done(300).log
    assert (lab.folder / "store/final/model.safetensors.index.json").exists()


def test_parameters_that_a_script_ties_by_hand_are_saved_too(lab: Lab) -> None:
    assert "read back True" in lab.run(HEAD + TIED_BY_HAND).done().log


@pytest.mark.parametrize("script", [ACCELERATE, OWN_LOOP], ids=["accelerate", "own loop"])
def test_from_pretrained_reads_the_model_of_a_loop_of_ones_own(lab: Lab, script: str) -> None:
    assert "read back True" in lab.run(HEAD + script).done().log


def test_what_the_library_refuses_to_save_is_said_and_loses_no_training(lab: Lab) -> None:
    script = OWN_LOOP.replace("GPT2LMHeadModel(", "contradict(").replace("read_back(model)", "")
    log = lab.run(HEAD + CONTRADICTION + script).done().log
    assert "about=final-weights" in log and "GenerationConfig is not stored" in log
    assert (lab.folder / "store/final/config.json").exists()


# --- what the script saves by itself ----------------------------------------------------------------------
SAVING = (
    TOKENIZER.partition("words")[0]
    + """\
words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
PreTrainedTokenizerFast(tokenizer_object=words, unk_token="a").save_pretrained("output")
model = trained(GPT2LMHeadModel(GPT2Config(**NAMES)))
trainer.save_model()
open("output/notes.md", "w").write("of the script")
"""
)


def saved(lab: Lab) -> dict[str, str]:
    """The files that the script has saved, and where they are below `final/`."""
    facts = json.loads((lab.folder / "store/final/manifest.json").read_text())
    return {each["name"]: each["at"] for each in facts.get("saved", [])}


def test_a_model_that_the_script_saves_after_its_training_is_stored_with_what_lies_beside(lab: Lab) -> None:
    lab.run(HEAD + SAVING).done()
    found = saved(lab)
    assert found["model.safetensors"] == "model.safetensors", "equal weights are not sent twice"
    assert found["config.json"] == "saved/config.json" and found["notes.md"] == "saved/notes.md"
    assert found["tokenizer.json"] == "saved/tokenizer.json", "stored before the training"
    assert (lab.folder / "store/final/saved/notes.md").read_text() == "of the script"


def test_a_download_is_what_the_script_has_saved_for_from_pretrained(lab: Lab) -> None:
    lab.run(HEAD + SAVING + 'model.half().save_pretrained("output/half")\n').done()
    found = saved(lab)
    assert found["model.safetensors"] == "model.safetensors"
    assert found["half/model.safetensors"] == "saved/half/model.safetensors"
    assert checkpoints(["download", str(lab.folder / "store"), "--to", str(lab.folder / "got")]) == 0
    log = lab.run(HEAD + READING, at="other").done().log
    assert "True True" in log and "tokens [1]" in log


READING = """\
from transformers import AutoModelForCausalLM, AutoTokenizer


def weights(folder):
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def same(name):
    here, there = weights(f"output{name}"), weights(f"got{name}")
    return here.keys() == there.keys() and all(torch.equal(here[each], there[each]) for each in here)


print(same(""), same("/half"), flush=True)
print("tokens", AutoTokenizer.from_pretrained("got")("b").input_ids, flush=True)
"""


def test_a_model_that_is_saved_too_early_or_too_late_is_said_to_be_lost(lab: Lab) -> None:
    log = lab.run(HEAD + ACCELERATE.replace("run.finish()", EARLY_AND_LATE)).done().log
    assert log.count("event=model-not-stored") == 2 and not saved(lab)
    assert "early" in log and "during the training" in log and "what was trained is at " in log


EARLY_AND_LATE = """\
model.save_pretrained("early")
run.finish()
model.save_pretrained("late")
"""


# --- models that are no models of transformers ------------------------------------------------------------
PLAIN = """\
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.out = torch.nn.Embedding(16, 4), torch.nn.Linear(4, 16)
        self.out.weight = self.words.weight
        self.register_buffer("every_second", torch.arange(8.0)[::2])

    def forward(self, input_ids, labels):
        scores = self.out(self.words(input_ids)).flatten(0, 1)
        return {"loss": torch.nn.functional.cross_entropy(scores, labels.flatten())}

    MORE


model = Net()
trained(model)
print("trained", flush=True)
"""
UNSTORABLE = {
    "an extra state": ("def get_extra_state(self): return {'seen': 1}", "_extra_state, a dict"),
    "a number format": (
        "register = lambda self: self.register_buffer('z', torch.zeros(2, dtype=torch.complex128))",
        "z has dtype torch.complex128",
    ),
}


def test_a_plain_module_with_tied_parameters_is_trained_to_its_end(lab: Lab) -> None:
    run = lab.run((HEAD + PLAIN).replace("MORE", "")).done()
    assert "trained" in run.log and run.message.durableStep == 2


@pytest.mark.parametrize("what", UNSTORABLE)
def test_a_module_that_cannot_be_saved_is_refused_before_its_first_step(lab: Lab, what: str) -> None:
    code, says = UNSTORABLE[what]
    script = (HEAD + PLAIN).replace("MORE", code).replace("model = Net()\n", "model = Net()\nREGISTER\n")
    script = script.replace("REGISTER", "model.register()" if "register" in code else "")
    run = lab.run(script).ends(ExitCode.BAD_CONFIGURATION)
    assert not run.losses and says in run.message.message

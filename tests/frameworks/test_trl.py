"""TRL's SFTTrainer with LoRA of PEFT, unchanged: exact after interruptions; no checkpoint has the base."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import spottrain
import torch
from safetensors.torch import load_file
from spottrain.contract import Env, Outcome

from tests.runs.launched import Launched
from tests.support.command import checkpoints
from tests.support.examples import ROOT, Kind

STEPS = 200
Train = Callable[..., Launched]


@pytest.fixture
def train(python: Path, tmp_path: Path) -> Iterator[Train]:
    """Starts the example in a folder of its own, as in a new pod."""
    begun: list[Launched] = []

    def train(attempt: int, *, at: str = "store", **env: str) -> Launched:
        folder = tmp_path / f"{at}-{attempt}"
        folder.mkdir()
        basic = {
            Env.JOB_NAME: "trl-lora",
            Env.JOB_UID: f"uid-{at}",
            Env.ATTEMPT: str(attempt),
            Env.CHECKPOINT_URI: str(tmp_path / at),
            Env.CHECKPOINT_INTERVAL: "20steps",
            "OUTPUT": str(folder / "output"),
            "HF_HOME": str(tmp_path / "cache"),
            "PYTHONPATH": str(ROOT / "runtime"),
            "STEPS": str(STEPS),
        }
        command = [str(python), "-m", "spottrain", *Kind(name="trl-lora").argv(folder)]
        begun.append(Launched(folder, command, **basic | env))
        return begun[-1]

    yield train
    for each in begun:
        each.close()


def digest(run: Launched) -> str:
    return run.log.rsplit("digest=", 1)[1].split()[0]


def sizes(store: Path) -> dict[int, int]:
    """Bytes of each checkpoint in the store, by its step."""
    entries = json.loads((store / "HEAD").read_text())["checkpoints"]
    return {
        entry["step"]: sum(
            file.stat().st_size for file in (store / entry["key"]).rglob("*") if file.is_file()
        )
        for entry in entries
    }


def test_the_weights_are_those_of_a_run_that_was_not_interrupted(train: Train, tmp_path: Path) -> None:
    plain = train(1, at="plain").done(300)
    deadline = tmp_path / "deadline"
    first = train(1, **{Env.DEADLINE_FILE: str(deadline), Env.GRACE_SECONDS: "30"})
    first.until(" step=30/", seconds=300)
    deadline.write_text(str(time.time() + 20))
    first.stopped()
    assert first.message.outcome is Outcome.INTERRUPTED
    assert first.message.durableStep == first.message.step, "no step is lost with a notice"
    train(2).until("event=restored", "event=committed", seconds=300).killed()
    third = train(3).done(300)
    assert digest(third) == digest(plain)
    assert third.message.step == STEPS and third.message.startStep


def test_the_adapter_and_its_tokenizer_lie_beside_the_final_weights(train: Train, tmp_path: Path) -> None:
    train(1, STEPS="2").done(300)
    final = tmp_path / "store" / "final"
    assert json.loads((final / "adapter_config.json").read_text())["r"] == 8
    assert (final / "tokenizer.json").exists()
    adapter, weights = load_file(final / "adapter_model.safetensors"), spottrain.load_weights(final)
    named = {name.replace(".default.", "."): each for name, each in weights.items() if ".lora_" in name}
    assert named.keys() == adapter.keys()
    assert all(torch.equal(named[name], each) for name, each in adapter.items())
    got = tmp_path / "got"
    assert checkpoints(["download", str(tmp_path / "store"), "--to", str(got)]) == 0
    assert (got / "adapter_model.safetensors").exists() and (got / "tokenizer.json").exists()
    assert not (got / "model.safetensors").exists(), "the base model is the person's own"


def test_no_checkpoint_holds_the_frozen_base_model(train: Train, tmp_path: Path) -> None:
    """The final weights do, once. Adapter, optimizer and tokenizer are a tenth of that."""
    train(1).done(300)
    whole = (tmp_path / "store" / "final" / "model.safetensors").stat().st_size
    found = sizes(tmp_path / "store")
    assert len(found) >= 2 and max(found) == STEPS
    assert max(found.values()) < 0.15 * whole, (found, whole)

"""docs/job-settings.md, "Every technique": each cell of the table is tried, with a manifest and without."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import spottrain
import torch
from spottrain.core.progress import ProgressBoard
from spottrain.core.training_settings import read_manifest
from spottrain.distributed.world import World
from spottrain.training.given_state import GivenState
from spottrain.training.job_settings import NAMES

from tests.support.sentences import Told

DOCS = Path(__file__).resolve().parents[4] / "docs" / "job-settings.md"
CODE = re.compile(r"`([^`]+)`")
STEP = re.compile(r"and `step`, which is `([^`]+)`")
MANIFEST = {
    "precision": "bf16",
    "clipGradNorm": 1.0,
    "optimizer": {"name": "sgd", "learningRate": 0.1},
    "learningRateScaling": {"rule": "linear", "baseBatchSize": 32},
    "schedule": "constant",
    "warmupFraction": 0.1,
    "globalBatchSize": 128,
    "activationCheckpointing": {"policy": "all"},
    "emaDecay": 0.9,
    "earlyStopping": {"patience": 1},
    "data": {"numWorkers": 0, "prefetchFactor": 4},
    "maxSteps": 50,
}


def section() -> str:
    return DOCS.read_text().split("## Every technique")[1].split("\n\n## ")[0]


def rows() -> dict[str, tuple[str, list[str]]]:
    """Of each technique: what is named, and the statements."""
    lines = section().splitlines()
    cells = [line.strip("|").split(" | ") for line in lines if line.startswith("| ")]
    found = {}
    for technique, named, use in cells[1:]:
        words = CODE.search(named)
        uses = [each for each in CODE.findall(use) if "(" in each or "=" in each]
        found[technique.strip()] = (words[1] if words else "", uses)
    return found


SHOWN = ("if stop:", "checkpointing=s", "spottrain profile", "lambda batch", "drop_last=True")
"""Words of the text, which are no statement by themselves."""


def session(manifest: dict[str, Any], ranks: int = 1) -> Any:
    run = SimpleNamespace(training=read_manifest(json.dumps(manifest)), job_uid="uid")
    return SimpleNamespace(
        run=run,
        world=World(size=ranks, local_size=ranks),
        asked=set(),
        env={},
        at_end=[],
        board=ProgressBoard(),
    )


def arguments(manifest: dict[str, Any], ranks: int = 1, **own: Any) -> Any:
    return spottrain.job_settings(session=session(manifest, ranks), **own)


def taking(**given: Any) -> GivenState:
    """A Run as far as it looks at what it is given."""
    model = torch.nn.Linear(1, 1)
    optimizer = getattr(given.get("scheduler"), "optimizer", None) or torch.optim.SGD(model.parameters())
    nothing = {"scheduler": None, "scaler": None, "extra": None}
    return GivenState(model, optimizer, give_scheduler="", **(nothing | given))


class Counting:
    """Fake of a Run: counts, and keeps what a save inside of `step_completed` would have of the average."""

    batches = staticmethod(iter)

    def __init__(self, ema: Any = None) -> None:
        self.global_step, self._ema = 0, ema
        self.saved: list[Any] = []

    def step_completed(self, loss: Any = None) -> None:
        self.global_step += 1
        self.saved.append(self._ema and self._ema.updated)

    def poll(self) -> None: ...

    def finish(self, ended_early: str | None = None) -> None: ...


def test_what_follows_a_step_is_told_its_number_and_is_in_what_advance_saves() -> None:
    model = torch.nn.Linear(1, 1)
    ema, kept = spottrain.techniques.EMA(model), Kept()
    trackers = spottrain.techniques.Trackers([kept])
    (block,) = re.findall(r"```python\n(.*?)```", section(), re.DOTALL)
    run = Counting(ema)
    scope = {"run": run, "ema": ema, "trackers": trackers, "loader": range(3), "train": float}
    exec(block, scope | {"s": arguments({})})
    trackers.close()
    assert run.saved == [1, 2, 3] and kept.calls == ["uid", 1, 2, 3, "closed"]


@pytest.mark.parametrize("manifest", [{}, MANIFEST], ids=["the script's own", "the manifest's"])
@pytest.mark.parametrize("technique", rows())
def test_three_lines_of_each_technique_do_what_they_say(technique: str, manifest: dict[str, Any]) -> None:
    named, uses = rows()[technique]
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()) for _ in "ab"))
    dataset = [torch.randn(4) for _ in range(128)]

    def loss_of(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(batch).square().mean()
        return loss

    own = eval(f"dict({named})", {"spottrain": spottrain})
    scope: dict[str, Any] = {
        "spottrain": spottrain,
        "s": arguments(manifest, **own),
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "dataset": dataset,
        "loss_of": loss_of,
        "batch": torch.stack(dataset[:4]),
        "device": torch.device("cpu"),
        "run": (run := Counting()),
        "step": eval(STEP.findall(section())[0], {"run": run}),
        "windows": 2,
        "Run": taking,
        "loader": [torch.stack(dataset[:4]), torch.stack(dataset[4:6])],
    }
    assert scope["step"] == 1, "what advance counts next"
    for each in uses:
        if any(word in each for word in SHOWN):
            continue
        exec(each, scope)
        if "parts" in scope and "part" not in scope:
            scope["part"] = next(scope["parts"])
    assert next(iter(scope["loader"])) is not None


def test_every_setting_has_a_row() -> None:
    named = " ".join(words for words, _ in rows().values())
    aliases = {"epochs", "warmup_epochs", "warmup_fraction", "seed"}
    assert {name for name in NAMES if f"{name}=" not in named} == aliases


# --- the learning rate ----------------------------------------------------------------------------------
Named = dict[str, Any]
RATED: Named = {
    "optimizer": None,
    "learning_rate_scaling": None,
    "schedule": "constant",
    "global_batch_size": 4,
}


def rated(manifest: Named) -> tuple[torch.optim.Optimizer, Any]:
    s = arguments(manifest, **RATED)
    model = torch.nn.Linear(2, 1)
    optimizer = s.make_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    return optimizer, s.make_scheduler(optimizer, total_steps=100)


def said(**values: float) -> Named:
    return {"optimizer": {"name": "sgd", **values}}


SCALED = {"learningRateScaling": {"rule": "linear", "baseBatchSize": 4}}


@pytest.mark.parametrize(
    ("first", "then", "rate", "holds"),
    [
        (said(learningRate=0.1), said(learningRate=0.02), 0.02, "now checkpoint=0.1 now=0.02"),
        ({}, SCALED | {"globalBatchSize": 8}, 0.2, "now checkpoint=0.1 now=0.2"),
        (said(learningRate=0.5), {}, 0.5, "checkpoint checkpoint=0.5 now=0.1"),
        (said(learningRate=0.5), said(learningRate=0.5), 0.5, None),
    ],
    ids=["the manifest's", "scaled", "no longer said", "the same"],
)
def test_a_rate_that_is_said_again_holds_after_a_resume_and_is_told(
    first: Named, then: Named, rate: float, holds: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    optimizer, scheduler = rated(first)
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    kept = json.loads(json.dumps(scheduler.state_dict()))
    capsys.readouterr()
    again, going_on = rated(then)
    again.load_state_dict(optimizer.state_dict())  # as the Run does, before the scheduler
    going_on.load_state_dict(kept)
    rates = [again.param_groups[0]["lr"]]
    again.step()
    going_on.step()
    assert [*rates, again.param_groups[0]["lr"]] == [rate, rate] and going_on.last_epoch == 4
    assert going_on.get_last_lr() == [rate] and again.param_groups[0]["initial_lr"] == rate
    told = [line for line in capsys.readouterr().out.splitlines() if "setting=lr " in line]
    assert len(told) == (holds is not None) and (holds is None or f"holds={holds}" in told[0])
    assert set(going_on.state_dict()) == set(kept), "what was said is no state"


def test_a_rate_that_is_a_tensor_stays_that_tensor() -> None:
    model = torch.nn.Linear(2, 1)
    own = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5))
    made = spottrain.techniques.lr_schedule(own, "constant", total_steps=9, override_checkpoint=True)
    state, held = rated({})[1].state_dict(), own.param_groups[0]["lr"]
    held.fill_(0.1)
    made.load_state_dict(state)
    assert own.param_groups[0]["lr"] is held and float(held) == 0.5


def test_a_scheduler_made_before_make_optimizer_is_left_as_it_is_or_refused(told: Told) -> None:
    model = torch.nn.Linear(2, 1)
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.LinearLR(own, start_factor=0.5)
    told(lambda: arguments({}, optimizer=None).make_optimizer(own, model))
    assert own.param_groups[0] | {"lr": 0.05, "initial_lr": 0.1} == own.param_groups[0]
    assert arguments({}, optimizer=None, schedule="cosine").make_optimizer(own, model) is own
    assert own.param_groups[0]["lr"] == 0.1, "the schedule is asked for, so ours takes its place"


# --- what a loop would get wrong without a word ---------------------------------------------------------
@pytest.mark.parametrize(
    ("manifest", "ranks", "own"),
    [
        ({}, 1, {"learning_rate_scaling": None}),
        ({"globalBatchSize": 100}, 1, {"global_batch_size": 64, "micro_batch_size": 32}),
        ({"globalBatchSize": 96}, 2, {"global_batch_size": 64, "micro_batch_size": 32}),
        ({"microBatchSize": "auto"}, 1, {"micro_batch_size": 32}),
        ({}, 1, {"num_workers": None}),
    ],
    ids=str,
)
def test_what_does_not_fit_together_is_one_sentence(
    manifest: Named, ranks: int, own: Named, told: Told
) -> None:
    told(lambda: arguments(manifest, ranks, **own))


OWN = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
SIZED = {"global_batch_size": 64, "micro_batch_size": "auto"}


@pytest.mark.parametrize(
    ("manifest", "own", "found"),
    [
        ({"microBatchSize": "auto"}, SIZED, {"micro_batch_size": "auto"}),
        ({"microBatchSize": 16}, SIZED, {"micro_batch_size": 16}),
        ({"maxSteps": 7}, {"epochs": 3}, {"epochs": 3, "max_steps": 7}),
        ({}, {"optimizer": "adamw"}, {"optimizer": "adamw"}),
        ({}, {"optimizer": OWN}, {"optimizer": OWN}),
        ({}, {"trackers": None}, {"trackers": []}),
    ],
)
def test_the_script_has_its_own_value_unless_the_manifest_has_one(
    manifest: Named, own: Named, found: Named
) -> None:
    s = arguments(manifest, **own)
    assert {name: getattr(s, name) for name in found} == found
    if "optimizer" in own:
        assert arguments(MANIFEST, **own).optimizer.name == "sgd"


# --- trackers -------------------------------------------------------------------------------------------
class Kept:
    """Fake of a tracker: what it was told."""

    name = "kept"

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def begin(self, run_id: str, resumed_step: int) -> None:
        self.calls.append(run_id)

    def log(self, step: int, values: Any) -> None:
        self.calls.append(step)

    def close(self) -> None:
        self.calls.append("closed")


def test_trackers_that_the_script_names_log_on_the_first_rank_alone() -> None:
    for rank, kept in enumerate((Kept(), Kept())):
        of_rank = session({}, 2)
        of_rank.world = World(rank=rank, size=2, local_rank=rank, local_size=2)
        s = spottrain.job_settings(session=of_rank, trackers=[kept])
        trackers = spottrain.techniques.Trackers(s.trackers)
        trackers.begin(s.run_id, 0)
        trackers.log(1, {"loss": 0.5})
        trackers.close()
        assert kept.calls == (["uid", 1, "closed"] if rank == 0 else [])


def test_what_are_no_trackers_is_one_sentence(told: Told) -> None:
    told(lambda: arguments({}, trackers="wandb"))
    trained: Named = {
        "model": torch.nn.Linear(2, 1),
        "optimizer": "sgd",
        "learning_rate": 0.1,
        "train_dataset": [torch.zeros(2)] * 32,
        "loss_fn": print,
        "max_steps": 2,
        "session": SimpleNamespace(store=None, **vars(session({}))),
    }
    spottrain.Trainer(**trained | {"trackers": None})
    assert len(trained["session"].at_end) == 1, "however the run ends, they are told"
    told(lambda: spottrain.Trainer(**trained | {"trackers": "wandb"}))


# --- an optimizer without our schedule ------------------------------------------------------------------
def held(**values: float) -> torch.optim.Optimizer:
    """As the manifest says it."""
    model = torch.nn.Linear(2, 1)
    own = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    made: torch.optim.Optimizer = arguments(said(**values), optimizer=None).make_optimizer(own, model)
    return made


@pytest.mark.parametrize("scheduled", [False, True])
def test_the_rate_of_a_constant_optimizer_holds_and_a_scheduler_of_torch_keeps_its_own(
    scheduled: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    def made(rate: float) -> torch.optim.Optimizer:
        optimizer = held(learningRate=rate)
        if scheduled:
            torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.5)
        return optimizer

    then = made(0.02)
    then.load_state_dict(made(0.1).state_dict())
    assert then.param_groups[0]["lr"] == (0.05 if scheduled else 0.02)
    holds = "checkpoint" if scheduled else "now"
    told = f"setting=optimizer.lr group=0 holds={holds} checkpoint=0.1 now=0.02"
    assert told in capsys.readouterr().out


def test_what_is_said_as_before_leaves_alone_what_a_schedule_has_moved_since(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """ReduceLROnPlateau keeps its rate in the group alone, and OneCycleLR moves momentum."""
    first, then = held(learningRate=0.1, momentum=0.9), held(learningRate=0.1, momentum=0.9)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(first, factor=0.5, patience=0)
    for measure in (1.0, 1.0, 1.0):
        plateau.step(measure)
    first.param_groups[0]["momentum"] = 0.85
    capsys.readouterr()
    then.load_state_dict(first.state_dict())
    assert (then.param_groups[0]["lr"], then.param_groups[0]["momentum"]) == (0.025, 0.85)
    assert "event=override" not in capsys.readouterr().out
    again = held(learningRate=0.1, momentum=0.7)
    again.load_state_dict(then.state_dict())
    assert (again.param_groups[0]["lr"], again.param_groups[0]["momentum"]) == (0.025, 0.7)


def test_a_group_that_is_added_later_is_its_own_affair() -> None:
    first, then = held(momentum=0.9), held(momentum=0.8)
    for each in (first, then):
        each.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "momentum": 0.1})
    then.load_state_dict(first.state_dict())
    assert [group["momentum"] for group in then.param_groups] == [0.8, 0.1]

"""Evaluations: means over samples, no trace in the training, and one cut short can be done again."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from spottrain.checkpoint.saver import Save
from spottrain.core.progress import ProgressBoard
from spottrain.training.evaluation import Best, Evaluation, EvaluationSchedule, Measure

SAMPLES = 10


class Numbers(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> torch.Tensor:
        torch.rand(1)  # as an augmentation would
        return torch.tensor([float(number)])


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(1)
        self.drop = torch.nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> Any:
        return self.drop(self.norm(x))


def mean(model: torch.nn.Module, batch: torch.Tensor) -> dict[str, Any]:
    model(batch)
    return {"loss": batch.mean(), "largest": batch.max()}


def evaluation(batch_size: int = 4, measure: Measure = mean) -> Evaluation:
    return Evaluation(
        dataset=Numbers(),
        measure=measure,
        batch_size=batch_size,
        device=torch.device("cpu"),
        autocast=nullcontext,
        workers=0,
        collate=None,
    )


def never() -> bool:
    return False


@pytest.mark.parametrize(("batch_size", "largest"), [(1, 4.5), (3, 5.4), (4, 5.8), (10, 9.0), (99, 9.0)])
def test_every_sample_counts_once_whatever_the_batches(batch_size: int, largest: float) -> None:
    values = evaluation(batch_size).run(Model(), never)
    assert values == pytest.approx({"largest": largest, "loss": 4.5})


def broken(model: torch.nn.Module, batch: torch.Tensor) -> dict[str, Any]:
    raise ValueError("no such metric")


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("measure", [mean, broken])
def test_it_leaves_no_trace_in_the_training(training: bool, measure: Measure) -> None:
    model = Model().train(training)
    model.norm.eval()  # frozen by the script
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with nullcontext() if measure is mean else pytest.raises(ValueError, match="no such metric"):
        evaluation(measure=measure).run(model, never)
    assert torch.equal(torch.rand(3), expected), "the random numbers go on as if it had not been"
    assert (model.training, model.drop.training, model.norm.training) == (training, training, False)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_one_that_is_cut_short_ends_after_the_batch_and_is_done_again_whole() -> None:
    seen: list[int] = []

    def counting(model: torch.nn.Module, batch: torch.Tensor) -> dict[str, Any]:
        seen.append(len(batch))
        return mean(model, batch)

    it, model = evaluation(measure=counting), Model()
    assert it.run(model, lambda: True) is None and not seen, "not begun"
    assert it.run(model, lambda: bool(seen)) is None
    assert seen == [4] and model.training
    seen.clear()
    values = it.run(model, never)
    assert seen == [4, 4, 2] and values is not None and values["loss"] == pytest.approx(4.5)


# --- the best of them ---------------------------------------------------------------------------------
@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_is_never_the_best(loss: float) -> None:
    best = Best()
    assert not best.note(loss, 5) and best.loss is None
    assert best.note(2.0, 6) and best.loss == 2.0
    assert not best.note(loss, 7) and best.loss == 2.0
    assert best.step == 6


@pytest.mark.parametrize(("how", "mark"), [("committed", 1.0), ("failed", 3.0), ("abandoned", 3.0)])
def test_the_mark_is_the_best_that_was_saved(how: str, mark: float) -> None:
    best, save = Best(loss=4.0, kept=3.0), Save(number=1, step=5)
    assert best.note(1.0, 5)
    best.keep(1.0, lambda: save)
    assert best.kept == 1.0 and not best.note(2.0, 6), "as long as it is on its way"
    setattr(save, how, True)
    if how != "abandoned":
        save.finished.set()
    assert best.kept == mark and best.note(2.0, 6) is (mark == 3.0)
    assert (best.loss, best.step) == (1.0, 5), "of all evaluations, kept or not"


def schedule() -> tuple[EvaluationSchedule, ProgressBoard]:
    board = ProgressBoard()
    made = EvaluationSchedule(
        None,
        model=Model(),
        every=10,
        total_steps=100,
        stopping=None,
        ema=None,
        session=cast(Any, SimpleNamespace(board=board)),
        on_evaluation=lambda step, values: None,
    )
    return made, board


def test_a_checkpoint_keeps_the_step_of_the_best_evaluation() -> None:
    before, _ = schedule()
    before.best.note(2.0, 30)
    after, board = schedule()
    after.load_state_dict(before.state_dict())
    assert board.facts.best_step == after.best.step == 30
    after.best.note(3.0, 40)
    assert after.best.step == 30


def test_an_older_checkpoint_has_the_loss_without_its_step() -> None:
    before, _ = schedule()
    before.best.note(2.0, 30)
    old = before.state_dict()
    del old["best_step"]
    after, board = schedule()
    after.load_state_dict(old)
    assert after.best.loss == 2.0 and board.facts.best_step is None
    after.best.note(3.0, 40)
    assert after.best.step is None, "the best is of an unknown step"
    after.best.note(1.0, 50)
    assert after.best.step == 50

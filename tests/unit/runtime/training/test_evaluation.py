"""Evaluations: means over samples, no trace in the training, and one cut short can be done again."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from spottrain.checkpoint.saver import Save
from spottrain.training.best_checkpoint import Best
from spottrain.training.evaluation import Evaluation, Measure

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


@pytest.mark.parametrize("batch_size", [1, 3, 4, 10, 99])
def test_every_sample_counts_once_whatever_the_batches(batch_size: int) -> None:
    values = evaluation(batch_size).run(Model(), never)
    assert values is not None and values["loss"] == pytest.approx(4.5)
    assert list(values) == ["largest", "loss"]


def test_a_short_last_batch_has_the_weight_of_its_samples() -> None:
    values = evaluation(4).run(Model(), never)
    assert values is not None and values["largest"] == pytest.approx((3 * 4 + 7 * 4 + 9 * 2) / 10)


@pytest.mark.parametrize("training", [True, False])
def test_it_leaves_no_trace(training: bool) -> None:
    model = Model().train(training)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    evaluation().run(model, never)
    assert torch.equal(torch.rand(3), expected), "the random numbers go on as if it had not been"
    assert model.training is training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_nor_when_the_measure_fails() -> None:
    def broken(model: torch.nn.Module, batch: torch.Tensor) -> dict[str, Any]:
        raise ValueError("no such metric")

    model = Model()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with pytest.raises(ValueError, match="no such metric"):
        evaluation(measure=broken).run(model, never)
    assert model.training and torch.equal(torch.rand(3), expected)


def test_one_that_is_cut_short_ends_after_the_batch_and_is_done_again_whole() -> None:
    seen: list[int] = []

    def counting(model: torch.nn.Module, batch: torch.Tensor) -> dict[str, Any]:
        seen.append(len(batch))
        return mean(model, batch)

    it, model = evaluation(measure=counting), Model()
    assert it.run(model, lambda: bool(seen)) is None
    assert seen == [4] and model.training
    seen.clear()
    values = it.run(model, never)
    assert seen == [4, 4, 2] and values is not None and values["loss"] == pytest.approx(4.5)


def test_one_that_was_not_begun_runs_nothing() -> None:
    def unwanted(model: torch.nn.Module, batch: torch.Tensor) -> dict[str, Any]:
        raise AssertionError("it ran")

    assert evaluation(measure=unwanted).run(Model(), lambda: True) is None


def test_what_the_script_has_frozen_stays_frozen() -> None:
    model = Model().train()
    model.norm.eval()
    assert evaluation().run(model, never) is not None
    assert model.training and model.drop.training and not model.norm.training


# --- the best of them ---------------------------------------------------------------------------------
@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_is_never_the_best(loss: float) -> None:
    best = Best()
    assert not best.note(loss) and best.loss is None
    assert best.note(2.0) and best.loss == 2.0
    assert not best.note(loss) and best.loss == 2.0


def kept(best: Best, loss: float) -> Save:
    save = Save(number=1, step=5)
    assert best.note(loss)
    best.keep(loss, lambda: save)
    return save


def end(save: Save, how: str) -> None:
    setattr(save, how, True)
    if how != "abandoned":
        save.finished.set()


@pytest.mark.parametrize("how", ["failed", "abandoned"])
def test_of_a_best_that_could_not_be_saved_the_one_before_is_the_mark_again(how: str) -> None:
    best = Best()
    end(kept(best, 3.0), "committed")
    save = kept(best, 1.0)
    assert best.kept == 1.0 and not best.note(2.0), "as long as it is on its way"
    end(save, how)
    assert best.kept == 3.0 and best.note(2.0)
    assert best.loss == 1.0, "of all evaluations, kept or not"


def test_a_best_that_was_saved_stays_the_mark() -> None:
    best = Best(loss=4.0, kept=4.0)
    end(kept(best, 3.0), "committed")
    assert best.kept == 3.0 and not best.note(3.5)

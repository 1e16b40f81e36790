"""Early stopping: tables of evaluations and what is answered to them; the same after a resume at any."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from spottrain.techniques.early_stopping import EarlyStopping

from tests.support.sentences import Told

NAN = math.nan


def stops_at(stopping: EarlyStopping, losses: list[float]) -> int | None:
    """Number of the evaluation, from 1, after which it stops; evaluations are 10 steps apart."""
    for number, loss in enumerate(losses, 1):
        if stopping.note(number * 10, {stopping.metric: loss}):
            return number
    return None


@pytest.mark.parametrize(
    ("words", "values", "expected"),
    [
        ({"patience": 2}, [5, 4, 3, 2, 1], None),
        ({"patience": 2}, [5, 4, 4, 4], 4),
        ({"patience": 2}, [5, 6, 4, 6, 6], 5),
        ({"patience": 1}, [5, 5], 2),
        ({"patience": 2, "min_delta": 0.5}, [5, 4.9, 4.8, 4.7], 3),
        ({"patience": 2, "min_delta": 0.5}, [5, 4.9, 4.4, 4.3], None),
        ({"patience": 2, "mode": "max"}, [1, 2, 2, 1], 4),
        ({"target": 3.0}, [5, 4, 3, 2], 3),
        ({"target": 3.0, "mode": "max"}, [1, 2, 3], 3),
        ({"patience": 1, "min_steps": 40}, [5, 6, 6, 6, 6], 4),
        ({"patience": 2, "min_steps": 40}, [5, 6, 6, 6, 6], 5),
        ({"target": 3.0, "min_steps": 30}, [2, 2, 2], 3),
        ({"patience": 9}, [5, NAN], 2),
        ({"patience": 9, "min_steps": 99}, [5, math.inf], 2),
        ({"patience": 2, "stop_on_nan": False}, [5, NAN, NAN], 3),
        ({"patience": 2, "stop_on_nan": False}, [NAN, 5, NAN, 4], None),
        ({}, [1, 2, 3, 4], None),
    ],
)
def test_it_stops_where_it_should(words: dict[str, Any], values: list[float], expected: int | None) -> None:
    assert stops_at(EarlyStopping(**words), values) == expected


REASONS: dict[str, tuple[dict[str, Any], list[float]]] = {
    "no improvement": ({"patience": 1, "min_delta": 0.1}, [5, 4.95]),
    "the target": ({"target": 0.5, "metric": "f1", "mode": "max"}, [0.75]),
    "no number": ({}, [NAN]),
    "no number ever": ({"patience": 1, "stop_on_nan": False}, [NAN]),
}


@pytest.mark.parametrize("name", REASONS)
def test_the_reason_is_a_sentence_with_its_numbers(
    name: str, capsys: pytest.CaptureFixture[str], told: Told
) -> None:
    words, values = REASONS[name]
    stopping = EarlyStopping(**words)
    stops_at(stopping, values)
    told(stopping.reason)
    said = f'event=early-stopping step={len(values) * 10} why="{stopping.reason}"'
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("cut", range(7))
def test_resumed_after_any_evaluation_it_stops_at_the_same_one(cut: int) -> None:
    losses = [5.0, 4.0, 4.5, 3.0, 3.5, 3.25, 3.125]
    words: dict[str, Any] = {"patience": 3, "min_steps": 20}
    whole, first = EarlyStopping(**words), EarlyStopping(**words)
    assert stops_at(whole, losses) == 7
    stops_at(first, losses[:cut])
    second = EarlyStopping(**words)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    found = [second.note(n * 10, {"loss": losses[n - 1]}) for n in range(cut + 1, 8)]
    assert [reason for reason in found if reason] == [whole.reason]
    assert second.state_dict() == whole.state_dict()


def test_an_evaluation_that_is_done_again_after_a_stop_counts_once() -> None:
    stopping = EarlyStopping(patience=2)
    assert not any([stopping.note(10, {"loss": 1.0}), stopping.note(20, {"loss": 2.0})])
    assert stopping.note(20, {"loss": 2.0}) is None and stopping.bad == 1
    first, second = EarlyStopping(target=1.0), EarlyStopping(target=1.0)
    reason = first.note(10, {"loss": 0.5})
    second.load_state_dict(first.state_dict())
    assert second.reason == reason and second.note(10, {"loss": 0.5}) == reason, "also a reason to stop"


def test_the_best_of_another_metric_says_nothing_and_is_not_taken(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = EarlyStopping(metric="accuracy", mode="max", patience=1), EarlyStopping(patience=1)
    first.note(10, {"accuracy": 0.9})
    second.load_state_dict(first.state_dict())
    assert second.best is None
    assert (
        "event=override setting=early-stopping checkpoint=accuracy/max script=loss/min"
        in capsys.readouterr().out
    )


# --- refused --------------------------------------------------------------------------------------------
def test_an_unknown_metric_is_refused_at_the_first_evaluation_with_those_there_are(told: Told) -> None:
    told(lambda: EarlyStopping(metric="acuracy").note(10, {"loss": 1.0, "accuracy": 0.5}))


def test_a_metric_that_never_comes_is_refused_before_the_first_step(told: Told) -> None:
    stopping = EarlyStopping(patience=3)
    told(lambda: stopping.require(evaluates=False))
    told(lambda: stopping.require(evaluates=True, metrics=["accuracy"]))
    stopping.require(evaluates=True, metrics=["accuracy", "loss"])
    stopping.require(evaluates=True)


@pytest.mark.parametrize(
    "words",
    [
        {"mode": "lowest"},
        {"patience": 0},
        {"min_delta": -1.0},
        {"target": NAN},
        {"min_steps": -1},
        {"stop_on_nan": False},
    ],
    ids=str,
)
def test_words_that_make_no_sense_are_refused(words: dict[str, Any], told: Told) -> None:
    told(lambda: EarlyStopping(**words))

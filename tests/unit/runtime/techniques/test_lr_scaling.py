"""The learning rate for another batch, and the length of the warm-up: plain arithmetic, and sentences."""

from __future__ import annotations

from typing import Any

import pytest
from spottrain.techniques.lr_scaling import scaled, warmup_steps

from tests.support.sentences import Told


@pytest.mark.parametrize(
    ("rule", "batch", "expected"),
    [
        ("none", 1024, 0.1),
        ("linear", 1024, 0.4),
        ("sqrt", 1024, 0.2),
        ("linear", 64, 0.025),
        ("sqrt", 64, 0.05),
        ("linear", 8192, 3.2),  # Goyal's own example
    ],
)
def test_the_rate_follows_the_batch_by_the_rule(rule: str, batch: int, expected: float) -> None:
    assert scaled(0.1, global_batch_size=batch, base_batch_size=256, rule=rule) == pytest.approx(expected)


def test_the_scaled_rate_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    scaled(0.1, global_batch_size=512, base_batch_size=256, rule="linear")
    assert "event=learning-rate rule=linear base=0.1 scaled=0.2 ratio=2" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        {"rule": "cubic"},
        {"global_batch_size": 0},
        {"base_batch_size": 0},
        {"learning_rate": float("nan")},
        {"learning_rate": 0.0},
    ],
    ids=str,
)
def test_what_cannot_be_scaled_is_refused(words: dict[str, Any], told: Told) -> None:
    given: dict[str, Any] = {
        "learning_rate": 0.1,
        "global_batch_size": 512,
        "base_batch_size": 256,
        "rule": "linear",
    }
    told(lambda: scaled(**given | words))


# --- warm-up --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, 0),
        ({"steps": 7}, 7),
        ({"steps": 0}, 0),
        ({"epochs": 2}, 20),
        ({"epochs": 0.25}, 3),
        ({"fraction": 0.1}, 10),
        ({"fraction": 0.101}, 11),
        ({"fraction": 0.07}, 7),  # although 0.07 * 100 is more than 7
    ],
)
def test_steps_epochs_and_a_fraction_come_to_steps(given: dict[str, float], expected: int) -> None:
    assert warmup_steps(**given, total_steps=100, steps_per_epoch=10) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "given",
    [
        {"steps": 5, "fraction": 0.1},
        {"steps": 100},
        {"fraction": 1.0},
        {"epochs": 10},
        {"steps": -1},
        {"fraction": float("inf")},
        {"epochs": 1, "steps_per_epoch": None},
    ],
    ids=str,
)
def test_a_warm_up_that_makes_no_sense_is_refused_before_the_first_step(
    given: dict[str, Any], told: Told
) -> None:
    told(lambda: warmup_steps(**{"total_steps": 100, "steps_per_epoch": 10} | given))

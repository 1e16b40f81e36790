"""The learning rate for another batch, and the length of the warm-up: plain arithmetic, and sentences."""

from __future__ import annotations

import pytest
from spottrain.errors import ConfigurationError
from spottrain.techniques.lr_scaling import scaled, warmup_steps


@pytest.mark.parametrize(("rule", "expected"), [("none", 0.1), ("linear", 0.4), ("sqrt", 0.2)])
def test_four_times_the_batch_is_four_times_the_rate_or_twice_or_the_same(rule: str, expected: float) -> None:
    assert scaled(0.1, global_batch_size=1024, base_batch_size=256, rule=rule) == pytest.approx(expected)


@pytest.mark.parametrize(("rule", "expected"), [("linear", 0.025), ("sqrt", 0.05)])
def test_a_smaller_batch_has_a_smaller_rate(rule: str, expected: float) -> None:
    assert scaled(0.1, global_batch_size=64, base_batch_size=256, rule=rule) == pytest.approx(expected)


def test_goyals_own_example_is_reproduced() -> None:
    assert scaled(0.1, global_batch_size=8192, base_batch_size=256, rule="linear") == pytest.approx(3.2)


@pytest.mark.parametrize(("rule", "limit"), [("linear", 8192), ("sqrt", 32768)])
def test_a_batch_beyond_what_was_tested_is_told_with_the_source(
    rule: str, limit: int, capsys: pytest.CaptureFixture[str]
) -> None:
    scaled(0.1, global_batch_size=limit, base_batch_size=256, rule=rule)
    assert "event=advice" not in capsys.readouterr().out
    scaled(0.1, global_batch_size=limit + 1, base_batch_size=256, rule=rule)
    told = capsys.readouterr().out
    assert "event=advice" in told and str(limit) in told and "et al." in told


def test_the_scaled_rate_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    scaled(0.1, global_batch_size=512, base_batch_size=256, rule="linear")
    assert "event=learning-rate rule=linear base=0.1 scaled=0.2 ratio=2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"rule": "cubic"}, "learning-rate rule 'cubic' is not known: use none, linear, sqrt"),
        ({"global_batch_size": 0}, "global batch size 0 must be at least 1"),
        ({"base_batch_size": 0}, "base batch size 0 must be at least 1"),
        ({"learning_rate": float("nan")}, "learning rate nan must be a finite number above 0"),
        ({"learning_rate": 0.0}, "learning rate 0.0 must be"),
    ],
)
def test_what_cannot_be_scaled_is_refused(words: dict[str, object], sentence: str) -> None:
    given: dict[str, object] = {"global_batch_size": 512, "base_batch_size": 256, "rule": "linear"} | words
    rate = given.pop("learning_rate", 0.1)
    with pytest.raises(ConfigurationError, match=sentence):
        scaled(rate, **given)  # type: ignore[arg-type]


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
    ],
)
def test_steps_epochs_and_a_fraction_come_to_steps(given: dict[str, float], expected: int) -> None:
    assert warmup_steps(**given, total_steps=100, steps_per_epoch=10) == expected  # type: ignore[arg-type]


def test_what_binary_fractions_add_makes_no_step_more() -> None:
    assert 0.07 * 100 > 7
    assert warmup_steps(fraction=0.07, total_steps=100) == 7


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"steps": 5, "fraction": 0.1}, r"more than once \(steps=5 and fraction=0.1\): keep one"),
        ({"steps": 100}, r"\(steps=100\) is 100 steps, but the run has only 100"),
        ({"fraction": 1.0}, "the run has only 100: shorten it"),
        ({"epochs": 10}, "is 100 steps"),
        ({"steps": -1}, "steps=-1 must be a finite number, at least 0"),
        ({"fraction": float("inf")}, "fraction=inf"),
    ],
)
def test_a_warm_up_that_makes_no_sense_is_refused_before_the_first_step(
    given: dict[str, float], sentence: str
) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        warmup_steps(**given, total_steps=100, steps_per_epoch=10)  # type: ignore[arg-type]


def test_epochs_of_a_stream_of_unknown_length_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="give it in steps, or set steps_per_epoch"):
        warmup_steps(epochs=1, total_steps=100)

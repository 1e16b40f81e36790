"""What `spottrain profile` puts into the environment of the run that it is."""

from __future__ import annotations

import json
from typing import Any

import pytest
from spottrain.cli.profile import settings
from spottrain.contract import Env

FLAGS = {"wait": "1", "warmup": "2", "active": "3", "script": "train.py"}


@pytest.mark.parametrize(
    "training", [{}, {"warmupFraction": 0.5}, {"warmupSteps": 100}, {"precision": "bf16"}]
)
def test_its_short_run_has_no_warm_up_which_would_not_end_in_it(training: dict[str, Any]) -> None:
    found = settings(FLAGS, {Env.TRAINING: json.dumps(training)}, 0.0)
    made = json.loads(found[Env.TRAINING])
    assert (made["maxSteps"], made["warmupSteps"]) == (6, 0) and "warmupFraction" not in made
    assert made.get("precision") == training.get("precision")


def test_a_run_with_checkpoints_of_its_own_is_left_as_it_is() -> None:
    assert Env.TRAINING not in settings(FLAGS, {Env.CHECKPOINT_URI: "s3://b/p"}, 0.0)

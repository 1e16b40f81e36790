"""`spottrain profile SCRIPT`: a run that profiles some of its steps. Translates its flags into variables.

Without --checkpoint the run is short and uses a folder of its own, `profiles/<script>-<time>`. So it neither
continues nor ends the training whose checkpoints are in `checkpoints/<script>`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from typing import Any

from spottrain.contract import PROFILE, Env
from spottrain.core import log
from spottrain.core.run_config import name_of
from spottrain.core.training_spec import Profile, Training
from spottrain.errors import ConfigurationError

KINETO, SILENT = "KINETO_LOG_LEVEL", "99"
"""By which torch.profiler's own library writes nothing to the terminal."""
ABOUT = """Runs a training script and profiles some of its steps with torch.profiler. Without --checkpoint the
run ends after these steps and uses a folder of its own; with it, the run is like any other."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    usual = Profile()
    for name, text in (
        ("wait", "steps to skip first (compilation, first allocations)"),
        ("warmup", "steps to trace and discard"),
        ("active", "steps to record"),
    ):
        default = getattr(usual, name)
        parser.add_argument(
            f"--{name}", default=str(default), metavar="STEPS", help=f"{text} (default {default})"
        )


def settings(values: Mapping[str, Any], env: Mapping[str, str], now: float) -> dict[str, str]:
    """Returns the environment variables for these flags, besides those of `run`. `now`: Unix seconds.

    Raises ConfigurationError.
    """
    asked = {name: _steps(name, values[name]) for name in ("wait", "warmup", "active")}
    window = Profile.from_json(json.dumps(asked), PROFILE)
    found = {PROFILE: window.to_json(), KINETO: env.get(KINETO, SILENT)}
    if not env.get(Env.CHECKPOINT_URI):
        moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now))
        found[Env.CHECKPOINT_URI] = f"profiles/{name_of(values['script'])}-{moment}"
        text = env.get(Env.TRAINING) or "{}"
        if Training.from_json(text).maxSteps is None:
            found[Env.TRAINING] = json.dumps(_short(json.loads(text), window))
    return found


def _short(training: dict[str, Any], window: Profile) -> dict[str, Any]:
    """Shortens the run to the window, without a warm-up and without another profile window."""
    if (given := training.pop("profile", None)) is not None:
        log.event("override", setting="profile", command=window.to_json(), manifest=json.dumps(given))
    rest = {name: value for name, value in training.items() if not name.startswith("warmup")}
    return rest | {"maxSteps": window.steps, "warmupSteps": 0}


def _steps(name: str, text: str) -> int:
    if not text.isdecimal():
        raise ConfigurationError(
            f"--{name} {text!r} is not a whole number of steps; see spottrain profile --help"
        )
    return int(text)

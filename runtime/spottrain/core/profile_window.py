"""The steps to profile: `Window`, read from the environment or from the settings.

Does not import torch: so the command line is quick, and a bad window ends a run before it begins.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final

from spottrain.contract import PROFILE, PROFILES_PREFIX, Env
from spottrain.core import log
from spottrain.core.training_spec import Profile, Training, problem
from spottrain.errors import ConfigurationError

MADE: Final[list[str]] = []
"""Keys of the folders in which this process has stored a profile."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """Steps to profile in one attempt.

    The warm-up is the profiler's, whose start slows the first steps that it traces. Use `wait` to skip the
    training's own warm-up (compilation, first allocations).

    Args:
        wait: Optimizer steps to skip, at least 0.
        warmup: Optimizer steps to trace and discard, at least 0.
        active: Optimizer steps to record, at least 1.

    Raises:
        ConfigurationError: A value is not such a whole number.
    """

    wait: int = 5
    warmup: int = 2
    active: int = 5

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if words := problem(f"profile.{name}", value):
                raise ConfigurationError(f"profile.{name} is {value!r}: it must be {words}")

    @property
    def steps(self) -> int:
        """Length of the whole window, in optimizer steps."""
        return self.wait + self.warmup + self.active

    def to_json(self) -> str:
        """Returns the window as JSON, as `from_env` reads it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Window | None:
        """Reads the window from SPOTTRAIN_PROFILE; None if no profile is requested.

        Raises:
            ConfigurationError: The variable is not JSON, not an object, or holds an invalid window.
        """
        text = env.get(PROFILE, "")
        if not text:
            return None
        try:
            raw = json.loads(text)
        except ValueError as error:
            raise ConfigurationError(f"{PROFILE} is not JSON ({error}): {text[:80]!r}") from error
        if not isinstance(raw, dict):
            raise ConfigurationError(f"{PROFILE} must be a JSON object, and is {text[:80]!r}")
        for name in raw:
            if name not in cls.__slots__:
                raise ConfigurationError(
                    f"profile.{name} is not a setting; the settings are wait, warmup and active"
                )
        return cls(**raw)


def chosen(env: Mapping[str, str], wanted: Profile | None) -> Window | None:
    """Returns the window of the environment (flags of `spottrain profile`), else `wanted`, of the settings.

    Raises ConfigurationError.
    """
    asked = Window.from_env(env)
    if wanted is None:
        return asked
    given = Window(wait=wanted.wait, warmup=wanted.warmup, active=wanted.active)
    if asked is None or asked == given:
        return given
    log.event("override", setting="profile", environment=asked.to_json(), settings=given.to_json())
    return asked


def not_made(env: Mapping[str, str]) -> str:
    """Returns why a process that ends as done must fail for want of a requested profile; else "".

    It must fail only if a person requested the profile with `spottrain profile`. A job, or a run whose
    settings request a profile, only logs it.
    """
    if MADE or not (env.get(PROFILE) or Training.from_json(env.get(Env.TRAINING, "")).profile):
        return ""
    lack = (
        "A profile was requested but not made. The script must run all steps of the window (wait + "
        "warmup + active) under spottrain.Trainer, spottrain.Run or a library's callback, or step a "
        "spottrain.diagnostics.Profiler itself. A line event=profile-... above may name another "
        "reason."
    )
    if env.get(PROFILE) and Env.JOB_UID not in env:
        return lack
    log.event("profile-not-made", why=lack)
    return ""


def require_window(wait: int, warmup: int, active: int, total_steps: int, start: int = 0) -> Window:
    """Checks before the first step that the window fits. `start`: steps done before this attempt.

    Raises ConfigurationError if the run ends before the window does: a shorter or empty profile would go
    unnoticed.
    """
    window = Window(wait=wait, warmup=warmup, active=active)
    if start + window.steps > total_steps:
        at = f" from step {start} on" if start else ""
        raise ConfigurationError(
            f"a profile of wait {wait} + warmup {warmup} + active {active} steps does not fit{at} "
            f"into the run's {total_steps} steps: make the window smaller, or set maxSteps to at "
            f"least {start + window.steps}"
        )
    return window


def profile_key(attempt: int, rank: int, name: str) -> str:
    """Key below the checkpoint URI; attempts and ranks are numbered as in logs."""
    return f"{PROFILES_PREFIX}attempt-{attempt:06d}/rank-{rank:05d}/{name}"

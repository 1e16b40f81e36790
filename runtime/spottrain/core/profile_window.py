"""The steps to profile, by the environment or by the settings.

Does not import torch: so the command line is quick, and a bad window ends a run before it begins.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from spottrain.contract import PROFILE, PROFILES_PREFIX, Env
from spottrain.core import log
from spottrain.core.training_settings import Profile, read_manifest
from spottrain.errors import ConfigurationError

MADE: Final[list[str]] = []
"""Keys of the folders in which this process has stored a profile."""


def asked_for(env: Mapping[str, str]) -> Profile | None:
    """Returns the window of SPOTTRAIN_PROFILE; None if it is not set. Raises ConfigurationError."""
    text = env.get(PROFILE, "")
    return Profile.from_json(text, PROFILE) if text else None


def chosen(env: Mapping[str, str], wanted: Profile | None) -> Profile | None:
    """Returns the window of the environment (flags of `spottrain profile`), else `wanted`, of the settings.

    Raises ConfigurationError.
    """
    asked = asked_for(env)
    if asked is None or wanted in (None, asked):
        return asked or wanted
    log.event("override", setting="profile", environment=asked.to_json(), settings=wanted.to_json())
    return asked


def not_made(env: Mapping[str, str]) -> str:
    """Returns why a process that ends as done must fail for want of a requested profile; else "".

    It must fail only if a person requested the profile with `spottrain profile`. A job, or a run whose
    settings request a profile, only logs it.
    """
    if MADE or not (env.get(PROFILE) or "profile" in read_manifest(env.get(Env.TRAINING, ""))):
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


def require_within(window: Profile, total_steps: int, start: int = 0) -> None:
    """Checks before the first step that the window fits. `start`: steps done before this attempt.

    Raises ConfigurationError if the run ends before the window does: a shorter or empty profile would go
    unnoticed.
    """
    if start + window.steps > total_steps:
        at = f" from step {start} on" if start else ""
        raise ConfigurationError(
            f"a profile of wait {window.wait} + warmup {window.warmup} + active {window.active} steps does "
            f"not fit{at} into the run's {total_steps} steps: make the window smaller, or set maxSteps to at "
            f"least {start + window.steps}"
        )


def profile_key(attempt: int, rank: int, name: str) -> str:
    """Key below the checkpoint URI; attempts and ranks are numbered as in logs."""
    return f"{PROFILES_PREFIX}attempt-{attempt:06d}/rank-{rank:05d}/{name}"

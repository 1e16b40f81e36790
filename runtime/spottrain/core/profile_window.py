"""Which steps are to be profiled: `Window`. Read from the environment; set by `cli/profile.py`.

No torch in it: the command line answers in an instant, and a bad window ends a run before anything is begun.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from spottrain.contract import PROFILE, PROFILES_PREFIX, Env
from spottrain.core import log
from spottrain.core.training_spec import Profile, Training
from spottrain.errors import ConfigurationError

MADE: Final[list[str]] = []
"""Keys of the folders in which this process has stored a profile, whoever made it: `session` asks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """Optimizer steps of one attempt: `wait` are let pass, `warmup` traced and thrown away, `active` kept.

    Raises ConfigurationError. The warm-up is not the training's (compilation, first allocations: `wait` is
    for those), it is the profiler's own, whose start slows the first steps that it sees.
    """

    wait: int = 5
    warmup: int = 2
    active: int = 5

    def __post_init__(self) -> None:
        for name, least in (("wait", 0), ("warmup", 0), ("active", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigurationError(
                    f"profile.{name} is {value!r}: it must be a whole number of steps, at least {least}"
                )

    @property
    def steps(self) -> int:
        return self.wait + self.warmup + self.active

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_mapping(cls, raw: Mapping[str, Any]) -> Window:
        """Of settings. Raises ConfigurationError."""
        unknown = [name for name in raw if name not in cls.__slots__]
        if unknown:
            raise ConfigurationError(
                f"profile.{unknown[0]} is not a setting; the settings are wait, warmup and active"
            )
        return cls(**raw)

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Window | None:
        """None where no profile is asked for. Raises ConfigurationError."""
        text = env.get(PROFILE, "")
        if not text:
            return None
        try:
            raw = json.loads(text)
        except ValueError as error:
            raise ConfigurationError(f"{PROFILE} is not JSON ({error}): {text[:80]!r}") from error
        if not isinstance(raw, dict):
            raise ConfigurationError(f"{PROFILE} must be a JSON object, and is {text[:80]!r}")
        return cls.from_mapping(raw)


def chosen(env: Mapping[str, str], wanted: Profile | None) -> Window | None:
    """The environment's, in which `spottrain profile` puts its flags, else `wanted`: that of the settings.

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
    """Of a process that is about to end as done: why it must not, for it owes a profile; else "".

    It does where a person has asked for one by `spottrain profile`. A job, and a run whose settings ask for a
    profile, are not failed for it: there it is only told.
    """
    if MADE or not (env.get(PROFILE) or Training.from_json(env.get(Env.TRAINING, "")).profile):
        return ""
    lack = (
        "A profile was asked for, and none was made: it takes a script that does all steps of the window "
        "(wait + warmup + active) under spottrain.Trainer, spottrain.Run or a library's callback, or that "
        "steps a spottrain.diagnostics.Profiler itself; a line event=profile-... above says what else went "
        "wrong."
    )
    if env.get(PROFILE) and Env.JOB_UID not in env:
        return lack
    log.event("profile-not-made", why=lack)
    return ""


def require_window(wait: int, warmup: int, active: int, total_steps: int, start: int = 0) -> Window:
    """Before the first step. `start`: steps that were done before this attempt.

    Raises ConfigurationError where the run ends before the window does: a profile of less than was asked
    for, or of nothing, is not made silently.
    """
    window = Window(wait=wait, warmup=warmup, active=active)
    if start + window.steps > total_steps:
        at = f" from step {start} on" if start else ""
        raise ConfigurationError(
            f"a profile of wait {wait} + warmup {warmup} + active {active} steps does not fit{at} into the "
            f"run's {total_steps} steps: make the window smaller, or maxSteps at least {start + window.steps}"
        )
    return window


def profile_key(attempt: int, rank: int, name: str) -> str:
    """Key below the checkpoint URI; numbered as logs are."""
    return f"{PROFILES_PREFIX}attempt-{attempt:06d}/rank-{rank:05d}/{name}"

"""Training settings: the arguments of `Trainer`, overridden by `spec.training`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from numbers import Integral, Real
from typing import Any, Final, Literal

from spottrain.core import log
from spottrain.core.training_spec import (
    ActivationCheckpointing,
    Data,
    EarlyStoppingSpec,
    LearningRateScaling,
    Optimizer,
    Profile,
    TrackersSpec,
    Training,
    problem,
)
from spottrain.errors import ConfigurationError

WARM_UPS: Final = ("warmup_steps", "warmup_epochs", "warmup_fraction")
GROUPS: Final = (WARM_UPS, ("max_steps", "epochs"))
"""Settings that exclude each other, because they express the same in different units."""
MADE: Final = ("optimizer", "trackers")
"""Settings that a script passes as ready-made objects. Code that replaces them logs it."""
NONE_MEANS: Final[Mapping[str, Any]] = {
    "activation_checkpointing": ActivationCheckpointing(),
}
"""Meaning of None, for settings of which None is not a value."""
NEEDED: Final = (
    "global_batch_size",
    "precision",
    "compile",
    "compile_mode",
    "seed",
    "deterministic",
    "drop_last",
    "num_workers",
)
"""Settings that must not be None."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Fields are named like the arguments of `Trainer`."""

    global_batch_size: int = 32
    micro_batch_size: int | Literal["auto"] | None = None
    """None: the batch size, so no accumulation."""
    max_steps: int | None = None
    epochs: int | None = None
    precision: str = "fp32"
    compile: bool = False
    compile_mode: str = "default"
    activation_checkpointing: ActivationCheckpointing = field(default_factory=ActivationCheckpointing)
    optimizer: Optimizer | None = None
    """None: the optimizer that the script has made."""
    learning_rate_scaling: LearningRateScaling | None = None
    schedule: Any = "cosine"
    warmup_steps: int | None = None
    warmup_epochs: float | None = None
    warmup_fraction: float | None = None
    clip_grad_norm: float | None = None
    ema_decay: float | None = None
    early_stopping: EarlyStoppingSpec | None = None
    num_workers: int | Literal["auto"] = 0
    prefetch_factor: int | None = None
    pin_memory: bool | None = None
    """None: true if there is a GPU."""
    drop_last: bool = False
    profile: Profile | None = None
    trackers: TrackersSpec | None = None
    """Added to the script's trackers; one of the same name is replaced."""
    seed: int = 0
    deterministic: bool = False

    def __post_init__(self) -> None:
        given = [name for name in WARM_UPS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigurationError(f"Trainer: {' and '.join(given)} exclude each other; give only one")

    def given(self) -> dict[str, Any]:
        """Returns the settings that are not None, by name."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in found.items() if value is not None}

    def total_steps(self, steps_per_epoch: int | None) -> int:
        """Returns the number of steps: `max_steps` or `epochs`, whichever ends first."""
        if steps_per_epoch is None:
            if self.max_steps is None:
                raise ConfigurationError(
                    "the length of an epoch is not known for this train_dataset: set "
                    "Trainer(max_steps=...) or steps_per_epoch"
                )
            return self.max_steps
        ends = (self.max_steps, self.epochs and self.epochs * steps_per_epoch)
        return min(end for end in ends if end is not None)


def _snake_case(name: str) -> str:
    return re.sub("[A-Z]", lambda letter: f"_{letter[0].lower()}", name)


_MANIFEST_NAME: Final = {
    **{_snake_case(each.name): each.name for each in fields(Training) if each.name != "data"},
    **{_snake_case(each.name): f"data.{each.name}" for each in fields(Data)},
}
"""Field of spec.training for each setting."""
ARGUMENTS: Final = tuple(each.name for each in fields(Settings) if each.name not in MADE)
"""Arguments of `Trainer` that are settings."""


def resolve(manifest: Training, *, of_loop: bool = False, **arguments: Any) -> Settings:
    """Merges both sources: the manifest overrides the script, and each override is logged.

    of_loop: for a custom loop. It takes only the settings that it names here, and may have no end set.
    Raises ConfigurationError.
    """
    script = {name: _checked(name, value) for name, value in arguments.items()}
    wins = {name: _of(manifest, path) for name, path in _MANIFEST_NAME.items()}
    wins = {n: v for n, v in wins.items() if v is not None and (not of_loop or n in arguments)}
    for group in GROUPS:  # one setting of the manifest replaces the script's whole group, such as its epochs
        if any(name in wins for name in group):
            # A custom loop counts in epochs, and the Run ends it at maxSteps.
            kept = {"epochs"} if of_loop else set()
            wins |= {name: None for name in group if name in script and name not in {*wins, *kept}}
    for name, value in wins.items():
        if name not in MADE and value != script.get(name):
            log.event("override", setting=name, manifest=log_value(value), script=log_value(script.get(name)))
    mode = script.get("compile_mode", "default")  # the manifest's is validated where it is read
    if mode != "default" and not script.get("compile") and not wins.get("compile"):
        raise ConfigurationError(
            f"Trainer(compile_mode={mode!r}) has no effect without compile=True: set it, or leave "
            "compile_mode out"
        )
    found = Settings(**script | wins)
    if found.max_steps is None and found.epochs is None and not of_loop:
        raise ConfigurationError(
            "the training has no end: set Trainer(max_steps=...) or epochs, or spec.training.maxSteps"
        )
    return found


def set_in(manifest: Training) -> dict[str, str]:
    """Returns the settings that spec.training sets: their names there, by the names here."""
    return {name: path for name, path in _MANIFEST_NAME.items() if _of(manifest, path) is not None}


def log_value(value: Any) -> Any:
    """Formats a setting as one word of a log line."""
    if is_dataclass(value):
        given = {each.name: getattr(value, each.name) for each in fields(value)}
        return ",".join(f"{name}={log_value(item)}" for name, item in given.items() if item not in (None, ()))
    plain = value is None or isinstance(value, Real | str | tuple)
    return value if plain else getattr(value, "__name__", type(value).__name__)


def _of(manifest: Training, path: str) -> Any:
    found: Any = manifest
    for name in path.split("."):
        found = None if found is None else getattr(found, name)
    return found


# --- the script's arguments ---------------------------------------------------------------------------
def require_whole(name: str, value: object) -> None:
    """Raises ConfigurationError unless this argument of Trainer is a whole number (numpy's count too)."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise ConfigurationError(f"Trainer({name}={value!r}): must be a whole number")


def _checked(name: str, value: Any) -> Any:
    """Validates an argument here: a value of a wrong type would fail later, with a traceback, or mislead."""
    if value is None:
        if name in NEEDED:
            raise ConfigurationError(f"Trainer({name}=None): leave it out, or give a value")
        return NONE_MEANS.get(name)
    value = _CONVERTED.get(name, _plain)(value)
    if name == "schedule" and not isinstance(value, str):
        return value
    if is_dataclass(value):
        return _checked_parts(name, value)
    path = _MANIFEST_NAME.get(name, "maxSteps")  # epochs: same rule as maxSteps
    if words := problem(path, value):
        raise ConfigurationError(f"Trainer({name}={value!r}): must be {words}")
    return value


def _checked_parts(name: str, value: Any) -> Any:
    """Validates an object of one of the spec's classes, made in Python and so not yet validated."""
    given = {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    for field_name, item in given.items():
        if item is None or item == ():
            continue
        raw = list(item) if isinstance(item, tuple) else item
        if words := problem(f"{_MANIFEST_NAME[name]}.{field_name}", raw):
            kind = type(value).__name__.removesuffix("Spec")  # as scripts call it
            raise ConfigurationError(f"Trainer({name}={kind}({field_name}={item!r})): must be {words}")
    return replace(value, **given)


def _plain(value: Any) -> Any:
    """Converts numpy's numbers to Python's."""
    if isinstance(value, bool):
        return value
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value


def activation_checkpointing(given: Any) -> ActivationCheckpointing:
    """Converts a policy's name, a number k (every k-th block), or classes (or their names); None is off.

    Raises ConfigurationError.
    """
    if given is None:
        return ActivationCheckpointing()
    if isinstance(given, ActivationCheckpointing):
        return given
    if isinstance(given, str) and given in ("none", "all", "auto"):
        return ActivationCheckpointing(policy=given)
    if isinstance(given, int) and not isinstance(given, bool) and given >= 1:
        every = ActivationCheckpointing(policy="every", every=given)
        return ActivationCheckpointing(policy="all") if given == 1 else every
    if names := _class_names(given):
        return ActivationCheckpointing(policy="classes", classes=names)
    raise ConfigurationError(
        f"Trainer(activation_checkpointing={given!r}): must be none, all, auto, a number k for every k-th "
        "block, or a list of module classes"
    )


def _class_names(given: Any) -> tuple[str, ...]:
    if not isinstance(given, type | list | tuple | set | frozenset):
        return ()
    each = [given] if isinstance(given, type) else given
    names = tuple(kind if isinstance(kind, str) else getattr(kind, "__name__", "") for kind in each)
    return names if all(names) else ()


def _early_stopping(given: Any) -> EarlyStoppingSpec:
    """Converts an EarlyStopping, or a number: the patience."""
    if hasattr(given, "min_delta"):  # spottrain.EarlyStopping: copied, since its state belongs to one run
        return EarlyStoppingSpec(
            metric=given.metric,
            mode=given.mode,
            patience=given.patience,
            minDelta=given.min_delta,
            target=given.target,
            minSteps=given.min_steps,
            stopOnNaN=given.stop_on_nan,
        )
    if words := problem("earlyStopping.patience", _plain(given)):
        raise ConfigurationError(
            f"Trainer(early_stopping={given!r}): must be a spottrain.EarlyStopping, or the patience, {words}"
        )
    return EarlyStoppingSpec(patience=int(given))


def _instance_of(kind: type[Any]) -> Callable[[Any], Any]:
    def check(given: Any) -> Any:
        if not isinstance(given, kind):
            name = _snake_case(kind.__name__).removeprefix("_")
            raise ConfigurationError(f"Trainer({name}={given!r}): must be a spottrain.{kind.__name__}")
        return given

    return check


_CONVERTED: Final[Mapping[str, Callable[[Any], Any]]] = {
    "activation_checkpointing": activation_checkpointing,
    "early_stopping": _early_stopping,
    "learning_rate_scaling": _instance_of(LearningRateScaling),
    "profile": _instance_of(Profile),
}

"""Training settings: the arguments of `Trainer`, and `spec.training` of the manifest, which wins over them.

`Settings` has one field for each. Its annotation says what a value must be, in a manifest and in a script. A
manifest comes as JSON in SPOTTRAIN_TRAINING, with the same names in camelCase, those of the loader below
`data`. Its schema in crds/ says the same, but no API server has validated that of a run on a laptop. Every
bad value raises a ConfigurationError that names the field or the argument.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from functools import cache
from numbers import Integral, Real
from typing import Annotated, Any, Final, Literal, NamedTuple, get_args, get_type_hints

from spottrain.contract import Env
from spottrain.core import log
from spottrain.errors import ConfigurationError

AUTO: Final = "auto"
PRECISIONS: Final = ("auto", "bf16", "fp16", "fp32", "tf32")
OPTIMIZERS: Final = ("adamw", "sgd", "adafactor")

Auto = Literal["auto"]
Manifest = Mapping[str, Any]
"""What spec.training sets, by the names of `Settings`."""


# --- what a value must be -------------------------------------------------------------------------------
class _Rule(NamedTuple):
    """What the value of a field must be, in words and as a check. It stands in the field's annotation."""

    words: str
    holds: Callable[[Any], bool]


def _whole(least: int) -> _Rule:
    words = f"a whole number, at least {least}"
    return _Rule(words, lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= least)


def _number(words: str, holds: Callable[[float], bool] = lambda v: True) -> _Rule:
    return _Rule(
        words,
        lambda v: isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v) and holds(v),
    )


def _one_of(*words: str) -> _Rule:
    return _Rule(f"{', '.join(words[:-1])} or {words[-1]}", lambda v: isinstance(v, str) and v in words)


def _or_auto(rule: _Rule) -> _Rule:
    return _Rule(f"{rule.words}, or auto", lambda v: v == AUTO or rule.holds(v))


_Flag = Annotated[bool, _Rule("true or false", lambda v: isinstance(v, bool))]
_FromZero = Annotated[int, _whole(0)]
_FromOne = Annotated[int, _whole(1)]
_AboveZero = Annotated[float, _number("a number above 0", lambda v: v > 0)]
_NotNegative = Annotated[float, _number("a number, at least 0", lambda v: v >= 0)]
_Share = Annotated[float, _number("a number from 0 to below 1", lambda v: 0 <= v < 1)]
_Name = Annotated[str, _Rule("a name", lambda v: isinstance(v, str) and bool(v))]
_Path = Annotated[str, _Rule("an absolute path", lambda v: isinstance(v, str) and v.startswith("/"))]
_NAMES: Final = _Rule(
    "a list of names",
    lambda v: isinstance(v, list | tuple) and bool(v) and all(isinstance(n, str) and n for n in v),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationCheckpointing:
    """Which blocks recompute their activations in the backward pass, to save memory.

    Args:
        policy: `none`, `every` (every k-th block), `all`, `classes`, or `auto` (decided by trial steps).
        every: k of the policy `every`, at least 2; 1 would be `all`.
        classes: Names of module classes, for the policy `classes`.
    """

    policy: Annotated[str, _one_of("none", "every", "all", "classes", "auto")] = "none"
    every: Annotated[int | None, _whole(2)] = None
    classes: Annotated[tuple[str, ...], _NAMES] = ()

    def __post_init__(self) -> None:
        wrong = (self.policy == "every") != (self.every is not None)
        if wrong or (self.policy == "classes") != bool(self.classes):
            raise ConfigurationError(
                "activationCheckpointing.every belongs to the policy every, and classes to the policy "
                "classes; give what the policy needs, and only that"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimizer:
    """Replaces the script's optimizer, over the same parameter groups."""

    name: Annotated[str, _one_of(*OPTIMIZERS)]
    learningRate: _AboveZero | None = None
    weightDecay: _NotNegative | None = None
    momentum: _Share | None = None

    def __post_init__(self) -> None:
        if self.momentum is not None and self.name != "sgd":
            raise ConfigurationError("optimizer.momentum belongs to sgd; leave it out")


@dataclass(frozen=True, kw_only=True, slots=True)
class LearningRateScaling:
    """Scales the learning rate with the global batch size.

    Args:
        rule: `none`, `linear` (by the ratio of the batch sizes) or `sqrt` (by its square root).
        baseBatchSize: Global batch size, in samples, for which the learning rate was tuned.
    """

    rule: Annotated[str, _one_of("none", "linear", "sqrt")]
    baseBatchSize: Annotated[int, _whole(1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class EarlyStoppingSpec:
    """Ends the training, as done, when an evaluation metric stops improving."""

    metric: _Name = "loss"
    mode: Annotated[str, _one_of("min", "max")] = "min"
    patience: _FromOne | None = None
    """Consecutive evaluations without an improvement; None: they do not end the training."""
    minDelta: _NotNegative = 0.0
    target: Annotated[float | None, _number("a number")] = None
    minSteps: _FromZero = 0
    stopOnNaN: _Flag = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """Which optimizer steps of each attempt to profile.

    The warm-up is the profiler's, whose start slows the first steps that it traces. Use `wait` to skip the
    training's own warm-up (compilation, first allocations).

    Args:
        wait: Steps to skip.
        warmup: Steps to trace and discard.
        active: Steps to record.
    """

    wait: Annotated[int, _whole(0)] = 10
    warmup: Annotated[int, _whole(0)] = 2
    active: Annotated[int, _whole(1)] = 3

    @property
    def steps(self) -> int:
        """Length of the whole window."""
        return self.wait + self.warmup + self.active


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorBoardSpec:
    """Event files in a folder of a volume that outlives the pod."""

    folder: _Path


@dataclass(frozen=True, kw_only=True, slots=True)
class WandBSpec:
    """Weights & Biases. Its API key is WANDB_API_KEY in the container's environment."""

    project: _Name
    entity: _Name | None = None
    mode: Annotated[str | None, _one_of("online", "offline", "disabled")] = None
    folder: _Path | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MLflowSpec:
    """MLflow. Its credentials come from MLflow's own environment variables."""

    experiment: _Name
    trackingURI: _Name | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackersSpec:
    """Experiment trackers, each of which shows all attempts as one run."""

    tensorboard: TensorBoardSpec | None = None
    wandb: WandBSpec | None = None
    mlflow: MLflowSpec | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Fields are named like the arguments of `Trainer`."""

    global_batch_size: _FromOne = 32
    micro_batch_size: Annotated[int | Auto | None, _or_auto(_whole(1))] = None
    """None: the batch size, so no accumulation."""
    max_steps: _FromOne | None = None
    epochs: _FromOne | None = None
    """Of the script alone."""
    precision: Annotated[str, _one_of(*PRECISIONS)] = "fp32"
    compile: _Flag = False
    compile_mode: Annotated[str, _one_of("default", "reduce-overhead", "max-autotune")] = "default"
    activation_checkpointing: ActivationCheckpointing = field(default_factory=ActivationCheckpointing)
    optimizer: Optimizer | None = None
    """None: the optimizer that the script has made."""
    learning_rate_scaling: LearningRateScaling | None = None
    schedule: Annotated[Any, _one_of("constant", "cosine")] = "cosine"
    """A script may also give a function of the step, or a torch LRScheduler."""
    warmup_steps: _FromZero | None = None
    warmup_epochs: _NotNegative | None = None
    warmup_fraction: _Share | None = None
    clip_grad_norm: _AboveZero | None = None
    ema_decay: Annotated[float | None, _number("a number above 0 and below 1", lambda v: 0 < v < 1)] = None
    early_stopping: EarlyStoppingSpec | None = None
    num_workers: Annotated[int | Auto, _or_auto(_whole(0))] = 0
    prefetch_factor: _FromOne | None = None
    pin_memory: _Flag | None = None
    """None: true if there is a GPU."""
    drop_last: _Flag = False
    profile: Profile | None = None
    trackers: TrackersSpec | None = None
    """Added to the script's trackers; one of the same name is replaced."""
    seed: _FromZero = 0
    deterministic: _Flag = False

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


WARM_UPS: Final = ("warmup_steps", "warmup_epochs", "warmup_fraction")
GROUPS: Final = (WARM_UPS, ("max_steps", "epochs"))
"""Settings that exclude each other, because they express the same in different units."""
MADE: Final = ("optimizer", "trackers")
"""Settings that a script passes as ready-made objects. Code that replaces them logs it."""
ARGUMENTS: Final = tuple(each.name for each in fields(Settings) if each.name not in MADE)
"""Arguments of `Trainer` that are settings."""
OF_LOADER: Final = ("num_workers", "prefetch_factor", "pin_memory", "drop_last")
"""Settings that a manifest has below `data`."""


def _path_of(name: str) -> str:
    """Returns the field of spec.training for a setting, such as `data.numWorkers`."""
    camel = re.sub("_(.)", lambda found: found[1].upper(), name)
    return f"data.{camel}" if name in OF_LOADER else camel


PATHS: Final = {each.name: _path_of(each.name) for each in fields(Settings) if each.name != "epochs"}
"""Field of spec.training for each setting that a manifest may set."""


# --- the manifest ---------------------------------------------------------------------------------------
def read_manifest(text: str) -> Manifest:
    """Parses and validates spec.training, as JSON; empty text sets nothing. Raises ConfigurationError."""
    given = _values(_fields_of_manifest(), _parsed(text or "{}"), "spec.training")
    given |= given.pop("data", {})
    names = {path.removeprefix("data."): name for name, path in PATHS.items()}
    return {names[path]: value for path, value in given.items()}


@cache
def _fields_of_manifest() -> Mapping[str, Any]:
    rules = _rules(Settings)
    own = {path: rules[name] for name, path in PATHS.items() if name not in OF_LOADER}
    return own | {"data": {PATHS[name].removeprefix("data."): rules[name] for name in OF_LOADER}}


def _parsed(text: str) -> dict[str, Any]:
    try:
        raw = json.loads(text)
    except ValueError as error:
        raise ConfigurationError(f"{Env.TRAINING} is not JSON ({error}): {text[:80]!r}") from error
    if not isinstance(raw, dict):
        raise ConfigurationError(f"{Env.TRAINING} must be a JSON object, and is {text[:80]!r}")
    return raw


@cache
def _rules(kind: Any) -> Mapping[str, Any]:
    """Returns the rule of each field, or its class if it has fields of its own."""
    return {name: _rule_in(hint) for name, hint in get_type_hints(kind, include_extras=True).items()}


def _rule_in(hint: Any) -> Any:
    """Returns what an annotation holds: a rule, or a class with fields of its own."""
    if isinstance(hint, _Rule) or is_dataclass(hint):
        return hint
    return next(filter(None, map(_rule_in, get_args(hint))), None)


def _read(kind: Any, raw: object, path: str) -> Any:
    given = _values(_rules(kind), raw, path)
    missing = [f.name for f in fields(kind) if f.default is MISSING and f.name not in given]
    if missing:
        raise ConfigurationError(f"{path} lacks {' and '.join(missing)}")
    return kind(**given)


def _values(rules: Mapping[str, Any], raw: object, path: str) -> dict[str, Any]:
    """Returns the fields of an object that are set. Raises ConfigurationError."""
    if not isinstance(raw, dict):
        raise ConfigurationError(f"{path} must be an object, and is {json.dumps(raw)[:80]}")
    for name in raw:
        if name not in rules:
            from difflib import get_close_matches  # slow to import, and seldom needed

            meant = "".join(f" (did you mean {each}?)" for each in get_close_matches(name, rules, n=1))
            known = ", ".join(rules)
            raise ConfigurationError(f"{path}.{name} is not a field{meant}; the fields are {known}")
    set_ones = ((name, value) for name, value in raw.items() if value is not None)
    return {name: _value(rules[name], value, f"{path}.{name}") for name, value in set_ones}


def _value(rule: Any, value: Any, path: str) -> Any:
    if isinstance(rule, dict):
        return _values(rule, value, path)
    if is_dataclass(rule):
        return _read(rule, value, path)
    if not rule.holds(value):
        raise ConfigurationError(f"{path} must be {rule.words}, and is {json.dumps(value)}")
    return tuple(value) if isinstance(value, list) else value


# --- both together --------------------------------------------------------------------------------------
def resolve(manifest: Manifest, *, of_loop: bool = False, **arguments: Any) -> Settings:
    """Merges both sources: the manifest overrides the script, and each override is logged.

    of_loop: for a custom loop. It takes only the settings that it names here, and may have no end set.
    Raises ConfigurationError.
    """
    script = {name: _checked(name, value) for name, value in arguments.items()}
    wins = {name: value for name, value in manifest.items() if not of_loop or name in arguments}
    for group in GROUPS:  # one setting of the manifest replaces the script's whole group, such as its epochs
        if any(name in wins for name in group):
            # A custom loop counts in epochs, and the Run ends it at maxSteps.
            kept = {"epochs"} if of_loop else set()
            wins |= {name: None for name in group if name in script and name not in {*wins, *kept}}
    for name, value in wins.items():
        if name not in MADE and value != script.get(name):
            log.event("override", setting=name, manifest=log_value(value), script=log_value(script.get(name)))
    found = Settings(**script | wins)
    if found.compile_mode != "default" and not (script.get("compile") or wins.get("compile")):
        raise ConfigurationError(
            f"Trainer(compile_mode={found.compile_mode!r}) has no effect without compile=True: set it, or "
            "leave compile_mode out"
        )
    if found.max_steps is None and found.epochs is None and not of_loop:
        raise ConfigurationError(
            "the training has no end: set Trainer(max_steps=...) or epochs, or spec.training.maxSteps"
        )
    return found


def log_value(value: Any) -> Any:
    """Formats a setting as one word of a log line."""
    if is_dataclass(value):
        given = {each.name: getattr(value, each.name) for each in fields(value)}
        return ",".join(f"{name}={log_value(item)}" for name, item in given.items() if item not in (None, ()))
    plain = value is None or isinstance(value, Real | str | tuple)
    return value if plain else getattr(value, "__name__", type(value).__name__)


# --- the script's arguments -----------------------------------------------------------------------------
def require_whole(name: str, value: object) -> None:
    """Raises ConfigurationError unless this argument of Trainer is a whole number (numpy's count too)."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise ConfigurationError(f"Trainer({name}={value!r}): must be a whole number")


def problem(name: str, value: Any, kind: Any = Settings) -> str:
    """Returns what the value of a setting must be, in words; "" if it is valid. `kind`: whose field it is."""
    rule = _rules(kind)[name]
    return "" if is_dataclass(rule) or rule.holds(value) else str(rule.words)


def _checked(name: str, value: Any) -> Any:
    """Validates an argument here: a value of a wrong type would fail later, with a traceback, or mislead."""
    if value is None:
        if name == "activation_checkpointing":
            return ActivationCheckpointing()
        if name != "schedule" and getattr(Settings(), name) is not None:
            raise ConfigurationError(f"Trainer({name}=None): leave it out, or give a value")
        return None
    value = _CONVERTED.get(name, _plain)(value)
    if name == "schedule" and not isinstance(value, str):
        return value
    if isinstance(kind := _rules(Settings)[name], type):
        if not isinstance(value, kind):
            raise ConfigurationError(f"Trainer({name}={value!r}): must be a spottrain.{kind.__name__}")
        return _checked_parts(name, value)
    if words := problem(name, value):
        raise ConfigurationError(f"Trainer({name}={value!r}): must be {words}")
    return value


def _checked_parts(name: str, value: Any) -> Any:
    """Validates an object of one of the classes above, made in Python and so not yet validated."""
    given = {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    for part, item in given.items():
        if item not in (None, ()) and (words := problem(part, item, type(value))):
            kind = type(value).__name__.removesuffix("Spec")  # as scripts call it
            raise ConfigurationError(f"Trainer({name}={kind}({part}={item!r})): must be {words}")
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
    if isinstance(given, type | list | tuple | set | frozenset):
        each = [given] if isinstance(given, type) else given
        names = tuple(kind if isinstance(kind, str) else getattr(kind, "__name__", "") for kind in each)
        if names and all(names):
            return ActivationCheckpointing(policy="classes", classes=names)
    raise ConfigurationError(
        f"Trainer(activation_checkpointing={given!r}): must be none, all, auto, a number k for every k-th "
        "block, or a list of module classes"
    )


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
    if words := problem("patience", _plain(given), EarlyStoppingSpec):
        raise ConfigurationError(
            f"Trainer(early_stopping={given!r}): must be a spottrain.EarlyStopping, or the patience, {words}"
        )
    return EarlyStoppingSpec(patience=int(given))


_CONVERTED: Final[Mapping[str, Callable[[Any], Any]]] = {
    "activation_checkpointing": activation_checkpointing,
    "early_stopping": _early_stopping,
}

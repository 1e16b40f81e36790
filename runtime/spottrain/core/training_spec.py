"""`spec.training` of the manifest, as JSON in SPOTTRAIN_TRAINING.

It repeats the schema of crds/, for runs on a laptop, which no API server has validated. An absent field
leaves the choice to the script. Every bad value raises a ConfigurationError that names the field.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from typing import Annotated, Any, Final, Literal, NamedTuple, get_args, get_type_hints

from spottrain.contract import Env
from spottrain.errors import ConfigurationError

AUTO: Final = "auto"
PRECISIONS: Final = ("auto", "bf16", "fp16", "fp32", "tf32")
OPTIMIZERS: Final = ("adamw", "sgd", "adafactor")

Auto = Literal["auto"]


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
    "a list of names", lambda v: isinstance(v, list) and bool(v) and all(isinstance(n, str) and n for n in v)
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimizer:
    """Replaces the script's optimizer, over the same parameter groups."""

    name: Annotated[str, _one_of(*OPTIMIZERS)]
    learningRate: _AboveZero | None = None
    weightDecay: _NotNegative | None = None
    momentum: _Share | None = None


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
class Data:
    """How the samples are loaded."""

    numWorkers: Annotated[int | Auto | None, _or_auto(_whole(0))] = None
    prefetchFactor: _FromOne | None = None
    pinMemory: _Flag | None = None
    dropLast: _Flag | None = None


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

    def to_json(self) -> str:
        """Returns the window as JSON, as `from_json` reads it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str, name: str) -> Profile:
        """Parses and validates the JSON. `name`: of its variable. Raises ConfigurationError."""
        found: Profile = _read(cls, _parsed(text, name), "profile")
        return found


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
class Training:
    """Values set here override the arguments of `Trainer`."""

    precision: Annotated[str | None, _one_of(*PRECISIONS)] = None
    microBatchSize: Annotated[int | Auto | None, _or_auto(_whole(1))] = None
    globalBatchSize: _FromOne | None = None
    compile: _Flag | None = None
    compileMode: Annotated[str | None, _one_of("default", "reduce-overhead", "max-autotune")] = None
    activationCheckpointing: ActivationCheckpointing | None = None
    optimizer: Optimizer | None = None
    learningRateScaling: LearningRateScaling | None = None
    schedule: Annotated[str | None, _one_of("constant", "cosine")] = None
    warmupSteps: _FromZero | None = None
    warmupEpochs: _NotNegative | None = None
    warmupFraction: _Share | None = None
    clipGradNorm: _AboveZero | None = None
    emaDecay: Annotated[float | None, _number("a number above 0 and below 1", lambda v: 0 < v < 1)] = None
    earlyStopping: EarlyStoppingSpec | None = None
    data: Data | None = None
    profile: Profile | None = None
    trackers: TrackersSpec | None = None
    maxSteps: _FromOne | None = None
    seed: _FromZero | None = None
    deterministic: _Flag | None = None

    @classmethod
    def from_json(cls, text: str) -> Training:
        """Parses and validates the JSON; empty text sets nothing. Raises ConfigurationError."""
        found: Training = _read(cls, _parsed(text or "{}", Env.TRAINING), "spec.training")
        if words := next(_contradictions(found), ""):
            raise ConfigurationError(f"spec.training: {words}")
        return found


def _parsed(text: str, name: str) -> dict[str, Any]:
    try:
        raw = json.loads(text)
    except ValueError as error:
        raise ConfigurationError(f"{name} is not JSON ({error}): {text[:80]!r}") from error
    if not isinstance(raw, dict):
        raise ConfigurationError(f"{name} must be a JSON object, and is {text[:80]!r}")
    return raw


def problem(path: str, value: Any) -> str:
    """Returns what the field's value must be, in words; "" if it is valid. `path`: below spec.training."""
    rule: Any = Training
    for name in path.split("."):
        rule = _rules(rule)[name]
    return "" if is_dataclass(rule) or rule.holds(value) else str(rule.words)


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
    if not isinstance(raw, dict):
        raise ConfigurationError(f"{path} must be an object, and is {json.dumps(raw)[:80]}")
    rules = _rules(kind)
    for name in raw:
        if name not in rules:
            meant = "".join(f" (did you mean {each}?)" for each in get_close_matches(name, rules, n=1))
            known = ", ".join(rules)
            raise ConfigurationError(f"{path}.{name} is not a field{meant}; the fields are {known}")
    given = {name: value for name, value in raw.items() if value is not None}
    missing = [f.name for f in fields(kind) if f.default is MISSING and f.name not in given]
    if missing:
        raise ConfigurationError(f"{path} lacks {' and '.join(missing)}")
    return kind(**{name: _value(rules[name], value, f"{path}.{name}") for name, value in given.items()})


def _value(rule: Any, value: Any, path: str) -> Any:
    if is_dataclass(rule):
        return _read(rule, value, path)
    if not rule.holds(value):
        raise ConfigurationError(f"{path} must be {rule.words}, and is {json.dumps(value)}")
    return tuple(value) if isinstance(value, list) else value


# --- rules between fields; the CRD has the same ones as CEL rules ---------------------------------------
def _contradictions(it: Training) -> Iterator[str]:
    micro, size, last = it.microBatchSize, it.globalBatchSize, it.maxSteps
    if isinstance(micro, int) and size is not None and size % micro:
        yield (
            f"globalBatchSize must be a multiple of microBatchSize, but {size} is not one of {micro}: choose "
            "a size that divides it, or auto"
        )
    if [it.warmupSteps, it.warmupEpochs, it.warmupFraction].count(None) < 2:
        yield "warmupSteps, warmupEpochs and warmupFraction exclude each other; give one"
    if it.warmupSteps is not None and last is not None and it.warmupSteps >= last:
        yield (
            f"warmupSteps, {it.warmupSteps}, must be less than maxSteps, {last}: shorten it, or set "
            "warmupFraction"
        )
    if it.compileMode is not None and not it.compile:
        yield "compileMode has no effect unless compile is true; set it, or leave compileMode out"
    yield from _contradictions_of_parts(it)


def _contradictions_of_parts(it: Training) -> Iterator[str]:
    wanted, optimizer, stopping = it.activationCheckpointing, it.optimizer, it.earlyStopping
    if wanted is not None and (
        (wanted.policy == "every") != (wanted.every is not None)
        or (wanted.policy == "classes") != bool(wanted.classes)
    ):
        yield (
            "activationCheckpointing.every belongs to the policy every, and classes to the policy classes; "
            "give what the policy needs, and only that"
        )
    if optimizer is not None and optimizer.momentum is not None and optimizer.name != "sgd":
        yield "optimizer.momentum belongs to sgd; leave it out"
    if stopping is not None and stopping.patience is None and stopping.target is None:
        yield "earlyStopping needs patience or target, or it would never end the training"
    window, last = it.profile, it.maxSteps
    if window is not None and last is not None and window.steps > last:
        yield (
            f"profile records past maxSteps: wait + warmup + active must not be more than {last} steps; wait "
            "less, or record less"
        )

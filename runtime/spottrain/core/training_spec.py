"""`spec.training` of the manifest, as JSON in SPOTTRAIN_TRAINING.

It repeats the schema of crds/, for runs on a laptop, which no API server has validated. An absent field
leaves the choice to the script. Every bad value raises a ConfigurationError that names the field.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Final, Literal, NamedTuple

from spottrain.contract import Env
from spottrain.errors import ConfigurationError

AUTO: Final = "auto"
PRECISIONS: Final = ("auto", "bf16", "fp16", "fp32", "tf32")
COMPILE_MODES: Final = ("default", "reduce-overhead", "max-autotune")
POLICIES: Final = ("none", "every", "all", "classes", "auto")
OPTIMIZERS: Final = ("adamw", "sgd", "adafactor")
SCHEDULES: Final = ("constant", "cosine")
SCALINGS: Final = ("none", "linear", "sqrt")
WANDB_MODES: Final = ("online", "offline", "disabled")
COMPRESSIONS: Final = ("none", "bf16", "powerSGD")

POWER_SGD_FP16: Final = (
    "powerSGD with fp16 is refused: with a loss scale some gradients overflow by design, and an "
    "infinite one would stay in the error feedback forever; use bf16 or fp32 (auto is fp16 on a GPU "
    "without bf16), or bf16 compression"
)

Auto = Literal["auto"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationCheckpointing:
    """Which blocks recompute their activations in the backward pass, to save memory.

    Args:
        policy: `none`, `every` (every k-th block), `all`, `classes`, or `auto` (decided by trial steps).
        every: k of the policy `every`, at least 2; 1 would be `all`.
        classes: Names of module classes, for the policy `classes`.
    """

    policy: str = "none"
    every: int | None = None
    classes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimizer:
    """Replaces the script's optimizer, over the same parameter groups."""

    name: str
    learningRate: float | None = None
    weightDecay: float | None = None
    momentum: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LearningRateScaling:
    """Scales the learning rate with the global batch size.

    Args:
        rule: `none`, `linear` (by the ratio of the batch sizes) or `sqrt` (by its square root).
        baseBatchSize: Global batch size, in samples, for which the learning rate was tuned.
    """

    rule: str
    baseBatchSize: int


@dataclass(frozen=True, kw_only=True, slots=True)
class EarlyStoppingSpec:
    """Ends the training, as done, when an evaluation metric stops improving."""

    metric: str = "loss"
    mode: str = "min"
    patience: int | None = None
    """Consecutive evaluations without an improvement; None: they do not end the training."""
    minDelta: float = 0.0
    target: float | None = None
    minSteps: int = 0
    stopOnNaN: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """How the samples are loaded."""

    numWorkers: int | Auto | None = None
    prefetchFactor: int | None = None
    pinMemory: bool | None = None
    dropLast: bool | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """Which optimizer steps of each attempt to profile.

    Args:
        wait: Steps to skip.
        warmup: Steps to trace and discard, while the profiler warms up.
        active: Steps to record.
    """

    wait: int = 10
    warmup: int = 2
    active: int = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorBoardSpec:
    """Event files in a folder of a volume that outlives the pod."""

    folder: str


@dataclass(frozen=True, kw_only=True, slots=True)
class WandBSpec:
    """Weights & Biases. Its API key is WANDB_API_KEY in the container's environment."""

    project: str
    entity: str | None = None
    mode: str | None = None
    folder: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MLflowSpec:
    """MLflow. Its credentials come from MLflow's own environment variables."""

    experiment: str
    trackingURI: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackersSpec:
    """Experiment trackers, each of which shows all attempts as one run."""

    tensorboard: TensorBoardSpec | None = None
    wandb: WandBSpec | None = None
    mlflow: MLflowSpec | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """Values set here override the arguments of `Trainer`."""

    precision: str | None = None
    microBatchSize: int | Auto | None = None
    globalBatchSize: int | None = None
    compile: bool | None = None
    compileMode: str | None = None
    activationCheckpointing: ActivationCheckpointing | None = None
    optimizer: Optimizer | None = None
    learningRateScaling: LearningRateScaling | None = None
    schedule: str | None = None
    warmupSteps: int | None = None
    warmupEpochs: float | None = None
    warmupFraction: float | None = None
    clipGradNorm: float | None = None
    emaDecay: float | None = None
    gradientCompression: str | None = None
    earlyStopping: EarlyStoppingSpec | None = None
    data: Data | None = None
    profile: Profile | None = None
    trackers: TrackersSpec | None = None
    maxSteps: int | None = None
    seed: int | None = None
    deterministic: bool | None = None

    @classmethod
    def from_json(cls, text: str) -> Training:
        """Parses and validates the JSON; empty text sets nothing. Raises ConfigurationError."""
        try:
            raw = json.loads(text or "{}")
        except ValueError as error:
            raise ConfigurationError(f"{Env.TRAINING} is not JSON ({error}): {text[:80]!r}") from error
        if not isinstance(raw, dict):
            raise ConfigurationError(f"{Env.TRAINING} must be a JSON object, and is {text[:80]!r}")
        found: Training = _read(cls, _FIELDS, raw, "spec.training")
        for holds, words in _TOGETHER:
            if not holds(found):
                raise ConfigurationError(f"spec.training: {words.format(it=found)}")
        return found


def problem(path: str, value: Any) -> str:
    """Returns what the field's value must be, in words; "" if it is valid. `path`: below spec.training."""
    rule: Any = _SpecPart(Training, _FIELDS)
    for name in path.split("."):
        rule = rule.rules[name]
    return "" if isinstance(rule, _SpecPart) or rule.holds(value) else str(rule.words)


class _Rule(NamedTuple):
    words: str
    holds: Callable[[Any], bool]


class _SpecPart(NamedTuple):
    """A field that has fields of its own."""

    kind: type[Any]
    rules: Mapping[str, Any]


def _read(kind: type[Any], rules: Mapping[str, _Rule | _SpecPart], raw: object, path: str) -> Any:
    if not isinstance(raw, dict):
        raise ConfigurationError(f"{path} must be an object, and is {json.dumps(raw)[:80]}")
    given = {name: value for name, value in raw.items() if value is not None}
    for name in raw:
        if name not in rules:
            raise ConfigurationError(f"{path}.{name} is not a field; the fields are {', '.join(rules)}")
    missing = [f.name for f in fields(kind) if _required(f) and f.name not in given]
    if missing:
        raise ConfigurationError(f"{path} lacks {' and '.join(missing)}")
    return kind(**{name: _value(rules[name], value, f"{path}.{name}") for name, value in given.items()})


def _required(field: Any) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _value(rule: _Rule | _SpecPart, value: Any, path: str) -> Any:
    if isinstance(rule, _SpecPart):
        return _read(rule.kind, rule.rules, value, path)
    if not rule.holds(value):
        raise ConfigurationError(f"{path} must be {rule.words}, and is {json.dumps(value)}")
    return tuple(value) if isinstance(value, list) else value


def _whole(least: int) -> _Rule:
    words = f"a whole number, at least {least}"
    return _Rule(words, lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= least)


def _number(words: str, holds: Callable[[float], bool] = lambda v: True) -> _Rule:
    return _Rule(
        words,
        lambda v: isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v) and holds(v),
    )


def _one_of(words: tuple[str, ...]) -> _Rule:
    return _Rule(f"{', '.join(words[:-1])} or {words[-1]}", lambda v: isinstance(v, str) and v in words)


def _or_auto(rule: _Rule) -> _Rule:
    return _Rule(f"{rule.words}, or auto", lambda v: v == AUTO or rule.holds(v))


_FLAG: Final = _Rule("true or false", lambda v: isinstance(v, bool))
_ABOVE_0: Final = _number("a number above 0", lambda v: v > 0)
_NOT_BELOW_0: Final = _number("a number, at least 0", lambda v: v >= 0)
_NAME: Final = _Rule("a name", lambda v: isinstance(v, str) and bool(v))
_PATH: Final = _Rule("an absolute path", lambda v: isinstance(v, str) and v.startswith("/"))
_NAMES: Final = _Rule(
    "a list of names", lambda v: isinstance(v, list) and bool(v) and all(isinstance(n, str) and n for n in v)
)

_FIELDS: Final[dict[str, _Rule | _SpecPart]] = {
    "precision": _one_of(PRECISIONS),
    "microBatchSize": _or_auto(_whole(1)),
    "globalBatchSize": _whole(1),
    "compile": _FLAG,
    "compileMode": _one_of(COMPILE_MODES),
    "activationCheckpointing": _SpecPart(
        ActivationCheckpointing, {"policy": _one_of(POLICIES), "every": _whole(2), "classes": _NAMES}
    ),
    "optimizer": _SpecPart(
        Optimizer,
        {
            "name": _one_of(OPTIMIZERS),
            "learningRate": _ABOVE_0,
            "weightDecay": _NOT_BELOW_0,
            "momentum": _number("a number from 0 to below 1", lambda v: 0 <= v < 1),
        },
    ),
    "learningRateScaling": _SpecPart(
        LearningRateScaling, {"rule": _one_of(SCALINGS), "baseBatchSize": _whole(1)}
    ),
    "schedule": _one_of(SCHEDULES),
    "warmupSteps": _whole(0),
    "warmupEpochs": _NOT_BELOW_0,
    "warmupFraction": _number("a number from 0 to below 1", lambda v: 0 <= v < 1),
    "clipGradNorm": _ABOVE_0,
    "emaDecay": _number("a number above 0 and below 1", lambda v: 0 < v < 1),
    "gradientCompression": _one_of(COMPRESSIONS),
    "earlyStopping": _SpecPart(
        EarlyStoppingSpec,
        {
            "metric": _NAME,
            "mode": _one_of(("min", "max")),
            "patience": _whole(1),
            "minDelta": _NOT_BELOW_0,
            "target": _number("a number"),
            "minSteps": _whole(0),
            "stopOnNaN": _FLAG,
        },
    ),
    "data": _SpecPart(
        Data,
        {
            "numWorkers": _or_auto(_whole(0)),
            "prefetchFactor": _whole(1),
            "pinMemory": _FLAG,
            "dropLast": _FLAG,
        },
    ),
    "profile": _SpecPart(Profile, {"wait": _whole(0), "warmup": _whole(0), "active": _whole(1)}),
    "trackers": _SpecPart(
        TrackersSpec,
        {
            "tensorboard": _SpecPart(TensorBoardSpec, {"folder": _PATH}),
            "wandb": _SpecPart(
                WandBSpec, {"project": _NAME, "entity": _NAME, "mode": _one_of(WANDB_MODES), "folder": _PATH}
            ),
            "mlflow": _SpecPart(MLflowSpec, {"experiment": _NAME, "trackingURI": _NAME}),
        },
    ),
    "maxSteps": _whole(1),
    "seed": _whole(0),
    "deterministic": _FLAG,
}


def _multiple(training: Training) -> bool:
    micro, size = training.microBatchSize, training.globalBatchSize
    return not isinstance(micro, int) or size is None or size % micro == 0


def _one_warm_up(training: Training) -> bool:
    given = (training.warmupSteps, training.warmupEpochs, training.warmupFraction)
    return sum(value is not None for value in given) <= 1


def _window_fits(training: Training) -> bool:
    window, last = training.profile, training.maxSteps
    return window is None or last is None or window.wait + window.warmup + window.active <= last


def _policy_fits(training: Training) -> bool:
    wanted = training.activationCheckpointing
    if wanted is None:
        return True
    every = (wanted.policy == "every") == (wanted.every is not None)
    return every and (wanted.policy == "classes") == bool(wanted.classes)


_TOGETHER: Final[tuple[tuple[Callable[[Training], bool], str], ...]] = (
    (
        _multiple,
        "globalBatchSize must be a multiple of microBatchSize, but {it.globalBatchSize} is not one of "
        "{it.microBatchSize}: choose a size that divides it, or auto",
    ),
    (_one_warm_up, "warmupSteps, warmupEpochs and warmupFraction exclude each other; give one"),
    (
        lambda t: t.warmupSteps is None or t.maxSteps is None or t.warmupSteps < t.maxSteps,
        "warmupSteps, {it.warmupSteps}, must be less than maxSteps, {it.maxSteps}: shorten it, or set "
        "warmupFraction",
    ),
    (
        lambda t: t.compileMode is None or t.compile is True,
        "compileMode has no effect unless compile is true; set it, or leave compileMode out",
    ),
    (
        _policy_fits,
        "activationCheckpointing.every belongs to the policy every, and classes to the policy classes; give "
        "what the policy needs, and only that",
    ),
    (
        lambda t: t.optimizer is None or t.optimizer.momentum is None or t.optimizer.name == "sgd",
        "optimizer.momentum belongs to sgd; leave it out",
    ),
    (lambda t: (t.precision, t.gradientCompression) != ("fp16", "powerSGD"), POWER_SGD_FP16),
    (
        lambda t: t.earlyStopping is None or {t.earlyStopping.patience, t.earlyStopping.target} != {None},
        "earlyStopping needs patience or target, or it would never end the training",
    ),
    (
        _window_fits,
        "profile records past maxSteps: wait + warmup + active must not be more than {it.maxSteps} steps; "
        "wait less, or record less",
    ),
)
"""Rules between fields; the CRD has the same ones as CEL rules."""

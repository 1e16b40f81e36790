"""How to train: the arguments of `Trainer`, overridden by `spec.training`. Made by `trainer`."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Final

from spottrain import log
from spottrain.config import PRECISIONS, Training
from spottrain.errors import ConfigurationError

_MANIFEST_NAME: Final = {
    "precision": "precision",
    "micro_batch_size": "microBatchSize",
    "batch_size": "globalBatchSize",
    "compile": "compile",
    "clip_grad_norm": "clipGradNorm",
    "warmup_steps": "warmupSteps",
    "max_steps": "maxSteps",
    "seed": "seed",
    "deterministic": "deterministic",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    batch_size: int
    micro_batch_size: int | None
    """None: the batch size, that is, no accumulation."""
    max_steps: int | None
    epochs: int | None
    precision: str
    compile: bool
    clip_grad_norm: float | None
    warmup_steps: int
    seed: int
    deterministic: bool

    def __post_init__(self) -> None:
        self._require_types()
        if self.precision not in PRECISIONS:
            raise ConfigurationError(f"precision {self.precision!r} is not known: use bf16, fp16 or fp32")
        for name in ("batch_size", "micro_batch_size", "max_steps", "epochs"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigurationError(f"Trainer({name}={value}): must be at least 1")
        if self.warmup_steps < 0:
            raise ConfigurationError(f"Trainer(warmup_steps={self.warmup_steps}): must be at least 0")
        if self.clip_grad_norm is not None and not self.clip_grad_norm > 0:
            raise ConfigurationError(f"Trainer(clip_grad_norm={self.clip_grad_norm}): must be above 0")
        if self.max_steps is None and self.epochs is None:
            raise ConfigurationError(
                "the training has no end: give Trainer max_steps or epochs, or set spec.training.maxSteps"
            )

    def _require_types(self) -> None:
        """Of another type a value would fail much later, by a traceback, or mean something else."""
        for name in ("batch_size", "warmup_steps", "seed"):
            require_whole(name, getattr(self, name))
        for name in ("micro_batch_size", "max_steps", "epochs"):
            if getattr(self, name) is not None:
                require_whole(name, getattr(self, name))
        for name in ("compile", "deterministic"):
            _require(name, getattr(self, name), bool, "True or False")
        if self.clip_grad_norm is not None:
            _require("clip_grad_norm", self.clip_grad_norm, Real, "a number")

    def total_steps(self, steps_per_epoch: int | None) -> int:
        """Whichever ends first."""
        if steps_per_epoch is None:
            if self.max_steps is None:
                raise ConfigurationError(
                    "how long an epoch is cannot be known of this train_set: give Trainer max_steps, or "
                    "steps_per_epoch"
                )
            return self.max_steps
        ends = (self.max_steps, self.epochs and self.epochs * steps_per_epoch)
        return min(end for end in ends if end is not None)


def require_whole(name: str, value: object) -> None:
    """Raises ConfigurationError unless this argument of Trainer is a whole number; numpy's are."""
    _require(name, value, Integral, "a whole number")


def _require(name: str, value: object, kind: type, words: str) -> None:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ConfigurationError(f"Trainer({name}={value!r}): must be {words}")


def resolve(manifest: Training, **arguments: Any) -> Settings:
    """The manifest wins, and each change that it makes is logged."""
    wins = {name: getattr(manifest, theirs) for name, theirs in _MANIFEST_NAME.items()}
    wins = {name: value for name, value in wins.items() if value is not None}
    if "max_steps" in wins:
        arguments["epochs"] = None  # maxSteps alone says when it ends
    for name, value in wins.items():
        if value != arguments[name]:
            log.event("override", setting=name, manifest=value, script=arguments[name])
    return Settings(**arguments | wins)

"""`spec.training` for custom loops: the settings that a loop applies, and those that it ignores.

    s = spottrain.job_settings(global_batch_size=32, precision="fp32", ema_decay=None)
    loader = spottrain.data.loader(dataset, batch_size=s.micro_batch_size, shuffle=True)

Names and rules are those of `Trainer` (`core.training_settings.resolve`): the manifest wins, and each
override is logged. Naming a setting declares that the loop applies it. Other settings of the manifest are
logged (`advise`), so that none is ignored silently.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from typing import Any, Final

import torch
from torch.optim.lr_scheduler import LRScheduler

from spottrain.core import device as devices
from spottrain.core import log
from spottrain.core.training_settings import AUTO, MADE, PATHS, WARM_UPS, Settings, resolve
from spottrain.distributed import process_group
from spottrain.distributed.world import World
from spottrain.errors import ConfigurationError
from spottrain.lifecycle.session import Session, current
from spottrain.techniques import optimizers, schedules
from spottrain.techniques.early_stopping import EarlyStopping
from spottrain.techniques.trackers import run_id
from spottrain.training import components

NAMES: Final = tuple(each.name for each in fields(Settings) if each.name != "profile")
"""Settings that a loop can name. The Run and the callbacks apply `profile` themselves."""


class JobSettings:
    """The named settings, as attributes.

    `early_stopping` is a `spottrain.EarlyStopping` or None, and `trackers` a list for `techniques.Trackers`.
    The others are values of the arguments of `Trainer`. Reading a setting that was not named raises
    AttributeError: it is logged as one that the loop ignores.
    """

    def __init__(self, settings: Settings, named: dict[str, Any], run_id: str) -> None:
        self._settings, self._named = settings, named
        self.run_id = run_id
        """Argument for `Trackers.begin`: one id for all attempts of the job."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # looked up by copy and pickle
            raise AttributeError(name)
        if name in self._named:
            return self._named[name]
        if name not in NAMES:
            raise AttributeError(f"{name} is not a setting; the settings are {', '.join(NAMES)}")
        raise AttributeError(
            f"spottrain.job_settings(...) was called without {name}: add it to the call, with the "
            f"script's own value ({name}=...)"
        )

    def __repr__(self) -> str:
        return f"JobSettings({', '.join(f'{name}={value!r}' for name, value in sorted(self._named.items()))})"

    def make_optimizer(
        self,
        given: torch.optim.Optimizer | str,
        model: torch.nn.Module,
        learning_rate: float | None = None,
    ) -> torch.optim.Optimizer:
        """Returns the optimizer that the script or the manifest sets. Make the scheduler after it.

        The manifest's optimizer replaces the script's if `optimizer` is named in `job_settings`; the
        learning rate is scaled for the batch size if `learning_rate_scaling` is named. After a resume,
        values set by the manifest win over the checkpoint's, and are logged. Exception: a torch LRScheduler
        that `make_scheduler` did not make keeps the checkpoint's rates.

        Args:
            given: the script's optimizer, or its name.
            model: provides the parameters of an optimizer given by name.
            learning_rate: for an optimizer given by name.

        Returns:
            `given`, changed in place, or a new optimizer.

        Raises:
            ConfigurationError: a scheduler for `given` exists already, or the learning rate is missing or
                invalid.
        """
        groups = () if isinstance(given, str) else given.param_groups
        if "schedule" not in self._named and any("initial_lr" in group for group in groups):
            raise ConfigurationError(
                "make_optimizer() was given an optimizer that already has a scheduler, which would set the "
                "learning rates of the wrong one: make the scheduler for the optimizer that it returns"
            )
        with _own_words():
            made = components.optimizer(given, model, self._settings, learning_rate)
        if "schedule" not in self._named and components.overrides_checkpoint(self._settings):
            optimizers.override_checkpoint(made, ["lr"])
        return made

    def make_scheduler(
        self, optimizer: torch.optim.Optimizer, *, total_steps: int, steps_per_epoch: int | None = None
    ) -> LRScheduler:
        """Returns a scheduler for `schedule` and the warm-up. Make it after the optimizer.

        After a resume its base rate is the checkpoint's. It is this attempt's if the manifest sets
        `optimizer.learningRate` or the rate is scaled; a difference is logged.

        Args:
            optimizer: the result of `make_optimizer`.
            total_steps: optimizer steps of the whole training.
            steps_per_epoch: optimizer steps per epoch, for a warm-up in epochs.

        Returns:
            A scheduler; call its step() after each optimizer step.

        Raises:
            ConfigurationError: the warm-up is invalid.
        """
        kind, settings = self._settings.schedule, self._settings
        if isinstance(kind, LRScheduler):
            return kind
        warmup = components.warmup_steps(settings, total_steps, steps_per_epoch)
        return schedules.lr_schedule(
            optimizer,
            kind,
            warmup_steps=warmup,
            total_steps=total_steps,
            override_checkpoint=components.overrides_checkpoint(settings),
        )


def job_settings(*, session: Session | None = None, **own: Any) -> JobSettings:
    """Returns the settings of a custom loop: the script's own values, overridden by `spec.training`.

    Name every setting that the loop applies; each override by the manifest is logged. Call it before you
    create the Run, or the library's Trainer. `deterministic` takes effect here.

    Args:
        session: the process's own session by default.
        **own: the script's values, by argument names of `Trainer`. A warm-up named in one unit covers all
            three. `epochs` also covers `max_steps`: the Run then ends training at the manifest's maxSteps.
            `optimizer` is the value that `make_optimizer` gets.

    Raises:
        ConfigurationError: a name is not a setting, or a value of the script or the manifest is invalid.
    """
    session = session or current()
    for name in own:
        if name not in NAMES:
            raise ConfigurationError(
                f"job_settings({name}=...) is not a setting; the settings are {', '.join(NAMES)}"
            )
    together = [*(WARM_UPS if set(WARM_UPS) & set(own) else ()), *(["max_steps"] if "epochs" in own else [])]
    made = {name: None for name in MADE if name in own}  # by the script itself
    named = dict.fromkeys(together) | own | made
    with _own_words():
        found = resolve(session.run.training, of_loop=True, **named)
        _require_sizes(found, own, session.world)
        values = {name: getattr(found, name) for name in named}
        if "early_stopping" in own:
            stopping = components.early_stopping(found, evaluates=True, more=True)
            use_first_rank(stopping, session.world)
            values["early_stopping"] = stopping
        if "trackers" in own:
            values["trackers"] = components.trackers(own["trackers"], found, session)
    if "optimizer" in own:
        values["optimizer"] = found.optimizer or own["optimizer"]
    if found.deterministic:
        devices.make_deterministic()
    session.asked |= set(named)
    return JobSettings(found, values, run_id(session.run.job_uid))


def _require_sizes(found: Settings, own: Mapping[str, Any], world: World) -> None:
    """Raises ConfigurationError for sizes that a loop would silently get wrong."""
    if "learning_rate_scaling" in own and "global_batch_size" not in own:
        raise ConfigurationError(
            "job_settings(learning_rate_scaling=...) needs the batch size: add it to the call, with the "
            "script's own value (global_batch_size=...)"
        )
    size = found.micro_batch_size
    if size == AUTO and own["micro_batch_size"] != AUTO:
        raise ConfigurationError(
            f"spec.training.microBatchSize is auto, and this loop has micro_batch_size="
            f"{own['micro_batch_size']!r}, so it tries none: set a number, or have the loop find it by "
            "spottrain.techniques.find_batch_size(...) and say job_settings(micro_batch_size='auto')"
        )
    if isinstance(size, int) and "global_batch_size" in own and found.global_batch_size % (size * world.size):
        ranks = f"{world.size} ranks x " if world.distributed else ""
        raise ConfigurationError(
            f"globalBatchSize {found.global_batch_size} (global_batch_size) is not a multiple of {ranks}"
            f"microBatchSize {size}: the loop would leave out the rest of each step"
        )


def use_first_rank(stopping: EarlyStopping | None, world: World) -> None:
    """Makes `stopping` use rank 0's metric on all ranks, so that they all stop together."""
    if stopping is not None and world.distributed:
        stopping.agree = partial(process_group.from_rank0, world=world)


@contextmanager
def _own_words() -> Iterator[None]:
    """Makes errors name job_settings() in place of Trainer()."""
    try:
        yield
    except ConfigurationError as error:
        words = str(error).replace("Trainer(", "job_settings(")
        raise ConfigurationError(words, reason=error.reason) from error


def advise(session: Session) -> None:
    """Reports settings in spec.training that this loop ignores. Call it before the first step.

    They appear in the log of rank 0, in /progress and in the termination message.
    """
    taken = {"profile", "max_steps", *session.asked, *(["seed"] if devices.seeded() else [])}
    if "profile" in session.run.training and session.run.training.get("warmup_steps") == 0:
        taken.add("warmup_steps")  # set by `spottrain profile`, for a run of a few steps
    paths = [PATHS[name] for name in session.run.training if name not in taken]
    session.board.update(ignored_settings=",".join(paths))
    if paths and session.world.first:
        text = (
            "spec.training sets these, and this loop does not apply them: add them to "
            "spottrain.job_settings(...) and use its result, or remove them from spec.training"
        )
        log.event("advice", about="training", fields=",".join(paths), text=text)

"""`spec.training` for a loop that is not `Trainer`'s: what the loop has asked for, and what nobody takes.

    s = spottrain.job_settings(batch_size=32, precision="fp32", ema_decay=None)
    loader = spottrain.data.loader(dataset, batch_size=s.batch_size)

The words and the rules are `Trainer`'s (`settings.resolve`): the manifest wins, and each override is logged.
What the script names here it says that it acts on; `loop` and `integrations` tell what the manifest sets
beyond that, so that no setting is ignored in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from typing import Any, Final, TypeVar

import torch
from torch.optim.lr_scheduler import LRScheduler

from spottrain.contract import PROFILE
from spottrain.core import device as devices
from spottrain.core import log
from spottrain.core.training_settings import MADE, WARM_UPS, Settings, resolve, set_in
from spottrain.core.training_spec import AUTO
from spottrain.distributed import process_group
from spottrain.distributed.world import World
from spottrain.errors import ConfigurationError
from spottrain.lifecycle.session import Session, current
from spottrain.techniques import memory_fit, optimizers, schedules
from spottrain.techniques.early_stopping import EarlyStopping
from spottrain.training import components, optimizer_setup

NAMES: Final = tuple(each.name for each in fields(Settings) if each.name != "profile")
"""What can be asked for. A profile is made by the Run and the callbacks, which need no help."""


class JobSettings:
    """The settings that were named, as attributes, ready for the levers: `early_stopping` is a
    `spottrain.EarlyStopping` or None, `activation_checkpointing` a `Policy`, `trackers` a
    list for `techniques.Trackers`; the rest are numbers and words as `Trainer` has them.

    To read one that was not named is an AttributeError: the manifest's would be taken though nobody was told.
    """

    def __init__(self, settings: Settings, asked: frozenset[str], ready: dict[str, Any], run_id: str) -> None:
        self._settings, self._asked, self._ready = settings, asked, ready
        self.run_id = run_id
        """For `Trackers.begin`: one for all attempts of the job."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # of a copy that is being made
            raise AttributeError(name)
        if name in self._ready:
            return self._ready[name]
        if name in self._asked:
            return getattr(self._settings, name)
        if name not in NAMES:
            raise AttributeError(f"{name} is not a setting; the settings are {', '.join(NAMES)}")
        raise AttributeError(
            f"spottrain.job_settings() was not asked for {name}: name it in the call, with the "
            f"script's own value ({name}=...)"
        )

    def __repr__(self) -> str:
        return f"Arguments({', '.join(f'{name}={getattr(self, name)!r}' for name in sorted(self._asked))})"

    def make_optimizer(
        self,
        given: torch.optim.Optimizer | str,
        model: torch.nn.Module,
        learning_rate: float | None = None,
    ) -> torch.optim.Optimizer:
        """The script's (or the one of that name), or what the manifest wants in its place, with the rate
        scaled for the batch size: as far as `optimizer` and `learning_rate_scaling` are named. Make the
        scheduler after it. What the manifest says of it holds against a checkpoint's, which is told; but the
        rates of a torch LRScheduler that is not `make_scheduler`'s are the checkpoint's.
        Raises ConfigurationError."""
        groups = () if isinstance(given, str) else given.param_groups
        if "schedule" not in self._asked and any("initial_lr" in group for group in groups):
            raise ConfigurationError(
                "make_optimizer() was given an optimizer for which a scheduler is made already, which would "
                "set the rates of another one: make the scheduler after it, of what make_optimizer() answers"
            )
        with _own_words():
            made = optimizer_setup.optimizer(given, model, self._settings, learning_rate)
        if "schedule" not in self._asked and optimizer_setup.said_anew(self._settings):
            optimizers.hold(made, ["lr"])
        return made

    def make_scheduler(
        self, optimizer: torch.optim.Optimizer, *, total_steps: int, steps_per_epoch: int | None = None
    ) -> LRScheduler:
        """By `schedule` and the warm-up: step() it after each optimizer step. Make it after the optimizer.

        Restored by the Run, it goes on with the checkpoint's base rate, or with this attempt's where the
        manifest says it (`optimizer.learningRate`) or it is scaled; where they differ it is told."""
        kind, settings = self._settings.schedule, self._settings
        if isinstance(kind, LRScheduler):
            return kind
        warmup = optimizer_setup.warmup_steps(settings, total_steps, steps_per_epoch)
        return schedules.lr_schedule(
            optimizer,
            kind,
            warmup_steps=warmup,
            total_steps=total_steps,
            said_anew=optimizer_setup.said_anew(settings),
        )


def job_settings(*, session: Session | None = None, **own: Any) -> JobSettings:
    """What the loop shall do: the script's own values by the names of `Trainer`'s arguments, and
    `spec.training` of the manifest, which wins, and whose every change is logged.

    Name all that the loop acts on. A warm-up may be named in one unit and is then asked for in all three;
    with `epochs` goes `max_steps`, at which the Run ends it where the manifest has it. `optimizer` is what
    `make_optimizer` is given. `deterministic` takes effect here. Call it before the Run, or the library's
    Trainer, is made. Raises ConfigurationError.
    """
    session = session or current()
    for name in own:
        if name not in NAMES:
            raise ConfigurationError(
                f"job_settings({name}=...) is not a setting; the settings are {', '.join(NAMES)}"
            )
    together = [*(WARM_UPS if set(WARM_UPS) & set(own) else ()), *(["max_steps"] if "epochs" in own else [])]
    named = dict.fromkeys(together) | own
    trackers = named.pop("trackers", None)
    plain = named | {name: None for name in MADE if name in own}  # what the script has ready made is its own
    with _own_words():
        found = resolve(session.run.training, of_loop=True, **plain)
        _require_sizes(found, own, session.world)
        ready = _ready(found, plain, trackers, session)
    if "optimizer" in own:
        ready["optimizer"] = found.optimizer or own["optimizer"]
    if found.deterministic:
        devices.make_deterministic()
    session.asked |= set(plain)
    return JobSettings(found, frozenset(plain), ready, components.run_id(session))


def _require_sizes(found: Settings, own: Mapping[str, Any], world: World) -> None:
    """What a loop would else get wrong without a word. Raises ConfigurationError."""
    if "learning_rate_scaling" in own and "batch_size" not in own:
        raise ConfigurationError(
            "job_settings(learning_rate_scaling=...) is by the batch size, which is not named: name "
            "it too, with the script's own value (batch_size=...)"
        )
    size = found.micro_batch_size
    if size == AUTO and own["micro_batch_size"] != AUTO:
        raise ConfigurationError(
            f"spec.training.microBatchSize is auto, and this loop has micro_batch_size="
            f"{own['micro_batch_size']!r}, so it tries none: set a number, or have the loop find it by "
            "spottrain.techniques.find_batch_size(...) and say job_settings(micro_batch_size='auto')"
        )
    if isinstance(size, int) and "batch_size" in own and found.batch_size % (size * world.size):
        ranks = f"{world.size} ranks x " if world.distributed else ""
        raise ConfigurationError(
            f"globalBatchSize {found.batch_size} (batch_size, of all ranks) is no multiple of {ranks}"
            f"microBatchSize {size}: the loop would leave out the rest of each step"
        )


def _ready(found: Settings, named: Collection[str], trackers: Any, session: Session) -> dict[str, Any]:
    """What a lever takes in another form than a manifest has it."""
    made: dict[str, Callable[[], Any]] = {
        "early_stopping": lambda: agreeing(
            components.early_stopping(found, evaluates=True, more=True), session.world
        ),
        "activation_checkpointing": lambda: memory_fit.policy_of(found.activation_checkpointing),
        "trackers": lambda: components.trackers(trackers, found, session),
    }
    return {name: make() for name, make in made.items() if name in named}


Stopping = TypeVar("Stopping", bound=EarlyStopping | None)


def agreeing(stopping: Stopping, world: World) -> Stopping:
    """The same, by rank 0's figures: by its own a rank might leave alone, and the others wait for it."""
    if stopping is not None and world.distributed:
        stopping.agree = partial(process_group.number_of_first, world=world)
    return stopping


@contextmanager
def _own_words() -> Iterator[None]:
    """The sentences are those of `Trainer`'s arguments."""
    try:
        yield
    except ConfigurationError as error:
        words = str(error).replace("Trainer(", "job_settings(")
        raise ConfigurationError(words, reason=error.reason) from error


def advise(session: Session, applied: Collection[str]) -> None:
    """Before the first step: says what spec.training sets and this loop does not take. It is in the log of
    rank 0, in /progress and in the termination message.

    applied: settings that whoever calls sees to itself.
    """
    taken = {"profile", *applied, *session.asked, *(["seed"] if devices.seeded() else [])}
    if session.env.get(PROFILE) and session.run.training.warmupSteps == 0:
        taken.add("warmup_steps")  # `spottrain profile` has set it, for a run of a few steps
    paths = [path for name, path in set_in(session.run.training).items() if name not in taken]
    session.board.update(ignored_settings=",".join(paths))
    if paths and session.world.first:
        text = (
            "spec.training sets these, and this loop does not take them: name them in "
            "spottrain.job_settings(...) and use what it answers, or leave them out of spec.training"
        )
        log.event("advice", about="training", fields=",".join(paths), text=text)

"""The life of a run, as a state machine: where it is, and what happens when something ends it. Pure.

    STARTING -> CLAIMING -> READY -> [ BOUNDARY -> WAITING -> STEP ] -> STORING -> STORED -> DONE -> OVER
                                        ENDED: stopped, or given up

The training thread moves the phase (`Session.enter`). `on_stop` says what is done in each phase. A training
that failed may begin again, from STARTING. With `finish(with_script=False)` STORED is left out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Final

POLL_SHARE: Final = 0.1
"""Share of a notice in which a loop that can be saved from outside may come to its boundary by itself."""
REST_SHARE: Final = 0.5
"""Share of a notice that the script gets for what it does after its training, or for a step that is near."""


class Phase(Enum):
    """Where a run is."""

    STARTING = auto()
    """No training has begun: imports, data, another rank's claim."""
    CLAIMING = auto()
    """A request to claim HEAD may be under way."""
    READY = auto()
    """HEAD is claimed, and no step of this attempt has changed anything."""
    BOUNDARY = auto()
    """Between two steps. The state is that after the last one."""
    WAITING = auto()
    """Between two steps, and the next batch has not come. The training thread changes nothing meanwhile."""
    BETWEEN = auto()
    """Between two steps of a custom loop, which may do anything meanwhile, such as a validation."""
    STEP = auto()
    """In a step, or in a loop whose state only its own thread can save."""
    STORING = auto()
    """The last checkpoint and the final weights are being stored."""
    STORED = auto()
    """They are stored. The job is done when the script ends."""
    DONE = auto()
    """HEAD is released as done: nothing can be lost any more."""
    ENDED = auto()
    """The training was stopped or given up: nothing more can be counted or saved."""
    OVER = auto()
    """The script is over; only the interpreter's shutdown is left."""

    @property
    def begun(self) -> bool:
        """Whether a training has claimed HEAD, or has failed to."""
        return self not in (Phase.STARTING, Phase.CLAIMING)

    @property
    def trains(self) -> bool:
        """Whether steps can still be counted and saved."""
        return self in (Phase.READY, Phase.BOUNDARY, Phase.WAITING, Phase.BETWEEN, Phase.STEP)


class Cause(Enum):
    """What may end a run."""

    NOTICE = auto()
    """A stop was requested. Another thread asks, again and again; the training thread polls by itself."""
    TIME_UP = auto()
    """The notice is nearly over. Another thread asks."""
    SCRIPT_ENDED = auto()
    """The script has ended by itself, without an error."""
    SCRIPT_RAISED = auto()
    """The script has raised an exception."""


class Action(Enum):
    """What is done about it. Each one but GO_ON, FINISH and COMPLETE leads to a termination message."""

    GO_ON = auto()
    """Nothing now."""
    END_UNBEGUN = auto()
    """End; no work of this run can be lost."""
    END_UNTRAINED = auto()
    """End: the script has trained nothing."""
    SAVE = auto()
    """Save the last step, release HEAD and end."""
    GIVE_UP = auto()
    """Wait for an upload in progress, release HEAD and end; what is not saved, if anything, is lost."""
    END_AS_IT_IS = auto()
    """End at once; what is not saved is lost."""
    END_UNFINISHED = auto()
    """Save, release HEAD and end as failed: the script lacks its `finish`."""
    FINISH = auto()
    """Finish a loop that has done all its steps."""
    COMPLETE = auto()
    """Mark the job as done, whose result is stored."""
    END_STORED = auto()
    """End between the training and the end of the script."""
    END_DONE = auto()
    """End as done."""
    FAIL = auto()
    """End as failed, by what the script has raised."""
    LEAVE = auto()
    """End with the exit code that is known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What `on_stop` decides by.

    Attributes:
        cause: what may end the run.
        stopping: whether a stop was requested.
        spent: share of the notice that has passed.
        step_near: whether a custom loop is likely to come to the end of a step soon.
        alone: whether there is a single rank. Several can save only together.
        loop_over: whether a custom loop has done all its steps.
        told: whether the termination message is written.
        unsaved: whether the script now does something that nobody saves, such as another training.
    """

    cause: Cause
    stopping: bool = True
    spent: float = 0.0
    step_near: bool = False
    alone: bool = True
    loop_over: bool = False
    told: bool = False
    unsaved: bool = False


def on_stop(phase: Phase, facts: Facts) -> Action:
    """Returns what is done in `phase`."""
    if phase is Phase.OVER or (facts.told and facts.cause is not Cause.NOTICE):
        return Action.LEAVE
    if facts.cause is Cause.SCRIPT_RAISED and not facts.stopping:
        return Action.FAIL
    if phase is Phase.DONE:
        return Action.END_DONE
    if facts.cause is Cause.SCRIPT_ENDED:
        return _on_end_of_script(phase, facts)
    if not phase.begun:
        polls = phase is Phase.CLAIMING and facts.cause is Cause.NOTICE
        return Action.GO_ON if polls else Action.END_UNBEGUN
    if facts.told:
        return Action.GO_ON
    if phase is Phase.STORED:
        soon = facts.cause is Cause.NOTICE and facts.spent < REST_SHARE
        return Action.GO_ON if soon else Action.END_STORED
    if facts.cause is Cause.TIME_UP:
        return Action.END_AS_IT_IS
    if facts.cause is Cause.SCRIPT_RAISED:
        whole = phase in (Phase.BOUNDARY, Phase.WAITING, Phase.BETWEEN)
        return Action.SAVE if whole and facts.alone else Action.GIVE_UP
    return _on_notice(phase, facts)


def _on_end_of_script(phase: Phase, facts: Facts) -> Action:
    if not phase.begun:
        return Action.END_UNTRAINED
    if phase is Phase.STORED:
        return Action.COMPLETE
    if facts.loop_over and phase is not Phase.ENDED:
        return Action.FINISH
    if facts.stopping:  # the script ended itself because of it
        return on_stop(phase, replace(facts, cause=Cause.SCRIPT_RAISED))
    return Action.END_UNFINISHED


def _on_notice(phase: Phase, facts: Facts) -> Action:
    """After the claim, and before anything is stored."""
    if phase is Phase.READY:
        return Action.GIVE_UP
    if phase is Phase.ENDED and facts.unsaved:
        return Action.END_UNBEGUN
    soon = facts.spent < POLL_SHARE
    if phase is Phase.WAITING:
        return Action.GO_ON if soon else Action.SAVE
    if phase is Phase.BETWEEN:
        near = facts.step_near and facts.spent < REST_SHARE
        return Action.GO_ON if soon or near else Action.SAVE
    return Action.GO_ON

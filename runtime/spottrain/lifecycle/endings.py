"""The ways in which a run ends, in the words of its termination message."""

from __future__ import annotations

import re
import sys
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from spottrain.contract import Outcome, Reason, TerminationMessage
from spottrain.core.progress import ProgressFacts
from spottrain.errors import RunError

LOOPS: Final = ("training", "data")
"""Modules of which a script that uses spottrain has imported one before its first step."""


@dataclass(frozen=True, slots=True)
class Ending:
    outcome: Outcome
    text: str
    reason: str = ""
    durable_seconds: float | None = None
    """Seconds from the stop request to the end of the last save."""

    @classmethod
    def of(cls, error: RunError, facts: ProgressFacts) -> Ending:
        """A lost peer, or memory that was short, costs only the steps that no checkpoint has."""
        kept = error.outcome is Outcome.INTERRUPTED_LOST and not facts.lost_steps
        return cls(Outcome.INTERRUPTED if kept else error.outcome, str(error), error.reason)

    def then(self, more: str) -> Ending:
        return replace(self, text=self.text + more)


# --- done -----------------------------------------------------------------------------------------------
def done(facts: ProgressFacts) -> Ending:
    where = f"are at {facts.output_uri}" if facts.output_uri else "were not stored: no checkpoint URI"
    early = f" and ended early: {facts.ended_early}" if facts.ended_early else ""
    short = f" of {facts.total_steps}" if facts.step < facts.total_steps and not early else ""
    text = f"Trained {facts.step}{short} steps{early}; the weights {where}."
    return Ending(Outcome.DONE, text, Reason.EARLY_STOPPED if early else "")


def done_before(uri: str, trained: int, *, total: int, wanted: int, in_job: bool = True) -> Ending:
    """The job was done before this attempt.

    total: the job's configured last step, which early stopping may have cut short; 0: none configured.
    wanted: the last step that this attempt asks for; 0: none.
    in_job: whether it runs as a TrainingJob.
    """
    what = "job" if in_job else "training"
    text = f"The {what} is done already: {trained} steps were trained, and its weights are at {uri}."
    if wanted <= max(total, trained):
        again = "use another checkpoint URI" if in_job else "use another --checkpoint"
        return Ending(Outcome.DONE, f"{text} To train again, {again}.")
    way = (
        "create a new job on this URI with checkpoint.onExisting: Resume."
        if in_job
        else "copy it with spottrain checkpoints copy URI --to NEW, then start with --checkpoint NEW "
        "--on-existing resume."
    )
    more = f"{wanted} steps are requested now, but a {what} that is done does not go on by itself."
    return Ending(Outcome.DONE, f"{text} {more} To continue from its last checkpoint {way}")


# --- interrupted ----------------------------------------------------------------------------------------
NO_URI: Final = "there is no checkpoint URI"
NO_COPY: Final = "their state could not be copied"
GIVEN_UP: Final = "the training had ended without saving them"
IN_STEP: Final = "the next step had begun, which cannot be undone"
SAVING: Final = "the save did not finish in time"
NO_STEP: Final = (
    "no save began, because the training thread came to the end of no step in the notice, and the step "
    "before could not be saved from outside"
)


def interrupted(facts: ProgressFacts, why_lost: str, durable_seconds: float | None = None) -> Ending:
    """A stop of a training. `why_lost`: why the steps since the last commit, if there are any, are lost."""
    where = f"Interrupted at step {facts.step}"
    if facts.lost_steps:
        lost = f"{facts.lost_steps} step(s) since the last commit are lost"
        return Ending(Outcome.INTERRUPTED_LOST, f"{where}; {lost}: {why_lost}.")
    saved = facts.step and facts.step == facts.durable_step
    rest = ", which is saved; the same command resumes from there." if saved else "; nothing was lost."
    return Ending(Outcome.INTERRUPTED, where + rest, durable_seconds=durable_seconds)


def interrupted_before_training(script: str) -> Ending:
    """`script`: the one that `spottrain run` has begun to execute, if any."""
    if not script or _uses_spottrain(script):
        return Ending(Outcome.INTERRUPTED, "Interrupted before the training began; nothing was lost.")
    return Ending(
        Outcome.INTERRUPTED_LOST,
        f"Interrupted. {script} does not use spottrain, which has therefore saved nothing of it. Whether it "
        "goes on from files of its own is up to the script: to keep these in a store, and have them back at "
        "the next start, use spottrain sync (docs/sync.md); or train with spottrain.Trainer, or add "
        "spottrain.Run to the loop (docs/own-loop.md).",
    )


def interrupted_after_training(step: int, lost: str) -> Ending:
    """The result of the training is stored, and the script had not ended. `lost`: what is lost besides."""
    return Ending(
        Outcome.INTERRUPTED_LOST if lost else Outcome.INTERRUPTED,
        f"Interrupted between the end of the training, whose {step} steps are saved, and the end of the "
        "script. The next start runs the lines after the training again, so what they do outside, such as an "
        f"upload, may happen twice. {lost}".strip(),
    )


def _uses_spottrain(script: str) -> bool:
    """Whether the script or a module of its own uses spottrain for training."""
    try:
        if re.search(r"\bspottrain\b", Path(script).read_text(errors="replace")):
            return True
    except OSError:
        return True  # unknown: then no claim is made about it
    if any(f"spottrain.{name}" in sys.modules for name in LOOPS):
        return True
    package = sys.modules["spottrain"]
    ours = ("spottrain.", "runpy")
    others = [module for name, module in list(sys.modules.items()) if not name.startswith(ours)]
    return any(getattr(module, "__dict__", {}).get("spottrain") is package for module in others)


# --- failed ---------------------------------------------------------------------------------------------
def raised(error: BaseException, script: str, gpu_fault: str = "") -> Ending:
    """The script raised `error`. `gpu_fault`: the evidence that a failed GPU caused it, if any."""
    text = what_was_raised(error, script)
    if gpu_fault:
        text = f"a GPU of this node has failed: {gpu_fault}; {text}"
    return Ending(Outcome.FAILED, text, Reason.NODE_FAULT if gpu_fault else Reason.SCRIPT_FAILED)


def what_was_raised(error: BaseException, script: str) -> str:
    """Returns the error with file:line of its innermost frame in the script, else of the innermost of all."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == script] or frames
    place = f"{own[-1].filename}:{own[-1].lineno}" if own else script
    if isinstance(error, SyntaxError):
        place = f"{error.filename}:{error.lineno}"
    return f"{traceback.format_exception_only(error)[-1].strip()} ({place})"


def what_failed(error: Exception, script: str) -> str:
    """Returns the text of an error: of ours alone, of others with their place."""
    return str(error) if isinstance(error, RunError) else what_was_raised(error, script)


def what_is_saved(message: TerminationMessage) -> str:
    """Returns what follows an error that was shown already: where the training stands; "" before it."""
    if not message.step:
        return ""
    if not message.durableStep:
        return f"Ended at step {message.step}; nothing is saved."
    saved = (
        "which is saved"
        if message.durableStep == message.step
        else f"and step {message.durableStep} is saved"
    )
    return f"Ended at step {message.step}, {saved}: the next start resumes there."


def store_unreachable(facts: ProgressFacts, seconds: float) -> Ending:
    lost = "nothing was lost"
    if facts.lost_steps:
        lost = f"{facts.lost_steps} step(s) since the last commit are lost"
    text = f"The checkpoint store did not answer for {seconds:.0f} s: {facts.waiting_for}; {lost}."
    return Ending(Outcome.STORE_UNREACHABLE, text, Reason.STORE_UNAVAILABLE)


def unfinished(step: int, attached: str) -> Ending:
    """`attached`: what `spottrain run` has attached to, if anything."""
    if attached:
        return Ending(
            Outcome.FAILED,
            f"{attached} failed after {step} step(s), and the script caught that and ended by itself. So the "
            "job is not done: let the exception end the script, or call it again on the same Trainer.",
            Reason.SCRIPT_FAILED,
        )
    return Ending(
        Outcome.FAILED,
        f"The script ended after {step} step(s) without saying that the training is "
        "finished, so no final weights were stored: call finish() after the last step.",
        Reason.SCRIPT_FAILED,
    )


PROFILED: Final = Ending(Outcome.DONE, "The script ended by itself; the profile is made.")
UNTRAINED: Final = Ending(
    Outcome.UNTRAINED,
    "The script ended by itself without beginning a training with the spottrain runtime (a Trainer, "
    "a Run or a callback), so nothing was saved.",
    Reason.NOT_TRAINED,
)

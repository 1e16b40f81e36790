"""Stops, resumes, deletes and interrupts a job. What each says is decided by pure functions."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Final

from spottrain.contract import INTERRUPT_ANNOTATION, ExitCode
from spottrain.core.log_format import counted, duration

from spottrain_cli import cluster, follow, kubectl
from spottrain_cli.errors import CommandError, Unreachable
from spottrain_cli.jobs import SUSPENDED, SYNC, Attempt, Interrupt, Job, plain
from spottrain_cli.kubectl import RESOURCE, Access

HEARD_SECONDS: Final = 60.0
"""How long an operator may take to see a request."""
POLL_SECONDS: Final = 1.0
Say = Callable[[str], None]


# --- stop and resume ------------------------------------------------------------------------------------
def stop(access: Access, ref: str) -> tuple[str, Job]:
    """Asks for a checkpoint and the end of all pods. Returns what happens now. Raises CommandError."""
    job = cluster.find(access, ref)
    _require_alive(job, "stopped")
    if job.suspend:
        return f"{job.ref} is stopped already: `spottrain resume {job.ref}` continues it", job
    after = cluster.patch(access, ref, {"spec": {"suspend": True}})
    how = "its pods save a checkpoint and end" if job.current is not None else "no pod of it is created"
    return f"{job.ref} stops: {how}. `spottrain resume {job.ref}` continues it", after


def resume(access: Access, ref: str) -> tuple[str, Job]:
    """Lets a stopped job go on. Returns from where. Raises CommandError."""
    job = cluster.find(access, ref)
    _require_alive(job, "resumed")
    if not job.suspend:
        held = job.condition(SUSPENDED)
        if held is not None and held.status == "True":
            raise CommandError(f"{job.ref} was not stopped by a person: {held.message}")
        return f"{job.ref} is not stopped: it is {job.phase or 'new'}", job
    after = cluster.patch(access, ref, {"spec": {"suspend": False}})
    saved = job.knownDurableStep
    begin = f"goes on from step {saved:,}" if saved is not None else "starts: it has no checkpoint yet"
    return f"{job.ref} {begin}. `spottrain watch {job.ref}` shows it", after


def _require_alive(job: Job, what: str) -> None:
    if job.deleted is not None:
        raise CommandError(f"{job.ref} cannot be {what}: it is being deleted")
    if job.ended:
        raise CommandError(f"{job.ref} cannot be {what}: it has ended, {job.phase}")


# --- delete ---------------------------------------------------------------------------------------------
def deletion(job: Job) -> str:
    """Says what a deletion takes with it, and what stays."""
    ends = "" if job.ended or job.current is None else "Its pods save and end. "
    if not job.checkpoint.uri:
        return f"{ends}It has no checkpoints."
    if job.deletes_checkpoints:
        return f"{ends}Its checkpoints at {job.checkpoint.uri} are deleted too (deletionPolicy: Delete)."
    return f"{ends}Its checkpoints stay at {job.checkpoint.uri}."


def delete(access: Access, job: Job) -> None:
    """Asks for the deletion; the operator lets the pods save first. Raises CommandError."""
    access, name = access.named(job.ref)
    kubectl.run(access, "delete", "--wait=false", "--", RESOURCE, name, shown=f"kubectl delete {job.ref}")


# --- a fire drill ---------------------------------------------------------------------------------------
def interrupt(access: Access, ref: str, say: Say) -> dict[str, Any]:
    """Interrupts the attempt that trains, as the loss of its nodes would, and follows it to its next step.

    Returns the figures. `say` gets a sentence for each thing that has happened.

    Raises:
        CommandError: The job does not train, or it lost steps.
        Unreachable: The cluster does not respond, or no operator has seen the request.
    """
    request = datetime.now(UTC).isoformat()
    cluster.patch(access, ref, {"metadata": {"annotations": {INTERRUPT_ANNOTATION: request}}})
    number = _answer(access, ref, request)
    say(f"attempt {number} was asked to save and end")
    ended = _wait(access, ref, lambda job: _ended(job, number))
    past = ended.record(number)
    assert past is not None
    say(saved(ended, past))
    if ended.ended or ended.suspend:
        return figures(ended, past, None)
    going = _wait(access, ref, lambda job: job.ended or job.phase == SUSPENDED or _trains(job, number))
    after = next((each for each in going.attempts if each.number > number and _trained(each)), None)
    say(goes_on(going, past, after))
    return figures(going, past, after)


def _answer(access: Access, ref: str, request: str) -> int:
    """Returns the attempt that the operator interrupted for this request."""
    give_up = time.monotonic() + HEARD_SECONDS
    while True:
        found = cluster.find(access, ref)
        if found.interrupt.request == request:
            return answered(found.interrupt)
        if time.monotonic() > give_up:
            raise Unreachable(
                f"the operator has not seen the request within {HEARD_SECONDS:.0f} s: does it run, and is it "
                "as new as this command? `spottrain doctor` looks"
            )
        time.sleep(POLL_SECONDS)


def answered(given: Interrupt) -> int:
    """Returns the attempt that was interrupted. Raises CommandError where none was."""
    if given.attempt is None:
        raise CommandError(given.message or "no attempt was interrupted")
    return given.attempt


def _wait(access: Access, ref: str, done: Callable[[Job], bool]) -> Job:
    return next(job for job in follow.states(access, ref, every=POLL_SECONDS) if done(job))


def _ended(job: Job, number: int) -> bool:
    record = job.record(number)
    return record is not None and record.endTime is not None and bool(record.cause)


def _trained(attempt: Attempt) -> bool:
    return attempt.firstStepTime is not None or (attempt.endTime is not None and attempt.cause == "Done")


def _trains(job: Job, number: int) -> bool:
    return any(each.number > number and _trained(each) for each in job.attempts)


def lost(attempt: Attempt) -> int | None:
    """Returns the steps that an interrupted attempt has lost; None where nothing was reported."""
    if attempt.exitCode == ExitCode.INTERRUPTED:
        return 0
    return attempt.lost_steps


def saved(job: Job, attempt: Attempt) -> str:
    """Says whether and how fast an interrupted attempt saved."""
    words, steps = f"attempt {attempt.number}", lost(attempt)
    took = attempt.signalToDurableSeconds
    if job.checkpoint.mode != SYNC and steps:
        return f"{words} lost {counted(steps, 'step')}: {attempt.evidence}"
    if took is not None:
        what = "its folder" if job.checkpoint.mode == SYNC else f"step {attempt.durableStep or 0:,}"
        return f"{words} saved {what} in {duration(float(took))}: nothing is lost"
    if steps == 0:
        return f"{words} had step {attempt.durableStep or attempt.startStep or 0:,} saved: nothing is lost"
    return f"{words} ended, and does not say whether it saved: {attempt.evidence}"


def goes_on(job: Job, past: Attempt, after: Attempt | None) -> str:
    """Says where the job went on, and how long that took."""
    if after is None:
        return f"{job.ref} is {job.phase}"
    place = " on the same node" if after.node == past.node else f" on node {after.node}" if after.node else ""
    later = _pause(past, after)
    when = f", {duration(later)} after the end of attempt {past.number}" if later is not None else ""
    return f"attempt {after.number} goes on from step {after.startStep or 0:,}{place}{when}"


def _pause(past: Attempt, after: Attempt) -> float | None:
    begun = after.firstStepTime
    return None if begun is None or past.endTime is None else max(0.0, (begun - past.endTime).total_seconds())


def figures(job: Job, past: Attempt, after: Attempt | None) -> dict[str, Any]:
    """Returns what the drill measured; null is unknown."""
    saved_in: Decimal | None = past.signalToDurableSeconds
    return {
        "job": job.ref,
        "interruptedAttempt": past.number,
        "lostSteps": lost(past),
        "saveSeconds": plain(saved_in),
        "nextAttempt": after.number if after else None,
        "startStep": after.startStep if after else None,
        "node": after.node if after else None,
        "pauseSeconds": _pause(past, after) if after else None,
        "phase": job.phase,
    }

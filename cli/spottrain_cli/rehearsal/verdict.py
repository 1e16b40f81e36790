"""Whether a job has survived its rehearsal, what it lost, and how long it took to save. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from spottrain.core.log_format import counted

from spottrain_cli.rehearsal.record import Attempt, Reclaim, Record

Json = dict[str, Any]
STARTED_OVER_SECONDS: Final = 4.0
"""Of training before reclaims, from which on it is seen that the last attempt did it all again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """What one reclaim has cost."""

    reclaim: Reclaim
    cause: str = ""
    last_step: int | None = None
    lost_steps: int | None = None
    """None: the steps are not seen, or no later attempt has trained."""
    saved_seconds: float | None = None
    """From the notice until the last step was durable; None: it was not saved, or nobody has said so."""
    resumed_seconds: float | None = None
    """From there (or from the notice) to the next attempt's first step."""

    @property
    def saved(self) -> str:
        return "" if self.saved_seconds is None else f"{self.saved_seconds:.1f} s"

    @property
    def resumed(self) -> str:
        return "" if self.resumed_seconds is None else f"{self.resumed_seconds:.1f} s"

    def facts(self) -> Json:
        return {
            "attempt": self.reclaim.attempt,
            "node": self.reclaim.node,
            "step": self.reclaim.step,
            "state": self.reclaim.state,
            "cause": self.cause,
            "lastStep": self.last_step,
            "stepsLost": self.lost_steps,
            "noticeToDurableSeconds": _rounded(self.saved_seconds),
            "durableToFirstStepSeconds": _rounded(self.resumed_seconds),
        }


@dataclass(frozen=True, kw_only=True)
class Verdict:
    survived: bool
    sentence: str
    losses: tuple[Loss, ...] = ()
    total_steps: int | None = None
    equal: bool | None = None
    """Whether the results are those of an undisturbed run; None: that is not known."""
    attempts: int = 0
    undisturbed_seconds: float = 0.0
    reclaimed_seconds: float = 0.0

    def facts(self) -> Json:
        known = [loss.lost_steps for loss in self.losses]
        return {
            "survived": self.survived,
            "verdict": self.sentence,
            "resultsEqual": self.equal,
            "steps": self.total_steps,
            "stepsLost": None if None in known else sum(each or 0 for each in known),
            "attempts": self.attempts,
            "reclaims": [loss.facts() for loss in self.losses],
            "undisturbedSeconds": _rounded(self.undisturbed_seconds),
            "reclaimedSeconds": _rounded(self.reclaimed_seconds),
        }


def differing(one: Mapping[str, str], other: Mapping[str, str]) -> frozenset[str]:
    """Names whose digests are not the same, or that only one has."""
    return frozenset(name for name in {*one, *other} if one.get(name) != other.get(name))


def of_undisturbed(record: Record, limit: float) -> Verdict | None:
    """Why there is nothing to reclaim; None where the job trains to its end when nobody disturbs it."""
    if record.timed_out:
        why = record.condition("Running").get("message") or record.condition("Scheduled").get("message") or ""
        sentence = f"the job did not end within {limit:.0f} s without any reclaim{': ' if why else ''}{why}"
    elif record.phase == "Failed":
        sentence = f"the job fails on this machine without any reclaim: {failure(record)}"
    else:
        return None
    return Verdict(survived=False, sentence=sentence, attempts=len(record.attempts))


def failure(record: Record) -> str:
    """Why the job has failed, as the operator tells it."""
    failed = record.condition("Failed")
    return str(failed.get("message") or failed.get("reason") or "for an unknown reason")


def of_reclaimed(
    undisturbed: Record,
    reclaimed: Record,
    wanted: int,
    limit: float,
    results: tuple[Mapping[str, str], Mapping[str, str]],
    noisy: frozenset[str],
) -> Verdict:
    """`results`: of the undisturbed job and of the reclaimed one; `noisy`: names of those that differ between
    two undisturbed jobs as well.
    """
    losses = tuple(loss_of(reclaimed, reclaim) for reclaim in reclaimed.reclaims)
    differs = differing(*results)
    equal = not differs - noisy if set(results[0]) - noisy else None
    no = (
        _not_ended(reclaimed, limit)
        or _started_over(undisturbed, reclaimed)
        or _charged(reclaimed)
        or _too_few(reclaimed, wanted)
        or ("" if equal is not False else _other_results(differs - noisy))
    )
    return Verdict(
        survived=not no,
        sentence=no or _survived(losses, equal, results[0], noisy),
        losses=losses,
        total_steps=next((a.total or a.step for a in reversed(reclaimed.in_order()) if a.step), None),
        equal=equal,
        attempts=len(reclaimed.attempts),
        undisturbed_seconds=undisturbed.ended_at - undisturbed.began_at,
        reclaimed_seconds=reclaimed.ended_at - reclaimed.began_at,
    )


def loss_of(record: Record, reclaim: Reclaim) -> Loss:
    """What the trainer's last message, the operator's record and the next attempt say of one reclaim."""
    attempt, told = record.attempts[reclaim.attempt], record.of_status(reclaim.attempt)
    later = [each for each in record.in_order() if each.number > attempt.number]
    after = next((each for each in later if each.start_step is not None), None)
    last = _last_step(attempt, told) if reclaim.step is not None else None
    message, durable = attempt.message, None
    if message is not None and message.signalledAt is not None and message.durableSeconds is not None:
        durable = message.signalledAt + message.durableSeconds
    first = after.first_step_at if after is not None else None
    return Loss(
        reclaim=reclaim,
        cause=str(told.get("cause", "")),
        last_step=last,
        lost_steps=max(0, last - (after.start_step or 0)) if last is not None and after is not None else None,
        saved_seconds=None if durable is None else durable - reclaim.published,
        resumed_seconds=None if first is None else max(0.0, first - (durable or reclaim.published)),
    )


def _last_step(attempt: Attempt, told: Json) -> int | None:
    said = attempt.message.step if attempt.message is not None else None
    known = [each for each in (attempt.step, said, told.get("lastStep")) if each is not None]
    return max(known, default=None)


# --- what speaks against it -------------------------------------------------------------------------
def _not_ended(record: Record, limit: float) -> str:
    if record.timed_out:
        return f"the job did not survive: it had not ended {limit:.0f} s after its start"
    if record.phase == "Failed":
        return f"the job did not survive: {failure(record)}"
    return ""


def _started_over(undisturbed: Record, reclaimed: Record) -> str:
    attempts = [each for each in reclaimed.in_order() if each.running_at is not None]
    for before, after in pairwise(attempts):
        if after.start_step == 0 and before.steps_of_its_own > 0:
            return (
                f"nothing was saved: attempt {after.number} began at step 0 again after attempt "
                f"{before.number} had done {before.steps_of_its_own} steps"
            )
    if len(attempts) > 1 and all(each.start_step is None for each in attempts):
        last, whole = attempts[-1].seconds(reclaimed.ended_at), undisturbed.seconds(undisturbed.ended_at)
        earlier = reclaimed.seconds(reclaimed.ended_at) - last
        if earlier >= STARTED_OVER_SECONDS and last > whole - earlier / 2:
            return (
                f"nothing was saved: the last attempt trained for {last:.0f} s, as the undisturbed job did "
                f"({whole:.0f} s), so it has done again what took {earlier:.0f} s before"
            )
    return ""


def _charged(record: Record) -> str:
    for told in record.status.get("attempts") or []:
        if told.get("charged"):
            code = f" with exit code {told['exitCode']}" if "exitCode" in told else ""
            return (
                f"attempt {told['number']} failed{code} ({told.get('evidence') or told.get('cause')}), which "
                "the undisturbed job did not"
            )
    return ""


def _too_few(record: Record, wanted: int) -> str:
    hit = [each for each in record.reclaims if record.of_status(each.attempt).get("cause") != "Done"]
    if len(hit) == wanted:
        return ""
    return (
        f"only {len(hit)} of {wanted} reclaims interrupted the training before its end; give more "
        "--max-steps, or fewer --reclaims"
    )


def _other_results(names: frozenset[str]) -> str:
    shown = ", ".join(sorted(names)[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    verb = "differs" if len(names) == 1 and not shown.endswith("weights") else "differ"
    return (
        f"the job goes on after a reclaim, but to another result: {shown} {verb} from those of the "
        "undisturbed job, and two undisturbed jobs agree; some state is not restored (see docs/own-loop.md)"
    )


def _survived(
    losses: tuple[Loss, ...], equal: bool | None, results: Mapping[str, str], noisy: frozenset[str]
) -> str:
    known = [loss.lost_steps for loss in losses if loss.lost_steps is not None]
    lost = f" with {counted(sum(known), 'step')} lost" if known else ""
    if equal:
        said = "the results are equal to those of the undisturbed job"
        if aside := sorted(noisy & set(results)):
            said += f" (without {', '.join(aside[:3])}, which differ between undisturbed jobs too)"
    elif noisy:
        said = "the results cannot be compared, because two undisturbed jobs differ as well"
    else:
        said = "the results were not compared, because none of them are in the store"
    return f"survived {counted(len(losses), 'reclaim')}{lost}; {said}"


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 1)

"""From what was seen to the demo's table and its JSON line. Pure; called by the story at its end."""

from __future__ import annotations

import json
from typing import Any

from demo.record import Attempt, JobRecord
from demo.timeline import table, unix

Raw = dict[str, Any]


def attempts_table(status: Raw) -> str:
    """The attempts as the operator's status tells them."""
    rows = [
        [
            str(a["number"]),
            a.get("node", ""),
            a.get("zone", ""),
            a.get("cause", ""),
            str(a.get("exitCode", "")),
            str(a.get("startStep", "")),
            str(a.get("lastStep", "")),
            str(a.get("durableStep", "")),
            "yes" if a.get("charged") else "no",
        ]
        for a in status.get("attempts", [])
    ]
    header = ["attempt", "node", "zone", "cause", "exit", "from", "to", "durable", "charged"]
    return table(header, rows)


def repeated_and_skipped(attempts: list[Attempt]) -> tuple[int, int]:
    """Optimizer steps that more than one attempt did, and steps up to the last that none did."""
    done = [step for attempt in attempts for step in attempt.losses]
    return len(done) - len(set(done)), max(done, default=0) - len(set(done))


def losses_equal(interrupted: JobRecord, baseline: JobRecord) -> bool:
    """Whether each step's loss is equal to the last digit printed."""
    ours = {s: v for a in interrupted.attempts.values() for s, v in a.losses.items()}
    theirs = {s: v for a in baseline.attempts.values() for s, v in a.losses.items()}
    return bool(ours) and ours == theirs


def digests_equal(interrupted: JobRecord, baseline: JobRecord) -> bool:
    """Whether both jobs ended with the same weights, by the SHA-256 that each trainer took of its own."""
    ours, theirs = _digest(interrupted), _digest(baseline)
    return ours is not None and ours == theirs


def _digest(record: JobRecord) -> str | None:
    last = record.latest()
    done = last.event("done") if last else None
    return done["digest"] if done else None


def figures(job: Raw, record: JobRecord, published: float | None) -> Raw:
    """The measured part of the JSON line; None where the run did not show it.

    The trainer learns of its end from the deadline file first, and may have saved and ended before SIGTERM
    comes; then notice_to_sigterm_s is the time to the pod's DELETE, at which the kubelet would have sent it.
    """
    first, last = record.attempts[min(record.attempts)], record.attempts[max(record.attempts)]
    status, told, resumed = job["status"], _message(first), _message(last)
    repeated, skipped = repeated_and_skipped(list(record.attempts.values()))
    durable = _sum(told.get("signalledAt"), told.get("durableSeconds"))
    return {
        "outcome": status.get("phase"),
        "attempts": status.get("attempt"),
        "interruptions": status.get("interruptions", 0),
        "failures": status.get("failures", 0),
        "notice_to_trainer_s": _difference(told.get("signalledAt"), published),
        "notice_to_sigterm_s": _difference(
            _event_time(first, "sigterm") or first.delete_at or None, published
        ),
        "sigterm_to_durable_s": told.get("durableSeconds"),
        "delete_to_running_s": _difference(last.running_at or None, first.delete_at or None),
        "notice_to_durable_s": _difference(durable, published),
        "durable_to_first_step_s": _difference(_event_time(last, "first-step"), durable),
        "resume_to_first_step_s": resumed.get("firstStepSeconds"),
        "cost": _cost(status.get("cost") or {}),
        "repeated_steps": repeated,
        "skipped_steps": skipped,
    }


def meaning(found: Raw, *, equal: bool) -> str:
    """What the run has shown, in sentences."""
    lost, skipped = found["repeated_steps"], found["skipped_steps"]
    rows = [
        "What it meant",
        f"  {lost} steps were done twice, {skipped} left out, {found['failures']} failures charged.",
        f"  {_words(found['notice_to_durable_s'])} from the notice to a durable checkpoint, then "
        f"{_words(found['durable_to_first_step_s'])} to the first step on the other node.",
    ]
    if cost := found["cost"]:
        rows.append(f"  {cost}")
    same = "are the same, bit for bit" if equal else "DIFFER: this is a defect"
    return "\n".join([*rows, f"  The losses of each step and the final weights of both jobs {same}."])


def _words(seconds: float | None) -> str:
    return "an unknown time" if seconds is None else f"{seconds:.1f} s"


def _message(attempt: Attempt) -> Raw:
    try:
        found = json.loads(attempt.message)
        return found if isinstance(found, dict) else {}
    except ValueError:
        return {}


def _event_time(attempt: Attempt, name: str) -> float | None:
    event = attempt.event(name)
    return unix(event["at"]) if event else None


def _sum(time: float | None, seconds: float | None) -> float | None:
    return None if time is None or seconds is None else time + seconds


def _cost(cost: Raw) -> str:
    """What the operator says that the job has cost."""
    if not cost.get("spent"):
        return ""
    dollars = f"${float(cost['spent']):.2f} spent, by a made-up price of a cent a second"
    return f"{dollars}; {cost['saving']} less than on demand." if cost.get("saving") else f"{dollars}."


def _difference(later: float | None, earlier: float | None) -> float | None:
    return None if later is None or earlier is None else round(later - earlier, 3)

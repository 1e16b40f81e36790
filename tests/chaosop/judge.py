"""Whether the operator did right by one job: what was seen and logged against what was really done. Pure.

Called by stage.py with what a scene has left behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.chaosop.api import Json
from tests.chaosop.audit import Entry, made_after, made_twice, overlaps
from tests.chaosop.play import Seen, summary
from tests.chaosop.scene import Policy
from tests.chaosop.truth import CHARGES, Charge, Deed, truth


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Sentences, none where all is well."""

    duplicates: tuple[str, ...] = ()
    stuck: tuple[str, ...] = ()
    miscounted: tuple[str, ...] = ()
    resurrected: tuple[str, ...] = ()

    @property
    def problems(self) -> tuple[str, ...]:
        return (*self.duplicates, *self.stuck, *self.miscounted, *self.resurrected)


def judge(seen: Seen, entries: Sequence[Entry], policy: Policy) -> Verdict:
    return Verdict(
        duplicates=tuple(_duplicates(entries)),
        stuck=seen.stuck,
        miscounted=tuple(_miscounted(seen, policy)),
        resurrected=tuple(_resurrected(seen, entries)),
    )


def _duplicates(entries: Sequence[Entry]) -> list[str]:
    twice = [f"pod {name} was made more than once" for name in made_twice(entries)]
    pairs = [f"attempt {b} claimed before {a} had let go" for a, b in overlaps(entries)]
    return twice + pairs


def _miscounted(seen: Seen, policy: Policy) -> list[str]:
    true, status = truth(_charged(seen), policy), seen.status
    found = []
    if (moves := moved(seen.status)) and not policy.mixes:
        found.append(f"attempts {sorted(moves)} have moved, and the job has no other capacity")
    if status.get("failures", 0) != true.failures:
        found.append(f"{status.get('failures', 0)} failures, and there were {true.failures}")
    if status.get("interruptions", 0) not in true.interruptions:
        real = " or ".join(map(str, sorted(true.interruptions)))
        found.append(f"{status.get('interruptions', 0)} interruptions, and there were {real}")
    if seen.over_at and status.get("phase") != true.phase:
        found.append(f"phase {status.get('phase')}, and it is to be {true.phase or 'not over'}")
    records = {record["number"]: record for record in status.get("attempts") or ()}
    for number, charged in true.charged.items():
        said = records.get(number)
        if said is not None and seen.over_at and bool(said.get("charged")) != charged:
            found.append(
                f"attempt {number} ({said.get('cause')}) is {'' if said.get('charged') else 'not '}charged"
            )
    return found


def moved(status: Json) -> set[int]:
    """Attempts that ended because the next one had its spot nodes."""
    return {record["number"] for record in status.get("attempts") or () if record.get("cause") == "Moved"}


def _charged(seen: Seen) -> list[Deed]:
    """What hits an attempt that is about to move costs nothing, unless it has done its work."""
    moves = moved(seen.status)
    done = (d.attempt for d in seen.deeds if d.finished or CHARGES[d.blow] is Charge.SUCCESS)
    free = moves - set(done)
    return [deed for deed in seen.deeds if deed.attempt not in free]


def _resurrected(seen: Seen, entries: Sequence[Entry]) -> list[str]:
    if not seen.over_at:
        return []
    found = [f"pod {name} was made after the end" for name in made_after(entries, seen.over_at)]
    if _essence(seen.later) != _essence(seen.status):
        found.append(f"after the end it went on: {summary(seen.status)}; then {summary(seen.later)}")
    return found


def _essence(status: Json) -> tuple[object, ...]:
    conditions = {c["type"]: c["status"] for c in status.get("conditions") or () if c["type"] in _ENDS}
    counters = (status.get(name, 0) for name in ("attempt", "failures", "interruptions"))
    return (status.get("phase"), tuple(sorted(conditions.items())), *counters)


_ENDS = ("Succeeded", "Failed")

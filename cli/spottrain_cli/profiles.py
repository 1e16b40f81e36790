"""Profiles that runs have stored beside their checkpoints: where the time of a step went.

What the runtime stores (diagnostics/profiler.py): a summary with torch.profiler's table, and the trace.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Final

from spottrain.contract import PROFILES_PREFIX
from spottrain.core.series import Attempt
from spottrain.storage.base import Store

from spottrain_cli.errors import NotFound
from spottrain_cli.report.reading import read_series

KEY: Final = re.compile(
    rf"{re.escape(PROFILES_PREFIX)}attempt-(\d+)/rank-(\d+)/rank-\d+\.(\d+)\.(top\.txt|pt\.trace\.json\.gz)"
)
SPLIT: Final = {
    "productive": "training",
    "startup": "starting",
    "dataWait": "waiting for data",
    "checkpointStall": "saving",
    "restore": "restoring",
    "waiting": "waiting",
    "other": "other",
}
"""Parts of an attempt's time, in words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    name: str
    share: str
    """Of the time of all operations."""
    time: str
    """Its own, without the operations that it calls."""
    calls: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """The newest profile of a rank."""

    attempt: int
    rank: int
    made: datetime
    words: str
    """What limits the steps, and what to change; empty where nothing does."""
    operations: tuple[Operation, ...]
    trace: str
    """Where the trace is."""


def read(store: Store) -> tuple[Profile | None, Attempt | None]:
    """Returns the newest profile of rank 0, or of the first rank that has one, and the newest attempt.

    Raises:
        NotFound: Neither is there.
        RunError: The store cannot be read.
    """
    found = newest(store.list(PROFILES_PREFIX))
    attempts = [each.attempt for each in read_series(store)]
    last = max(attempts, key=lambda each: each.term, default=None)
    if found is None and last is None:
        raise NotFound(
            f"there is no profile at {store.uri}: make one with `spottrain profile train.py`, or with "
            "spec.training.profile in the job"
        )
    if found is None:
        return None, last
    body = store.get(found)
    text = body.body.decode(errors="replace") if body is not None else ""
    return of_text(text, found, store.uri), last


def newest(keys: Iterable[str]) -> str | None:
    """Returns the key of the summary that is shown."""
    found = [(key, match) for key in keys if (match := KEY.fullmatch(key)) and match[4] == "top.txt"]
    best = max(found, key=lambda each: (int(each[1][1]), -int(each[1][2]), int(each[1][3])), default=None)
    return None if best is None else best[0]


def of_text(text: str, key: str, uri: str) -> Profile:
    match = KEY.fullmatch(key)
    assert match is not None
    words, _, table = text.partition("\n\n") if not text.startswith("---") else ("", "", text)
    return Profile(
        attempt=int(match[1]),
        rank=int(match[2]),
        made=datetime.fromtimestamp(int(match[3]) / 1e9, UTC),
        words=words.strip(),
        operations=tuple(_operations(table.splitlines())),
        trace=f"{uri.rstrip('/')}/{key.removesuffix('top.txt')}pt.trace.json.gz",
    )


def _operations(lines: Sequence[str]) -> Iterable[Operation]:
    """Reads the columns between the two rules of dashes, which are as wide as the columns."""
    rules = [number for number, line in enumerate(lines) if line.startswith("---")]
    if len(rules) < 3:
        return
    spans = [match.span() for match in re.finditer("-+", lines[rules[0]])]
    head = [lines[rules[0] + 1][start:end].strip() for start, end in spans]
    own = [name for name in head if name.startswith("Self ") and name.endswith(" %")]
    share = next((name for name in own if name != "Self CPU %"), "Self CPU %")
    for line in lines[rules[1] + 1 : rules[2]]:
        row = dict(zip(head, (line[start:end].strip() for start, end in spans), strict=True))
        calls = row.get("# of Calls", "")
        yield Operation(
            name=row.get("Name", ""),
            share=row.get(share, ""),
            time=row.get(share.removesuffix(" %"), ""),
            calls=int(calls) if calls.isdecimal() else 0,
        )


# --- what is shown ----------------------------------------------------------------------------------------
def lines(profile: Profile | None, last: Attempt | None, *, name: str) -> list[str]:
    shown = [] if profile is None else _of_profile(profile, name)
    if last is None:
        return shown
    whole = _split(last)
    parts = ", ".join(f"{share:.0%} {SPLIT[part]}" for part, share in whole.items() if round(share, 2))
    if parts:
        shown += [*([""] if shown else []), f"The time of attempt {last.number}: {parts}."]
    if last.diagnosis and (profile is None or last.diagnosis not in profile.words):
        shown.append(last.diagnosis)
    if profile is None:
        shown.append("There is no profile of its operations: spec.training.profile makes one.")
    return shown


def _of_profile(profile: Profile, name: str) -> list[str]:
    from spottrain_cli.figures import table

    when = profile.made.strftime("%Y-%m-%d %H:%M UTC")
    rows = [[each.share, each.time, str(each.calls), each.name] for each in profile.operations]
    return [
        f"{name}, attempt {profile.attempt}, rank {profile.rank}, profiled {when}",
        *([profile.words] if profile.words else []),
        *(["", *table([["share", "time", "calls", "operation"], *rows])] if rows else []),
        "",
        f"Trace, for ui.perfetto.dev: {profile.trace}",
    ]


def _split(last: Attempt) -> dict[str, float]:
    seconds = {name: float(getattr(last.timeSplit, name)) for name in SPLIT} if last.timeSplit else {}
    total = sum(seconds.values())
    return {name: value / total for name, value in seconds.items()} if total > 0 else {}


def facts(profile: Profile | None, last: Attempt | None) -> dict[str, Any]:
    made = None if profile is None else asdict(profile) | {"made": profile.made.isoformat()}
    attempt = None
    if last is not None:
        attempt = {"number": last.number, "diagnosis": last.diagnosis, "shares": _split(last)}
    return {"profile": made, "attempt": attempt}

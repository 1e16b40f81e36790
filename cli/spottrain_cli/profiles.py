"""Profiles that runs have stored beside their checkpoints: where the time of a step went.

The runtime stores a summary, the operations that take longest, and the trace (diagnostics/profiler.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
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
class Profile:
    """The newest profile of a rank."""

    attempt: int
    rank: int
    made: datetime
    words: str
    """What limits the steps, and what to change; empty where nothing does."""
    operations: tuple[str, ...]
    """Those that take longest, as a table for a terminal; its first line is the head."""
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
    words, _, table = text.rstrip().rpartition("\n\n")
    return Profile(
        attempt=int(match[1]),
        rank=int(match[2]),
        made=datetime.fromtimestamp(int(match[3]) / 1e9, UTC),
        words=words.strip(),
        operations=tuple(table.splitlines()),
        trace=f"{uri.rstrip('/')}/{key.removesuffix('top.txt')}pt.trace.json.gz",
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
    when = profile.made.strftime("%Y-%m-%d %H:%M UTC")
    return [
        f"{name}, attempt {profile.attempt}, rank {profile.rank}, profiled {when}",
        *([profile.words] if profile.words else []),
        "",
        *profile.operations,
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

"""`spottrain checkpoints logs`: prints the output of ranks, part by part, as log capture has stored it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from spottrain.cli.output import Answer
from spottrain.contract import LOGS_PREFIX, part_of_log
from spottrain.storage.base import Store

from spottrain_cli.errors import NotFound


@dataclass(frozen=True, kw_only=True, slots=True)
class Printed:
    """Stored output of one rank in one attempt. `parts`: key by number, in order."""

    attempt: int
    rank: int
    parts: dict[int, str]


def logs(store: Store, *, attempt: int | None = None, rank: int | None = None) -> Answer:
    """Returns the logs of all attempts and ranks, or of those named. Raises NotFound if there are none."""
    found = _found(store)
    chosen = [p for p in found if attempt in (None, p.attempt) and rank in (None, p.rank)]
    if not chosen:
        raise NotFound(_nothing(store, found, attempt, rank))
    facts = [{"attempt": p.attempt, "rank": p.rank, "parts": [*p.parts.values()]} for p in chosen]
    return Answer(facts={"uri": store.uri, "logs": facts}, body=_text(store, chosen))


def _found(store: Store) -> list[Printed]:
    by_rank: dict[tuple[int, int], dict[int, str]] = {}
    for key in store.list(LOGS_PREFIX):
        if (part := part_of_log(key)) is not None:
            by_rank.setdefault(part[:2], {})[part[2]] = key
    return [
        Printed(attempt=attempt, rank=rank, parts=dict(sorted(parts.items())))
        for (attempt, rank), parts in sorted(by_rank.items())
    ]


def _nothing(store: Store, found: Sequence[Printed], attempt: int | None, rank: int | None) -> str:
    if not found:
        return (
            f"there are no logs at {store.uri}; check the URI. Logs are stored if SPOTTRAIN_LOGS is keep, "
            "which is the default in a job with a checkpoint URI (spec.checkpoint.logs)"
        )
    named: list[tuple[str, Any]] = [("attempt", attempt), ("rank", rank)]
    wanted = ", ".join(f"{name} {value}" for name, value in named if value is not None)
    there = ", ".join(f"attempt {p.attempt} rank {p.rank}" for p in found)
    return f"there are no logs of {wanted} at {store.uri}; there are logs of {there}"


def _text(store: Store, chosen: Sequence[Printed]) -> Iterator[bytes]:
    """Yields the logs, with headings only if there are several."""
    for number, printed in enumerate(chosen):
        if len(chosen) > 1:
            heading = f"==> attempt {printed.attempt}, rank {printed.rank} <==\n"
            yield (("\n" if number else "") + heading).encode()
        yield from _parts(store, printed)


def _parts(store: Store, printed: Printed) -> Iterator[bytes]:
    last = max(printed.parts)
    for number in range(1, last + 1):
        key = printed.parts.get(number)
        found = store.get(key) if key is not None else None
        yield found.body if found is not None else f"[part {number} is missing]\n".encode()

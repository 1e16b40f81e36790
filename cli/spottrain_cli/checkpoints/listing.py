"""`spottrain checkpoints list`: shows what is at a URI, even while a job uses it. Reads HEAD alone.

Of a folder that `spottrain sync` keeps it also reads the manifests, which say where the contents are.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

from spottrain.checkpoint.head.admin import leftovers
from spottrain.checkpoint.head.owner import HeadClient, without_head
from spottrain.checkpoint.head.state import Entry, Head, folder_of
from spottrain.checkpoint.manifest import Damaged
from spottrain.cli.output import Answer
from spottrain.contract import BLOBS_PREFIX, CHECKPOINTS_PREFIX, MANIFEST_NAME, is_own
from spottrain.core.log_format import counted, duration
from spottrain.errors import CheckpointError
from spottrain.storage.base import Stat, Store
from spottrain.sync.manifest import manifest_or_none

from spottrain_cli.figures import size, table

ASKING: Final = 16
"""Concurrent requests for the sizes of objects."""
LOOKS: Final = 3
"""Maximum number of tries if HEAD changes meanwhile."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Inventory:
    head: Head | None
    objects: Mapping[str, Stat]
    """Objects below `checkpoints/`, by key."""
    orphans: tuple[str, ...]
    """Keys that no HEAD can list any more."""
    under_way: tuple[str, ...]
    """Keys that HEAD does not name but a running job's next commit may name."""

    folders: Mapping[str, bool]
    """Whether all contents are there, by key of the checkpoints that `spottrain sync` wrote."""

    def of(self, entry: Entry) -> dict[str, Stat]:
        return {key: stat for key, stat in self.objects.items() if folder_of(key) == entry.key}

    def condition(self, entry: Entry) -> str:
        """ "incomplete", "archived" or "restoring"; empty if the objects exist and are readable."""
        if entry.key in self.folders:
            return "" if self.folders[entry.key] else "incomplete"
        mine = self.of(entry)
        if entry.key + MANIFEST_NAME not in mine or sum(s.bytes for s in mine.values()) < entry.bytes:
            return "incomplete"
        shut = [stat for stat in mine.values() if stat.archived]
        if not shut:
            return ""
        return "restoring" if all(stat.restoring for stat in shut) else "archived"

    def bytes(self, keys: Iterable[str]) -> int:
        return sum(self.objects[key].bytes for key in keys)


def look(store: Store) -> Inventory:
    """Lists the objects, then reads HEAD.

    In this order an orphan stays one, even if HEAD is removed by hand and a run starts over. If HEAD changed
    meanwhile, the objects may not match it, and both are read again.
    """
    client = HeadClient(store)
    before = client.read()
    for _ in range(LOOKS):
        objects, head = _objects(store), client.read()
        if head == before:
            break
        before = head
    unnamed = [key for key in objects if head is None or folder_of(key) not in head.keys]
    orphans = set(leftovers(unnamed, head)) if head else set(unnamed)
    return Inventory(
        head=head,
        objects=objects,
        orphans=tuple(key for key in unnamed if key in orphans),
        under_way=tuple(key for key in unnamed if key not in orphans),
        folders=_folders(store, head) if head else {},
    )


def _folders(store: Store, head: Head) -> dict[str, bool]:
    there = set(store.list(BLOBS_PREFIX))
    found: dict[str, bool] = {}
    for entry in head.checkpoints if there else ():
        with contextlib.suppress(Damaged, CheckpointError):  # it is shown as incomplete
            if manifest := manifest_or_none(store, entry.key):
                found[entry.key] = manifest.blobs <= there
    return found


def _objects(store: Store) -> dict[str, Stat]:
    keys = [key for key in store.list(CHECKPOINTS_PREFIX) if is_own(key)]
    with ThreadPoolExecutor(ASKING) as pool:
        stats = zip(keys, pool.map(store.stat, keys), strict=True)
        return {key: stat for key, stat in stats if stat is not None}


def listing(store: Store, *, now: float) -> Answer:
    seen = look(store)
    entries = seen.head.checkpoints if seen.head else ()
    facts = {
        "uri": store.uri,
        "head": _head_facts(seen.head),
        "checkpoints": [_entry_facts(seen, entry, now) for entry in entries],
        "orphans": [{"key": key, "bytes": seen.objects[key].bytes} for key in seen.orphans],
        "underWay": [{"key": key, "bytes": seen.objects[key].bytes} for key in seen.under_way],
    }
    return Answer(facts=facts, lines=[*_head_lines(store, seen.head), *_lines(seen, now)])


def _head_facts(head: Head | None) -> dict[str, Any] | None:
    names = ("state", "job", "jobUID", "attempt", "term")
    return None if head is None else {name: getattr(head, name) for name in names}


def _entry_facts(seen: Inventory, entry: Entry, now: float) -> dict[str, Any]:
    facts = {name: getattr(entry, name) for name in ("step", "time", "bytes", "keptAs", "key")}
    return facts | {"ageSeconds": round(now - entry.time, 3), "condition": seen.condition(entry)}


def _head_lines(store: Store, head: Head | None) -> list[str]:
    if head is None:
        return [str(without_head(store))]
    owner = f"job {head.job} (UID {head.jobUID}, attempt {head.attempt}, term {head.term})"
    return [f"{store.uri}: {head.state}; {'owner' if head.state == 'active' else 'last owner'}: {owner}"]


def _lines(seen: Inventory, now: float) -> list[str]:
    rows = [("STEP", "AGE", "SIZE", "KEPT AS", "CONDITION", "KEY")]
    newest = seen.head.resumable[:1] if seen.head else ()
    for entry in seen.head.checkpoints if seen.head else ():
        kept = ", ".join(filter(None, ["newest" if entry in newest else "", entry.keptAs]))
        condition = seen.condition(entry) or "ok"
        rows.append(
            (
                str(entry.step),
                duration(max(0.0, now - entry.time)),
                size(entry.bytes),
                kept,
                condition,
                entry.key,
            )
        )
    lines = table(rows) if len(rows) > 1 else ["no checkpoints"]
    return lines + _unnamed_lines(seen)


def _unnamed_lines(seen: Inventory) -> list[str]:
    def amount(keys: Sequence[str]) -> str:
        return f"{counted(len(keys), 'object')}, {size(seen.bytes(keys))}"

    lines = []
    for keys, what in (
        (seen.orphans, "orphans, used by no checkpoint" if seen.head else "without HEAD"),
        (seen.under_way, "being uploaded, or left by a dead owner"),
    ):
        if keys:
            lines.append(f"{what}: {amount(keys)}")
        for folder, own in itertools.groupby(sorted(keys), key=folder_of):
            lines.append(f"  {folder}  {amount([*own])}")
    return lines

"""`spottrain checkpoints repair`: makes HEAD again from the checkpoints that are there.

For a URI whose HEAD was removed, cannot be read, or was replaced by an older version. What only HEAD knew is
lost: whose the checkpoints are, so a job needs onExisting: Resume to go on from them, and which of them
earlier jobs left.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from spottrain.checkpoint.head.admin import repaired
from spottrain.checkpoint.head.owner import fresh_nonce, whole_of, without_head
from spottrain.checkpoint.head.state import BEST, Entry, Head, beyond, folder_of
from spottrain.checkpoint.manifest import Damaged
from spottrain.cli.output import Answer
from spottrain.contract import (
    CHECKPOINTS_PREFIX,
    FINAL_PREFIX,
    HEAD_KEY,
    MANIFEST_NAME,
    Reason,
    step_of_key,
)
from spottrain.core.log_format import counted
from spottrain.errors import CheckpointError, ConfigurationError
from spottrain.storage.base import AlreadyExists, KeyMissing, PreconditionFailed, Store
from spottrain.sync.manifest import manifest_or_none

from spottrain_cli.checkpoints.reading import manifest_of
from spottrain_cli.checkpoints.verifying import DAMAGED, checked, lines_of


def repair(store: Store) -> Answer:
    """Writes HEAD, conditionally. Raises RunError if HEAD is fine, or if no checkpoint can be read.

    HEAD then names all checkpoints that have a manifest, newest first. Damaged ones too: a resume passes over
    them, and nothing deletes what a person may yet restore.
    """
    keys = store.list(CHECKPOINTS_PREFIX)  # before HEAD is read (see `require_head_of`)
    whole = sorted(whole_of(keys), reverse=True)  # newest first (see `checkpoint_key`)
    found = store.get(HEAD_KEY)
    seen = _parsed(found.body) if found is not None else None
    if seen is not None and not beyond(whole, seen):
        raise ConfigurationError(
            f"there is nothing to repair: HEAD at {store.uri} can be read, and no checkpoint is newer than "
            "it; spottrain checkpoints list URI shows what it names"
        )
    if not whole:
        raise without_head(store)
    entries = _marked(store, [_entry(store, key, keys) for key in whole], seen)
    entries += [entry for entry in seen.checkpoints if entry.key not in whole] if seen is not None else []
    facts = [checked(store, entry) for entry in entries]
    lines = [line for each in facts for line in lines_of(each)]
    if all(each["condition"] == DAMAGED for each in facts):
        raise CheckpointError(
            "\n".join([*lines, f"none of them can be used; HEAD at {store.uri} was not changed"]),
            reason=Reason.CHECKPOINT_DAMAGED,
        )
    finished_with = _finished_with(store)
    head = repaired(entries, keys, seen, nonce=fresh_nonce(), finished_with=finished_with)
    _write(store, head, found.etag if found is not None else None)
    lines.append(
        f"HEAD names {counted(len(entries), 'checkpoint')} again, newest first; a job resumes from there "
        "with checkpoint.onExisting: Resume (spottrain run --on-existing resume)"
    )
    return Answer(facts={"uri": store.uri, "state": head.state, "checkpoints": facts}, lines=lines)


def _parsed(body: bytes) -> Head | None:
    """Returns HEAD; None if it cannot be read. Raises ConfigurationError if it is of a newer format."""
    try:
        return Head.from_json(body)
    except CheckpointError:
        return None


def _entry(store: Store, key: str, keys: Sequence[str]) -> Entry:
    stats = {each: store.stat(each) for each in keys if folder_of(each) == key}
    written = stats[key + MANIFEST_NAME]
    size = sum(stat.bytes for stat in stats.values() if stat is not None)
    with contextlib.suppress(Damaged, CheckpointError):
        if (folder := manifest_or_none(store, key)) is not None:  # its contents lie elsewhere
            size = folder.size
    return Entry(
        key=key,
        step=step_of_key(key) or 0,
        time=written.modified if written is not None else 0.0,
        bytes=size,
    )


def _marked(store: Store, entries: Sequence[Entry], seen: Head | None) -> list[Entry]:
    """Returns the entries with the marks that the HEAD there gave them; without one, marks the best one."""
    if seen is not None:
        marks = {entry.key: entry.keptAs for entry in seen.checkpoints}
    else:
        best = _best_step(store, entries[0].key)
        marks = {next((entry.key for entry in entries if entry.step == best), ""): BEST}
    return [replace(entry, keptAs=marks.get(entry.key, "")) for entry in entries]


def _best_step(store: Store, key: str) -> int | None:
    """Returns the step of the best checkpoint, as the newest one records it (see `training.evaluation`)."""
    try:
        tree = manifest_of(store, key)[0].tree
        progress = tree["progress"]
        return int(progress["best_step"]) if progress["best"] == progress["best_kept"] else None
    except (Damaged, CheckpointError, KeyError, TypeError):
        return None


def _finished_with(store: Store) -> str:
    """Returns the key of the checkpoint whose run has left final weights; "" if there are none."""
    found = store.get(FINAL_PREFIX + MANIFEST_NAME)
    try:
        facts: Any = json.loads(found.body) if found is not None else {}
        return str(facts["checkpoint"])
    except (ValueError, KeyError, TypeError):
        return ""


def _write(store: Store, head: Head, etag: str | None) -> None:
    try:
        if etag is None:
            store.put_if_absent(HEAD_KEY, head.to_json())
        else:
            store.put_if_match(HEAD_KEY, head.to_json(), etag)
    except (AlreadyExists, PreconditionFailed, KeyMissing):
        raise ConfigurationError(
            f"HEAD at {store.uri} changed while this command was running, so it was not written; check with "
            "spottrain checkpoints list URI"
        ) from None

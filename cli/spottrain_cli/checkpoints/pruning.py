"""`spottrain checkpoints prune`: removes old checkpoints from HEAD, and deletes unused objects.

It reads what it keeps before it deletes anything, so that N readable checkpoints remain, if there are N.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spottrain.checkpoint.head.admin import Pruning, leftovers, prunable, require_idle
from spottrain.checkpoint.head.owner import HeadClient, without_head
from spottrain.checkpoint.head.state import Entry, Head
from spottrain.cli.output import Answer, confirm
from spottrain.contract import CHECKPOINTS_PREFIX
from spottrain.core.log_format import counted
from spottrain.errors import ConfigurationError
from spottrain.storage.base import Store

from spottrain_cli.checkpoints import contents
from spottrain_cli.checkpoints.listing import Inventory, look
from spottrain_cli.checkpoints.verifying import OK, problems_of
from spottrain_cli.figures import size


def prune(
    store: Store,
    *,
    keep: int | None,
    verify: bool,
    orphans: bool,
    earlier_jobs: bool,
    dry_run: bool,
    sure: bool,
) -> Answer:
    """Changes HEAD first, then deletes only what that dropped. Raises ConfigurationError while a job runs.

    keep: None: HEAD stays as it is. verify: read the kept checkpoints in full; otherwise compare sizes only.
    """
    if keep is None and not orphans:
        raise ConfigurationError("nothing to prune was named; give --keep N, --orphans, or both")
    seen = look(store)
    if seen.head is None:
        raise without_head(store)
    require_idle(seen.head)
    doomed, bad = _doomed(store, seen, seen.head, keep, verify=verify, earlier_jobs=earlier_jobs)
    unused = seen.orphans if orphans else ()
    stray = contents.unused(store)
    lines = [f"stays, but does not count: {key} ({why})" for key, why in bad.items()]
    lines += _lines(seen, doomed, unused, "would delete" if dry_run else "to delete")
    if stray and orphans:
        lines.append(f"and {counted(len(stray), 'content')} of files that no checkpoint names")
    if doomed and not verify:
        lines.append("the checkpoints to keep were checked by object sizes only, not read")
    facts = _facts(store, seen, doomed, unused) | {"notCounted": bad}
    if dry_run or not (doomed or orphans):
        return Answer(facts=facts | {"deleted": False}, lines=lines)
    confirm("\n".join([*lines, "Delete?"]), sure=sure)
    if doomed:
        _drop(store, seen.head, doomed)
    if orphans:
        _sweep(store, seen.head, unused)
    store.delete([key for key in contents.unused(store) if orphans or key not in stray])
    return Answer(facts=facts | {"deleted": True}, lines=[*lines, "deleted"])


def _doomed(
    store: Store, seen: Inventory, head: Head, keep: int | None, *, verify: bool, earlier_jobs: bool
) -> tuple[tuple[Entry, ...], dict[str, str]]:
    """Returns the checkpoints to remove; and by key, why a kept one does not count towards `keep`."""
    doomed: tuple[Entry, ...] = ()
    bad: dict[str, str] = {}
    if keep is not None:
        for read in (False, True) if verify else (False,):
            bad = _uncounted(store, seen, head, keep, read=read)
            doomed = prunable(head, keep, earlier_jobs=earlier_jobs, damaged=bad)
            if not doomed:
                break  # then nothing needs to be read
    return doomed, bad


def _uncounted(store: Store, seen: Inventory, head: Head, keep: int, *, read: bool) -> dict[str, str]:
    """Returns why checkpoints cannot be used, newest first, up to the `keep`-th one that can."""
    bad: dict[str, str] = {}
    usable = 0
    for entry in head.checkpoints:
        if usable == keep:
            break
        if entry.keptAs:
            continue
        why = "incomplete" if seen.condition(entry) == "incomplete" else ""
        if read and not why:
            condition, problems = problems_of(store, entry)
            why = "" if condition == OK else f"{condition}: {problems[0]}"
        if why:
            bad[entry.key] = why
        usable += not why
    return bad


def _drop(store: Store, seen: Head, doomed: Sequence[Entry]) -> None:
    done = HeadClient(store).change(Pruning(seen=seen, doomed=frozenset(entry.key for entry in doomed)))
    assert done is not None, "nothing stops it"
    for key in done.dropped:
        store.delete(store.list(key))


def _sweep(store: Store, head: Head, orphans: Sequence[str]) -> None:
    """Deletes orphans. A job that started meanwhile only adds keys of a higher term: they stay orphans."""
    store.delete(orphans)
    store.sweep_uploads(CHECKPOINTS_PREFIX, lambda key: bool(leftovers([key], head)))


def _lines(seen: Inventory, doomed: Sequence[Entry], orphans: Sequence[str], what: str) -> list[str]:
    lines = []
    for entry in doomed:
        mark = f", {entry.keptAs}" if entry.keptAs else ""
        lines.append(f"{what}: step {entry.step} ({entry.key}{mark}), {size(entry.bytes)}")
    if orphans:
        lines.append(f"{what}: {counted(len(orphans), 'orphan object')}, {size(seen.bytes(orphans))}")
    return lines or ["nothing to delete"]


def _facts(store: Store, seen: Inventory, doomed: Sequence[Entry], orphans: Sequence[str]) -> dict[str, Any]:
    return {
        "uri": store.uri,
        "checkpoints": [{"step": e.step, "key": e.key, "bytes": e.bytes, "keptAs": e.keptAs} for e in doomed],
        "orphans": [{"key": key, "bytes": seen.objects[key].bytes} for key in orphans],
    }

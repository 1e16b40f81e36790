"""`spottrain checkpoints verify`: reads every byte of checkpoints and compares it with its checksum."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from spottrain.checkpoint.head.state import Entry
from spottrain.checkpoint.manifest import Damaged, Manifest, Shard
from spottrain.cli.output import Answer
from spottrain.cli.reading import head_of
from spottrain.contract import CHUNK_BYTES, Reason
from spottrain.core.log_format import counted
from spottrain.errors import CheckpointArchived, CheckpointError
from spottrain.storage.base import Store
from spottrain.sync.manifest import read_manifest
from spottrain.sync.restore import damage

from spottrain_cli.checkpoints.reading import Shards, choose, manifest_of
from spottrain_cli.figures import size

ALL: Final = "all"
OK: Final = "ok"
DAMAGED: Final = "DAMAGED"
ARCHIVED: Final = "ARCHIVED"
OTHER_FORMAT: Final = "OTHER FORMAT"
"""Written by a newer or an older spottrain, which may be able to read it."""
READERS: Final = 4
"""Chunks read concurrently; each takes CHUNK_BYTES of memory."""
assert CHUNK_BYTES * READERS <= 2**28, "a laptop must do"


def verify(store: Store, which: str = ALL) -> Answer:
    """Verifies checkpoints. Raises StoreError if the store does not respond: then the state is unknown."""
    head = head_of(store)
    entries = head.checkpoints if which == ALL else (choose(head, which),)
    found = [checked(store, entry) for entry in entries]
    bad = sum(each["condition"] != OK for each in found)
    lines = [line for each in found for line in lines_of(each)]
    total = counted(len(found), "checkpoint")
    lines.append(f"{bad} of {total} cannot be used" if bad else f"{total} ok")
    return Answer(facts={"uri": store.uri, "checkpoints": found, "unusable": bad}, lines=lines, ok=not bad)


def checked(store: Store, entry: Entry) -> dict[str, Any]:
    condition, problems = problems_of(store, entry)
    place = {"step": entry.step, "key": entry.key, "bytes": entry.bytes}
    return place | {"condition": condition, "problems": problems}


def problems_of(store: Store, entry: Entry) -> tuple[str, list[str]]:
    """Returns OK, DAMAGED, OTHER_FORMAT or ARCHIVED, and messages if it is not OK."""
    try:
        manifest, _ = manifest_of(store, entry.key)
        problems = _shards(store, entry.key, manifest)
        return (DAMAGED if problems else OK), problems
    except CheckpointArchived as error:
        return ARCHIVED, [str(error)]
    except CheckpointError as error:
        with contextlib.suppress(CheckpointError, Damaged):
            problems = damage(store, read_manifest(store, entry.key))
            return (DAMAGED if problems else OK), problems
        other = error.reason == Reason.CHECKPOINT_INCOMPATIBLE
        return (OTHER_FORMAT if other else DAMAGED), [str(error)]
    except Damaged as error:
        return DAMAGED, [str(error)]


def _shards(store: Store, key: str, manifest: Manifest) -> list[str]:
    problems = [text for shard in manifest.shards if (text := _wrong_size(store, key, shard))]
    if problems:
        return problems  # further reading would report the same again
    shards = Shards(store, key, manifest)

    def check(work: tuple[Shard, int]) -> str | None:
        try:
            shards.chunk(*work)
        except Damaged as error:
            return str(error)
        return None

    work = [(shard, number) for shard in manifest.shards for number in range(len(shard.chunks))]
    pool = ThreadPoolExecutor(READERS)
    try:
        return [text for text in pool.map(check, work) if text]
    finally:
        pool.shutdown(cancel_futures=True)  # after an error the rest is not needed


def _wrong_size(store: Store, key: str, shard: Shard) -> str | None:
    stat = store.stat(key + shard.name)
    if stat is None:
        return f"{shard.name} is missing"
    if stat.bytes != shard.bytes:
        return f"{shard.name} has {stat.bytes} bytes instead of {shard.bytes}"
    return None


def lines_of(facts: dict[str, Any]) -> list[str]:
    name = f"step {facts['step']} ({facts['key']}), {size(facts['bytes'])}"
    return [f"{facts['condition']:8}  {name}", *(f"          {text}" for text in facts["problems"])]

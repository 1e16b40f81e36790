"""`spottrain checkpoints copy`: moves or branches a run, by copying one checkpoint to a URI of its own."""

from __future__ import annotations

import contextlib
from dataclasses import replace

from spottrain.checkpoint.head.admin import Adopting, term_for_copy
from spottrain.checkpoint.head.owner import HeadClient, fresh_nonce, remains
from spottrain.checkpoint.head.state import Entry, require_head_of
from spottrain.checkpoint.manifest import Damaged
from spottrain.cli.output import Answer
from spottrain.cli.reading import head_of
from spottrain.contract import CHUNK_BYTES, MANIFEST_NAME, Reason, blobs_of, checkpoint_key
from spottrain.errors import CheckpointError, ConfigurationError, StoreError
from spottrain.storage.base import Store
from spottrain.sync.manifest import SyncManifest

from spottrain_cli.checkpoints import synced
from spottrain_cli.checkpoints.reading import Shards, choose, manifest_of
from spottrain_cli.figures import size


def copy(source: Store, target: Store, which: str) -> Answer:
    """Copies objects first, then changes the target's HEAD conditionally: until then it is unchanged."""
    if source.uri == target.uri:
        raise ConfigurationError(f"source and target are the same: {source.uri}")
    entry = choose(head_of(source), which)
    client, there = HeadClient(target), remains(target)
    head = client.read()
    require_head_of(there, head)
    key = checkpoint_key(term_for_copy(head), entry.step, fresh_nonce())
    try:
        folder = _objects(source, entry, target, key)
    except BaseException:
        # HEAD does not name them, and no change of HEAD was requested, so it never will.
        with contextlib.suppress(StoreError):
            target.delete([*target.list(key), *target.list(blobs_of(key))])
        raise
    client.change(Adopting(entry=replace(entry, key=key, keptAs=""), job=f"copy:{source.uri}"))
    line = (
        f"copied step {entry.step}, {size(entry.bytes)}, to {target.uri}; a job resumes from there with "
        f"checkpoint.onExisting: Resume (spottrain {'sync' if folder else 'run'} --on-existing resume)"
    )
    facts = {"from": source.uri, "to": target.uri, "step": entry.step, "key": key, "bytes": entry.bytes}
    return Answer(facts=facts, lines=[line, *(synced.note(folder) if folder else ())])


def _objects(source: Store, entry: Entry, target: Store, key: str) -> SyncManifest | None:
    """Copies the objects, with one shard at a time in memory and the manifest last.

    Returns the manifest of a folder that `spottrain sync` has stored.
    """
    try:
        if (folder := synced.folder_of(source, entry)) is not None:
            synced.copy(source, folder, target, key)
            return folder
        manifest, text = manifest_of(source, entry.key)
        shards = Shards(source, entry.key, manifest)
        for shard in manifest.shards:
            sums = target.upload(key + shard.name, shards.whole(shard))
            if manifest.chunk_bytes == CHUNK_BYTES and shard.bytes and tuple(sums) != shard.chunks:
                raise Damaged(f"{shard.name} was stored with other checksums than it was read with")
    except Damaged as error:
        raise CheckpointError(
            f"step {entry.step} cannot be copied: {error}. Nothing was left at the target. A running job may "
            "have pruned this checkpoint meanwhile. Choose another --step; spottrain checkpoints verify "
            f"{source.uri} shows which are intact",
            reason=Reason.CHECKPOINT_DAMAGED,
        ) from error
    target.put_if_absent(key + MANIFEST_NAME, text)
    return None

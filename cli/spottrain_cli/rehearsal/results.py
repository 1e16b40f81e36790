"""What a job has left in the store, by digests, and the end of its log."""

from __future__ import annotations

import json
from typing import Final

from spottrain.checkpoint.head.state import Head
from spottrain.contract import FINAL_PREFIX, HEAD_KEY, MANIFEST_NAME, log_key
from spottrain.storage.open import open_store
from spottrain.sync.manifest import digest_of, read_manifest

FINAL_WEIGHTS: Final = "the final weights"


def results(uri: str, endpoint: str, mode: str) -> dict[str, str]:
    """Digests by name: of the final weights, or of each file of a synced folder. Empty: nothing is known."""
    if mode == "Self":
        return {}
    store = open_store(uri, endpoint)
    if mode == "Runtime":
        found = store.get(FINAL_PREFIX + MANIFEST_NAME)
        return {FINAL_WEIGHTS: json.loads(bytes(found.body))["digest"]} if found is not None else {}
    head = store.get(HEAD_KEY)
    checkpoints = Head.from_json(head.body).checkpoints if head is not None else ()
    if not checkpoints:
        return {}
    files = read_manifest(store, checkpoints[0].key).files
    return {path: " ".join(map(digest_of, file.chunks)) for path, file in files.items()}


def end_of_log(uri: str, endpoint: str, attempt: int, lines: int) -> list[str]:
    """Of rank 0, as it is kept beside the checkpoints; empty where nothing was kept."""
    store = open_store(uri, endpoint)
    folder = log_key(attempt, 0, 1).rpartition("/")[0] + "/"
    parts = [store.get(key) for key in sorted(store.list(folder))]
    text = b"".join(bytes(part.body) for part in parts if part is not None).decode(errors="replace")
    return text.splitlines()[-lines:]


def delete(uri: str, endpoint: str) -> None:
    """Everything below the URI, which only a rehearsal has written to."""
    store = open_store(uri, endpoint)
    if keys := store.list(""):
        store.delete(keys)

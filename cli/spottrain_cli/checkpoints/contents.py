"""Contents of files that `spottrain sync` has stored beside its checkpoints: which belong to none of them."""

from __future__ import annotations

from spottrain.checkpoint.head.owner import HeadClient
from spottrain.checkpoint.head.state import HeadState
from spottrain.contract import BLOBS_PREFIX, is_own
from spottrain.storage.base import Store
from spottrain.sync.manifest import named_by, unnamed


def unused(store: Store) -> list[str]:
    """Returns the keys of contents that no checkpoint can name any more.

    While a job runs, contents of its own term may belong to its next checkpoint.
    """
    keys = [key for key in store.list(BLOBS_PREFIX) if is_own(key)]  # before HEAD is read
    head = HeadClient(store).read() if keys else None
    if head is None:
        return keys
    return unnamed(keys, named_by(store, head, {}), below=head.term + (head.state is not HeadState.ACTIVE))

"""Which micro-batch sizes a job has run out of memory with, kept in the store for its next start.

The processes that ran out are gone by then, and so may be their pod, so it is an object of the store: one for
each size, written once, in no order. The least of them counts. Written by any rank, read by rank 0. HEAD is
not the place: rank 0 alone writes that, and another rank may be the one that ran out. Called by `fitting`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import dataclass
from typing import Any

from spottrain.contract import out_of_memory_key, out_of_memory_policy_key
from spottrain.core import log
from spottrain.errors import StoreError
from spottrain.storage.base import AlreadyExists, Store


@dataclass(frozen=True, kw_only=True, slots=True)
class Shortages:
    """Of one job. store: None where there is no checkpoint URI; then nothing is kept."""

    store: Store | None
    job_uid: str

    def note(self, size: int, **facts: Any) -> bool:
        """Whether the next start will know it: what cannot be found again is nothing to rely on.

        facts: for people who read the object.
        """
        names = self._keep(out_of_memory_key(self._job, size), size, microBatchSize=size, **facts)
        return any(name.isdecimal() and int(name) <= size for name in names)

    def note_policy(self, policy: str, **facts: Any) -> bool:
        """The same of a policy of activation checkpointing, with which no step could be tried to its end."""
        names = self._keep(out_of_memory_policy_key(self._job, policy), policy, policy=policy, **facts)
        return f"policy-{policy}" in names

    def policies(self) -> set[str]:
        """Those that are known. Raises StoreError."""
        return {name.removeprefix("policy-") for name in self._names() if name.startswith("policy-")}

    def _keep(self, key: str, what: object, **facts: Any) -> list[str]:
        """The names of all that is kept, of `what` too if it can be relied on."""
        if self.store is None:
            return []
        body = json.dumps({"jobUID": self.job_uid, **facts}).encode()
        try:
            with contextlib.suppress(AlreadyExists):  # by another rank, in the same step
                self.store.put_if_absent(key, body)
            return self._names()
        except StoreError as error:
            log.event("batch-size", too_large=what, kept=False, why=error)
            return []

    def least(self) -> int | None:
        """The smallest size that was too large; None where none is known. Raises StoreError."""
        return min((int(name) for name in self._names() if name.isdecimal()), default=None)

    def _names(self) -> list[str]:
        if self.store is None:
            return []
        keys = self.store.list(out_of_memory_key(self._job, 0))
        return [key.rpartition("/")[2].removesuffix(".json") for key in keys]

    @property
    def _job(self) -> str:
        """A UID may hold whatever a script's file name does."""
        return hashlib.sha256(self.job_uid.encode()).hexdigest()[:16]

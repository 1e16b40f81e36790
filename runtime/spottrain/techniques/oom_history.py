"""Records in the store which micro-batch sizes ran out of memory, for the next start of the job.

By then the processes, and maybe the pod, are gone. So there is one object in the store per size, written
once, in any order; the smallest counts. Any rank writes them, rank 0 reads them. HEAD is not used: only
rank 0 writes it, but any rank may run out of memory.
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
class OOMHistory:
    """The record of one job. store: None without a checkpoint URI; then nothing is recorded."""

    store: Store | None
    job_uid: str

    def note(self, size: int, **facts: Any) -> bool:
        """Records that `size` ran out of memory. Returns whether it can be read back for the next start.

        facts: further fields of the object, for human readers.
        """
        names = self._keep(out_of_memory_key(self._job, size), size, microBatchSize=size, **facts)
        return any(name.isdecimal() and int(name) <= size for name in names)

    def note_policy(self, policy: str, **facts: Any) -> bool:
        """The same for a policy of activation checkpointing whose trial ran out of memory."""
        names = self._keep(out_of_memory_policy_key(self._job, policy), policy, policy=policy, **facts)
        return f"policy-{policy}" in names

    def policies(self) -> set[str]:
        """Returns the recorded policies. Raises StoreError."""
        return {name.removeprefix("policy-") for name in self._names() if name.startswith("policy-")}

    def _keep(self, key: str, what: object, **facts: Any) -> list[str]:
        """Writes the object and returns the names of all objects; empty if the store fails."""
        if self.store is None:
            return []
        body = json.dumps({"jobUID": self.job_uid, **facts}).encode()
        try:
            with contextlib.suppress(AlreadyExists):  # another rank wrote it in the same step
                self.store.put_if_absent(key, body)
            return self._names()
        except StoreError as error:
            log.event("batch-size", too_large=what, kept=False, why=error)
            return []

    def least(self) -> int | None:
        """Returns the smallest size that was too large; None if none is recorded. Raises StoreError."""
        return min((int(name) for name in self._names() if name.isdecimal()), default=None)

    def _names(self) -> list[str]:
        if self.store is None:
            return []
        keys = self.store.list(out_of_memory_key(self._job, 0))
        return [key.rpartition("/")[2].removesuffix(".json") for key in keys]

    @property
    def _job(self) -> str:
        """The job's part of the key: a hash, because a UID may contain any character of a file name."""
        return hashlib.sha256(self.job_uid.encode()).hexdigest()[:16]

"""`spottrain checkpoints delete`: deletes what a job left, as its `deletionPolicy: Delete` requests.

HEAD changes first, so that no job can start from what is about to be deleted. Then the objects are deleted;
this can be repeated after a crash at any point. The final weights stay: they are the job's result.
"""

from __future__ import annotations

from spottrain.checkpoint.head.admin import Deleting, leftovers
from spottrain.checkpoint.head.owner import Walker
from spottrain.checkpoint.head.state import folder_of
from spottrain.cli.output import Answer, confirm
from spottrain.cli.reading import head_of
from spottrain.contract import (
    CHECKPOINTS_PREFIX,
    COMPILE_CACHE_PREFIX,
    LOGS_PREFIX,
    OUT_OF_MEMORY_PREFIX,
    PROFILES_PREFIX,
)
from spottrain.core.text import counted
from spottrain.storage.base import Store


def delete(store: Store, job_uid: str, *, sure: bool = False) -> Answer:
    """Deletes a job's objects. Raises ConfigurationError if another job owns the URI, or still runs on it.

    Objects of earlier jobs stay. If there is no HEAD, nothing is deleted.
    """
    keys = store.list(CHECKPOINTS_PREFIX)  # before HEAD is read
    walker = Walker(store)
    if walker.read() is None:
        text = f"nothing to delete: there is no HEAD object at {store.uri}"
        return Answer(facts={"uri": store.uri, "objects": 0}, lines=[text])
    confirm(f"delete all checkpoints of job UID {job_uid} at {store.uri}?", sure=sure)
    walker.change(Deleting(job_uid=job_uid))
    head = head_of(store)
    doomed = [key for key in keys if folder_of(key) not in head.keys]
    doomed = sorted({*doomed, *leftovers(keys, head)})
    for rest in (LOGS_PREFIX, PROFILES_PREFIX, COMPILE_CACHE_PREFIX, OUT_OF_MEMORY_PREFIX):
        doomed += store.list(rest)
    store.delete(doomed)
    store.sweep_uploads(CHECKPOINTS_PREFIX, lambda key: folder_of(key) not in head.keys)
    words = f"deleted {counted(len(doomed), 'object')} at {store.uri}; the final weights stay"
    return Answer(facts={"uri": store.uri, "objects": len(doomed)}, lines=[words])

"""`spottrain checkpoints delete URI`: what the operator runs in a pod for `deletionPolicy: Delete`.

HEAD changes first, so that no job can start from what is about to be deleted. Then the objects are deleted;
this can be repeated after a crash at any point. The final weights stay: they are the job's result. The other
verbs of `spottrain checkpoints` are the command line's (spottrain_cli).
"""

from __future__ import annotations

import argparse
import sys
from typing import Final

from spottrain.checkpoint.head.admin import Deleting, leftovers, require_ended
from spottrain.checkpoint.head.owner import HeadClient, whole_checkpoints
from spottrain.checkpoint.head.state import Head, folder_of, require_head_of
from spottrain.checkpoint.manifest import Damaged
from spottrain.cli.output import Answer, confirm
from spottrain.cli.reading import head_of, open_existing
from spottrain.contract import (
    BLOBS_PREFIX,
    CHECKPOINTS_PREFIX,
    COMPILE_CACHE_PREFIX,
    LOGS_PREFIX,
    OUT_OF_MEMORY_PREFIX,
    PROFILES_PREFIX,
    SERIES_PREFIX,
    is_own,
)
from spottrain.core.log_format import counted
from spottrain.errors import RunError
from spottrain.storage.base import Store
from spottrain.sync.manifest import named_by

BESIDE: Final = (
    LOGS_PREFIX,
    PROFILES_PREFIX,
    COMPILE_CACHE_PREFIX,
    OUT_OF_MEMORY_PREFIX,
    SERIES_PREFIX,
)
"""Folders of a job's other objects."""


def main(argv: list[str]) -> int:
    given = _parser().parse_args(argv)
    try:
        answer = delete(
            open_existing(given.uri, given.endpoint),
            given.job_uid,
            earlier_jobs=given.earlier_jobs,
            sure=given.yes,
        )
    except (RunError, Damaged) as error:
        print(f"spottrain: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print("\n".join(answer.lines))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="spottrain checkpoints")
    verb = parser.add_subparsers(required=True, metavar="delete").add_parser(
        "delete", description="Deletes the checkpoints, logs and caches of a job that has ended."
    )
    verb.add_argument("uri", metavar="URI", help="folder, s3://bucket/prefix or gs://bucket/prefix")
    verb.add_argument("--endpoint", metavar="URL", help="URL of an S3-compatible server")
    about = (
        "the owner's UID, as list shows it, of a job that has ended for certain; without it that is the last "
        "owner, and a URI in use is refused"
    )
    verb.add_argument("--job-uid", default="", metavar="UID", help=about)
    verb.add_argument("--earlier-jobs", action="store_true", help="also checkpoints that earlier jobs left")
    verb.add_argument("--yes", action="store_true", help="do not ask for confirmation")
    return parser


def delete(store: Store, job_uid: str = "", *, earlier_jobs: bool = False, sure: bool = False) -> Answer:
    """Deletes a job's objects, and nothing else. Raises ConfigurationError if another job owns the URI.

    Objects of earlier jobs stay, unless `earlier_jobs`. If HEAD was removed, or is older than checkpoints
    that are there, nothing is deleted, and CheckpointError is raised. Without `job_uid` it is the last
    owner's, and that job must not own HEAD any more.
    """
    whole = whole_checkpoints(store)  # before HEAD is read
    keys = own(store, CHECKPOINTS_PREFIX)  # before HEAD is read
    rest = [key for folder in BESIDE for key in own(store, folder)]  # before another job can claim HEAD
    stored = own(store, BLOBS_PREFIX)  # of folders: earlier jobs' checkpoints may name some
    client = HeadClient(store)
    head = client.read()
    require_head_of(whole, head)
    if head is None:
        text = f"nothing to delete: there is no HEAD object at {store.uri}"
        return Answer(facts={"uri": store.uri, "objects": 0}, lines=[text])
    if not job_uid:
        require_ended(head)
    confirm(_question(store, head, job_uid), sure=sure)
    only_idle, job_uid = not job_uid, job_uid or head.jobUID
    client.change(Deleting(job_uid=job_uid, earlier_jobs=earlier_jobs, only_idle=only_idle))
    head = head_of(store)
    doomed = [key for key in keys if folder_of(key) not in head.keys]
    needed = named_by(store, head, {})
    contents = [key for key in stored if key not in needed]
    doomed = sorted({*doomed, *leftovers(keys, head)}) + rest + contents
    store.delete(doomed)
    store.sweep_uploads(CHECKPOINTS_PREFIX, lambda key: is_own(key) and folder_of(key) not in head.keys)
    words = f"deleted {counted(len(doomed), 'object')} at {store.uri}; the final weights stay"
    lines = [
        f"contents of files that {key} may need stay, for it cannot be read: {why}"
        for key, why in needed.unreadable.items()
        if stored
    ]
    return Answer(facts={"uri": store.uri, "objects": len(doomed)}, lines=[*lines, words])


def own(store: Store, folder: str) -> list[str]:
    return [key for key in store.list(folder) if is_own(key)]


def _question(store: Store, head: Head, job_uid: str) -> str:
    if job_uid:
        return f"delete all checkpoints of job UID {job_uid} at {store.uri}?"
    there = counted(len(head.checkpoints), "checkpoint")
    return (
        f"{store.uri} has {there} of job {head.job} (UID {head.jobUID}), now {head.state}. Is that job "
        "deleted, and may all of them go?"
    )

"""`spottrain release`: frees a checkpoint URI whose owner died without releasing it.

A trainer that was killed outright (its node vanished) leaves HEAD active. The next attempt of the same job
takes HEAD over. If that job was deleted, only a person can know that the owner is dead.
"""

from __future__ import annotations

import argparse
import sys

from spottrain.checkpoint.head.owner import HeadOwner, Identity
from spottrain.checkpoint.head.state import Head, HeadState
from spottrain.cli.reading import open_existing
from spottrain.contract import HEAD_KEY
from spottrain.core.text import counted
from spottrain.errors import ConfigurationError, RunError
from spottrain.storage.base import Store


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="spottrain release", description="Frees a checkpoint URI whose owner is gone."
    )
    parser.add_argument("--checkpoint", required=True, metavar="URI", help="folder or s3://bucket/prefix")
    parser.add_argument("--endpoint", help="URL of an S3-compatible server")
    parser.add_argument("--yes", action="store_true", help="do not ask whether the owner is really gone")
    given = parser.parse_args(argv)
    try:
        print(release(open_existing(given.checkpoint, given.endpoint), sure=given.yes))
    except RunError as error:
        print(f"spottrain: {error}", file=sys.stderr)
        return 1
    return 0


def release(store: Store, *, sure: bool) -> str:
    """Releases an active HEAD and returns a description. Raises RunError.

    It claims HEAD first, as the owner's next attempt would. The term rises, so an owner that is still alive
    (paused, cut off) is superseded and commits nothing more.
    """
    found = store.get(HEAD_KEY)
    if found is None:
        raise ConfigurationError(f"there is no HEAD at {store.uri}; check the URI")
    head = Head.from_json(found.body)
    owner = f"job {head.job} (UID {head.jobUID}, attempt {head.attempt})"
    if head.state is not HeadState.ACTIVE:
        return f"{store.uri} is {head.state} already; {owner} was its last owner."
    if not sure and not _confirmed(owner):
        raise ConfigurationError("nothing was changed; --yes says that the owner is gone")
    holder = HeadOwner(store, Identity(job_uid=head.jobUID, job=head.job, attempt=head.attempt))
    holder.claim()
    holder.release()
    kept = counted(len(head.checkpoints), "checkpoint")
    return f"{store.uri} is released; it keeps {kept} of {owner}."


def _confirmed(owner: str) -> bool:
    if not sys.stdin.isatty():
        return False
    return input(f"HEAD belongs to {owner}. Is it gone for good? [y/N] ").strip().lower() in ("y", "yes")

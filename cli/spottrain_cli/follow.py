"""Follows a job until it settles, through outages of the connection."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Final

from spottrain_cli import cluster
from spottrain_cli.errors import CommandError, NotFound, Unreachable
from spottrain_cli.jobs import FAILED, INVALID, SUCCEEDED, SUSPENDED, Job
from spottrain_cli.kubectl import Access

CODES: Final = {SUCCEEDED: 0, FAILED: 1, SUSPENDED: 1, INVALID: 1}
"""Exit codes by the phases in which nothing happens any more unless somebody acts."""


def ignore(error: CommandError) -> None:
    """Default of `lost`."""


def states(
    access: Access,
    ref: str,
    *,
    every: float,
    lost: Callable[[CommandError], None] = ignore,
    limit: float | None = None,
) -> Iterator[Job]:
    """Yields the job again and again, until `limit`.

    Args:
        access: The cluster and namespace.
        ref: NAME or NAMESPACE/NAME.
        every: Seconds between two looks.
        lost: Called once at the begin of each outage, which may last: the cluster is asked on.
        limit: Time of time.monotonic(); None: without end.

    Raises:
        NotFound: There is no such job, or it was deleted meanwhile.
        CommandError: At the first look, as `cluster.find`.
    """
    yield cluster.find(access, ref)
    down = False
    while True:
        left = every if limit is None else min(every, limit - time.monotonic())
        if left < 0:
            return
        time.sleep(left)
        try:
            job = cluster.find(access, ref)
        except NotFound as error:
            raise NotFound(f"{ref} was deleted meanwhile") from error
        except Unreachable as error:
            if not down:
                lost(error)
            down = True
        else:
            down = False
            yield job


def code_of(job: Job) -> int | None:
    """Returns the exit code of a job that has settled, else None."""
    return CODES.get(job.phase)

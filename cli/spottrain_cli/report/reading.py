"""Reads the series of steps of all attempts from a store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Final

from spottrain.contract import SERIES_PREFIX, is_own
from spottrain.core.series import Series
from spottrain.errors import RunError
from spottrain.storage.base import Store

from spottrain_cli.checkpoints.source import open_job
from spottrain_cli.errors import CommandError
from spottrain_cli.jobs import SELF, SYNC, Job

READERS: Final = 16
"""Objects read concurrently; each is smaller than 0.2 MB."""
LACK: Final = "loss and speed over the steps are not on the page"


def read_series(store: Store) -> list[Series]:
    """Returns what is at the store's URI. Raises RunError, or CommandError for an object that is none."""
    keys = [key for key in store.list(SERIES_PREFIX) if is_own(key)]
    with ThreadPoolExecutor(READERS) as pool:
        found = pool.map(lambda key: _read(store, key), keys)
        return [series for series in found if series is not None]


def _read(store: Store, key: str) -> Series | None:
    """Returns None for an object that was deleted meanwhile."""
    found = store.get(key)
    if found is None:
        return None
    try:
        return Series.from_bytes(found.body)
    except ValueError as error:
        raise CommandError(f"{store.uri.rstrip('/')}/{key} cannot be read: {error}") from error


def read_of_job(job: Job, endpoint: str) -> tuple[list[Series], str]:
    """Returns a job's series; where it cannot be read from here, none, and why the page lacks it."""
    if job.checkpoint.mode in (SELF, SYNC):
        return [], f"{LACK}: with checkpoint.mode {job.checkpoint.mode} the script's loop reports none"
    try:
        found = read_series(open_job(job, endpoint))
    except (RunError, CommandError) as error:
        return [], f"{LACK}, for they cannot be read from here: {error}"
    if not any(series.attempt.jobUID == job.uid for series in found):
        return [], f"{LACK}: no attempt has stored them at {job.checkpoint.uri} yet"
    return found, ""

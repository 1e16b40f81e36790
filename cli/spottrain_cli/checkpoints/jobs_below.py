"""`spottrain checkpoints jobs`: lists the checkpoint URIs below a prefix, or those of deleted jobs alone.

A URI is a folder with a HEAD object, at most two folders below the prefix: `<prefix>/<namespace>/<job>`. Its
job is deleted if no TrainingJob of the cluster uses that URI or has its UID. The store is read before the
cluster, so that a job that begins meanwhile is in the cluster's answer.

Of one place there are several spellings (`//`, `/` at the end, a path and its file: URI), so URIs are
compared by their parts.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from spottrain.checkpoint.head.state import Head, HeadState
from spottrain.cli.output import Answer
from spottrain.contract import HEAD_KEY
from spottrain.core.log_format import duration
from spottrain.core.uri import is_path
from spottrain.errors import CheckpointError, ConfigurationError, RunError
from spottrain.storage.base import Store

from spottrain_cli.figures import size, table

DEPTH: Final = 2
ASKING: Final = 16
"""Concurrent requests."""


Place = tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A URI with a HEAD object."""

    uri: str
    head: Head | None
    """None: it cannot be read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterJobs:
    """What the TrainingJobs of a cluster say about checkpoint URIs."""

    places: frozenset[Place]
    uids: frozenset[str]
    undecided: frozenset[Place]
    """Namespace and name of jobs whose URI the operator has not chosen yet."""

    def use(self, found: Found) -> bool:
        where = place(found.uri)
        if where in self.places or (found.head is not None and found.head.jobUID in self.uids):
            return True
        return where[-2:] in self.undecided


def place(uri: str) -> Place:
    """Returns the scheme and the parts of a URI or path, the same for all spellings that `open_store` takes
    for one place. On S3 a `//` within a prefix is a place of its own; here it counts as the same, so that
    nothing in use is taken for unused."""
    uri = uri.strip()
    if is_path(uri):
        return _folder(uri)
    try:
        parts = urlsplit(uri)
    except ValueError:  # such as a [ in place of a bucket
        return (uri,)
    if parts.scheme == "file":
        return _folder(unquote(parts.path))
    return (parts.scheme, parts.netloc, *filter(None, parts.path.split("/")))


def _folder(path: str) -> Place:
    return ("file", "", *filter(None, os.path.realpath(path).split("/")))


def find(store: Store) -> list[Found]:
    """Returns the URIs at the store's own and below it, sorted."""
    level, found = [""], list[Found]()
    with ThreadPoolExecutor(ASKING) as pool:
        for depth in range(DEPTH + 1):
            heads = dict(zip(level, pool.map(lambda folder: _look(store, folder), level), strict=True))
            found += [it for it in heads.values() if it is not None]
            if depth < DEPTH:
                above = [folder for folder, it in heads.items() if it is None]
                level = [folder for below in pool.map(store.folders, above) for folder in below]
    return sorted(found, key=lambda it: it.uri)


def _look(store: Store, folder: str) -> Found | None:
    body = store.get(folder + HEAD_KEY)
    if body is None:
        return None
    uri = f"{store.uri.rstrip('/')}/{folder}".rstrip("/")
    try:
        return Found(uri=uri, head=Head.from_json(body.body))
    except (CheckpointError, ConfigurationError):
        return Found(uri=uri, head=None)


def jobs_of(document: Any, source: str) -> ClusterJobs:
    """Parses kubectl's JSON: a list of TrainingJobs. Raises RunError."""
    items = document.get("items") if isinstance(document, dict) else None
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise RunError(
            f"{source} is not a list of TrainingJobs, as of kubectl get tj --all-namespaces -o json"
        )
    places, uids, undecided = set[Place](), set[str](), set[Place]()
    for item in items:
        meta = _part(item, "metadata")
        uids.add(str(meta.get("uid")))
        uri = _part(item, "spec", "checkpoint").get("uri") or _part(
            item, "status", "defaults", "checkpoint"
        ).get("uri")
        if uri:
            places.add(place(str(uri)))
        else:
            undecided.add((str(meta.get("namespace")), str(meta.get("name"))))
    return ClusterJobs(places=frozenset(places), uids=frozenset(uids), undecided=frozenset(undecided))


def _part(item: Any, *path: str) -> dict[str, Any]:
    for step in path:
        item = item.get(step) if isinstance(item, dict) else None
    return item if isinstance(item, dict) else {}


def listing(store: Store, found: Iterable[Found], *, now: float) -> Answer:
    found = list(found)
    facts = {"prefix": store.uri, "uris": [_facts(it) for it in found]}
    heading = ("URI", "STATE", "JOB", "UID", "CHECKPOINTS", "SIZE", "NEWEST")
    rows = [heading, *(_row(it, now) for it in found)]
    lines = table(rows) if len(rows) > 1 else [f"{store.uri}: no such URI at this prefix or below it"]
    return Answer(facts=facts, lines=lines)


def deleted_only(found: Iterable[Found], jobs: ClusterJobs) -> list[Found]:
    """Returns the URIs that no job of the cluster uses; those that are empty already are left out."""
    kept = (it for it in found if it.head is None or it.head.state is not HeadState.DELETED)
    return [it for it in kept if not jobs.use(it)]


def _facts(found: Found) -> dict[str, Any]:
    head = found.head
    if head is None:
        return {"uri": found.uri, "state": "unreadable"}
    names = ("state", "job", "jobUID", "attempt")
    facts = {"uri": found.uri} | {name: getattr(head, name) for name in names}
    newest = max((entry.time for entry in head.checkpoints), default=None)
    return facts | {
        "checkpoints": len(head.checkpoints),
        "bytes": sum(entry.bytes for entry in head.checkpoints),
        "newest": newest,
    }


def _row(found: Found, now: float) -> tuple[str, ...]:
    head = found.head
    if head is None:
        return (found.uri, "unreadable", "", "", "", "", "")
    times = [entry.time for entry in head.checkpoints]
    age = f"{duration(max(0.0, now - max(times)))} ago" if times else ""
    total = size(sum(entry.bytes for entry in head.checkpoints))
    return (found.uri, head.state, head.job, head.jobUID, str(len(times)), total, age)

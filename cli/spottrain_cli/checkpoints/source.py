"""Opens the store of a job's checkpoints, with the person's own credentials: of a JOB, or at a URI."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from spottrain.cli.reading import open_existing
from spottrain.core.uri import folder_of
from spottrain.storage.base import Store
from spottrain.storage.open import open_store

from spottrain_cli import cluster
from spottrain_cli.errors import CommandError, NotFound, Unreachable, UsageError
from spottrain_cli.jobs import SELF, Job
from spottrain_cli.kubectl import Access


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    store: Store
    job: Job | None = None
    """None: a URI was given."""


def is_uri(text: str) -> bool:
    """Whether it is a URI or a path; else it is a job's name."""
    return "://" in text or text.strip("\"' \t\n").startswith(("/", ".", "~"))


def open_source(text: str, endpoint: str, access: Access) -> Source:
    """Opens the store at a URI, or that of a job. `endpoint`: in place of the job's.

    Raises:
        NotFound: There is no such job, or it has no checkpoints.
        CommandError: As `kubectl.run`; the job's checkpoints cannot be reached from here.
        RunError: As `open_store`.
    """
    if is_uri(text):
        return Source(store=open_existing(text, endpoint or None))
    try:
        job = cluster.find(access, text)
    except CommandError as error:
        if Path(text).is_dir():
            raise type(error)(f"{error}; for the folder of that name write ./{text}") from None
        raise
    return Source(store=open_job(job, endpoint), job=job)


def open_job(job: Job, endpoint: str = "") -> Store:
    """Opens the store of a job's checkpoints. Raises as `open_source`."""
    _require_readable(job)
    endpoint = endpoint or job.checkpoint.endpoint
    if endpoint and not _resolves(endpoint):
        raise Unreachable(unknown_here(job, endpoint))
    style, key = job.checkpoint.path_style, job.checkpoint.kms_key
    return open_store(job.checkpoint.uri, endpoint or None, path_style=style, kms_key=key or None)


def _require_readable(job: Job) -> None:
    if not job.checkpoint.uri:
        own = job.checkpoint.mode == SELF
        why = "its image saves by itself (checkpoint.mode Self)" if own else "it has none"
        raise NotFound(f"job {job.ref} has no checkpoint URI: {why}")
    folder = folder_of(job.checkpoint.uri)
    if folder is not None and not os.path.isdir(folder):
        raise UsageError(
            f"job {job.ref} keeps its checkpoints in {folder}, a volume of its pods: mount it on this "
            "machine, and give its folder in place of the job's name"
        )


def _resolves(endpoint: str) -> bool:
    host = urlsplit(endpoint).hostname
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError):
        return False
    return True


def unknown_here(job: Job, endpoint: str) -> str:
    """Returns what to do about an endpoint whose host has no address here. Pure."""
    parts = urlsplit(endpoint)
    names = (parts.hostname or "").split(".")
    ours = len(names) < 3 or names[2:] in (["svc"], ["svc", "cluster", "local"])
    if not ours:
        return (
            f"the endpoint {endpoint} of job {job.ref} has no address on this machine: connect to its "
            "network, or give one that has, by --endpoint URL"
        )
    service, namespace = names[0], names[1] if len(names) > 1 else job.namespace
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return (
        f"the endpoint {endpoint} of job {job.ref} has an address in its cluster alone: run `kubectl -n "
        f"{namespace} port-forward service/{service} 9000:{port}`, and give --endpoint "
        f"{parts.scheme}://localhost:9000"
    )

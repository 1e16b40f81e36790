"""Reads and changes TrainingJobs of a cluster, by kubectl."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from spottrain_cli import jobs, kubectl
from spottrain_cli.errors import CommandError, NotFound
from spottrain_cli.jobs import Job
from spottrain_cli.kubectl import RESOURCE, Access

PATH: Final = "/apis/spottrain.io/v1alpha1"
IN_POD: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


def find(access: Access, ref: str) -> Job:
    """Returns the job that NAME or NAMESPACE/NAME names.

    Raises:
        NotFound: There is none; the message names those that are spelled alike.
        CommandError: As `kubectl.run`.
    """
    access, name = access.named(ref)
    try:
        return jobs.job(kubectl.get(access, name), "kubectl's answer")
    except NotFound as error:
        raise no_such(access, name) if f'"{name}"' in str(error) else error from None


def no_such(access: Access, name: str) -> NotFound:
    there: list[str] = []
    with contextlib.suppress(CommandError):
        said = kubectl.run(access, "get", "--output=name", RESOURCE).decode()
        there = [line.rpartition("/")[2] for line in said.splitlines()]
    return NotFound(_no_such(name, access.place, there))


def _no_such(name: str, place: str, there: list[str]) -> str:
    words = f"there is no job {name!r} in {place}"
    if alike := get_close_matches(name, there, n=3, cutoff=0.6):
        return f"{words}; did you mean {' or '.join(alike)}?"
    if not there:
        return f"{words}, which has no job at all: `spottrain list -A` shows those of all namespaces"
    return f"{words}: `spottrain list` shows those that are there"


def all_jobs(access: Access) -> list[Job]:
    """Returns the jobs of the namespace, or of all, the newest first. Raises CommandError."""
    found = jobs.jobs(_list(access), "kubectl's answer")
    if not found and not access.all_namespaces:
        _check_namespace(access)
    return sorted(found, key=lambda job: (job.created is not None, job.created, job.ref), reverse=True)


def _list(access: Access) -> Any:
    """Reads the API server's own answer: `kubectl get` takes 2 s of processor time for 1,000 jobs."""
    where = "" if access.all_namespaces else f"/namespaces/{namespace(access)}"
    raw = kubectl.run(
        replace(access, namespace="", all_namespaces=False), "get", "--raw", f"{PATH}{where}/trainingjobs"
    )
    return kubectl.decoded(raw, "the API server's answer")


def namespace(access: Access) -> str:
    """Returns the namespace of kubectl's context, or of the pod that this is, where none is given."""
    if access.namespace:
        return access.namespace
    words = ("config", "view", "--minify", "--output=jsonpath={..namespace}")
    try:
        return kubectl.run(access, *words).decode().strip() or "default"
    except CommandError:  # the next request says what is wrong, unless this is a pod, as for kubectl itself
        return IN_POD.read_text().strip() if IN_POD.is_file() else "default"


def _check_namespace(access: Access) -> None:
    """Raises NotFound where the namespace does not exist; one may be allowed to read jobs, and not that."""
    try:
        kubectl.run(access, "get", "namespace", namespace(access), "--output=name")
    except NotFound:
        raise
    except CommandError:
        return


def patch(access: Access, ref: str, change: dict[str, Any]) -> Job:
    """Merges a change into a job. Returns the changed job. Raises as `find`."""
    access, name = access.named(ref)
    words = ("patch", "--type=merge", f"--patch={json.dumps(change)}", "--output=json", "--", RESOURCE, name)
    try:
        said = kubectl.run(access, *words, shown=f"kubectl patch {RESOURCE} {name}")
    except NotFound as error:
        raise no_such(access, name) if f'"{name}"' in str(error) else error from None
    return jobs.job(kubectl.decoded(said, "kubectl's answer"), "kubectl's answer")

"""A Python client for notebooks and pipelines, on the code of the command line.

    from spottrain_cli import Client

    client = Client(namespace="vision")
    job = client.submit("job.yaml")          # or a dictionary
    for line in job.logs(follow=True):       # over interruptions, until it has ended
        print(line)
    result = job.result()                    # raises JobFailed where there is none
    print(result, result.loss)
    result.download("model")                 # for from_pretrained("model")

It reads the cluster by the user's own kubectl. Every error is a `spottrain_cli.errors.CommandError`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

from spottrain.core.log_format import counted
from spottrain.errors import RunError

from spottrain_cli import cluster, errors, follow, steering
from spottrain_cli.errors import CommandError
from spottrain_cli.figures import dollars
from spottrain_cli.jobs import SUCCEEDED, Job
from spottrain_cli.kubectl import Access

POLL_SECONDS: Final = 2.0


class JobFailed(CommandError):
    """The job has settled without a result: it failed, was stopped, or is invalid."""

    def __init__(self, job: Job) -> None:
        condition = job.condition(job.phase) or job.condition("Accepted")
        why = f": {condition.message}" if condition is not None and condition.message else ""
        super().__init__(f"{job.ref} is {job.phase}{why}")
        self.job = job


class WaitTimeout(CommandError):
    """The job has not settled in time; it goes on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What a job that succeeded has left. None: unknown."""

    job: Job = field(repr=False)
    """As it was when it had succeeded."""
    step: int | None
    """Optimizer steps done, in all attempts."""
    loss: float | None
    """The last one reported."""
    checkpoint_uri: str
    """Of its checkpoints; "" where there are none."""
    output_uri: str
    """Of the final weights; "" where a script writes its own."""
    spent: Decimal | None
    """US dollars; None where a price is unknown."""
    interruptions: int
    """How often it was interrupted."""
    _access: Access = field(repr=False)

    def __str__(self) -> str:
        figures = [f"{self.job.ref}: {self.job.phase}"]
        figures += [f"step {self.step:,}"] if self.step is not None else []
        figures += [f"loss {self.loss:.4g}"] if self.loss is not None else []
        figures += [dollars(self.spent)] if self.spent is not None else []
        figures += [counted(self.interruptions, "interruption")]
        return f"{', '.join(figures)}; checkpoints at {self.checkpoint_uri or 'no URI'}"

    def download(self, to: str | os.PathLike[str], *, endpoint: str = "") -> Path:
        """Writes the model to a folder that from_pretrained reads, as `spottrain checkpoints download`.

        Args:
            to: A folder: new, empty, or of the same download.
            endpoint: Of an S3-compatible server, in place of the job's.

        Raises:
            CommandError: The store cannot be read from here, or the folder has other files.
        """
        from spottrain_cli.checkpoints import downloading
        from spottrain_cli.checkpoints.source import open_source

        with _translated():
            downloading.run(open_source(self.job.ref, endpoint, self._access), "", Path(to), "safetensors")
        return Path(to)


class JobHandle:
    """A job in the cluster."""

    def __init__(self, access: Access, ref: str) -> None:
        self._access = access
        self.ref = ref
        """NAMESPACE/NAME."""

    def __repr__(self) -> str:
        return f"JobHandle({self.ref!r})"

    def status(self) -> Job:
        """Returns the job as it is now. Raises CommandError."""
        return cluster.find(self._access, self.ref)

    def wait(self, timeout: float | None = None) -> Job:
        """Returns the job once nothing happens any more without somebody's doing, whatever its phase is.

        A connection that is lost meanwhile is tried again.

        Args:
            timeout: Seconds; None: without limit.

        Raises:
            WaitTimeout: The job has not settled in time.
            NotFound: There is no such job, or it was deleted meanwhile.
        """
        give_up = None if timeout is None else time.monotonic() + timeout
        for job in follow.states(self._access, self.ref, every=POLL_SECONDS, limit=give_up):
            if follow.code_of(job) is not None:
                return job
        raise WaitTimeout(f"{self.ref} has not ended within {timeout:g} s")

    def result(self, timeout: float | None = None) -> Result:
        """Waits, and returns what the job has left.

        Raises:
            JobFailed: It failed, was stopped, or is invalid.
            WaitTimeout, NotFound: As `wait`.
        """
        job = self.wait(timeout)
        if job.phase != SUCCEEDED:
            raise JobFailed(job)
        return Result(
            job=job,
            step=job.progress.step,
            loss=None if job.progress.loss is None else float(job.progress.loss),
            checkpoint_uri=job.checkpoint.uri,
            output_uri=job.output,
            spent=job.cost.spent if job.cost is not None and job.cost.known else None,
            interruptions=job.interruptions,
            _access=self._access,
        )

    def logs(
        self, *, follow: bool = False, attempt: int | None = None, rank: int | None = None, endpoint: str = ""
    ) -> Iterator[str]:
        """Yields lines of all attempts and ranks in order, as `spottrain logs`, without their line ends.

        What cannot be shown is said on standard error.

        Raises:
            NotFound: There is nothing of what is wanted.
            CommandError: The cluster or the store cannot be reached.
        """
        from spottrain_cli import logs
        from spottrain_cli.log_sources import Wanted

        wanted = Wanted(attempt=attempt, rank=rank)
        with _translated():
            for line in logs.read(
                self._access, self.ref, wanted, following=follow, endpoint=endpoint, say=_say
            ):
                yield line.body.decode(errors="replace").rstrip("\r\n")

    def stop(self) -> None:
        """Saves a checkpoint and ends all pods, until `resume`. Raises CommandError."""
        steering.stop(self._access, self.ref)

    def resume(self) -> None:
        """Continues from the last checkpoint. Raises CommandError."""
        steering.resume(self._access, self.ref)

    def delete(self) -> None:
        """Deletes the job, without asking. Checkpoints stay, unless its deletionPolicy is Delete."""
        steering.delete(self._access, self.status())


class Client:
    """Jobs of one namespace.

    Args:
        namespace: Default: that of kubectl's context.
        context: kubectl's context. Default: the current one.
        kubeconfig: kubectl's configuration file.
    """

    def __init__(self, namespace: str = "", context: str = "", kubeconfig: str = "") -> None:
        self._access = Access(namespace=namespace, context=context, kubeconfig=kubeconfig)

    def submit(self, manifest: Mapping[str, Any] | str | os.PathLike[str]) -> JobHandle:
        """Creates a TrainingJob from a manifest: a dictionary, or a YAML or JSON file.

        Raises:
            UsageError: The manifest is not valid.
            CommandError: There is a job of this name, or the cluster cannot be reached.
        """
        from spottrain_cli.submit import journey

        if isinstance(manifest, Mapping):
            body = dict(manifest)
        else:
            body = journey.of_file(os.fspath(manifest)).manifest
        made = journey.create(self._access, body)["metadata"]
        return self.job(f"{made['namespace']}/{made['name']}")

    def job(self, name: str) -> JobHandle:
        """Returns a handle of the job NAME or NAMESPACE/NAME, which need not exist yet."""
        space, slash, _ = name.rpartition("/")
        access = Access(
            namespace=space if slash else self._access.namespace,
            context=self._access.context,
            kubeconfig=self._access.kubeconfig,
        )
        return JobHandle(access, name if slash else f"{cluster.namespace(access)}/{name}")

    def jobs(self) -> list[Job]:
        """Returns the jobs of the namespace, the newest first. Raises CommandError."""
        return cluster.all_jobs(self._access)


def _say(sentence: str) -> None:
    print(f"spottrain: {sentence}", file=sys.stderr)


@contextmanager
def _translated() -> Iterator[None]:
    """Has errors of a store be errors of the command line."""
    try:
        yield
    except RunError as error:
        kinds = (errors.UsageError, errors.NotFound, errors.Unreachable)
        code = errors.exit_code_of(error)
        kind = next((each for each in kinds if each.exit_code == code), CommandError)
        raise kind(str(error)) from error

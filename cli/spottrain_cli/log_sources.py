"""Where the output of each attempt and rank of a job is: in pods that are there, else in the store. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spottrain_cli.jobs import SELF, SYNC, Job
from spottrain_cli.pods import ATTEMPT_LABEL, RANK_LABEL, trainer_container, trainer_state

WORKER = "worker"
Stored = Mapping[tuple[int, int], Sequence[str]]
"""Keys of the parts that log capture has stored, in order, by attempt and rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pod:
    """A trainer's pod. It prints for all ranks of its worker."""

    name: str
    attempt: int
    worker: int
    container: str
    started: bool
    """Whether its trainer has run."""
    over: bool
    """Whether it prints no more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """Which output; None: all."""

    attempt: int | None = None
    rank: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Output of one rank in the store, or of one worker in its pod."""

    attempt: int
    number: int
    """Of the rank, or of the worker."""
    pod: Pod | None = None
    parts: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{WORKER if self.pod is not None else 'rank'} {self.number}"


def pods(document: Any) -> list[Pod]:
    """Returns the trainers' pods in kubectl's list."""
    return [_pod(item) for item in document.get("items") or []]


def _pod(item: Mapping[str, Any]) -> Pod:
    metadata, state = item["metadata"], trainer_state(item)
    phase = (item.get("status") or {}).get("phase")
    over = "terminated" in state or phase in ("Succeeded", "Failed")
    return Pod(
        name=metadata["name"],
        attempt=int(metadata["labels"][ATTEMPT_LABEL]),
        worker=int(metadata["labels"][RANK_LABEL]),
        container=trainer_container(item),
        started="running" in state or "terminated" in state,
        over=over,
    )


def sources(job: Job, stored: Stored, pods: Iterable[Pod], wanted: Wanted) -> list[Source]:
    """Returns where to read what is wanted, by attempt, and by rank or worker.

    A pod has the last lines of a trainer that was killed, which the store lacks. Where several ranks share a
    pod, the store alone tells them apart.
    """
    there = [pod for pod in pods if pod.started]
    numbers = sorted({attempt for attempt, _ in stored} | {pod.attempt for pod in there})
    chosen = (number for number in numbers if wanted.attempt in (None, number))
    return [source for number in chosen for source in _of_attempt(job, number, stored, there, wanted.rank)]


def _of_attempt(
    job: Job, attempt: int, stored: Stored, pods: Iterable[Pod], rank: int | None
) -> Iterator[Source]:
    own = sorted((pod for pod in pods if pod.attempt == attempt), key=lambda pod: pod.worker)
    parts = {number: keys for (of, number), keys in sorted(stored.items()) if of == attempt}
    shared = rank is not None and job.gpus_per_worker > 1 and all(pod.over for pod in own)
    if parts and (not own or shared):
        for number, keys in parts.items():
            if rank in (None, number):
                yield Source(attempt=attempt, number=number, parts=tuple(keys))
        return
    worker = None if rank is None else rank // max(1, job.gpus_per_worker)
    for pod in own:
        if worker in (None, pod.worker):
            yield Source(attempt=attempt, number=pod.worker, pod=pod)


def startable(
    found: Iterable[Source], shown: Collection[tuple[int, str]], running: Iterable[tuple[int, str]]
) -> list[Source]:
    """Returns the sources to begin with now: new ones, of no later attempt than those that run.

    Pods print at the same time, and ranks are read from the store one after the other. An attempt that was
    shown from its pods is not shown again from the store.
    """
    from_pods = {attempt for attempt, name in shown if name.startswith(WORKER)}
    going = {attempt for attempt, _ in running}
    new = [
        each
        for each in found
        if (each.attempt, each.name) not in shown and (each.pod is not None or each.attempt not in from_pods)
    ]
    first = min(going or {each.attempt for each in new}, default=None)
    ready = [each for each in new if each.attempt == first]
    if any(each.pod is None for each in ready):
        return [] if going else ready[:1]
    return ready


def history(found: Sequence[Source]) -> list[Source]:
    """Returns the sources of the attempts before the first one that still prints."""
    live = min((each.attempt for each in found if each.pod is not None and not each.pod.over), default=None)
    return [each for each in found if live is None or each.attempt < live]


def missing(job: Job, found: Sequence[Source], wanted: Wanted, problem: str = "") -> str:
    """Says of which attempts that are over nothing is there, and why; "" where all are.

    `problem`: why the store cannot be read from here.
    """
    there = {each.attempt for each in found}
    over = [each.number for each in job.attempts if each.startTime is not None and each.endTime is not None]
    gone = [str(each) for each in over if each not in there and wanted.attempt in (None, each)]
    if not gone:
        return ""
    what = f"attempt {gone[0]}" if len(gone) == 1 else f"attempts {', '.join(gone)}"
    why = f"the store cannot be read from here: {problem}" if problem else unstored(job)
    return f"there are no logs of {what}: the pods are gone, and {why}"


def unstored(job: Job) -> str:
    """Says why the store has no logs of a job."""
    if job.checkpoint.mode in (SELF, SYNC):
        return f"with checkpoint.mode {job.checkpoint.mode} nothing stores what they printed"
    if not job.checkpoint.keeps_logs:
        return "checkpoint.logs: None stores none"
    return "the store has none of them"


def nothing(job: Job, found: Sequence[Source], wanted: Wanted) -> str:
    """Says that there is nothing of what is wanted, and what there is."""
    named = [("attempt", wanted.attempt), ("rank", wanted.rank)]
    of = ", ".join(f"{name} {value}" for name, value in named if value is not None)
    if found:
        there = ", ".join(f"attempt {each.attempt} {each.name}" for each in found)
        return f"there are no logs of {of} of {job.ref}; there are logs of {there}"
    if job.current is None or job.current.startTime is None:
        return (
            f"{job.ref} has printed nothing: no pod of it has run yet; `spottrain status {job.ref}` says why"
        )
    if job.current.endTime is None:
        return f"{job.ref} has printed nothing yet: its pod starts; --follow waits for it"
    return f"there are no logs of {job.ref}: its pods are gone, and {unstored(job)}"


class Overlap:
    """Skips at the begin of a stream that was opened again what the stream before has had already.

    Args:
        had: The last lines of the stream before.
    """

    def __init__(self, had: Sequence[bytes]) -> None:
        self._had = had
        self._starts: Sequence[int] | None = range(len(had)) if had else None
        self._held: list[bytes] = []
        self._same = 0
        """How many of the held lines are the last ones that were had."""

    def take(self, line: bytes) -> list[bytes]:
        """Returns the lines that are new; none as long as that is not certain."""
        if self._starts is None:
            return [line]
        at = len(self._held)
        self._held.append(line)
        alike = [start for start in self._starts if self._had[start + at] == line]
        if any(start + at + 1 == len(self._had) for start in alike):
            self._same = at + 1
        self._starts = [start for start in alike if start + at + 1 < len(self._had)] or None
        return [] if self._starts is not None else self._held[self._same :]

    def rest(self) -> list[bytes]:
        """Returns the lines that are still held, at the end of the stream."""
        return self._held[self._same :] if self._starts is not None else []

    @property
    def gap(self) -> bool:
        """Whether lines between both streams may be missing."""
        return bool(self._had) and bool(self._held) and self._starts is None and not self._same

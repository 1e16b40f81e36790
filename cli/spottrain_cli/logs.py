"""Reads what all attempts and ranks of a job have printed, in order, and follows what they print."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

from spottrain.contract import LOGS_PREFIX, part_of_log
from spottrain.errors import RunError
from spottrain.storage.base import Store

from spottrain_cli import cluster, follow, kubectl, log_sources
from spottrain_cli.errors import CommandError, NotFound, Unreachable
from spottrain_cli.jobs import Job
from spottrain_cli.kubectl import Access
from spottrain_cli.log_sources import Overlap, Pod, Source, Stored, Wanted
from spottrain_cli.pods import JOB_UID_LABEL, TRAINERS

POLL_SECONDS: Final = 2.0
TAIL_LINES: Final = 5000
"""How many lines of a stream that broke are asked for again, to find where it goes on."""
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """`body` has its line end."""

    attempt: int
    source: str
    """Such as `worker 0`; "" where the attempt has one source alone."""
    body: bytes


def read(
    access: Access, ref: str, wanted: Wanted, *, following: bool, endpoint: str = "", say: Say
) -> Iterator[Line]:
    """Yields the lines of attempts and ranks in order.

    Args:
        access: The cluster and namespace.
        ref: NAME or NAMESPACE/NAME.
        wanted: Which attempt and rank.
        following: Whether to go on, over interruptions, until the job has settled.
        endpoint: Of the store, in place of the job's.
        say: Gets a sentence for what cannot be shown, and for outages.

    Raises:
        NotFound: There is no such job, or nothing of what is wanted.
        CommandError: As `cluster.find`.
        RunError: The store cannot be read, and there is no pod.
    """
    job = cluster.find(access, ref)
    reader = Reader(access, job, endpoint, say)
    found = reader.sources(job, wanted)
    if not found and not following:
        raise reader.problem or NotFound(log_sources.nothing(job, reader.sources(job, Wanted()), wanted))
    if words := log_sources.missing(job, found, wanted, str(reader.problem or "")):
        say(words)
    past = log_sources.history(found) if following else found
    for source in past:
        yield from reader.lines(source, alone=_alone(source, found))
    if following:
        shown = {(source.attempt, source.name) for source in past}
        yield from Follower(reader, wanted, shown, say).lines(access, ref)


def _alone(source: Source, among: Sequence[Source]) -> bool:
    return sum(each.attempt == source.attempt for each in among) == 1


class Reader:
    """Reads sources of one job."""

    def __init__(self, access: Access, job: Job, endpoint: str, say: Say) -> None:
        self._access = access.named(job.ref)[0]
        self._selector = f"{TRAINERS},{JOB_UID_LABEL}={job.uid}"
        self._say = say
        self._listed: tuple[int, str] | None = None
        self._parts: Stored = {}
        self.problem: CommandError | RunError | None = None
        """Why the store cannot be read from here."""
        self._store = self._open(job, endpoint) if job.checkpoint.stores_logs else None

    def _open(self, job: Job, endpoint: str) -> Store | None:
        from spottrain_cli.checkpoints.source import open_job

        try:
            return open_job(job, endpoint)
        except (CommandError, RunError) as error:
            self._give_up_store(error)
            return None

    def _give_up_store(self, error: CommandError | RunError) -> None:
        self.problem, self._store = error, None

    def sources(self, job: Job, wanted: Wanted) -> list[Source]:
        """Returns where to read. The store is listed again once the attempt or the phase is another one."""
        pods = self._pods()  # first: a pod that goes has stored its lines before
        if self._listed != (job.attempt, job.phase):
            self._listed, self._parts = (job.attempt, job.phase), self._stored()
        return log_sources.sources(job, self._parts, pods, wanted)

    def _pods(self) -> list[Pod]:
        try:
            said = kubectl.run(self._access, "get", "pods", f"--selector={self._selector}", "--output=json")
        except Unreachable as error:
            self._say(str(error))
            return []
        return log_sources.pods(kubectl.decoded(said, "kubectl's answer"))

    def _stored(self) -> Stored:
        by_rank: dict[tuple[int, int], dict[int, str]] = {}
        try:
            keys = self._store.list(LOGS_PREFIX) if self._store is not None else []
        except RunError as error:
            self._give_up_store(error)
            return {}
        for key in keys:
            if (part := part_of_log(key)) is not None:
                by_rank.setdefault(part[:2], {})[part[2]] = key
        return {each: [parts[number] for number in sorted(parts)] for each, parts in by_rank.items()}

    def lines(self, source: Source, *, alone: bool) -> Iterator[Line]:
        """Yields what is there of a source now."""
        try:
            for body in self.of(source, following=False):
                yield Line(attempt=source.attempt, source="" if alone else source.name, body=body)
        except NotFound:  # since the pods were listed
            self._say(f"the pod of attempt {source.attempt}, {source.name}, is gone, and so are its logs")

    def of(self, source: Source, *, following: bool) -> Iterator[bytes]:
        """Returns the lines of a source; `following`: until it has ended. Raises CommandError or RunError."""
        if source.pod is None:
            return self._of_store(source.parts)
        return self.until_over(source.pod) if following else self._of_pod(source.pod)

    def _of_store(self, parts: Sequence[str]) -> Iterator[bytes]:
        begun = b""
        for key in parts:
            found = self._store.get(key) if self._store is not None else None
            *whole, begun = (begun + (found.body if found else b"[a part is missing]\n")).split(b"\n")
            yield from (line + b"\n" for line in whole)
        if begun:
            yield begun + b"\n"

    def _of_pod(self, pod: Pod, *flags: str) -> Iterator[bytes]:
        yield from kubectl.stream(self._access, "logs", pod.name, f"--container={pod.container}", *flags)

    def until_over(self, pod: Pod) -> Iterator[bytes]:
        """Yields a pod's lines as they come, through broken connections, and once more after its end."""
        had: deque[bytes] = deque(maxlen=TAIL_LINES)
        over, told = pod.over, False
        while True:
            overlap = Overlap([*had])
            flags = [f"--tail={TAIL_LINES}"] if had else []
            flags += [] if over else ["--follow"]
            try:
                for line in chain.from_iterable(map(overlap.take, self._of_pod(pod, *flags))):
                    told = False
                    had.append(line)
                    yield line
                yield from overlap.rest()
            except NotFound:
                return
            except Unreachable as error:
                if not told:
                    self._say(str(error))
                told = True
            if overlap.gap:
                self._say(f"lines of attempt {pod.attempt} may be missing here")
            if over:
                return
            over = self._is_over(pod)
            if not over:
                time.sleep(POLL_SECONDS)

    def _is_over(self, pod: Pod) -> bool:
        try:
            said = kubectl.run(self._access, "get", "pod", pod.name, "--output=json")
        except NotFound:
            return True
        except CommandError:
            return False
        return log_sources.pods({"items": [kubectl.decoded(said, "kubectl's answer")]})[0].over


class Follower:
    """Follows all attempts of a job, one after the other; of one attempt, all sources at once."""

    def __init__(self, reader: Reader, wanted: Wanted, shown: set[tuple[int, str]], say: Say) -> None:
        self._reader = reader
        self._wanted = wanted
        self._say = say
        self._shown = shown
        """Attempts and names of the sources that were begun."""
        self._open: dict[tuple[int, str], Source] = {}
        """Those that have not ended."""
        self._lines: queue.Queue[tuple[Source, bytes | None]] = queue.Queue(maxsize=10_000)
        """None: the source has ended."""

    def lines(self, access: Access, ref: str) -> Iterator[Line]:
        """Yields lines until the job has settled and all sources have ended."""
        states = follow.states(access, ref, every=0, lost=lambda error: self._say(str(error)))
        for job in states:
            for source in log_sources.startable(
                self._reader.sources(job, self._wanted), self._shown, self._open
            ):
                self._begin(source)
            if follow.code_of(job) is not None and not self._open:
                self._say(f"{job.ref} is {job.phase}")
                return
            yield from self._drain(POLL_SECONDS)

    def _begin(self, source: Source) -> None:
        self._shown.add((source.attempt, source.name))
        self._open[source.attempt, source.name] = source
        threading.Thread(target=self._pump, args=[source], daemon=True).start()

    def _pump(self, source: Source) -> None:
        try:
            for body in self._reader.of(source, following=True):
                self._lines.put((source, body))
        except (CommandError, RunError) as error:
            self._say(f"attempt {source.attempt}, {source.name}: {error}")
        finally:
            self._lines.put((source, None))

    def _drain(self, seconds: float) -> Iterator[Line]:
        """Yields what comes within `seconds`."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            try:
                source, body = self._lines.get(timeout=left)
            except queue.Empty:
                return
            if body is None:
                del self._open[source.attempt, source.name]
                if not self._open:
                    return
                continue
            several = sum(attempt == source.attempt for attempt, _ in self._shown) > 1
            yield Line(attempt=source.attempt, source=source.name if several else "", body=body)

"""Reads what all attempts and ranks of a job have printed, in order, and follows what they print."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from spottrain.contract import LOGS_PREFIX, part_of_log
from spottrain.errors import RunError
from spottrain.storage.base import Store

from spottrain_cli import cluster, follow, kubectl, log_sources
from spottrain_cli.errors import CommandError, NotFound, Unreachable
from spottrain_cli.jobs import Job
from spottrain_cli.kubectl import Access
from spottrain_cli.log_sources import Overlap, Pod, Source, Stored, Wanted

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
    if words := log_sources.missing(job, found, wanted):
        say(words)
    if not following:
        for source in found:
            yield from reader.lines(source, alone=_alone(source, found))
        return
    shown = set[tuple[int, str]]()
    for job in follow.states(access, ref, every=POLL_SECONDS, lost=lambda error: say(str(error))):
        for sources in _by_attempt(reader.sources(job, wanted), shown):
            shown |= {(each.attempt, each.name) for each in sources}
            yield from reader.follow(sources)
        if follow.code_of(job) is not None:
            say(f"{job.ref} is {job.phase}")
            return


def _alone(source: Source, among: Sequence[Source]) -> bool:
    return sum(each.attempt == source.attempt for each in among) == 1


def _by_attempt(found: Sequence[Source], shown: set[tuple[int, str]]) -> list[list[Source]]:
    new = [each for each in found if (each.attempt, each.name) not in shown]
    return [[each for each in new if each.attempt == number] for number in sorted({it.attempt for it in new})]


class Reader:
    """Reads sources of one job."""

    def __init__(self, access: Access, job: Job, endpoint: str, say: Say) -> None:
        self._access = access.named(job.ref)[0]
        self._selector = f"{cluster.POD_SELECTOR},spottrain.io/job-uid={job.uid}"
        self._say = say
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
        self._say(f"the logs of pods that are gone cannot be read from here: {error}")

    def sources(self, job: Job, wanted: Wanted) -> list[Source]:
        return log_sources.sources(job, self._stored(), self._pods(), wanted)

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

    # --- one source -----------------------------------------------------------------------------------------
    def lines(self, source: Source, *, alone: bool) -> Iterator[Line]:
        """Yields what is there of a source now."""
        name = "" if alone else source.name
        found = self._of_store(source.parts) if source.pod is None else self._of_pod(source.pod)
        for body in found:
            yield Line(attempt=source.attempt, source=name, body=body)

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

    # --- what is printed from now on ------------------------------------------------------------------------
    def follow(self, sources: Sequence[Source]) -> Iterator[Line]:
        """Yields the lines of one attempt's sources as they come, until all of them have ended."""
        pods = [each for each in sources if each.pod is not None]
        for source in (each for each in sources if each.pod is None):
            yield from self.lines(source, alone=len(sources) == 1)
        lines: queue.Queue[Line | None] = queue.Queue(maxsize=10_000)
        for source in pods:
            threading.Thread(
                target=self._follow_pod, args=[source, len(sources) == 1, lines], daemon=True
            ).start()
        ended = 0
        while ended < len(pods):
            line = lines.get()
            if line is None:
                ended += 1
            else:
                yield line

    def _follow_pod(self, source: Source, alone: bool, out: queue.Queue[Line | None]) -> None:
        assert source.pod is not None
        name = "" if alone else source.name
        had: deque[bytes] = deque(maxlen=TAIL_LINES)
        try:
            for body in self._until_over(source.pod, had):
                had.append(body)
                out.put(Line(attempt=source.attempt, source=name, body=body))
        except (CommandError, OSError) as error:
            self._say(f"attempt {source.attempt}, {source.name}: {error}")
        finally:
            out.put(None)

    def _until_over(self, pod: Pod, had: deque[bytes]) -> Iterator[bytes]:
        """Yields a pod's lines, through broken connections, and once more after its end."""
        over, told = pod.over, False
        while True:
            overlap = Overlap([*had])
            tail = [f"--tail={TAIL_LINES}"] if had else []
            try:
                for line in self._of_pod(pod, *tail, *([] if over else ["--follow"])):
                    yield from overlap.take(line)
                    told = False
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

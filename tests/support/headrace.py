"""Two processes with the real HeadOwner race for one HEAD on the real S3 server, through the fault proxy.

Used by test_head_race.py and head_races.py of tests/s3. What happened is judged from the proxy's record of
what landed at the server, by the same rules as in the model (`headrules.py`), not from what the racers say;
what they say is then held against it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from typing import Final

from spottrain.checkpoint.head.owner import HeadClient, HeadOwner, Identity
from spottrain.checkpoint.head.state import Entry, Head
from spottrain.contract import HEAD_KEY
from spottrain.errors import RunError
from spottrain.storage.s3 import S3Store

from tests.support.faultproxy import AMBIGUOUS, Exchange, Fault, FaultProxy, Landing, Plan, Request, Treatment
from tests.support.headrules import Violation, check_change
from tests.support.s3server import S3Server

HEAD_TIMEOUT: Final = 0.3
FASTER: Final = 0.1
"""Pauses of the racers are this much of the real ones."""
SAVES: Final = 3
FAULTS: Final = {
    Fault.NONE: 50,
    Fault.TWICE: 12,
    Fault.REPLY_LOST: 10,
    Fault.REQUEST_LATE: 8,
    Fault.ERROR_AFTER: 5,
    Fault.REQUEST_LOST: 5,
    Fault.ERROR_503: 4,
    Fault.ERROR_500: 2,
    Fault.REPLY_CUT: 2,
    Fault.REPLY_HANGS: 1,
    Fault.REPLY_STALLS: 1,
}
"""Weights, for requests of HEAD; all else passes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    attempt: int
    delay: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Finish:
    how: str
    """released, or the error's name and sentence."""
    committed: tuple[str, ...]
    """Keys that the racer holds to be committed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    contended: bool
    ambiguous: int
    unreadable: bool
    stale: int
    """Changes of HEAD that break a rule, and beliefs of a racer that the record does not bear out."""
    finishes: tuple[Finish, ...]
    problems: tuple[str, ...]


def plan(seed: str) -> Plan:
    def treat(request: Request) -> Treatment:
        if not request.path.split("?")[0].endswith(f"/{HEAD_KEY}"):
            return Treatment()
        chance = random.Random(f"{seed}/{request.client}/{request.number}")
        fault = chance.choices(list(FAULTS), list(FAULTS.values()))[0]
        return Treatment(fault=fault, delay=chance.uniform(0, 0.012), late=chance.uniform(0, 0.12))

    return treat


# --- the racer's process ----------------------------------------------------------------------------
def racer(pipe: Connection, bucket: str, prefix: str, endpoint: str) -> None:
    store = S3Store(bucket, prefix, endpoint=endpoint, head_timeout=HEAD_TIMEOUT)
    while (start := pipe.recv()) is not None:
        pipe.send(_race(start, store))


def _race(start: Start, store: S3Store) -> Finish:
    who = Identity(job_uid="uid", job="race", attempt=start.attempt)
    head_client = HeadClient(store, sleep=lambda seconds: time.sleep(seconds * FASTER))
    owner = HeadOwner(store, who, client=head_client)
    committed: list[str] = []
    time.sleep(start.delay)
    try:
        owner.claim()
        for step in range(SAVES):
            key = owner.new_key(step)
            store.put_if_absent(f"{key}manifest.json", b"{}")
            dropped = owner.commit(Entry(key=key, step=step, time=0.0, bytes=2), 2)
            committed.append(key)
            owner.prune(dropped)
        owner.release()
        how = "released"
    except RunError as error:
        how = f"{type(error).__name__}: {error}"
    return Finish(how=how, committed=tuple(committed))


# --- the race track ---------------------------------------------------------------------------------
@dataclass
class Track:
    """Two racers, a proxy of their own and one prefix, which is emptied before each race."""

    server: S3Server
    bucket: str
    prefix: str
    seed: int

    @contextlib.contextmanager
    def open(self) -> Iterator[Track]:
        context = multiprocessing.get_context("spawn")
        self._judge = S3Store(self.bucket, self.prefix, endpoint=self.server.endpoint)
        with FaultProxy(self.server.port).running(clients=2) as self.proxy, contextlib.ExitStack() as racers:
            self._pipes = [racers.enter_context(self._racer(context, client)) for client in range(2)]
            yield self

    @contextlib.contextmanager
    def _racer(self, context: SpawnContext, client: int) -> Iterator[Connection]:
        ours, theirs = context.Pipe()
        endpoint = self.proxy.endpoint(client)
        process = context.Process(target=racer, args=(theirs, self.bucket, self.prefix, endpoint))
        process.start()
        theirs.close()  # so that a racer's death is an EOFError here
        try:
            yield ours
            ours.send(None)
            process.join(timeout=30)
        finally:
            process.kill()

    def race(self, number: int) -> Verdict:
        chance = random.Random(f"{self.seed}/{number}")
        shutil.rmtree(self.server.folder / self.bucket / self.prefix, ignore_errors=True)
        self.proxy.reset(plan(f"{self.seed}/{number}"))
        first = number % 2
        for client, pipe in enumerate(self._pipes):
            early = client == first
            pipe.send(Start(attempt=1 if early else 2, delay=0.0 if early else chance.uniform(0, 0.15)))
        finishes = tuple(pipe.recv() for pipe in self._pipes)
        self.proxy.settle()
        return judge(self.proxy, finishes, self._judge)


# --- the judge --------------------------------------------------------------------------------------
def judge(proxy: FaultProxy, finishes: tuple[Finish, ...], store: S3Store) -> Verdict:
    heads = [e for e in proxy.exchanges if e.request.path.split("?")[0].endswith(f"/{HEAD_KEY}")]
    landed = [x for x in proxy.landings if _is_head_put(x.request) and x.status == 200]
    problems = [*unlawful(landed), *_false_beliefs(landed, finishes)]
    unreadable = _unreadable(store, landed)
    return Verdict(
        contended=_contended(heads),
        ambiguous=sum(_is_head_put(e.request) and e.treatment.fault in AMBIGUOUS for e in heads),
        unreadable=bool(unreadable),
        stale=len(problems),
        finishes=finishes,
        problems=(*problems, *unreadable),
    )


def _is_head_put(request: Request) -> bool:
    return request.method == "PUT" and request.path.split("?")[0].endswith(f"/{HEAD_KEY}")


def _contended(heads: list[Exchange]) -> bool:
    """Each racer had a request of HEAD under way between the first and the last of the other's."""
    spans = [[e for e in heads if e.request.client == client] for client in range(2)]
    if not all(spans):
        return False
    (a, b) = ((span[0].began, span[-1].ended) for span in spans)
    return any(a[0] < e.ended and e.began < a[1] for e in spans[1]) and any(
        b[0] < e.ended and e.began < b[1] for e in spans[0]
    )


def chain(landed: list[Landing]) -> list[Landing]:
    """The successful PUTs in the order of their If-Match; raises Violation unless they are one chain."""
    after = {landing.request.headers.get("if-match", ""): landing for landing in landed}
    if len(after) != len(landed):
        raise Violation("two writes of HEAD succeeded over the same ETag")
    ordered: list[Landing] = []
    etag = ""
    while etag in after:
        ordered.append(after.pop(etag))
        etag = ordered[-1].etag
    if after:
        raise Violation(f"{len(after)} writes of HEAD succeeded over an ETag that was never there")
    return ordered


def unlawful(landed: list[Landing]) -> Iterator[str]:
    old: Head | None = None
    try:
        for landing in chain(landed):
            new = Head.from_json(landing.request.body)
            check_change(old, new)
            old = new
    except (Violation, RunError) as error:
        yield str(error)


def _false_beliefs(landed: list[Landing], finishes: tuple[Finish, ...]) -> Iterator[str]:
    ever = {key for landing in landed for key in Head.from_json(landing.request.body).keys}
    for finish in finishes:
        for key in finish.committed:
            if key not in ever:
                yield f"{key} was believed committed, and never was in HEAD"


def _unreadable(store: S3Store, landed: list[Landing]) -> list[str]:
    """HEAD at the end is the last of the chain, and all that it names is there."""
    found = store.get(HEAD_KEY)
    try:
        head = Head.from_json(found.body if found else b"")
        last = Head.from_json(chain(landed)[-1].request.body)
    except (RunError, Violation, IndexError) as error:
        return [f"HEAD cannot be read: {error}"]
    lost = [key for key in head.keys if store.get(f"{key}manifest.json") is None]
    return [f"HEAD names {key}, which is gone" for key in lost] + ["HEAD is not the last"] * (head != last)

"""What became of the runs of a scene: their records against the uninterrupted run's, HEAD's history, ends.

Called by the matrices and by random_kills.py, once a scene is over.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from spottrain.checkpoint.head.state import Head
from spottrain.contract import EXIT_CODE_OF, ExitCode

from tests.chaos.faults import is_head
from tests.chaos.judge import Found
from tests.chaos.play import Attempt, Played
from tests.support.faultproxy import AMBIGUOUS, Exchange, Landing, Request
from tests.support.headrace import unlawful

Line = dict[str, Any]
PARTS: Final = (
    "loss", "best", "parameters", "buffers", "optimizer", "schedule", "scaler", "data", "random", "stream",
)  # fmt: skip
OF_FIRST_RANK: Final = ("buffers",)
KILLED: Final = 128 + signal.SIGKILL


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """The uninterrupted run: lines by rank and step; of a custom loop what it did after each epoch, by epoch,
    and the state in which it called `finish`."""

    lines: Mapping[int, Mapping[int, Line]]
    final: str
    epochs: Mapping[int, Line]
    finished: tuple[Line, ...]

    @classmethod
    def of(cls, played: Played) -> Reference:
        (attempt,) = played.attempts
        cell = played.scene.cell
        if attempt.code != 0:
            raise RuntimeError(f"{played.scene.name} ended with {attempt.code}:\n{attempt.log}")
        lines = {rank: {line["step"]: line for line in lines_of(attempt, rank)} for rank in range(cell.ranks)}
        if any(sorted(found) != list(range(cell.steps + 1)) for found in lines.values()):
            raise RuntimeError(f"{played.scene.name} has not recorded every step:\n{attempt.log}")
        epochs = {line["epoch"]: line for line in lines_of(attempt, 0, "epochs")}
        finished = tuple(lines_of(attempt, 0, "finished"))
        return cls(lines=lines, final=played.found.final, epochs=epochs, finished=finished)


@dataclass(kw_only=True, slots=True)
class Verdict:
    """Sentences by kind; empty lists are what is wanted."""

    unreadable: list[str] = field(default_factory=list)
    mismatches: list[str] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    """Hung, another exit code than the case calls for, or another message."""
    noticed: int = 0
    saved: int = 0
    contended: bool = False
    ambiguous: int = 0
    done: int = 0
    lost: int = 0
    """Steps done, and steps done that had to be done again."""
    compared: int = 0
    """Steps after the first blow that equal the uninterrupted run's."""

    @property
    def problems(self) -> list[str]:
        return [*self.unreadable, *self.mismatches, *self.stale, *self.ends]


def judge(played: Played, reference: Reference) -> Verdict:
    verdict = Verdict()
    for found in played.founds:
        verdict.unreadable += found.problems
        verdict.mismatches += _stored(found, reference)
    for attempt in played.attempts:
        for rank in range(played.scene.cell.ranks):
            lines = lines_of(attempt, rank)
            verdict.mismatches += differing(attempt, rank, lines, reference)
        verdict.ends += _end(attempt, played)
    verdict.mismatches += _whole(played, reference)
    verdict.mismatches += _epochs(played, reference)
    _judge_losses(played, verdict)
    _judge_head(played, verdict)
    return verdict


def lines_of(attempt: Attempt, rank: int, name: str = "states") -> list[Line]:
    path = Path(f"{attempt.record}-{rank}.{name}.jsonl")
    if not path.exists():
        return []
    whole, _, _cut_short_by_a_kill = path.read_text().rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]


# --- states -------------------------------------------------------------------------------------------
def differing(attempt: Attempt, rank: int, lines: list[Line], reference: Reference) -> Iterator[str]:
    """The first step that differs, with all parts that do; what follows is its consequence."""
    for number, line in enumerate(lines):
        wanted = [reference.lines[rank][line["step"]]]
        skipped = set(OF_FIRST_RANK) if rank else set()
        if number == 0:  # restored: without a loss, and maybe what finish() has saved of the last step
            skipped.add("loss")
            wanted += [each for each in reference.finished if each["step"] == line["step"]]
        parts = [part for part in PARTS if part not in skipped]
        wrong = min(([part for part in parts if line[part] != each[part]] for each in wanted), key=len)
        if wrong:
            yield f"attempt {attempt.number} rank {rank} step {line['step']}: {', '.join(wrong)} differ"
            return


def _stored(found: Found, reference: Reference) -> Iterator[str]:
    for step, parts in found.states.items():
        for name, value in parts.items():
            part, _, rank = name.partition("/")
            at_the_end = [line[part] for line in reference.finished if line["step"] == step]
            if value not in (reference.lines[int(rank or 0)][step][part], *at_the_end):
                yield f"the checkpoint of step {step}: {name} differs"


def _whole(played: Played, reference: Reference) -> Iterator[str]:
    """Nothing is missing in the end."""
    if played.attempts[-1].code != 0:
        return  # told among the ends
    steps = {line["step"] for attempt in played.attempts for line in lines_of(attempt, 0)}
    if missing := set(range(1, played.scene.cell.steps + 1)) - steps:
        yield f"no attempt has done steps {sorted(missing)}"
    if played.found.final != reference.final:
        yield "the final weights differ"
    for attempt in played.attempts:
        lines = lines_of(attempt, 0)
        if lines and not played.scene.race and lines[0]["step"] != attempt.before.newest:
            yield (
                f"attempt {attempt.number} went on from step {lines[0]['step']}, "
                f"and HEAD named {attempt.before.newest}"
            )


def _epochs(played: Played, reference: Reference) -> Iterator[str]:
    """What follows an epoch's last step is done for each epoch, and always with the same result."""
    done: set[int] = set()
    for attempt in played.attempts:
        for line in lines_of(attempt, 0, "epochs"):
            done.add(line["epoch"])
            if line != reference.epochs.get(line["epoch"]):
                yield f"attempt {attempt.number}: the work after epoch {line['epoch']} differs: {line}"
                return
    missing = set(reference.epochs) - done
    if missing and played.attempts[-1].code == ExitCode.DONE:
        yield f"no attempt has done the work after epochs {sorted(missing)}"


def _judge_losses(played: Played, verdict: Verdict) -> None:
    after = [*(attempt.before for attempt in played.attempts[1:]), played.found]
    struck = False
    for attempt, found in zip(played.attempts, after, strict=True):
        lines = lines_of(attempt, 0)
        verdict.compared += len(lines[1:]) if struck else 0
        struck = struck or bool(attempt.struck)
        if not lines or played.scene.race:
            continue
        newest, first = lines[-1]["step"], lines[0]["step"]
        verdict.done += newest - first
        verdict.lost += max(0, newest - found.newest)
        told = [blow.signal for blow in attempt.struck]
        if told and set(told) == {"TERM"} and newest > first and attempt.code != 0:
            verdict.noticed += 1
            verdict.saved += found.newest >= newest


# --- ends ---------------------------------------------------------------------------------------------
def _end(attempt: Attempt, played: Played) -> Iterator[str]:
    what = f"attempt {attempt.number} ({'; '.join(map(str, attempt.struck)) or 'left alone'})"
    if attempt.hung:
        yield f"{what} hung"
        return
    lawful = lawful_codes(attempt, played)
    if attempt.code not in lawful:
        yield f"{what} ended with {attempt.code}, not with one of {sorted(lawful)}"
    message = attempt.message
    said = EXIT_CODE_OF[message.outcome] if message else None
    if attempt.code in EXIT_CODE_OF.values() and said != attempt.code:
        yield f"{what} ended with {attempt.code}, and its message is {message}"
    if _done_by(attempt) and attempt.code not in (ExitCode.DONE, -signal.SIGKILL, KILLED):
        yield f"{what} ended with {attempt.code} after HEAD had said that the job is done"
    if attempt.code == ExitCode.INTERRUPTED and message is not None and message.signalledAt is None:
        yield f"{what} does not say when it was told to stop"


def _done_by(attempt: Attempt) -> bool:
    """Whether this attempt is known to have written to HEAD that the job is done."""
    lines = lines_of(attempt, 0, "heads")
    writes = itertools.pairwise(lines)
    return any(
        "etag" in after and json.loads(line.get("body", "{}")).get("state") == "done"
        for line, after in writes
    )


def lawful_codes(attempt: Attempt, played: Played) -> set[int]:
    """A kill that comes when all is done may meet nothing."""
    told = [blow.signal for blow in attempt.struck if blow.signal in ("TERM", "KILL")]
    if played.scene.fresh and told == ["TERM"]:
        return {ExitCode.INTERRUPTED}  # long before the training's end: done means that the signal was lost
    lawful: set[int] = {ExitCode.DONE}
    if played.scene.race:
        lawful.add(ExitCode.SUPERSEDED)
    if "TERM" in told:
        lawful.add(ExitCode.INTERRUPTED)
        if played.scene.faults or "KILL" in told:
            lawful.add(ExitCode.INTERRUPTED_LOST)
    if "KILL" in told:
        kills = [blow for blow in attempt.struck if blow.signal == "KILL"]
        direct = played.scene.cell.ranks == 1 or any(not b.target.startswith("rank") for b in kills)
        lawful.add(-signal.SIGKILL if direct else KILLED)
        if any(blow.at == "start" for blow in kills):  # there is no rank yet: the launcher itself is met
            lawful.add(-signal.SIGKILL)
    return lawful


# --- HEAD ---------------------------------------------------------------------------------------------
def _judge_head(played: Played, verdict: Verdict) -> None:
    if played.proxy is not None:
        heads = [exchange for exchange in played.proxy.exchanges if is_head(exchange.request)]
        landed = [x for x in played.proxy.landings if _is_write(x.request) and x.status == 200]
        verdict.ambiguous = sum(_is_write(e.request) and e.treatment.fault in AMBIGUOUS for e in heads)
        spans = _spans_of_exchanges(heads)
    else:
        landed, spans = _landed(played)
    verdict.contended = played.scene.race and _contended(spans)
    verdict.stale += unlawful(landed)
    verdict.stale += _false_beliefs(played, landed)


def _is_write(request: Request) -> bool:
    return request.method == "PUT" and is_head(request)


def _landed(played: Played) -> tuple[list[Landing], list[list[tuple[float, float]]]]:
    """From what the script wrote around each write: those that took effect, as the proxy would tell it."""
    sure: list[Landing] = []
    open_: list[Landing] = []
    spans: list[list[tuple[float, float]]] = []
    for attempt in played.attempts:
        begun: dict[str, Any] | None = None
        spans.append([])
        for line in lines_of(attempt, 0, "heads"):
            if "body" in line:
                open_ += [_landing(begun)] if begun else []
                begun = line
            elif begun:
                spans[-1].append((begun["at"], line["at"]))
                sure += [_landing(begun)] if "etag" in line else []
                begun = None
        open_ += [_landing(begun)] if begun else []
    return _with_those_that_arrived(sure, open_, played.found), spans


def _landing(line: Line) -> Landing:
    body = line["body"].encode()
    headers = {"if-match": line["match"]} if line["match"] else {}
    request = Request(
        client=0, number=0, method="PUT", path="/HEAD", headers=headers, raw_head=b"", body=body
    )
    return Landing(request=request, status=200, etag=hashlib.sha256(body).hexdigest())


def _with_those_that_arrived(sure: list[Landing], open_: list[Landing], found: Found) -> list[Landing]:
    """A process that was killed in a write has not said whether it took effect; what came after shows it."""
    last = hashlib.sha256(found.raw).hexdigest() if found.raw else ""
    while True:
        needed = {landing.request.headers.get("if-match", "") for landing in sure} | {last}
        arrived = [landing for landing in open_ if landing.etag in needed]
        if not arrived:
            return sure
        sure = sure + arrived
        open_ = [landing for landing in open_ if landing not in arrived]


def _false_beliefs(played: Played, landed: list[Landing]) -> Iterator[str]:
    ever = {key for landing in landed for key in Head.from_json(landing.request.body).keys}
    for attempt in played.attempts:
        for line in attempt.log.splitlines():
            if " event=committed " in line and (key := line.rsplit(" key=", 1)[1].strip()) not in ever:
                yield f"attempt {attempt.number} believed {key} committed, and it never was in HEAD"


def _spans_of_exchanges(heads: list[Exchange]) -> list[list[tuple[float, float]]]:
    return [[(e.began, e.ended) for e in heads if e.request.client == client] for client in range(2)]


def _contended(spans: list[list[tuple[float, float]]]) -> bool:
    """Each of the first two had a request of HEAD under way between the first and the last of the other's."""
    if len(spans) < 2 or not spans[0] or not spans[1]:
        return False
    one, two = spans[0], spans[1]
    return any(one[0][0] < end and begin < one[-1][1] for begin, end in two) and any(
        two[0][0] < end and begin < two[-1][1] for begin, end in one
    )

"""A trainer as the outside sees it: gate, claim, steps, a save when it is told to stop, and its last words.

Nothing is trained and nothing is stored: HEAD is an object of ours that all attempts of a job share. Run by
kubelet.Pod; told what to do by strike.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final

from spottrain.contract import Outcome, Progress, Reason, TerminationMessage

from tests.chaosop.audit import Mark
from tests.chaosop.scene import POLITE, Act, Farewell

STEPS_PER_SECOND: Final = 20
LOOK: Final = 0.2
"""Seconds between two looks at HEAD while gated, and between two commits."""
PEER_SECONDS: Final = 0.3
"""Until a rank notices that another one is gone."""


async def heard(news: asyncio.Event, seconds: float | None) -> None:
    """Until it is set, or the time is over. Before Python 3.12 wait_for can lose a cancellation."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await news.wait()


@dataclass(kw_only=True, slots=True)
class Head:
    """HEAD of the job's checkpoints."""

    state: str = "absent"
    """absent, active, released or done."""
    attempt: int = 0
    step: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """How a container ended, in the kubelet's words."""

    code: int
    message: str = ""
    reason: str = ""

    @property
    def done(self) -> bool:
        """Whether its word is that all is done."""
        word = TerminationMessage.from_json(self.message)
        return word is not None and word.outcome is Outcome.DONE


@dataclass(kw_only=True)
class Attempt:
    """What the ranks of one attempt share."""

    number: int
    workers: int
    act: Act
    head: Head
    mark: Callable[[Mark, int], Awaitable[None]]
    did: Callable[[Attempt], None]
    """Takes down that the act is performed."""
    trainers: dict[int, Trainer] = field(default_factory=dict)
    struck: bool = False
    """Whether the act has been performed."""
    holds: bool = False
    """Rank 0 has claimed and has neither released nor died."""
    training: asyncio.Event = field(default_factory=asyncio.Event)
    """Rank 0 has claimed, and all ranks are there."""
    stopping: bool = False
    """A rank was told to stop, and all do so together."""
    lost: bool = False
    """A rank is gone."""
    finished: bool = False
    _notes: asyncio.Task[None] | None = None
    told_done: bool = False
    """The API server has its word that it is done."""
    bare: bool = False
    """Whether it ends without a word, as a program that is not ours."""

    def strike(self) -> None:
        if not self.struck:
            self.struck = True
            self.did(self)

    def tell(self) -> None:
        """Something above has changed."""
        for trainer in self.trainers.values():
            trainer.news.set()

    async def note(self, mark: Mark) -> None:
        """One after the other, and whole, whoever is cancelled meanwhile."""
        self._notes = asyncio.create_task(self._note(mark, self._notes))
        await asyncio.shield(self._notes)

    async def _note(self, mark: Mark, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await before
        await self.mark(mark, self.number)

    async def noted(self) -> None:
        if self._notes is not None:
            await self._notes

    async def let_go(self, mark: Mark, state: str = "") -> None:
        """The mark first: whoever waits for HEAD must not claim before the log has it."""
        if self.holds:
            self.holds = False
            await self.note(mark)
            if state and self.head.attempt == self.number:
                self.head.state = state


@dataclass(kw_only=True)
class Trainer:
    """One rank."""

    attempt: Attempt
    rank: int
    job_uid: str
    gate_until: float
    known_durable: int | None
    told: bool = False
    """SIGTERM, or the file with the deadline."""
    order: End | None = None
    """How it is to end by itself, now."""
    leaving: bool = False
    """It is about to end by itself, and listens to nobody."""
    owner: bool = False
    """It has claimed HEAD."""
    start_step: int | None = None
    began: float = 0.0
    news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def step(self) -> int:
        if self.start_step is None:
            return 0
        return self.start_step + int((time.monotonic() - self.began) * STEPS_PER_SECOND)

    async def run(self) -> End:
        """To its end; the kubelet's SIGKILL is a cancellation."""
        while True:
            self.news.clear()
            if (end := await self._end()) is not None:
                return end
            await heard(self.news, LOOK)

    async def _end(self) -> End | None:
        attempt = self.attempt
        if self.order is not None or self.leaving:
            return self.order
        if attempt.finished:
            return End(code=0) if attempt.bare else self.word(Outcome.DONE, 0)
        if self.told or attempt.stopping:
            return await self._farewell()
        if attempt.lost:
            return await self._without_peer()
        if self.rank == 0:
            return await self._lead()
        self._follow()
        return None

    def _follow(self) -> None:
        if self.start_step is None and self.attempt.training.is_set():
            self.start_step, self.began = self.attempt.head.step, time.monotonic()

    # --- rank 0 ---
    async def _lead(self) -> End | None:
        head, attempt = self.attempt.head, self.attempt
        if not self.owner:
            if head.state == "active" and head.attempt < attempt.number and time.time() < self.gate_until:
                return None
            return await self._claim()
        if head.attempt != attempt.number:
            return End(code=76, message=_message(Outcome.SUPERSEDED))
        if self.start_step is None and len(attempt.trainers) == attempt.workers:
            self.start_step, self.began = head.step, time.monotonic()
            attempt.training.set()
            attempt.tell()
        head.step = max(head.step, self.step)
        return None

    async def _claim(self) -> End | None:
        head, attempt = self.attempt.head, self.attempt
        if head.state == "done":
            attempt.strike()  # its predecessor was done, and could not say so
            return self.word(Outcome.DONE, 0)
        if head.attempt > attempt.number:
            return End(code=76, message=_message(Outcome.SUPERSEDED))
        if self.known_durable is not None and self.known_durable > head.step:
            words = f"the operator knows of step {self.known_durable}, and HEAD names {head.step}"
            text = _message(Outcome.BAD_CONFIGURATION, reason=Reason.CHECKPOINT_MISSING, message=words)
            return End(code=64, message=text)
        head.state, head.attempt = "active", attempt.number
        attempt.holds = self.owner = True
        await attempt.note(Mark.CLAIM)
        self.news.set()
        return None

    # --- ends ---
    async def _farewell(self) -> End:
        """The rank that was told to stop as the act says, its peers well; but all of them finish, or none."""
        attempt, act = self.attempt, self.attempt.act
        hit = act.blow in POLITE and (self.rank == act.rank or act.farewell is Farewell.FINISHES)
        how = act.farewell if hit else Farewell.SAVES
        if how is Farewell.DEAF:
            await asyncio.Event().wait()
        attempt.stopping = True
        attempt.tell()
        if self.start_step is None:  # gated: nothing to save
            return self.word(Outcome.INTERRUPTED, 75)
        await asyncio.sleep(act.saving)
        if how is Farewell.FINISHES:
            return await (self.finish() if self.rank == 0 else self._after_rank_0())
        if how is Farewell.SAVES and self.rank == 0:
            attempt.head.step = self.step
        await self._release(Mark.RELEASE if how in (Farewell.SAVES, Farewell.LOSES) else Mark.DEATH)
        match how:
            case Farewell.LEAVES:
                return End(code=0)
            case Farewell.CRASHES:
                return End(code=1, message="Traceback: while it was saving")
            case Farewell.LOSES:
                return self.word(Outcome.INTERRUPTED_LOST, 79)
        return self.word(Outcome.INTERRUPTED, 75)

    async def finish(self, *, bare: bool = False) -> End:
        """Done: of a gang all ranks are."""
        attempt, self.leaving = self.attempt, True
        attempt.head.step = max(attempt.head.step, self.step)
        await attempt.let_go(Mark.RELEASE, "released" if bare else "done")
        attempt.finished, attempt.bare = True, bare
        attempt.tell()
        return End(code=0) if bare else self.word(Outcome.DONE, 0)

    async def _after_rank_0(self) -> End:
        while not self.attempt.finished:
            self.news.clear()
            await self.news.wait()
        return self.word(Outcome.DONE, 0)

    async def stop(self, *, lost: bool) -> End:
        """It ends before its time, and nobody knows why: all of a gang together, or the others notice."""
        attempt, self.leaving = self.attempt, True
        if not lost:
            attempt.stopping = True
            attempt.head.step = max(attempt.head.step, self.step)
        await attempt.let_go(Mark.RELEASE, "released")
        attempt.tell()
        outcome = Outcome.INTERRUPTED_LOST if lost else Outcome.INTERRUPTED
        return self.word(outcome, 79 if lost else 75)

    async def _without_peer(self) -> End:
        if self.attempt.act.peers_hang:
            while not self.told:
                self.news.clear()
                await self.news.wait()
        await asyncio.sleep(PEER_SECONDS)
        await self._release(Mark.RELEASE)
        return self.word(Outcome.INTERRUPTED_LOST, 79, reason=Reason.PEER_LOST)

    async def _release(self, mark: Mark) -> None:
        if self.rank == 0:
            await self.attempt.let_go(mark, "released" if mark is Mark.RELEASE else "")

    # --- words ---
    def word(self, outcome: Outcome, code: int, *, reason: str = "") -> End:
        durable, start = self.attempt.head.step, self.start_step
        word = TerminationMessage(outcome=outcome, reason=reason)
        if start is not None:
            word = replace(word, step=self.step, startStep=start, durableStep=durable)
        return End(code=code, message=word.to_json())

    def progress(self) -> str:
        """The answer of /progress."""
        state = "Gated" if self.start_step is None else "Training"
        durable = None if self.start_step is None else self.attempt.head.step
        progress = Progress(
            state=state,
            attempt=self.attempt.number,
            jobUID=self.job_uid,
            worker=self.rank,
            step=self.step,
            totalSteps=10_000,
            startStep=self.start_step,
            durableStep=durable,
        )
        return progress.to_json()


def _message(outcome: Outcome, *, reason: str = "", message: str = "") -> str:
    return TerminationMessage(outcome=outcome, reason=reason, message=message).to_json()


REFUSAL: Final = _message(
    Outcome.BAD_CONFIGURATION, reason=Reason.STORE_DENIED, message="S3 refuses the credentials"
)

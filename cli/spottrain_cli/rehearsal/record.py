"""What was seen of one job: its attempts by their pods and by what their trainers report, and its status."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any, Final

from spottrain.contract import Progress, TerminationMessage

from spottrain_cli.pods import ATTEMPT_LABEL, RANK_LABEL, trainer_state
from spottrain_cli.rehearsal.moments import Pace

Json = dict[str, Any]
SYNC_CONTAINER: Final = "spottrain-sync"


@dataclass(frozen=True, kw_only=True, slots=True)
class Reclaim:
    """A notice that a node got while the job trained on it."""

    attempt: int
    node: str
    step: int | None
    """The last step that was seen; None where the job reports none."""
    state: str
    published: float
    notice_seconds: float


@dataclass(kw_only=True, slots=True)
class Attempt:
    """One start of the job. Times are Unix seconds at which this machine saw them."""

    number: int
    pod: str = ""
    """Of rank 0, as is the next field."""
    address: str = ""
    nodes: dict[int, str] = field(default_factory=dict)
    """By rank."""
    running_at: float | None = None
    ended_at: float | None = None
    exit_code: int | None = None
    message: TerminationMessage | None = None
    start_step: int | None = None
    first_step_at: float | None = None
    first_seen: int | None = None
    """The step that was seen then."""
    step: int | None = None
    total: int | None = None
    state: str = ""
    ignored: str = ""

    @property
    def steps_of_its_own(self) -> int:
        return 0 if self.step is None else self.step - (self.start_step or 0)

    @property
    def trains(self) -> bool:
        return self.running_at is not None and self.ended_at is None

    def seconds(self, now: float) -> float:
        """Of its trainer's life."""
        return 0.0 if self.running_at is None else (self.ended_at or now) - self.running_at


@dataclass(kw_only=True, slots=True)
class Record:
    """Fed by several threads; a reader gets whole attempts."""

    name: str
    attempts: dict[int, Attempt] = field(default_factory=dict)
    status: Json = field(default_factory=dict)
    reclaims: list[Reclaim] = field(default_factory=list)
    began_at: float = 0.0
    ended_at: float = 0.0
    timed_out: bool = False
    lock: threading.RLock = field(default_factory=threading.RLock)

    # --- what came ---
    def on_job(self, job: Json) -> None:
        with self.lock:
            self.status = job.get("status") or {}

    def on_pod(self, pod: Json, now: float) -> None:
        labels = pod["metadata"].get("labels") or {}
        number, rank = int(labels[ATTEMPT_LABEL]), int(labels[RANK_LABEL])
        with self.lock:
            attempt = self.attempts.setdefault(number, Attempt(number=number))
            if node := pod["spec"].get("nodeName"):
                attempt.nodes[rank] = node
            if rank == 0:
                attempt.pod = pod["metadata"]["name"]
                attempt.address = (pod.get("status") or {}).get("podIP") or attempt.address
                _containers(attempt, pod, now)

    def on_progress(self, number: int, seen: Progress, now: float) -> None:
        with self.lock:
            attempt = self.attempts[number]
            attempt.state, attempt.ignored = seen.state, seen.ignoredSettings or attempt.ignored
            attempt.total = seen.totalSteps or attempt.total
            if seen.startStep is None:
                return
            attempt.start_step = seen.startStep
            attempt.step = max(seen.step, attempt.step or 0)
            if attempt.first_step_at is None and seen.step > seen.startStep:
                attempt.first_step_at, attempt.first_seen = now, seen.step

    # --- what it means ---
    @property
    def phase(self) -> str:
        return str(self.status.get("phase", ""))

    @property
    def over(self) -> bool:
        return self.phase in ("Succeeded", "Failed")

    @property
    def latest(self) -> Attempt | None:
        with self.lock:
            return self.attempts[max(self.attempts)] if self.attempts else None

    def in_order(self) -> list[Attempt]:
        with self.lock:
            return [self.attempts[number] for number in sorted(self.attempts)]

    def of_status(self, number: int) -> Json:
        """An attempt as the operator tells it."""
        found: Json = next((a for a in self.status.get("attempts") or [] if a["number"] == number), {})
        return found

    def condition(self, kind: str) -> Json:
        found: Json = next((c for c in self.status.get("conditions") or [] if c["type"] == kind), {})
        return found

    @property
    def refused(self) -> str:
        """Why the operator does not accept it; "" where it does."""
        accepted = self.condition("Accepted")
        return str(accepted.get("message", "")) if accepted.get("status") == "False" else ""

    @property
    def waits(self) -> str:
        """Why no trainer runs; "" where one does, or has."""
        if any(attempt.running_at is not None for attempt in self.in_order()):
            return ""
        kinds = ("Running", "Scheduled")
        return next((str(text) for kind in kinds if (text := self.condition(kind).get("message"))), "")

    def seconds(self, now: float) -> float:
        """Of all its trainers' lives."""
        return sum(attempt.seconds(now) for attempt in self.in_order())

    def pace(self, now: float) -> Pace | None:
        """None before two of the first attempt's steps were seen."""
        first = self.attempts.get(1)
        if first is None or first.first_step_at is None:
            return None
        assert first.step is not None
        assert first.first_seen is not None
        if first.step == first.first_seen:
            return None
        seconds = min(first.ended_at or now, now) - first.first_step_at
        return Pace(first=first.first_seen, step=first.step, total=first.total, seconds=seconds)


def _containers(attempt: Attempt, pod: Json, now: float) -> None:
    state = trainer_state(pod)
    if ("running" in state or "terminated" in state) and attempt.running_at is None:
        attempt.running_at = now
    if "terminated" in state and attempt.ended_at is None:
        attempt.ended_at, attempt.exit_code = now, state["terminated"].get("exitCode")
    for each in (pod.get("status") or {}).get("initContainerStatuses") or []:
        if each["name"] == SYNC_CONTAINER:
            state = each.get("state") or {}
    if text := (state.get("terminated") or {}).get("message"):
        attempt.message = TerminationMessage.from_json(text) or attempt.message

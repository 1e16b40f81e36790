"""What the demo saw of one job: pods by attempt and their log lines. Filled by watches, read by figures."""

from __future__ import annotations

import re
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from demo.kubectl import Kubectl, LogFollower
from demo.timeline import Timeline, unix

Raw = dict[str, Any]
PAIR = re.compile(r"(\S+?)=(\S+)")
SHOWN = {
    "claimed": ("owns the checkpoints", ("term", "step")),
    "first-step": ("first step done", ("step",)),
    "deadline": ("knows its deadline", ()),
    "committed": ("checkpoint durable", ("step",)),
}
"""Events of the log that the timeline shows, in words, with these of their facts."""


@dataclass(kw_only=True, slots=True)
class Attempt:
    """One pod of the job."""

    number: int
    pod: str
    node: str = ""
    created_at: float = 0.0
    delete_at: float = 0.0
    running_at: float = 0.0
    ended_at: float = 0.0
    exit_code: int | None = None
    message: str = ""
    losses: dict[int, str] = field(default_factory=dict)
    events: list[dict[str, str]] = field(default_factory=list)

    def event(self, name: str) -> dict[str, str] | None:
        """The first event of that name in the log."""
        return next((e for e in self.events if e["event"] == name), None)


class JobRecord:
    """Collects what one job's pods do; safe to feed from several threads."""

    def __init__(
        self, name: str, label: str, timeline: Timeline, kubectl: Kubectl, *, quiet: bool = False
    ) -> None:
        self.name = name
        self._quiet = quiet
        self.attempts: dict[int, Attempt] = {}
        self._label = label
        self._timeline = timeline
        self._kubectl = kubectl
        self._followers: dict[str, LogFollower] = {}
        self._lock = threading.RLock()

    def on_pod(self, kind: str, pod: Raw) -> None:
        """Takes one watch event of a pod; other jobs' pods are passed over."""
        labels = pod["metadata"].get("labels", {})
        if labels.get("spottrain.io/job") != self.name:
            return
        with self._lock:
            attempt = self._attempt(int(labels["spottrain.io/attempt"]), pod)
            self._placed(attempt, pod)
            self._deleted(attempt, pod)
            for status in pod.get("status", {}).get("containerStatuses", []):
                if status["name"] == "trainer":
                    self._state(attempt, status.get("state", {}))

    def latest(self) -> Attempt | None:
        return self.attempts[max(self.attempts)] if self.attempts else None

    def join_logs(self, timeout: float = 15) -> None:
        for follower in self._followers.values():
            follower.join(timeout)

    def _say(self, what: str, *, at: float | None = None, mark: bool = False) -> None:
        if not self._quiet:
            self._timeline.say(self._label, what, at=at, mark=mark)

    def _attempt(self, number: int, pod: Raw) -> Attempt:
        if number not in self.attempts:
            name = pod["metadata"]["name"]
            self.attempts[number] = Attempt(number=number, pod=name, created_at=time.time())
        return self.attempts[number]

    def _placed(self, attempt: Attempt, pod: Raw) -> None:
        node = pod["spec"].get("nodeName", "")
        if node and not attempt.node:
            attempt.node = node
            self._say(f"attempt {attempt.number}: pod {attempt.pod} is placed on {node}")

    def _deleted(self, attempt: Attempt, pod: Raw) -> None:
        if pod["metadata"].get("deletionTimestamp") and not attempt.delete_at:
            attempt.delete_at = time.time()

    def _state(self, attempt: Attempt, state: Raw) -> None:
        if "running" in state and not attempt.running_at:
            attempt.running_at = time.time()
            self._followers[attempt.pod] = LogFollower(
                self._kubectl, attempt.pod, "trainer", lambda line: self._on_line(attempt, line)
            )
        ended = state.get("terminated")
        if ended and attempt.exit_code is None:
            attempt.exit_code, attempt.message = ended["exitCode"], ended.get("message", "")
            attempt.ended_at = unix(ended["finishedAt"]) if ended.get("finishedAt") else time.time()
            self._say(f"attempt {attempt.number}: exit code {attempt.exit_code}", mark=True)

    def _on_line(self, attempt: Attempt, line: str) -> None:
        pairs = dict(PAIR.findall(line))
        if "event" in pairs:
            attempt.events.append({**pairs, "at": line.split(" ", 1)[0]})
            self._show_event(attempt, pairs)
        elif "step" in pairs and "loss" in pairs:
            step, _, total = pairs["step"].partition("/")
            attempt.losses[int(step)] = pairs["loss"]
            self._timeline.progress(f"{self._label}: step {step}/{total}  loss {pairs['loss']}")

    def _show_event(self, attempt: Attempt, pairs: dict[str, str]) -> None:
        name = pairs["event"]
        if name not in SHOWN or (name == "committed" and self._is_routine(attempt)):
            return
        words, facts = SHOWN[name]
        details = "".join(f" {fact}={pairs[fact]}" for fact in facts if fact in pairs)
        self._say(f"attempt {attempt.number}: {words}{details}", mark=name == "deadline")

    def _is_routine(self, attempt: Attempt) -> bool:
        """A further checkpoint of an attempt that nobody has asked to end."""
        earlier = [event["event"] for event in attempt.events[:-1]]
        return "committed" in earlier and "deadline" not in earlier

"""What the trainer itself said last, by its log: the status has a step only once a minute."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime
from decimal import Decimal, InvalidOperation
from functools import cache
from typing import Any, Final

from spottrain_cli import kubectl
from spottrain_cli.errors import CommandError
from spottrain_cli.jobs import Job, Progress
from spottrain_cli.kubectl import Access
from spottrain_cli.pods import trainer_container

LINES: Final = 40
PATIENCE: Final = 10.0
LOGFMT: Final = re.compile(r"(?P<time>\S+) step=(?P<step>\d+)/(?P<total_steps>\d+) (?P<rest>.*)")
COMMITTED: Final = re.compile(r"(?P<time>\S+) event=committed step=(?P<step>\d+)")


def newer(access: Access, job: Job) -> Job:
    """Returns the job with the running trainer's own last step; as it is where its log cannot be read."""
    attempt = job.current
    if job.ended or attempt is None or not attempt.pod or attempt.firstStepTime is None:
        return job
    there = replace(access, namespace=job.namespace, all_namespaces=False)
    try:
        words = ("logs", attempt.pod, "--container", _container(there, attempt.pod), f"--tail={LINES}")
        text = kubectl.run(there, *words, seconds=PATIENCE).decode(errors="replace")
    except CommandError:
        return job
    return replace(job, progress=updated(job.progress, text.splitlines()))


@cache
def _container(access: Access, pod: str) -> str:
    found = kubectl.run(access, "get", "pod", pod, "--output=json", seconds=PATIENCE)
    return trainer_container(kubectl.decoded(found, "kubectl's answer"))


def updated(progress: Progress, lines: Iterable[str]) -> Progress:
    """Returns the figures with those of the last lines that are newer."""
    for line in lines:
        told = _step(line)
        if told is not None and int(told["step"]) >= (progress.step or 0):
            step, total, speed = int(told["step"]), int(told["total_steps"]), told["samples_per_second"]
            progress = replace(
                progress,
                step=step,
                totalSteps=total or progress.totalSteps,
                loss=told["loss"] if told["loss"] is not None else progress.loss,
                samplesPerSecond=speed or progress.samplesPerSecond,
                etaSeconds=_left(progress, step, total),
                pollTime=_moment(told["time"]) or progress.pollTime,
            )
        elif (kept := _committed(line)) is not None and kept[1] >= (progress.durableStep or 0):
            progress = replace(progress, durableTime=kept[0], durableStep=kept[1])
    return progress


def _left(progress: Progress, step: int, total: int) -> Decimal | None:
    """Seconds that the rest takes: the operator's, less what was done since."""
    if not total or progress.etaSeconds is None or progress.step is None or progress.step >= total:
        return progress.etaSeconds
    return progress.etaSeconds * (total - step) / (total - progress.step)


def _step(line: str) -> dict[str, Any] | None:
    """A line of a step, of either format."""
    if found := LOGFMT.match(line):
        rest = dict(word.partition("=")[::2] for word in found["rest"].split())
        return found.groupdict() | {
            "loss": _number(rest.get("loss")),
            "samples_per_second": _number(rest.get("samples/s")),
        }
    told = _object(line)
    if told.get("event") != "step" or not isinstance(told.get("step"), int):
        return None
    return {
        "time": told.get("time"),
        "step": told["step"],
        "total_steps": told.get("total_steps") or 0,
        "loss": _number(told.get("loss")),
        "samples_per_second": _number(told.get("samples_per_second")),
    }


def _committed(line: str) -> tuple[str, int] | None:
    """When a checkpoint became durable, and its step."""
    if found := COMMITTED.match(line):
        return found["time"], int(found["step"])
    told = _object(line)
    if told.get("event") != "committed" or not isinstance(told.get("step"), int):
        return None
    return str(told.get("time") or ""), told["step"]


def _object(line: str) -> dict[str, Any]:
    try:
        told = json.loads(line) if line.startswith("{") else {}
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}


def _number(value: object) -> Decimal | None:
    try:
        found = Decimal(str(value))
    except InvalidOperation:
        return None
    return found if found.is_finite() else None


def _moment(text: object) -> datetime | None:
    try:
        return datetime.fromisoformat(str(text))
    except ValueError:
        return None

"""What a log event looks like: a sentence, a line of `key=value`, or a JSON object. Pure functions.

logfmt  2026-11-21T12:03:04.123Z event=committed step=120 seconds=1.803 bytes=10172817 key=checkpoints/...
        2026-11-21T12:03:05.009Z step=121/400 loss=2.34567890 lr=0.0003 samples/s=812.0
json    {"time": "2026-11-21T12:03:04.123Z", "level": "info", "event": "committed", "step": 120, ...}
text    12:03:04 Saved step 120 in 1.8 s, 10.2 MB (checkpoints/...)

An event is its name and its facts. Its sentence is made of them, such as `Profile stored: folder x, 10.2 MB`,
unless SENTENCES has a better one.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from spottrain.contract import ExitCode

STEP: Final = "step"
"""The event of a training step's figures."""
STEP_DIGITS: Final = {"loss": ".9g", "lr": ".6g", "samples_per_second": ".1f", "eta_seconds": ".0f"}
"""Formats of a step's figures; nine digits distinguish any two fp32 losses."""

LONGEST_VALUE: Final = 4096
"""Characters of a text in a line."""

EXACT: Final = re.compile(r"-?\d+\.\d{5,}(e-?\d+)?")
"""A figure with more digits than a person reads."""
FIELD: Final = re.compile(r"\{(\w+)(?::(\w+))?\}")
EXPLAINS: Final = ("why", "error", "text", "what", "next", "then", "fix", "remedy", "warning")
"""Facts that are sentences themselves: shown last, without their names."""

SENTENCES: Final[Mapping[str, str]] = {
    STEP: "Step {step}[/{total_steps}]: {rest}",
    "start": "Training {job}, attempt {attempt}[, {world} ranks]; checkpoints: {checkpoints}",
    "override": "{setting}[: {manifest} by the manifest][: {checkpoint} of the checkpoint]"
    "[: {ours} of spottrain][, not {script} as in the script][; {rest}]",
    "device": "Training on {name}, torch {torch}",
    "attached": "Attached to {library} {version} ({what}); {off} turns this off",
    "restored": "Resumed from step {step} in {seconds:duration}",
    "first-step": "First step done, {startup:duration} after the start",
    "emergency-budget": "A save at a notice takes {seconds:duration}[ of {grace:duration}][. {warning}]",
    "evaluated": "Evaluated step {step} in {seconds:duration}: {rest}",
    "committed": "Saved step {step} in {seconds:duration}[, {bytes:size}]",
    "done": "Training is done after {step} steps[; weights: {output}]",
    "end": "[{message}]",
    "launcher-end": "{why} Exit code {code}",
    "sync-committed": "Saved checkpoint {step} of the folder in {seconds:duration}, {bytes:size}, of which "
    "{sent:size} were sent ({key})",
    "step-time": "A step took {step_seconds:duration} on average[: {compute:percent} computing]"
    "[, {data:percent} waiting for data][, {h2d:percent} copying to the device]"
    "[, {communication:percent} exchanging gradients][, {checkpoint:percent} saving]"
    "[, {other:percent} other]",
    "diagnosis": "{why}[ First: {first}]",
    "damaged": "The checkpoint of step {step} is damaged, using the one before: {error} ({key})",
    "sigterm": "Termination notice ({source}): {deadline:left} left, saving",
    "deadline": "Termination notice ({source}): {deadline:left} left, saving",
    "stop": "Told to stop ({source}): {deadline:left} left, saving",
    "waiting-for-store": "{store} has not responded for {seconds:duration}[ (limit {limit:duration})]: {why}",
    "store-unreachable": "{store} has not responded for {seconds:duration}: {why}",
    "save-failed": "The save of step {step} failed: {error}[; {seconds_left:duration} left][; {next}]",
    "stalled": "No progress for {idle:duration} at step {step} ({state}): {why}",
    "not-pinned": "{bytes:size} of staging memory could not be pinned (CUDA error {code}); copies are slower",
    "advice": "{about}: {text}",
    "sync-link-out": "{path} leads to {target}, outside the folder: only the link itself is stored",
    "sync-notes-inside": "Its own notes are in {folder}, where a script may list them: the folder is a mount "
    "of its own, or its parent cannot be written, and it has no extended attributes. Take a folder in it",
    "sync-left-out": "Checkpoints are stored without the new version of {files}",
    "sync-writes-lost": "Too many writes to {folder} at once: a file that does not say whether it is whole "
    "counts as whole after 30 s without a change",
    "sync-left-running": "The command has ended, and processes that it had started run on: they have "
    "{seconds:duration} to end",
}
"""Sentences by event. `[...]` is left out if a fact in it is absent; `{rest}` is all facts not named.

Formats: `duration` of seconds, `size` of bytes, `percent` of a share, `left` until an RFC 3339 time. A share
that would be 0% counts as absent."""
WARNINGS: Final = frozenset(
    """
    advice bandwidth-not-measured compile-cache-not-saved compile-cache-unusable damaged
    data-cache-not-writable data-cache-without-locks deadline empty-step grace-shortened
    head-check-failed logs-failed logs-full logs-missing logs-not-kept model-not-stored no-checkpoints
    not-finished not-pinned outcome-not-recorded peer-lost profile-cut-short
    profile-failed profile-left-out profile-not-stored progress-not-served progress-request-failed
    prune-failed ranks-killed release-failed save-abandoned save-failed series-not-written sigterm
    sigterm-will-not-arrive stalled step-left-out stop store-unreachable sync-left-out sync-left-running
    sync-link-out sync-not-watched sync-notes-inside sync-owners-lost
    sync-record-not-written sync-writes-lost termination-message-not-written tracker-closed
    tracker-failed tracker-incomplete tracker-slow upload-not-aborted uploader-died
    utilisation-not-sampled waiting-for-store
    """.split()  # noqa: SIM905
)
DETAILS: Final = frozenset(
    "claimed done emergency-budget launched progress-served released saving trained".split()  # noqa: SIM905
)
"""Events that a terminal does not show, unless they are warnings: a person has no use for them, or another
sentence says the same."""
USUAL_ENDS: Final = (ExitCode.DONE, ExitCode.INTERRUPTED)
"""Of ranks: their own sentences say the rest."""
CTRL_C: Final = "SIGINT"
INTERRUPTED: Final = "Interrupted: saving, then it stops, within {deadline:left}"
"""In place of `sigterm` for Ctrl-C, which is no warning to the person who pressed it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """The `msg` of a log record. As a string it is the sentence."""

    name: str
    facts: Mapping[str, object] = field(default_factory=dict)
    """Facts that are None are left out."""
    at: float
    """Unix seconds."""

    @property
    def level(self) -> int:
        warns = self.name in WARNINGS and not self.by_ctrl_c
        return logging.WARNING if warns or self.facts.get("warning") else logging.INFO

    @property
    def for_people(self) -> bool:
        """Whether a person at a terminal is shown it. Rank 0 speaks for all, but for warnings."""
        if self.level >= logging.WARNING:
            return True
        usual = self.facts.get("status", self.facts.get("code")) in USUAL_ENDS
        detail = self.name in DETAILS or (self.name in ("rank-ended", "launcher-end") and usual)
        return not (detail or self.facts.get("rank")) and bool(str(self))

    @property
    def by_ctrl_c(self) -> bool:
        return self.name == "sigterm" and self.facts.get("source") == CTRL_C

    @property
    def known(self) -> dict[str, Any]:
        return {key: _cut(value) for key, value in self.facts.items() if value is not None}

    def __str__(self) -> str:
        return sentence(self)


def _cut(value: object) -> object:
    """Shortens a text, such as an error that quotes a whole document: a line of 1 MB hides all others."""
    text = str(value) if isinstance(value, str | BaseException) else ""
    if len(text) <= LONGEST_VALUE:
        return value
    return f"{text[:LONGEST_VALUE]}... ({len(text)} characters)"


def event_of(record: logging.LogRecord) -> Event:
    """Returns the event of a record; a record of other code becomes the event `log`."""
    if isinstance(record.msg, Event):
        return record.msg
    facts: dict[str, object] = {"logger": record.name, "message": record.getMessage()}
    if record.exc_info:
        facts["error"] = repr(record.exc_info[1])
    return Event(name="log", facts=facts, at=record.created)


# --- machine formats ------------------------------------------------------------------------------------
def rfc3339(seconds: float) -> str:
    """Unix seconds as UTC with milliseconds."""
    moment = datetime.fromtimestamp(seconds, UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{moment.microsecond // 1000:03d}Z"


def logfmt(event: Event, level: int) -> str:
    """Values with blanks are quoted."""
    facts = event.known
    head = f"event={event.name}"
    if event.name == STEP:
        total = facts.pop("total_steps", None)
        head = f"step={facts.pop('step')}" + (f"/{total}" if total else "")
        facts = {key: format(value, STEP_DIGITS.get(key, "")) for key, value in facts.items()}
        facts = {key.replace("_per_second", "/s"): value for key, value in facts.items()}
    words = [f"{key}={_word(value)}" for key, value in facts.items()]
    return " ".join([rfc3339(event.at), head, *words])


def _word(value: object) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    return json.dumps(text, ensure_ascii=False) if not text or any(c in text for c in ' "\n=') else text


def json_line(event: Event, level: int) -> str:
    head = {"time": rfc3339(event.at), "level": logging.getLevelName(level).lower(), "event": event.name}
    return json.dumps(head | {key: _value(value) for key, value in event.known.items()}, default=str)


def _value(value: object) -> object:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


# --- sentences ------------------------------------------------------------------------------------------
def sentence_line(event: Event, level: int) -> str:
    """One line for people, with the local time of day."""
    rank = event.facts.get("rank")
    whose = f"[rank {rank}] " if rank or (rank is not None and level >= logging.WARNING) else ""
    warning = "Warning: " if level >= logging.WARNING else ""
    return f"{datetime.fromtimestamp(event.at):%H:%M:%S} {whose}{warning}{' '.join(str(event).split())}"


def sentence(event: Event) -> str:
    """Returns the event in plain words."""
    template = INTERRUPTED if event.by_ctrl_c else SENTENCES.get(event.name)
    facts = {key: value for key, value in event.known.items() if key != "rank"}
    if template is None:
        return f"{event.name.replace('-', ' ').capitalize()}: {_listed(facts)}".rstrip(": ")
    named = {name for name, _ in FIELD.findall(template)}
    facts["rest"] = _listed({key: value for key, value in facts.items() if key not in named})
    pieces = re.split(r"\[(.*?)\]", template)
    pieces[1::2] = [piece if _known(facts, piece) else "" for piece in pieces[1::2]]
    shown = FIELD.sub(lambda found: _shown(facts.get(found[1]), found[2], event.at), "".join(pieces))
    return shown.rstrip(": ")


def _listed(facts: Mapping[str, object]) -> str:
    """Returns facts with their names, and after them those that explain the event."""
    named = [_named(key, value) for key, value in facts.items() if key not in EXPLAINS]
    return "; ".join([", ".join(named), *(str(facts[key]) for key in EXPLAINS if key in facts)]).strip("; ")


def _named(key: str, value: object) -> str:
    if key == "seconds":
        return _shown(value, "duration")
    if key == "bytes":
        return _shown(value, "size")
    name = key.removeprefix("eval_").removesuffix("_seconds").replace("_", " ")
    return f"{name} {_shown(value, 'duration' if key.endswith('_seconds') else None)}"


def _known(facts: Mapping[str, object], piece: str) -> bool:
    return all(
        facts.get(name, "") != "" and (form != "percent" or _shown(facts[name], form) != "0%")
        for name, form in FIELD.findall(piece)
    )


def _shown(value: object, form: str | None = None, at: float = 0.0) -> str:
    if form == "left" and isinstance(value, str):
        return duration(max(0.0, datetime.fromisoformat(value).timestamp() - at))
    if form == "duration" and isinstance(value, int | float):
        return duration(value)
    if form == "percent" and value is not None:
        return f"{float(str(value)):.0%}"
    if form == "size" and isinstance(value, int | float):
        return size(value)
    if isinstance(value, str) and EXACT.fullmatch(value):
        value = float(value)
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def counted(number: int, noun: str) -> str:
    """Returns `1 checkpoint`, `2 checkpoints` and so on."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def duration(seconds: float) -> str:
    """`18 ms`, `1.8 s`, `57 s`, `12 min`, `3 h 05 min` or `2 d 3 h`; `?` if it is NaN or infinite."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 99.5:
        return f"{seconds:.{1 if seconds < 9.95 else 0}f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60} h"


def size(count: float) -> str:
    """Bytes in decimal units: `512 B`, `10.2 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            break
        count, unit = count / 1000, {"B": "kB", "kB": "MB", "MB": "GB", "GB": "TB"}[unit]
    return f"{count:.3g} {unit}"


FORMATS: Final[Mapping[str, Callable[[Event, int], str]]] = {
    "text": sentence_line,
    "logfmt": logfmt,
    "json": json_line,
}
AUTO: Final = "auto"


def chosen_format(asked: str, *, terminal: bool) -> str:
    """Returns one of FORMATS. `auto`, and a value that is none of them, depends on the output."""
    return asked if asked in FORMATS else "text" if terminal else "logfmt"

"""What a log event looks like: a sentence, a line of `key=value`, or a JSON object. Pure functions.

logfmt  2026-11-21T12:03:04.123Z event=committed step=120 seconds=1.803 bytes=10172817 key=checkpoints/...
        2026-11-21T12:03:05.009Z step=121/400 loss=2.34567890 lr=0.0003 samples/s=812.0
json    {"time": "2026-11-21T12:03:04.123Z", "level": "info", "event": "committed", "step": 120, ...}
text    12:03:04 Saved step 120 in 1.8 s, 10.2 MB (checkpoints/...)
"""

from __future__ import annotations

import json
import logging
import math
import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from spottrain.contract import ExitCode

STEP: Final = "step"
"""The event of a training step's figures."""
STEP_DIGITS: Final = {"loss": ".9g", "lr": ".6g", "samples_per_second": ".1f"}
"""Formats of a step's figures; nine digits distinguish any two fp32 losses."""

LONGEST_VALUE: Final = 4096
"""Characters of a text in a line."""

EXACT: Final = re.compile(r"-?\d+\.\d{5,}(e-?\d+)?")
"""A figure with more digits than a person reads."""
FIELD: Final = re.compile(r"\{(\w+)(?::(\w+))?\}")

INFO: Final[Mapping[str, str]] = {
    STEP: "Step {step}[/{total_steps}]: {rest}",
    # a run
    "launched": "Started {processes} of {world} processes",
    "start": "Training {job}, attempt {attempt}[, {world} ranks]; checkpoints: {checkpoints}",
    "progress-served": "Progress and metrics are served on port {port}",
    "override": "{setting}: {rest}",
    "deterministic": "Deterministic mode, {threads} threads",
    "device": "Training on {name}, torch {torch}",
    "attached": "Attached to {library} {version} ({what}); {off} turns this off",
    "claimed": "Owns the checkpoint URI[; its newest checkpoint is of step {step}]",
    "restored": "Resumed from step {step} in {seconds:duration}",
    "initialized": "Initialized {tensors} tensors of the model from {source} in {seconds:duration}"
    "[; step {step}][; left out: {left_out}]",
    "new-rank": "{why}",
    "first-step": "First step done, {startup:duration} after the start",
    "emergency-budget": "A save at a notice takes {seconds:duration}[ of {grace:duration}][. {warning}]",
    "evaluated": "Evaluated step {step} in {seconds:duration}: {rest}",
    "saving": "Saving step {step}; the training waited {stall:duration}",
    "save-advised": "Advised to save at step {step}[, not done: {skipped}]",
    "save-skipped": "No save at step {step}: step {uploading} is still being uploaded",
    "committed": "Saved step {step} in {seconds:duration}[, {bytes:size}]",
    "model-stored": "What the script has saved is stored in {seconds:duration}: {files} files, {bytes:size} "
    "sent ({output})",
    "trained": "Trained {step} steps; the job is done when the script ends",
    "done": "Training is done after {step} steps[; weights: {output}]",
    "end": "[{message}]",
    # a stop
    "abandoning": "Abandoning the upload of step {step} for a newer one",
    "released": "Released the checkpoint URI",
    "rank-ended": "Rank {of} ended: {status}",
    "launcher-end": "{why} Exit code {code}",
    # the rendezvous of several pods or ranks
    "rendezvous-waiting": "Waiting for all {pods} pods[; missing: {missing}][; the first is {first}]",
    "rendezvous-complete": "All {pods} pods are there after {seconds:duration}",
    "rendezvous-left": "Left the rendezvous of {pods} pods after {seconds:duration}: told to stop",
    "waiting-for-rank": "Waiting for another rank, for {seconds:duration} so far: {what}",
    # a synced folder
    "sync-committed": "Saved checkpoint {step} of the folder in {seconds:duration}, {bytes:size}, of which "
    "{sent:size} were sent ({key})",
    "sync-replaced": "Moved {files} files that the checkpoint does not have so from {folder} to {place}",
    "sync-skipped": "Checkpoint {step} is not restored: {why}",
    # the store
    "store-reachable": "{store} responds again",
    # techniques
    "precision": "Precision[ {name}][ {chosen}][: {why}]",
    "loss-scale": "Loss scale: [{text}]{rest}",
    "batch-size": "Batch size: {rest}",
    "activation-checkpointing": "Activation checkpointing: {rest}",
    "compile": "Compiling the model: {rest}",
    "compiled": "Compiled {graphs} graphs",
    "optimizer": "Optimizer {name}[ is not fused: {why}]",
    "learning-rate": "Learning rate: {rest}",
    "ema": "Moving average of the weights: {rest}",
    "early-stopping": "Stopping early at step {step}: {why}",
    "loader-workers": "Using {workers} loader workers: {rest}",
    "step-skipped": "A step was skipped: {why}; the scale is now {scale}",
    # what is slow
    "step-time": "A step took {step_seconds:duration} on average[: {compute:percent} computing]"
    "[, {data:percent} waiting for data][, {h2d:percent} copying to the device]"
    "[, {communication:percent} exchanging gradients][, {checkpoint:percent} saving]"
    "[, {other:percent} other]",
    "diagnosis": "{why}[ First: {first}]",
    "peak-unknown": "The peak of {device} is unknown: {next}",
    "flops-not-counted": "The FLOPs of a step were not counted: {why}; {next}",
    "profiling": "Profiling {active} steps after {wait} and a warm-up of {warmup}",
    "profiled": "Profiled {steps} steps in {seconds:duration}[. First: {first}]",
    "profile-stored": "The profile is at {folder} ({bytes:size})",
    "profile-left-out": "No profile in this attempt: {why}",
    # the data cache
    "data-cache-hit": "{name} is in the data cache ({path})",
    "data-cache-filled": "Downloaded {name} in {seconds:duration}: {files} files, {bytes:size} ({path})",
    "data-cache-waiting": "Waiting for {name}: {why}",
    "data-cache-leftover": "An unfinished download of {name} was found ({path}); removed: {removed}",
    "data-cache-discarded": "The download of {name} is discarded: {why}",
    # the compile cache
    "compile-cache-restored": "Compile cache found: {hit}[; {files} files, {bytes:size}]",
    "compile-cache-saved": "Compile cache saved in {seconds:duration}: {files} files, {bytes:size}",
    "compile-cache-dropped": "The compile cache was deleted ({objects} objects)",
}
WARNINGS: Final[Mapping[str, str]] = {
    # a run
    "damaged": "The checkpoint of step {step} is damaged, using the one before: {error} ({key})",
    # a stop
    "sigterm": "Termination notice ({source}): {deadline:left} left, saving",
    "deadline": "Termination notice ({source}): {deadline:left} left, saving",
    "stop": "Told to stop ({source}): {deadline:left} left, saving",
    "save-abandoned": "The save of step {step} was abandoned",
    "ranks-killed": "Killed ranks {ranks}: their time is up",
    # the rendezvous of several pods or ranks
    # a synced folder
    "sync-link-out": "{path} leads to {target}, outside the folder: only the link itself is stored",
    "sync-little-room": "The file system of {folder} has {bytes:size} left",
    "sync-record-not-written": "{folder} has no record of what is in it, so a later start may refuse "
    "it: {error}",
    "sync-notes-inside": "Its own notes are in {folder}, where a script may list them: the folder is a mount "
    "of its own, or its parent cannot be written, and it has no extended attributes. Take a folder in it",
    "sync-left-out": "Checkpoints are stored without the new version of {files}",
    "sync-not-watched": "Writes to {folder} are seen by looks alone: {why}",
    "sync-writes-lost": "Too many writes to {folder} at once: a file that does not say whether it is whole "
    "counts as whole after 30 s without a change",
    "sync-left-running": "The command has ended, and processes that it had started run on: they have "
    "{seconds:duration} to end",
    "sync-owners-lost": "Restored files keep this process's user: {path} cannot be given to "
    "{user}:{group} ({why})",
    # trouble with the store
    "waiting-for-store": "{store} has not responded for {seconds:duration}[ (limit {limit:duration})]: {why}",
    "store-unreachable": "{store} has not responded for {seconds:duration}: {why}",
    "save-failed": "The save of step {step} failed: {error}[; {seconds_left:duration} left][; {next}]",
    "uploader-died": "The upload process died: {error}; {next}",
    "upload-not-aborted": "Parts of an upload stay in the bucket: {key}[ ({upload})]: {error}",
    "prune-failed": "Old checkpoints were not deleted: {error}",
    "series-not-written": "The series of steps was not written: {why}; {then}",
    "release-failed": "The checkpoint URI was not released: {error}",
    "head-check-failed": "HEAD could not be read: {error}",
    "bandwidth-not-measured": "The bandwidth to the store was not measured: {error}",
    "no-checkpoints": "Nothing is saved: {why}",
    "model-not-stored": "{folder} is in this pod alone: {why}",
    "no-last-checkpoint": "Step {step} is not saved: {why}",
    # trouble with processes
    "peer-lost": "Another rank is lost: {error}",
    "stalled": "No progress for {idle:duration} at step {step} ({state}): {why}",
    "not-finished": "Not finished at step {step}: {why}",
    "grace-shortened": "{why}",
    "sigterm-will-not-arrive": "SIGTERM will not arrive here: {why}; {remedy}",
    "not-pinned": "{bytes:size} of staging memory could not be pinned (CUDA error {code}); copies are slower",
    "progress-not-served": "Progress is not served on port {port}: {error}",
    "progress-request-failed": "A request for progress failed: {error}",
    "termination-message-not-written": "The termination message was not written to {path}: {error}",
    "outcome-not-recorded": "The outcome was not recorded[ in {path}]: [{why}][{error}]",
    # logs that are kept
    "logs-failed": "The logs are not stored: {error}; {next}",
    "logs-missing": "{bytes:size} of the log[ of rank {of}] are missing: {why}",
    "logs-full": "The log of rank {of} is full at {bytes:size}: {why}",
    "logs-not-kept": "The logs are not kept: {why}[; {remedy}][; {next}]",
    # techniques
    "advice": "{about}: [{text}][{why}][; {fix}]",
    "step-left-out": "A step was left out: {why}",
    "empty-step": "A step is empty: {why}",
    "tracker-failed": "Tracker {tracker} failed: {why}; {then}",
    "tracker-slow": "Tracker {tracker} is slow: {why}",
    "tracker-closed": "Figures of step {step} were not tracked: {why}",
    "tracker-incomplete": "Tracker {tracker} is incomplete: {rest}",
    # what is slow
    "utilisation-not-sampled": "GPU utilisation is not sampled: {why}; {next}",
    "profile-not-stored": "The profile was not stored: {error}",
    "profile-not-made": "There is no profile: {why}",
    "profile-failed": "The profiler failed: {error}",
    "profile-cut-short": "The profile lacks {steps_missing} steps: {why}",
    # the data cache
    "data-cache-without-locks": "The data cache {folder} has no locks: {why}",
    "data-cache-not-writable": "The data cache {folder} is not writable: {why}",
    # the compile cache
    "compile-cache-not-saved": "The compile cache was not saved: {why}",
    "compile-cache-unusable": "The compile cache is unusable, so everything is compiled: {why}",
}
SENTENCES: Final = {**INFO, **WARNINGS}
"""Sentences by event. `[...]` is left out if a fact in it is absent; `{rest}` is all facts not named.

Formats: `duration` of seconds, `size` of bytes, `percent` of a share, `left` until an RFC 3339 time. A share
that would be 0% counts as absent."""
DETAILS: Final = frozenset(
    {
        "claimed",
        "done",
        "emergency-budget",
        "launched",
        "progress-served",
        "released",
        "saving",
        "trained",
    }
)
"""Events that a terminal does not show, unless they are warnings: a person has no use for them, or another
sentence says the same."""
USUAL_ENDS: Final = (ExitCode.DONE, ExitCode.INTERRUPTED)
"""Of ranks: their own sentences say the rest."""
OVERRIDES: Final = (
    "{setting} is {manifest}, not {script} as in the script",
    "{setting} is {manifest}",
    "{setting} is {checkpoint} in the checkpoint, {script} in the script",
    "{setting} is {ours}, not {script} as in the script",
)
"""The first one counts whose facts an override has."""
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
def text(event: Event, level: int) -> str:
    """One line for people, with the local time of day."""
    rank = event.facts.get("rank")
    whose = f"[rank {rank}] " if rank or (rank is not None and level >= logging.WARNING) else ""
    warning = "Warning: " if level >= logging.WARNING else ""
    return f"{datetime.fromtimestamp(event.at):%H:%M:%S} {whose}{warning}{' '.join(str(event).split())}"


def wrapped(line: str, columns: int, *, indent: str = " " * len("12:03:04 ")) -> str:
    """Breaks a line for people between words. Its other rows begin below its sentence; paths stay whole."""
    if len(line) <= columns:
        return line
    return textwrap.fill(
        line, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def sentence(event: Event) -> str:
    """Returns the event in plain words."""
    template = _template(event)
    facts = {key: value for key, value in event.known.items() if key != "rank"}
    named = {name for name, _ in FIELD.findall(template)}
    rest = [f"{_words_of(key)} {_shown(value)}" for key, value in facts.items() if key not in named]
    facts["rest"] = ", ".join(rest)
    pieces = re.split(r"\[(.*?)\]", template)
    pieces[1::2] = [piece if _known(facts, piece) else "" for piece in pieces[1::2]]
    return FIELD.sub(lambda found: _shown(facts.get(found[1]), found[2], event.at), "".join(pieces)).rstrip(
        ": "
    )


def _template(event: Event) -> str:
    if event.by_ctrl_c:
        return INTERRUPTED
    if event.name == "override":
        return next((each for each in OVERRIDES if _known(event.known, each)), SENTENCES[event.name])
    return SENTENCES.get(event.name, event.name.replace("-", " ").capitalize() + ": {rest}")


def _words_of(key: str) -> str:
    return key.removeprefix("eval_").replace("_", " ")


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
    "text": text,
    "logfmt": logfmt,
    "json": json_line,
}
AUTO: Final = "auto"


def chosen_format(asked: str, *, terminal: bool) -> str:
    """Returns one of FORMATS. `auto`, and a value that is none of them, depends on the output."""
    return asked if asked in FORMATS else "text" if terminal else "logfmt"

"""A finding of the doctor, and how findings are shown. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Final

from spottrain.core.log_format import counted


class Level(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


LEAST_WIDTH: Final = 40


@dataclass(frozen=True, slots=True)
class Finding:
    level: Level
    subject: str
    """What was looked at, such as `operator`."""
    text: str
    fix: str = ""


def ok(subject: str, text: str) -> Finding:
    return Finding(Level.OK, subject, text)


def warn(subject: str, text: str, fix: str) -> Finding:
    return Finding(Level.WARN, subject, text, fix)


def fail(subject: str, text: str, fix: str) -> Finding:
    return Finding(Level.FAIL, subject, text, fix)


def failed(findings: Iterable[Finding]) -> bool:
    return any(each.level is Level.FAIL for each in findings)


def facts(findings: Sequence[Finding]) -> dict[str, Any]:
    return {"ok": not failed(findings), "findings": [asdict(each) for each in findings]}


def lines(findings: Sequence[Finding], *, width: int) -> list[str]:
    """Returns a line for each finding, its fix below it, and a line that sums up. `width`: 0 for no limit."""
    wide = max((len(each.subject) for each in findings), default=0)
    shown = [line for each in findings for line in _shown(each, wide, width)]
    return [*shown, "", _sum(findings)]


def _shown(each: Finding, wide: int, width: int) -> list[str]:
    head = f"{each.level:<4}  {each.subject:<{wide}}  "
    texts = [each.text, *([f"Fix: {each.fix}"] if each.fix else [])]
    rows = [row for text in texts for row in _wrapped(text, width - len(head))]
    return [head + rows[0], *(" " * len(head) + row for row in rows[1:])]


def _wrapped(text: str, width: int) -> list[str]:
    if width < LEAST_WIDTH:
        return [text]
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def _sum(findings: Sequence[Finding]) -> str:
    bad, doubtful = (sum(each.level is level for each in findings) for level in (Level.FAIL, Level.WARN))
    if not bad and not doubtful:
        return "All is well."
    parts = [f"{bad} failed" if bad else "", f"{doubtful} to look at" if doubtful else ""]
    return f"{counted(len(findings), 'check')}: {', '.join(filter(None, parts))}."

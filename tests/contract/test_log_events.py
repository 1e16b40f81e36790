"""The sentences of events name facts that they have, and the documentation lists every event."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

from spottrain.core.log_format import DETAILS, FIELD, SENTENCES, STEP, WARNINGS

ROOT = Path(__file__).resolve().parents[2]
LOGS = ("event", "unhindered", "text")
"""Functions of the module `log` that log an event."""
IN_VARIABLES = {
    "preemption.py": ("sigterm", "deadline", "stop"),
    "outage_report.py": ("waiting-for-store", "store-unreachable"),
}
"""Names of events that a call in these files has in a variable."""


@cache
def logged() -> dict[str, set[str]]:
    """Facts by event; `**` stands for facts that are not in the call."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in (ROOT / "runtime" / "spottrain").rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and _logs(call.func):
                for name in names_of(call.args[0], path.name):
                    found[name] |= {keyword.arg or "**" for keyword in call.keywords}
    return found


def _logs(called: ast.expr) -> bool:
    owner = called.value if isinstance(called, ast.Attribute) and called.attr in LOGS else None
    return isinstance(owner, ast.Name) and owner.id == "log"


def names_of(first: ast.expr, file: str) -> list[str]:
    if isinstance(first, ast.Name):
        return list(IN_VARIABLES[file])
    constants = [each.value for each in ast.walk(first) if isinstance(each, ast.Constant)]
    return [each for each in constants if isinstance(each, str)]


def sentences() -> dict[str, tuple[str, set[str]]]:
    """The events that have a sentence of their own: the sentence, and the facts that it may name."""
    return {name: (SENTENCES[name], facts) for name, facts in logged().items() if name in SENTENCES}


def test_sentences_warnings_and_details_are_of_events_that_are_logged() -> None:
    assert set(SENTENCES) | WARNINGS | DETAILS <= set(logged()) | {STEP}


def test_a_sentence_names_only_facts_that_its_event_has() -> None:
    for name, (sentence, facts) in sentences().items():
        named = {field for field, _ in FIELD.findall(sentence)} - {"rest"}
        assert named <= facts or "**" in facts, f"{name}: {named - facts}"


def test_a_sentence_leaves_out_no_reason() -> None:
    for name, (sentence, facts) in sentences().items():
        named = {field for field, _ in FIELD.findall(sentence)}
        reasons = facts & {"why", "error", "text", "next", "then", "fix", "remedy", "warning", "message"}
        assert "rest" in named or reasons <= named, f"{name}: {reasons - named}"


def test_the_documentation_lists_every_event_once() -> None:
    page = (ROOT / "docs" / "reference" / "log-events.md").read_text()
    listed = re.findall(r"^\| `([a-z-]+)` \|", page, re.MULTILINE)
    assert sorted(listed) == sorted(set(logged()) | {STEP})

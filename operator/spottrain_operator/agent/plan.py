"""What to write, given what the metadata service says and what node and pods carry. Pure; called by loop."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, Final, TypeAlias

from spottrain_operator import names
from spottrain_operator.agent.findings import (
    BEGUN_SECONDS,
    Answer,
    Finding,
    Findings,
    NodeEnding,
    Unreadable,
    rfc3339,
)

ADVICE_LIFE: Final = timedelta(hours=1)
"""Older advice says nothing about this hour."""
_BEGUN: Final = timedelta(seconds=BEGUN_SECONDS)
_ENDED: Final = frozenset({"Succeeded", "Failed"})
_NODE_ANNOTATIONS: Final = (
    names.DEADLINE_ANNOTATION,
    names.SOURCE_ANNOTATION,
    names.NOTICE_SEEN_ANNOTATION,
    names.SAVE_ADVISED_ANNOTATION,
)

Patch: TypeAlias = dict[str, Any]
"""A JSON merge patch: None deletes a key."""


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """What the agent holds to be so."""

    heard: Mapping[str, Findings] = field(default_factory=dict)
    """The latest readable answer to each watch."""
    first_read: Mapping[Finding, datetime] = field(default_factory=dict)
    """When each finding that stands was first read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeNotice:
    """A pending end as the cluster is told of it."""

    cause: NodeEnding
    deadline: datetime
    seen: datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class Advised:
    """Advice to save as the cluster is told of it."""

    cause: Finding
    at: datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class Marks:
    """What the cluster is to be told."""

    notice: NodeNotice | None = None
    advised: Advised | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """The parts of a node that the agent reads."""

    resource_version: str
    taints: tuple[Mapping[str, Any], ...] = ()
    annotations: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pod:
    """The parts of a trainer pod that the agent reads."""

    namespace: str
    name: str
    uid: str
    phase: str = "Running"
    annotations: Mapping[str, str] = field(default_factory=dict)

    @property
    def ended(self) -> bool:
        return self.phase in _ENDED


# --- from answers to marks ----------------------------------------------------------------------------
def advance(view: View, watch: str, answer: Answer, now: datetime) -> View:
    """The view after an answer. An error changes nothing; the same finding keeps the time of its reading."""
    if isinstance(answer, Unreadable):
        return view
    before = view.heard.get(watch, Findings()).found
    found = tuple(_settled(finding, before, now) for finding in answer.found)
    heard = {**view.heard, watch: replace(answer, found=found)}
    standing = [finding for findings in heard.values() for finding in findings.found]
    return View(heard=heard, first_read={f: view.first_read.get(f, now) for f in standing})


def _settled(finding: Finding, before: Iterable[Finding], now: datetime) -> Finding:
    """An event that has begun may no longer say when: it keeps its time, and with it its deadline."""
    if not (isinstance(finding, NodeEnding) and finding.id and finding.at is None):
        return finding
    for old in before:
        same = isinstance(old, NodeEnding) and (old.source, old.id) == (finding.source, finding.id)
        if same and old.at is not None and old.at <= now + _BEGUN:
            return old
    return finding


def marks(view: View, now: datetime) -> Marks:
    """The earliest end that can be acted on, and the latest advice, which an end still far away is too."""
    notices: list[NodeNotice] = []
    advice: list[Advised] = []
    for finding, first in view.first_read.items():
        if isinstance(finding, NodeEnding) and _is_near(finding, now):
            notices.append(_notice(finding, first))
        else:
            advice.append(_advised(finding, first))
    fresh = [a for a in advice if now - a.at < ADVICE_LIFE]
    return Marks(
        notice=min(notices, key=lambda n: (n.deadline, n.cause.source, n.cause.id), default=None),
        advised=max(fresh, key=lambda a: (a.at, a.cause.source, a.cause.id), default=None),
    )


def _is_near(ending: NodeEnding, now: datetime) -> bool:
    return ending.at is None or (ending.at - now).total_seconds() <= ending.lead


def _notice(ending: NodeEnding, first: datetime) -> NodeNotice:
    """Seen: since it could be acted on. One that is overdue leaves the seconds of one that has begun."""
    if ending.at is None:
        return NodeNotice(cause=ending, deadline=first + timedelta(seconds=ending.after), seen=first)
    far = (ending.at - first).total_seconds() > ending.lead
    seen = ending.at - timedelta(seconds=ending.lead) if far else first
    deadline = ending.at if ending.at > seen else seen + _BEGUN
    return NodeNotice(cause=ending, deadline=deadline, seen=seen)


def _advised(finding: Finding, first: datetime) -> Advised:
    """A time that lies ahead, or none, is the time of reading: each value is one extra save."""
    said = None if isinstance(finding, NodeEnding) else finding.at
    return Advised(cause=finding, at=first if said is None else min(said, first))


# --- from marks to patches ----------------------------------------------------------------------------
def pod_patch(notice: NodeNotice, pod: Pod) -> Patch | None:
    """The deadline for a pod that has not ended; None where it carries one that is no later.

    The UID makes the API server refuse the patch should the name belong to another pod by now.
    """
    if pod.ended:
        return None
    carried = _time(pod.annotations.get(names.DEADLINE_ANNOTATION))
    if carried is not None and carried <= notice.deadline:
        return None
    annotations = {
        names.DEADLINE_ANNOTATION: rfc3339(notice.deadline),
        names.SOURCE_ANNOTATION: notice.cause.source,
    }
    return {"metadata": {"uid": pod.uid, "annotations": annotations}}


def node_patch(told: Marks, node: Node) -> Patch | None:
    """Makes the node carry these marks of ours and no others; None where it does.

    A node's taints are one value to the API server (an atomic list), so the patch holds all of them, and the
    resource version makes it fail rather than undo what somebody else has tainted meanwhile.
    """
    notice = _as_told_before(told.notice, node) if told.notice else None
    taints = [t for t in node.taints if t["key"] != names.TERMINATING_TAINT]
    ours = [t for t in node.taints if t["key"] == names.TERMINATING_TAINT]
    wanted = _taint(notice) if notice else []
    annotations = _annotations(notice, told.advised, node)
    if [_bare(t) for t in ours] == wanted and not annotations:
        return None
    return {
        "metadata": {"resourceVersion": node.resource_version, "annotations": annotations},
        "spec": {"taints": taints + wanted},
    }


def _as_told_before(notice: NodeNotice, node: Node) -> NodeNotice:
    """An end without a time of its own keeps the deadline that the agent before this one reckoned."""
    before = _time(node.annotations.get(names.DEADLINE_ANNOTATION))
    same = node.annotations.get(names.SOURCE_ANNOTATION) == notice.cause.source
    if before and same and notice.cause.at is None and notice.seen <= before < notice.deadline:
        return replace(notice, deadline=before)
    return notice


def _taint(notice: NodeNotice) -> list[Mapping[str, Any]]:
    value = str(int(notice.deadline.timestamp()))
    return [{"key": names.TERMINATING_TAINT, "value": value, "effect": "NoSchedule"}]


def _bare(taint: Mapping[str, Any]) -> Mapping[str, Any]:
    """A taint without what the API server adds (timeAdded)."""
    return {k: taint.get(k) for k in ("key", "value", "effect")}


def _annotations(notice: NodeNotice | None, advised: Advised | None, node: Node) -> dict[str, str | None]:
    """The changes that the node's annotations need; an agent that restarts keeps the first time of seeing."""
    wanted: dict[str, str] = {}
    if notice:
        told = {
            names.DEADLINE_ANNOTATION: rfc3339(notice.deadline),
            names.SOURCE_ANNOTATION: notice.cause.source,
        }
        same = all(node.annotations.get(key) == value for key, value in told.items())
        seen = node.annotations.get(names.NOTICE_SEEN_ANNOTATION) if same else None
        wanted = told | {names.NOTICE_SEEN_ANNOTATION: seen or rfc3339(notice.seen)}
    if advised:
        wanted[names.SAVE_ADVISED_ANNOTATION] = rfc3339(advised.at)
    changes: dict[str, str | None] = {k: v for k, v in wanted.items() if node.annotations.get(k) != v}
    return changes | {k: None for k in _NODE_ANNOTATIONS if k in node.annotations and k not in wanted}


def _time(text: str | None) -> datetime | None:
    """None for what is not a time, or one without a zone."""
    try:
        value = datetime.fromisoformat(text or "")
    except ValueError:
        return None
    return value if value.tzinfo else None

"""What to write, given what the metadata service says and what node and pods carry. Pure; called by loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any, Final, TypeAlias

from spottrain_operator import names, wire

AWS_SOURCE: Final = "AWS spot/instance-action"
HIBERNATE: Final = "hibernate"
"""The one action that begins with the notice, not two minutes after it."""
_ENDED: Final = frozenset({"Succeeded", "Failed"})
_NODE_ANNOTATIONS: Final = (names.DEADLINE_ANNOTATION, names.SOURCE_ANNOTATION, names.NOTICE_SEEN_ANNOTATION)

rfc3339 = partial(wire.rfc3339, timespec="microseconds")
"""A time as runtime and operator read it."""

Patch: TypeAlias = dict[str, Any]
"""A JSON merge patch: None deletes a key."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceAction:
    """The metadata service announces the end of this instance."""

    action: str
    time: datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class NoNotice:
    """The metadata service answered that no notice is pending: its 404, never an error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unreadable:
    """No answer that says anything: time-out, 5xx, foreign text."""

    why: str


Answer: TypeAlias = InstanceAction | NoNotice | Unreadable


@dataclass(frozen=True, kw_only=True, slots=True)
class Notice:
    """A pending notice as the cluster is told of it."""

    cause: InstanceAction
    deadline: datetime
    seen: datetime


View: TypeAlias = Notice | NoNotice | None
"""What the agent holds to be so; None until the metadata service has answered once."""


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


def advance(view: View, answer: Answer, now: datetime) -> View:
    """The view after an answer. An error changes nothing; the same notice keeps its deadline and its time."""
    if isinstance(answer, Unreadable):
        return view
    if isinstance(answer, NoNotice):
        return answer
    if isinstance(view, Notice) and view.cause == answer:
        return view
    return Notice(cause=answer, deadline=now if answer.action == HIBERNATE else answer.time, seen=now)


def pod_patch(notice: Notice, pod: Pod) -> Patch | None:
    """The deadline for a pod that has not ended; None where it carries one that is no later.

    The UID makes the API server refuse the patch should the name belong to another pod by now.
    """
    if pod.phase in _ENDED or _no_later(pod.annotations.get(names.DEADLINE_ANNOTATION), notice.deadline):
        return None
    annotations = {
        names.DEADLINE_ANNOTATION: rfc3339(notice.deadline),
        names.SOURCE_ANNOTATION: AWS_SOURCE,
    }
    return {"metadata": {"uid": pod.uid, "annotations": annotations}}


def node_patch(notice: Notice | None, node: Node) -> Patch | None:
    """Marks the node, or with no notice takes our marks away; None where it is as it should be.

    A node's taints are one value to the API server (an atomic list), so the patch holds all of them, and the
    resource version makes it fail rather than undo what somebody else has tainted meanwhile.
    """
    taints = [t for t in node.taints if t["key"] != names.TERMINATING_TAINT]
    ours = [t for t in node.taints if t["key"] == names.TERMINATING_TAINT]
    wanted = _taint(notice) if notice else []
    annotations = _annotations(notice, node)
    if [_bare(t) for t in ours] == wanted and not annotations:
        return None
    return {
        "metadata": {"resourceVersion": node.resource_version, "annotations": annotations},
        "spec": {"taints": taints + wanted},
    }


def _taint(notice: Notice) -> list[Mapping[str, Any]]:
    value = str(int(notice.deadline.timestamp()))
    return [{"key": names.TERMINATING_TAINT, "value": value, "effect": "NoSchedule"}]


def _bare(taint: Mapping[str, Any]) -> Mapping[str, Any]:
    """A taint without what the API server adds (timeAdded)."""
    return {k: taint.get(k) for k in ("key", "value", "effect")}


def _annotations(notice: Notice | None, node: Node) -> dict[str, str | None]:
    """The changes that the node's annotations need; an agent that restarts keeps the first time of seeing."""
    if notice is None:
        return {k: None for k in _NODE_ANNOTATIONS if k in node.annotations}
    wanted = {names.DEADLINE_ANNOTATION: rfc3339(notice.deadline), names.SOURCE_ANNOTATION: AWS_SOURCE}
    changes: dict[str, str | None] = {k: v for k, v in wanted.items() if node.annotations.get(k) != v}
    if changes or names.NOTICE_SEEN_ANNOTATION not in node.annotations:
        changes[names.NOTICE_SEEN_ANNOTATION] = rfc3339(notice.seen)
    return changes


def _no_later(text: str | None, deadline: datetime) -> bool:
    try:
        return text is not None and datetime.fromisoformat(text) <= deadline
    except (ValueError, TypeError):  # not a time, or one without a zone
        return False

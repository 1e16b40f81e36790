"""Computes which marks to write, from the metadata service's findings and the present node and pods. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, Final, TypeAlias

from spottrain_operator import names
from spottrain_operator.agent.findings import BEGUN_SECONDS, Finding, Findings, rfc3339
from spottrain_operator.api.wire import deadline_annotations, optional_timestamp

ADVICE_LIFE: Final = timedelta(hours=1)
"""Older advice is ignored."""
_BEGUN: Final = timedelta(seconds=BEGUN_SECONDS)
_ENDED: Final = frozenset({"Succeeded", "Failed"})
_NODE_ANNOTATIONS: Final = (
    names.DEADLINE_ANNOTATION,
    names.SOURCE_ANNOTATION,
    names.NOTICE_SEEN_ANNOTATION,
    names.SAVE_ADVISED_ANNOTATION,
)

Json: TypeAlias = dict[str, Any]
"""An object of the API server, or a merge patch of one, in which None deletes a key."""


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """The agent's knowledge from all watches."""

    heard: Mapping[str, Findings] = field(default_factory=dict)
    """The latest readable response of each watch, by its name."""
    first_read: Mapping[Finding, datetime] = field(default_factory=dict)
    """When each current finding was first read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeNotice:
    """A pending termination as published to the cluster."""

    cause: Finding
    deadline: datetime
    seen: datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class Advised:
    """Advice to save as published to the cluster."""

    cause: Finding
    at: datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class Marks:
    """What to publish to the cluster."""

    notice: NodeNotice | None = None
    advised: Advised | None = None


# --- from responses to marks --------------------------------------------------------------------------
def advance(view: View, watch: str, findings: Findings, now: datetime) -> View:
    """Returns the view after a response. A known finding keeps its first time."""
    before = view.heard.get(watch, Findings()).found
    found = tuple(_settled(finding, before, now) for finding in findings.found)
    heard = {**view.heard, watch: replace(findings, found=found)}
    standing = [finding for findings in heard.values() for finding in findings.found]
    return View(heard=heard, first_read={f: view.first_read.get(f, now) for f in standing})


def _settled(finding: Finding, before: Iterable[Finding], now: datetime) -> Finding:
    """Keeps the earlier `at`, and so the deadline, of an event that no longer reports a time once begun."""
    if not finding.id or finding.at is not None:
        return finding
    same = (old for old in before if (old.source, old.id) == (finding.source, finding.id))
    return next((old for old in same if old.at is not None and old.at <= now + _BEGUN), finding)


def marks(view: View, now: datetime) -> Marks:
    """Returns the earliest near end, and the latest advice; a distant end counts as advice."""
    # An end without a time is near.
    near = {
        finding: first
        for finding, first in view.first_read.items()
        if finding.ends and (finding.at is None or (finding.at - now).total_seconds() <= finding.lead)
    }
    notices = [_notice(finding, first) for finding, first in near.items()]
    # The first reading, where a time lies ahead or is missing: each new time costs one save.
    advice = [
        Advised(cause=finding, at=min(finding.at or first, first))
        for finding, first in view.first_read.items()
        if finding not in near
    ]
    fresh = [advised for advised in advice if now - advised.at < ADVICE_LIFE]
    return Marks(
        notice=min(notices, key=lambda n: (n.deadline, n.cause.source, n.cause.id), default=None),
        advised=max(fresh, key=lambda a: (a.at, a.cause.source, a.cause.id), default=None),
    )


def _notice(ending: Finding, first: datetime) -> NodeNotice:
    """`seen` is when the end became near. An overdue end gets the seconds of one that has just begun."""
    if ending.at is None:
        return NodeNotice(cause=ending, deadline=first + timedelta(seconds=ending.after), seen=first)
    far = (ending.at - first).total_seconds() > ending.lead
    seen = ending.at - timedelta(seconds=ending.lead) if far else first
    deadline = ending.at if ending.at > seen else seen + _BEGUN
    return NodeNotice(cause=ending, deadline=deadline, seen=seen)


# --- from marks to patches ----------------------------------------------------------------------------
def pod_patch(notice: NodeNotice, pod: Json) -> Json | None:
    """Returns the patch with a running pod's deadline; None where the pod has the same or an earlier one.

    The UID makes the API server reject the patch if the name now belongs to another pod.
    """
    carried = optional_timestamp(_annotations(pod).get(names.DEADLINE_ANNOTATION))
    if pod["status"].get("phase") in _ENDED or (carried is not None and carried <= notice.deadline):
        return None
    annotations = deadline_annotations(notice.deadline, notice.cause.source)
    return {"metadata": {"uid": pod["metadata"]["uid"], "annotations": annotations}}


def node_patch(marks: Marks, node: Json) -> Json | None:
    """Returns the patch that sets the marks and removes our others; None where nothing changes.

    A node's taints are an atomic list for the API server, so the patch holds all of them. The resource
    version makes it fail rather than undo another writer's taint.
    """
    notice = _with_earlier_deadline(marks.notice, _annotations(node)) if marks.notice else None
    taints = node["spec"].get("taints") or []
    ours = [taint for taint in taints if taint["key"] == names.TERMINATING_TAINT]
    # The API server adds timeAdded.
    carried = [{key: taint.get(key) for key in ("key", "value", "effect")} for taint in ours]
    value = str(int(notice.deadline.timestamp())) if notice else ""
    taint = {"key": names.TERMINATING_TAINT, "value": value, "effect": "NoSchedule"}
    wanted = [taint] if notice else []
    changes = _changes(notice, marks.advised, _annotations(node))
    if carried == wanted and not changes:
        return None
    return {
        "metadata": {"resourceVersion": node["metadata"]["resourceVersion"], "annotations": changes},
        "spec": {"taints": [taint for taint in taints if taint not in ours] + wanted},
    }


def _annotations(item: Json) -> Mapping[str, str]:
    return item["metadata"].get("annotations") or {}


def _with_earlier_deadline(notice: NodeNotice, carried: Mapping[str, str]) -> NodeNotice:
    """Keeps the deadline that an earlier agent process computed for an end without a time."""
    before = optional_timestamp(carried.get(names.DEADLINE_ANNOTATION))
    same = carried.get(names.SOURCE_ANNOTATION) == notice.cause.source
    if before and same and notice.cause.at is None and notice.seen <= before < notice.deadline:
        return replace(notice, deadline=before)
    return notice


def _changes(
    notice: NodeNotice | None, advised: Advised | None, carried: Mapping[str, str]
) -> dict[str, str | None]:
    """Returns the changes of the node's annotations; the first notice-seen time survives agent restarts."""
    wanted: dict[str, str] = {}
    if notice:
        wanted = deadline_annotations(notice.deadline, notice.cause.source)
        seen = carried.get(names.NOTICE_SEEN_ANNOTATION) if wanted.items() <= carried.items() else None
        wanted[names.NOTICE_SEEN_ANNOTATION] = seen or rfc3339(notice.seen)
    if advised:
        wanted[names.SAVE_ADVISED_ANNOTATION] = rfc3339(advised.at)
    changes: dict[str, str | None] = {key: None for key in _NODE_ANNOTATIONS if key in carried}
    return {key: text for key, text in (changes | wanted).items() if carried.get(key) != text}

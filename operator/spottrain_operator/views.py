"""Raw pods and nodes to the few words that decisions need.

Called by the caches, for every event and every list.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from spottrain_operator import native, signals
from spottrain_operator.api import JobKey
from spottrain_operator.model import ClaimView, Ended, NodeView, Notice, PodView, Waiting
from spottrain_operator.names import (
    ATTEMPT_LABEL,
    AVOIDS_ANNOTATION,
    DEADLINE_ANNOTATION,
    HOSTNAME_LABEL,
    INSTANCE_TYPE_LABEL,
    JOB_LABEL,
    JOB_UID_LABEL,
    KARPENTER_LABEL,
    KIND,
    NOTICE_SEEN_ANNOTATION,
    OUTCOME_FINALIZER,
    PINNED_ANNOTATION,
    RANK_LABEL,
    SAVE_ADVISED_ANNOTATION,
    SELECTED_NODE_ANNOTATION,
    SOURCE_ANNOTATION,
    TERMINATING_TAINT,
    ZONE_LABEL,
)
from spottrain_operator.pools import of_node
from spottrain_operator.template import judged
from spottrain_operator.wire import timestamp

Raw = Mapping[str, Any]
MAX_WORDS = 2000
"""Of a container's last words, from their end."""


def pod_view(raw: Raw) -> PodView | None:
    """None for a pod that is not ours: it lacks our labels, or another controller owns it."""
    meta, spec, status = raw["metadata"], raw.get("spec", {}), raw.get("status", {})
    job, attempt = _owner(meta), (meta.get("labels") or {}).get(ATTEMPT_LABEL, "")
    if job is None or not attempt.isdigit():
        return None
    state = _trainer_state(spec, status)
    return PodView(
        name=meta["name"],
        namespace=meta["namespace"],
        uid=meta["uid"],
        job=job,
        resource_version=int(meta["resourceVersion"]),
        attempt=int(attempt),
        rank=_rank(meta),
        created=timestamp(meta["creationTimestamp"]),
        phase=status.get("phase", "Pending"),
        reason=status.get("reason", ""),
        message=status.get("message", ""),
        node=spec.get("nodeName", ""),
        ip=status.get("podIP", ""),
        grace=int(spec.get("terminationGracePeriodSeconds", 30)),
        memory_limit=_memory_limit(spec),
        others_run=_others_run(spec, status),
        deleted=_time(meta.get("deletionTimestamp")),
        deletion_grace=int(meta.get("deletionGracePeriodSeconds") or 0),
        holds_outcome=OUTCOME_FINALIZER in (meta.get("finalizers") or ()),
        notice=_annotated_notice(meta),
        save_advised=_advice(meta),
        running_since=_time((state.get("running") or {}).get("startedAt")),
        waiting=_waiting(state) or _blocking_init(status),
        ended=_ended(state),
        unschedulable=_unschedulable(status),
        queued=bool(spec.get("schedulingGates")),
        disruption=_disruption(status),
        init_failure=_init_failure(status),
        avoids=_avoids(meta),
        pinned=(meta.get("annotations") or {}).get(PINNED_ANNOTATION, ""),
        grouped=native.grouped(spec),
    )


def _rank(meta: Raw) -> int:
    text = (meta.get("labels") or {}).get(RANK_LABEL, "")
    return int(text) if text.isdecimal() and len(text) < 6 else 0


def _avoids(meta: Raw) -> tuple[str, ...]:
    names = (meta.get("annotations") or {}).get(AVOIDS_ANNOTATION, "")
    return tuple(name for name in names.split(",") if name)


def _owner(meta: Raw) -> JobKey | None:
    owner = next((o for o in meta.get("ownerReferences") or () if o.get("controller")), None)
    labels = meta.get("labels") or {}
    if owner is not None and owner.get("kind") == KIND:
        return JobKey(namespace=meta["namespace"], name=owner["name"], uid=owner["uid"])
    if owner is None and OUTCOME_FINALIZER in (meta.get("finalizers") or ()) and JOB_UID_LABEL in labels:
        # Orphaned with its job: nobody but us can take the finalizer off.
        return JobKey(namespace=meta["namespace"], name=labels.get(JOB_LABEL, ""), uid=labels[JOB_UID_LABEL])
    return None


def _trainer_state(spec: Raw, status: Raw) -> Raw:
    name = judged(spec.get("containers") or ()).get("name")
    states = (s.get("state") or {} for s in status.get("containerStatuses") or () if s["name"] == name)
    return next(states, {})


def _others_run(spec: Raw, status: Raw) -> bool:
    name = judged(spec.get("containers") or ()).get("name")
    others = (s for s in status.get("containerStatuses") or () if s["name"] != name)
    return any("running" in (s.get("state") or {}) for s in others)


def _memory_limit(spec: Raw) -> str:
    limits = (judged(spec.get("containers") or ()).get("resources") or {}).get("limits") or {}
    return str(limits.get("memory", ""))


def _waiting(state: Raw) -> Waiting | None:
    waiting = state.get("waiting")
    return Waiting(reason=waiting.get("reason", ""), message=waiting.get("message", "")) if waiting else None


def _blocking_init(status: Raw) -> Waiting | None:
    """An init container that cannot start is why the trainer waits."""
    states = (s.get("state") or {} for s in status.get("initContainerStatuses") or ())
    return next((w for s in states if (w := _waiting(s)) is not None and w.reason != "PodInitializing"), None)


def _init_failure(status: Raw) -> str:
    """The first init container that failed: with restartPolicy Never the trainer never starts."""
    for init in status.get("initContainerStatuses") or ():
        ended = _ended(init.get("state") or {})
        if ended is not None and ended.exit_code != 0:
            why = f" ({ended.reason})" if ended.reason not in ("", "Error") else ""
            words = f"init container {init['name']}: exit code {ended.exit_code}{why}"
            said = ended.message.strip()[-MAX_WORDS:]
            return f"{words}: {said}" if said else words
    return ""


def _ended(state: Raw) -> Ended | None:
    ended = state.get("terminated")
    if ended is None:
        return None
    return Ended(
        exit_code=int(ended.get("exitCode", 0)),
        reason=ended.get("reason", ""),
        message=ended.get("message", ""),
        started=_time(ended.get("startedAt")),
        finished=_time(ended.get("finishedAt")),
    )


def ended_of(raw: Raw) -> Ended | None:
    """How the only container of a pod has ended for good."""
    status = raw.get("status", {})
    states = [s.get("state") or {} for s in status.get("containerStatuses") or ()]
    if status.get("phase") not in ("Succeeded", "Failed"):
        return None
    said = status.get("message", "")
    return next((found for s in states if (found := _ended(s))), Ended(exit_code=1, message=said))


def _unschedulable(status: Raw) -> str:
    found = _condition(status, "PodScheduled")
    return found.get("message", "") or found.get("reason", "") if found.get("status") == "False" else ""


def _disruption(status: Raw) -> str:
    found = _condition(status, "DisruptionTarget")
    return f"{found.get('reason')}: {found.get('message', '')}" if found.get("status") == "True" else ""


def _condition(status: Raw, kind: str) -> Raw:
    conditions: Iterable[Raw] = status.get("conditions") or ()
    return next((c for c in conditions if c["type"] == kind), {})


def node_view(raw: Raw) -> NodeView:
    meta, labels = raw["metadata"], raw["metadata"].get("labels") or {}
    return NodeView(
        name=meta["name"],
        resource_version=int(meta["resourceVersion"]),
        ready=_condition(raw.get("status", {}), "Ready").get("status", "True") == "True",
        hostname=labels.get(HOSTNAME_LABEL, meta["name"]),
        zone=labels.get(ZONE_LABEL, ""),
        instance_type=labels.get(INSTANCE_TYPE_LABEL, ""),
        notice=_annotated_notice(meta) or _tainted_notice(raw) or signals.notice(raw),
        save_advised=_advice(meta) or signals.advice(raw),
        leaving=signals.leaving(raw),
        out_of_service=signals.out_of_service(raw),
        karpenter=KARPENTER_LABEL in labels,
        found=of_node(labels, (raw.get("spec") or {}).get("providerID", "")),
    )


def claim_view(raw: Raw) -> ClaimView:
    meta = raw["metadata"]
    owner: Raw = next((o for o in meta.get("ownerReferences") or () if o.get("controller")), {})
    bound = raw.get("status", {}).get("phase") == "Bound"
    return ClaimView(
        name=meta["name"],
        owner_uid=owner.get("uid", ""),
        access_modes=tuple(raw.get("spec", {}).get("accessModes") or ()),
        bound=bound,
        selected=not bound and SELECTED_NODE_ANNOTATION in (meta.get("annotations") or {}),
        going="deletionTimestamp" in meta,
    )


def _advice(meta: Raw) -> str:
    """As it was written, for it is passed on; "" for what is no time."""
    text = (meta.get("annotations") or {}).get(SAVE_ADVISED_ANNOTATION, "")
    return text if _time(text) is not None else ""


def _annotated_notice(meta: Raw) -> Notice | None:
    annotations = meta.get("annotations") or {}
    deadline = _time(annotations.get(DEADLINE_ANNOTATION))
    if deadline is None:
        return None
    return Notice(
        deadline=deadline,
        source=annotations.get(SOURCE_ANNOTATION, ""),
        seen=_time(annotations.get(NOTICE_SEEN_ANNOTATION)),
    )


def _tainted_notice(raw: Raw) -> Notice | None:
    taints: Iterable[Raw] = raw.get("spec", {}).get("taints") or ()
    taint = next((t for t in taints if t.get("key") == TERMINATING_TAINT), {})
    seconds = taint.get("value", "")
    if not (seconds.isdigit() and len(seconds) <= len("9999999999")):
        return None
    deadline = datetime.fromtimestamp(int(seconds), UTC)
    return Notice(deadline=deadline, source=f"taint {TERMINATING_TAINT}", seen=_time(taint.get("timeAdded")))


def _time(text: str | None) -> datetime | None:
    """None also for what is no time: an annotation may be anyone's, and must not stop the operator."""
    try:
        time = timestamp(text) if text else None
    except (ValueError, OverflowError):
        return None
    return time if time is not None and 2000 < time.year < 3000 else None

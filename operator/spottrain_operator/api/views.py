"""Converts raw pods, nodes, claims and Events to the views that decisions need."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Final

from spottrain_operator import names
from spottrain_operator.api import gpus, native_gangs, node_signals, resources
from spottrain_operator.api.node_pools import of_node
from spottrain_operator.api.observed import (
    Ended,
    NodeView,
    Notice,
    PodEvents,
    PodView,
    SyncView,
    Waiting,
)
from spottrain_operator.api.template import trainer_of
from spottrain_operator.api.training_job import JobKey
from spottrain_operator.api.wire import optional_timestamp, timestamp, unix_timestamp

Raw = Mapping[str, Any]
MAX_WORDS = 2000
"""Maximum number of characters of a container's message, counted from its end."""


def pod_view(raw: Raw) -> PodView | None:
    """Returns None for a pod that is not ours: it lacks our labels, or another controller owns it."""
    meta, spec, status = raw["metadata"], raw.get("spec", {}), raw.get("status", {})
    labels, annotations = meta.get("labels") or {}, meta.get("annotations") or {}
    job, attempt = _owner(meta), labels.get(names.ATTEMPT_LABEL, "")
    if job is None or not attempt.isdigit():
        return None
    if meta["name"] != names.pod_name(job.name, job.uid, int(attempt), _rank(labels)):
        return None  # a person's copy
    # That which the annotation names; by default the template's rule applies.
    named, containers = annotations.get(names.TRAINER_ANNOTATION), spec.get("containers") or ()
    trainer = next((c for c in containers if c.get("name") == named), trainer_of(containers))
    name, limits = str(trainer.get("name", "")), (trainer.get("resources") or {}).get("limits") or {}
    state, disrupted = _named(status, name).get("state") or {}, _condition(status, "DisruptionTarget", "True")
    ended, sync = _ended(state), _sync(spec, status)
    # The kubelet ends the sidecar after all other containers: it may still upload.
    over = status.get("phase") in ("Succeeded", "Failed") or "terminated" in (
        _named(status, names.SYNC_CONTAINER).get("state") or {}
    )
    uploads = sync is not None and not over
    return PodView(
        name=meta["name"],
        namespace=meta["namespace"],
        uid=meta["uid"],
        job=job,
        resource_version=int(meta["resourceVersion"]),
        attempt=int(attempt),
        rank=_rank(labels),
        created=timestamp(meta["creationTimestamp"]),
        phase=status.get("phase", "Pending"),
        reason=status.get("reason", ""),
        message=status.get("message", ""),
        node=spec.get("nodeName", ""),
        ip=status.get("podIP", ""),
        grace=int(spec.get("terminationGracePeriodSeconds", 30)),
        gpus=gpus.counted(limits),
        requests=resources.of_pod(spec),
        memory_limit=str(limits.get("memory", "")),
        trainer=name,
        others_run=any(
            "running" in (s.get("state") or {})
            for s in status.get("containerStatuses") or ()
            if s["name"] != name
        ),
        deleted=optional_timestamp(meta.get("deletionTimestamp")),
        deletion_grace=int(meta.get("deletionGracePeriodSeconds") or 0),
        holds_outcome=names.OUTCOME_FINALIZER in (meta.get("finalizers") or ()),
        notice=_annotated_notice(annotations),
        save_advised=_advice(annotations),
        running_since=optional_timestamp((state.get("running") or {}).get("startedAt")),
        bound=optional_timestamp(_condition(status, "PodScheduled", "True").get("lastTransitionTime"))
        or optional_timestamp(status.get("startTime")),
        waiting=_why_waiting(status, name),
        ended=None if uploads else ended,
        sync=sync,
        uploading=ended if uploads else None,
        unschedulable=_unschedulable(status),
        queued=bool(spec.get("schedulingGates")),
        disruption=f"{disrupted.get('reason')}: {disrupted.get('message', '')}" if disrupted else "",
        disrupted=optional_timestamp(disrupted.get("lastTransitionTime")),
        unhealthy=_unhealthy(status, name),
        init_failure=_init_failure(status),
        lost=_lost(status, name),
        avoids=tuple(filter(None, annotations.get(names.AVOIDS_ANNOTATION, "").split(","))),
        grouped=native_gangs.grouped(spec),
    )


def _rank(labels: Raw) -> int:
    text = labels.get(names.RANK_LABEL, "")
    return int(text) if text.isdecimal() and len(text) < 6 else 0


def _owner(meta: Raw) -> JobKey | None:
    if any(owner.get("controller") for owner in meta.get("ownerReferences") or ()):
        return JobKey.of_owner(meta)
    labels = meta.get("labels") or {}
    uid = labels.get(names.JOB_UID_LABEL)
    if not uid or names.OUTCOME_FINALIZER not in (meta.get("finalizers") or ()):
        return None
    # Orphaned by its job's deletion: only the operator removes this finalizer.
    return JobKey(namespace=meta["namespace"], name=labels.get(names.JOB_LABEL, ""), uid=uid)


def _named(status: Raw, container: str) -> Raw:
    """Returns the status of a container."""
    return next((s for s in _containers(status) if s["name"] == container), {})


def _containers(status: Raw) -> list[Raw]:
    """Returns the statuses of all containers, init containers first."""
    return [s for kind in ("initContainerStatuses", "containerStatuses") for s in status.get(kind) or ()]


def _sync(spec: Raw, status: Raw) -> SyncView | None:
    """Returns the state of the sidecar that uploads a folder; None where the pod has none."""
    if not any(c.get("name") == names.SYNC_CONTAINER for c in spec.get("initContainers") or ()):
        return None
    found = _named(status, names.SYNC_CONTAINER)
    state, last = found.get("state") or {}, found.get("lastState") or {}
    running = "running" in state
    return SyncView(running=running, ended=None if running else _ended(state) or _ended(last))


def _why_waiting(status: Raw, trainer: str) -> Waiting | None:
    """Returns the first container that fails to start, because the others wait for it; else the trainer."""
    waits = [w for s in _containers(status) if (w := _waiting(s)) is not None]
    failing = next((w for w in waits if w.error), None)
    return failing or next((w for w in waits if w.container == trainer), None)


def _waiting(status: Raw) -> Waiting | None:
    found = (status.get("state") or {}).get("waiting")
    if not found:
        return None
    message, name = found.get("message", ""), status.get("name", "")
    if name == names.SYNC_CONTAINER and (last := _ended(status.get("lastState") or {})) is not None:
        said = last.message.strip()[-MAX_WORDS:] or f"exit code {last.exit_code}"
        message = f"{message}; it ended last with: {said}"  # the kubelet says only that it waits
    return Waiting(reason=found.get("reason", ""), message=message, container=name)


SET_UP_ERRORS: Final = frozenset(
    {
        "FailedMount",
        "FailedAttachVolume",
        "FailedMapVolume",
        "FailedCreatePodSandBox",
        "FailedPrepareDynamicResources",
        "NetworkNotReady",
    }
)
"""Reasons of a pod's Events whose errors do not appear in its status."""
CONTAINERS_BEGIN: Final = frozenset({"Pulling", "Pulled", "Created", "Started"})
"""Reasons of Events that come once volumes and sandbox are ready."""


IMAGE_EVENTS: Final = frozenset({"Pulling", "Pulled", "Failed", "BackOff", "Created"})
STATUS_UNKNOWN: Final = "ContainerStatusUnknown"
UNKNOWN_ENDS: Final = frozenset({(STATUS_UNKNOWN, 137), ("Unknown", 255)})
"""Reason and exit code of a container that is gone: by the kubelet, and by containerd after a restart of the
machine."""
LONG_AGO: Final = datetime.min.replace(tzinfo=UTC)


def pod_events(raws: Iterable[Raw]) -> PodEvents:
    """Converts the Events of one pod, in any order, to the facts that its status does not have."""
    # Events of the same second are sorted: a pull first, then its result.
    events = sorted(raws, key=lambda e: (_last_seen(e), e.get("reason") != "Pulling"))
    begun = _newest(events, CONTAINERS_BEGIN)
    over = {"FailedAttachVolume": max(begun, _newest(events, frozenset({"SuccessfulAttachVolume"})))}
    failed = [
        Waiting(reason=e["reason"], message=e.get("message", ""))
        for e in events
        if e.get("reason") in SET_UP_ERRORS and _last_seen(e) > over.get(e["reason"], begun)
    ]
    errors, slow = [w for w in failed if not _only_slow(w)], [w for w in failed if _only_slow(w)]
    images = [e["reason"] for e in events if e.get("reason") in IMAGE_EVENTS]
    return PodEvents(
        trouble=errors[-1] if errors else None,
        slow=slow[-1].message if slow else "",
        set_up=begun > LONG_AGO and not failed,
        pulling=images[-1:] == ["Pulling"],
    )


def _newest(events: Iterable[Raw], reasons: frozenset[str]) -> datetime:
    return max((_last_seen(e) for e in events if e.get("reason") in reasons), default=LONG_AGO)


def _last_seen(event: Raw) -> datetime:
    """Returns an Event's latest time; the API has two ways to record a repeated Event."""
    series = event.get("series") or {}
    times = (series.get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"))
    return next((t for text in times if (t := optional_timestamp(text)) is not None), LONG_AGO)


def _only_slow(failed: Waiting) -> bool:
    """Detects the Event that the kubelet repeats every two minutes while it waits for volumes."""
    words = failed.message
    return "unmounted volumes=" in words and "failed to process volumes=[]" in words


def _unhealthy(status: Raw, trainer: str) -> str:
    """Returns the trainer's device that a device plugin reports as unhealthy, if the kubelet passes it on."""
    for resource in _named(status, trainer).get("allocatedResourcesStatus") or ():
        for device in resource.get("resources") or ():
            if device.get("health") == "Unhealthy":
                return f"{resource.get('name')}: device {device.get('resourceID')} is unhealthy"
    return ""


def _init_failure(status: Raw) -> str:
    """Describes the first failed init container; with restartPolicy Never the trainer then never starts."""
    for init in status.get("initContainerStatuses") or ():
        ended = _ended(init.get("state") or {})
        if ended is not None and ended.exit_code != 0:
            why = f" ({ended.reason})" if ended.reason not in ("", "Error") else ""
            words = f"init container {init['name']}: exit code {ended.exit_code}{why}"
            said = ended.message.strip()[-MAX_WORDS:]
            return f"{words}: {said}" if said else words
    return ""


def _lost(status: Raw, trainer: str) -> str:
    """Returns a sentence about the trainer, or an init container before it, that the kubelet found gone.

    It happens when a machine is started again, or comes back under its name as another one.
    """
    inits = status.get("initContainerStatuses") or ()
    for found in (*inits, _named(status, trainer)):
        ended = _ended(found.get("state") or {})
        if ended is not None and (ended.reason, ended.exit_code) in UNKNOWN_ENDS:
            said = f": {ended.message}" if ended.reason == STATUS_UNKNOWN and ended.message else ""
            return f"the kubelet does not know how container {found['name']} ended ({ended.reason}{said})"
    return ""


def _ended(state: Raw) -> Ended | None:
    ended = state.get("terminated")
    if ended is None:
        return None
    return Ended(
        exit_code=int(ended.get("exitCode", 0)),
        reason=ended.get("reason", ""),
        message=ended.get("message", ""),
        started=optional_timestamp(ended.get("startedAt")),
        finished=optional_timestamp(ended.get("finishedAt")),
    )


def cleanup_trouble(raw: Raw) -> str:
    """Returns why the cleanup pod cannot start, or how it failed last; "" where nothing is wrong."""
    status = raw.get("status", {})
    found = _named(status, names.ROLE_CLEANUP)
    waiting = _waiting(found)
    last = _ended(found.get("state") or {}) or _ended(found.get("lastState") or {})
    if last is not None and last.exit_code != 0:
        return last.message.strip()[-MAX_WORDS:] or f"exit code {last.exit_code} ({last.reason})"
    if waiting is not None and waiting.error:
        return f"{waiting.reason}: {waiting.message[:MAX_WORDS]}"
    return _unschedulable(status)


def cleanup_ended(raw: Raw) -> Ended | None:
    """Returns how the cleanup pod ended; None while it runs. Containers of a webhook are ignored."""
    status = raw.get("status", {})
    if status.get("phase") not in ("Succeeded", "Failed"):
        return None
    ended = _ended(_named(status, names.ROLE_CLEANUP).get("state") or {})
    return ended or Ended(exit_code=1, message=status.get("message", ""))


def _unschedulable(status: Raw) -> str:
    found = _condition(status, "PodScheduled", "False")
    return str(found.get("message") or found.get("reason", ""))


def _condition(status: Raw, kind: str, value: str) -> Raw:
    """Returns a condition that has this value; {} otherwise."""
    conditions: Iterable[Raw] = status.get("conditions") or ()
    return next((c for c in conditions if c["type"] == kind and c.get("status") == value), {})


def node_view(raw: Raw) -> NodeView:
    meta, spec, status = raw["metadata"], raw.get("spec") or {}, raw.get("status") or {}
    labels, annotations = meta.get("labels") or {}, meta.get("annotations") or {}
    allocatable, unready = status.get("allocatable") or {}, _unready(status)
    return NodeView(
        name=meta["name"],
        resource_version=int(meta["resourceVersion"]),
        ready=not unready,
        unready=unready,
        fault=node_signals.fault(raw),
        hostname=labels.get(names.HOSTNAME_LABEL, meta["name"]),
        zone=labels.get(names.ZONE_LABEL, ""),
        instance_type=labels.get(names.INSTANCE_TYPE_LABEL, ""),
        created=optional_timestamp(meta.get("creationTimestamp")),
        gpus=gpus.counted(allocatable),
        allocatable=resources.of_node(allocatable),
        notice=_annotated_notice(annotations) or _tainted_notice(raw) or node_signals.notice(raw),
        save_advised=_advice(annotations) or node_signals.advice(raw),
        leaving=node_signals.leaving(raw),
        cordoned=bool(spec.get("unschedulable")),
        out_of_service=node_signals.out_of_service(raw),
        karpenter=names.KARPENTER_LABEL in labels,
        found=of_node(labels, spec.get("providerID", "")),
    )


def _unready(status: Raw) -> str:
    """Returns why a node is not ready, and since when; "" where it is, or has not said yet."""
    found = _condition(status, "Ready", "False") or _condition(status, "Ready", "Unknown")
    if not found:
        return ""
    why = ": ".join(filter(None, (found.get("reason"), found.get("message", "")[:500])))
    return f"since {found.get('lastTransitionTime', 'an unknown time')} ({why or 'no reason given'})"


def _advice(annotations: Raw) -> str:
    """Returns the annotation unchanged, because it is passed on; "" where it is not a valid time."""
    text = annotations.get(names.SAVE_ADVISED_ANNOTATION, "")
    return text if optional_timestamp(text) is not None else ""


def _annotated_notice(annotations: Raw) -> Notice | None:
    deadline = optional_timestamp(annotations.get(names.DEADLINE_ANNOTATION))
    if deadline is None:
        return None
    return Notice(
        deadline=deadline,
        source=annotations.get(names.SOURCE_ANNOTATION, ""),
        seen=optional_timestamp(annotations.get(names.NOTICE_SEEN_ANNOTATION)),
    )


def _tainted_notice(raw: Raw) -> Notice | None:
    taints: Iterable[Raw] = raw.get("spec", {}).get("taints") or ()
    taint = next((t for t in taints if t.get("key") == names.TERMINATING_TAINT), {})
    deadline = unix_timestamp(taint.get("value", ""))
    if deadline is None:
        return None
    return Notice(
        deadline=deadline,
        source=f"taint {names.TERMINATING_TAINT}",
        seen=optional_timestamp(taint.get("timeAdded")),
    )

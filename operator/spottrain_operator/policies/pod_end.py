"""Whether a pod has ended, or counts as ended because its node is dead, and what it says of that. Pure."""

from __future__ import annotations

from datetime import datetime
from typing import Final

from spottrain.contract import TerminationMessage

from spottrain_operator.api.node_signals import OUT_OF_SERVICE
from spottrain_operator.api.observed import Observed, PodView
from spottrain_operator.api.reports import bounded

NODE_MISSED: Final = "DeletionByPodGC"
"""Begins the disruption of a pod that Kubernetes deleted because its node did not exist any more."""


def trainer_ended(pod: PodView) -> bool:
    """Returns whether the trainer has ended, as the kubelet reports or because it was never bound."""
    never_bound = pod.deleted is not None and not pod.node
    return pod.ended is not None or pod.phase in ("Succeeded", "Failed") or never_bound


NEVER_BEGAN: Final = frozenset({"ContainerStatusUnknown", "ContainerCannotRun", "StartError"})
"""Reasons of a container's end where it did not run, unless it has the time of a start."""


def may_have_run(pod: PodView, o: Observed) -> bool:
    """Returns whether a container that can write checkpoints ran, or may have, as on a lost node."""
    sidecar = pod.sync is not None and (pod.sync.running or pod.sync.ended is not None)
    if pod.running_since is not None or pod.uploading is not None or sidecar:
        return True
    if pod.ended is not None:
        return pod.ended.started is not None or pod.ended.reason not in NEVER_BEGAN
    return bool(node_lost(pod, o)) and not trainer_ended(pod)


def any_container_runs(pod: PodView) -> bool:
    """Returns whether any container runs or may run, even if the trainer has ended."""
    return pod.others_run or not trainer_ended(pod)


def node_lost(pod: PodView, o: Observed) -> str:
    """Returns a sentence about why no kubelet will report on this pod any more; "" while one may."""
    if not pod.node:
        return ""
    node = o.nodes.get(pod.node)
    if node is None:
        return f"node {pod.node} does not exist any more"
    if node.out_of_service:
        return f"node {pod.node} is out of service (taint {OUT_OF_SERVICE})"
    overdue = pod.deleted is not None and o.now > pod.deleted + o.limits.dead_slack
    return (
        f"node {pod.node} is not ready, and the pod is past its grace period"
        if overdue and not node.ready
        else ""
    )


def saving_predecessor(o: Observed) -> str:
    """Returns a sentence about a pod of a deleted job of this name that may own the checkpoints, or ""."""
    pod = next((p for p in o.predecessors if not pod_ended(p, o)), None)
    return f"pod {pod.name} of the deleted job of this name is still saving" if pod else ""


def pod_ended(pod: PodView, o: Observed) -> bool:
    """Returns whether the trainer has ended (`ended`), or counts as ended because its node is dead."""
    return trainer_ended(pod) or bool(node_lost(pod, o))


def end_time(pod: PodView, o: Observed) -> datetime:
    """Returns when a pod that has ended did so; where nobody reported that, when it had at the latest."""
    uploaded = pod.sync.ended.finished if pod.sync is not None and pod.sync.ended is not None else None
    if pod.ended is not None and pod.ended.finished is not None:
        return max(pod.ended.finished, uploaded or pod.ended.finished)
    now = o.now.replace(microsecond=0)
    return min(now, max((at for at in (pod.deleted, pod.disrupted) if at is not None), default=now))


def termination_message_of(pod: PodView) -> TerminationMessage | None:
    """Returns the pod's termination message; None where it is not in our format.

    It is the trainer's, or with checkpoint.mode Sync the sidecar's: there `done` means that all is uploaded,
    and not that the training is done.
    """
    ended = pod.sync.ended if pod.sync is not None else pod.ended
    try:
        word = TerminationMessage.from_json(ended.message) if ended and ended.message else None
    except RecursionError:  # [[[[[[...
        return None
    return bounded(word) if word is not None else None

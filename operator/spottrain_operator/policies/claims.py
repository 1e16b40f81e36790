"""The claims of a job's volumes: which to read, which are missing, which restrict its pods to one node. Pure.

Claims are not watched. They are read by name while pods of the job are to be created or are pending, or
their node has a notice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from spottrain_operator.api.observed import Observed, PodView
from spottrain_operator.api.training_job import TrainingJobSpec
from spottrain_operator.names import CLAIMS
from spottrain_operator.policies import gang, lifecycle
from spottrain_operator.policies.cause import notice_of
from spottrain_operator.policies.pod_end import pod_ended

SHARED: Final = frozenset({"ReadWriteMany", "ReadOnlyMany"})
"""Access modes that let pods on several nodes use a volume at once."""
NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
"""Valid claim names. A pod may contain others, and `..` would change the path of a request."""


# --- claims to read -------------------------------------------------------------------------------------
def wanted(o: Observed) -> tuple[str, ...]:
    """Returns the names of the claims that the next decision depends on."""
    spec, team = o.job.spec, gang.team(o)
    if spec is None or lifecycle.halted(o) or o.job.deleting or o.job.status.terminal:
        return ()
    if _quiet(o) or not (team or o.admitted):  # without admission no pod is created
        return ()
    cache = (spec.data_cache.claim_ref.name,) if spec.data_cache is not None else ()
    replaced = spec.replaces_during_notice and any(notice_of(p, o) is not None for p in team)
    return tuple(dict.fromkeys((*cache, *(_of_template(spec) if replaced or _without_node(o) else ()))))


def every(o: Observed) -> tuple[str, ...]:
    """Returns the names of all claims that the job's pods mount."""
    spec = o.job.spec
    if spec is None:
        return ()
    cache = (spec.data_cache.claim_ref.name,) if spec.data_cache is not None else ()
    return tuple(dict.fromkeys((*cache, *_of_template(spec))))


def _quiet(o: Observed) -> bool:
    """Returns whether all pods run, and none is about to be replaced."""
    team = gang.team(o)
    calm = all(p.running_since is not None and not pod_ended(p, o) and notice_of(p, o) is None for p in team)
    return calm and len(team) == gang.size(o) and not any(p.deleted is not None for p in team)


def _without_node(o: Observed) -> tuple[PodView, ...]:
    """Returns the pods that wait for a node."""
    return tuple(p for p in gang.team(o) if not p.node and p.deleted is None)


def _volumes(spec: TrainingJobSpec) -> Iterator[Mapping[str, Any]]:
    """Yields the template's well-formed volumes; the dry run, which comes later, rejects the others."""
    volumes = spec.template["spec"].get("volumes")
    return (v for v in (volumes if isinstance(volumes, list) else ()) if isinstance(v, dict))


def _of_template(spec: TrainingJobSpec) -> list[str]:
    sources = (v.get("persistentVolumeClaim") for v in _volumes(spec))
    names = (source.get("claimName") for source in sources if isinstance(source, dict))
    return [name for name in names if isinstance(name, str) and NAME.fullmatch(name)]


def mounted(spec: TrainingJobSpec) -> bool:
    """Returns whether its pods may have to wait for a volume."""
    kinds = ("persistentVolumeClaim", "ephemeral")
    return spec.data_cache is not None or any(kind in v for v in _volumes(spec) for kind in kinds)


# --- the data cache's claim -----------------------------------------------------------------------------
def problem(o: Observed) -> str:
    """Returns a sentence about why the data cache's claim blocks new pods; "" where it does not."""
    spec = o.job.spec
    if spec is None or spec.data_cache is None or spec.data_cache.claim_ref.name not in o.claims:
        return ""  # not read, because no pod is to be created
    name = spec.data_cache.claim_ref.name
    claim, what = o.claims[name], f"spec.dataCache.claimRef: PersistentVolumeClaim {name}"
    if claim is None:
        return f"{what} does not exist in namespace {o.job.key.namespace}; create it"
    if claim.unread:
        return f"{what} cannot be read: {claim.unread}"
    if claim.going:
        return f"{what} is being deleted; create it again afterwards"
    if spec.workers > 1 and SHARED.isdisjoint(claim.access_modes):
        modes = ", ".join(claim.access_modes)
        return (
            f"{what} is {modes}, so one node at a time can mount it, and the job has {spec.workers} workers; "
            "use one that is ReadWriteMany"
        )
    return ""


def one_node_at_a_time(o: Observed) -> bool:
    """Returns whether a pod on another node must wait until the running one has released a volume.

    An unreadable claim is treated as single-node.
    """
    return any(claim is not None and SHARED.isdisjoint(claim.access_modes) for claim in o.claims.values())


# --- pending pods ---------------------------------------------------------------------------------------
def wait_for_volume(o: Observed) -> bool:
    """Returns whether a pending pod waits for a volume, so that another node would not help."""
    return any(_unbound_immediate(p) for p in _without_node(o)) or bool(
        _without_node(o) and _without_volume(o)
    )


def _unbound_immediate(pod: PodView) -> bool:
    """Returns whether the scheduler reports an unbound claim; its message does not name the claim."""
    return f"unbound immediate {CLAIMS}" in pod.unschedulable.lower()


def _without_volume(o: Observed) -> list[str]:
    """Returns claims that are missing or terminating, or whose volume is being created for a chosen node.

    During the creation the scheduler reports nothing; after a failure it reports a timeout.
    """
    return [n for n, claim in o.claims.items() if claim is None or claim.going or claim.selected]


def unsettled(o: Observed) -> bool:
    """Returns whether a pending pod has a claim whose state may still change."""
    return bool(_without_node(o)) and any(c is None or c.going or not c.bound for c in o.claims.values())


def lost(o: Observed) -> str:
    """Returns a sentence about why a gang must release its nodes; "" where it need not.

    Its scheduled pods block the claim's deletion, and no pod is scheduled with a claim that is being deleted.
    """
    gone = [name for name, claim in o.claims.items() if claim is None or claim.going]
    if not gone or not _without_node(o) or not any(p.node for p in gang.team(o)):
        return ""
    return f"PersistentVolumeClaim {gone[0]} was deleted before all pods had a node"


def note(o: Observed, pod: PodView) -> str:
    """Returns which claim's volume the scheduler waits for, as it does not say so; "" for other reasons."""
    if words := problem(o):
        return f" ({words})"
    waiting = _without_volume(o)
    if _unbound_immediate(pod):
        waiting = [n for n, claim in o.claims.items() if claim is None or not (claim.bound or claim.unread)]
    if not waiting:
        return ""
    return f" (no volume yet for {', '.join(waiting)}: kubectl describe persistentvolumeclaim says why)"

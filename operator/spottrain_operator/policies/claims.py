"""The claims of a job's volumes: which to read, which block its pods, which restrict them to one node. Pure.

Claims are not watched. They are read by name while pods of the job are to be created or are pending, or
their node has a notice. Which claim a pending pod waits for is the scheduler's to say.
"""

from __future__ import annotations

import re
from typing import Final

from spottrain_operator.api.observed import Observed
from spottrain_operator.api.training_job import TrainingJobSpec
from spottrain_operator.policies import gang, lifecycle
from spottrain_operator.policies.cause import notice_of
from spottrain_operator.policies.pod_end import pod_ended

SHARED: Final = frozenset({"ReadWriteMany", "ReadOnlyMany"})
"""Access modes that let pods on several nodes use a volume at once."""
NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
"""Valid claim names. A pod may contain others, and `..` would change the path of a request."""


def wanted(o: Observed) -> tuple[str, ...]:
    """Returns the names of the claims that the next decision depends on."""
    spec, team = o.job.spec, gang.team(o)
    if spec is None or lifecycle.halted(o) or o.job.deleting or o.job.status.terminal:
        return ()
    noticed = any(notice_of(p, o) is not None for p in team)
    if noticed and spec.replaces_during_notice:
        return every(o)
    running = [p for p in team if p.running_since is not None and p.deleted is None and not pod_ended(p, o)]
    starts = noticed or len(running) < gang.size(o)
    return _of_cache(spec) if starts and (team or o.admitted) else ()


def every(o: Observed) -> tuple[str, ...]:
    """Returns the names of all claims that the job's pods mount."""
    spec = o.job.spec
    if spec is None:
        return ()
    # The dry run, which comes later, rejects volumes that are malformed.
    volumes = spec.template["spec"].get("volumes")
    volumes = volumes if isinstance(volumes, list) else ()
    sources = (v.get("persistentVolumeClaim") for v in volumes if isinstance(v, dict))
    names = (source.get("claimName") for source in sources if isinstance(source, dict))
    valid = (name for name in names if isinstance(name, str) and NAME.fullmatch(name))
    return tuple(dict.fromkeys((*_of_cache(spec), *valid)))


def _of_cache(spec: TrainingJobSpec) -> tuple[str, ...]:
    return (spec.data_cache.claim_ref.name,) if spec.data_cache is not None else ()


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


def wait_for_volume(o: Observed) -> bool:
    """Returns whether the pods wait for a claim, so that another pool would not help.

    A gang of which a pod has a node does not: such a pod keeps a claim that is being deleted from going.
    """
    waiting = [p for p in gang.team(o) if not p.node and p.deleted is None]
    named = any("persistentvolumeclaim" in p.unschedulable.lower() for p in waiting)
    return named and not any(p.node for p in gang.team(o))

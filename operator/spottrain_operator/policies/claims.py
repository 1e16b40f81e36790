"""The claims of a job's volumes, which may restrict its pods to one node. Pure.

Claims are not watched. They are read by name where a pod of the job may come beside a running one. Which
claim a pending pod waits for is the scheduler's to say.
"""

from __future__ import annotations

import re
from typing import Final

from spottrain_operator.api.observed import Observed
from spottrain_operator.policies import gang, lifecycle
from spottrain_operator.policies.cause import notice_of

SHARED: Final = frozenset({"ReadWriteMany", "ReadOnlyMany"})
"""Access modes that let pods on several nodes use a volume at once."""
NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
"""Valid claim names. A pod may contain others, and `..` would change the path of a request."""


def wanted(o: Observed) -> tuple[str, ...]:
    """Returns the names of the claims that decide whether the next attempt may come during a notice."""
    spec = o.job.spec
    if spec is None or lifecycle.halted(o) or o.job.deleting or o.job.status.terminal:
        return ()
    noticed = any(notice_of(p, o) is not None for p in gang.team(o))
    return every(o) if noticed and spec.replaces_during_notice else ()


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
    cache = (spec.data_cache.claim_ref.name,) if spec.data_cache is not None else ()
    return tuple(dict.fromkeys((*cache, *valid)))


def one_node_at_a_time(o: Observed) -> bool:
    """Returns whether a pod on another node must wait until the running one has released a volume."""
    return any(map(SHARED.isdisjoint, o.claims.values()))


def wait_for_volume(o: Observed) -> bool:
    """Returns whether the pods wait for a claim, so that another pool would not help.

    A gang of which a pod has a node does not: such a pod keeps a claim that is being deleted from going.
    """
    waiting = [p for p in gang.team(o) if not p.node and p.deleted is None]
    named = any("persistentvolumeclaim" in p.unschedulable.lower() for p in waiting)
    return named and not any(p.node for p in gang.team(o))

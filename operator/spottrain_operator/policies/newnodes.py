"""Where the pods of an attempt that are still to be made may go, so that they get nodes. Pure.

Called by follow.py. Karpenter makes no node for a pod whose required node affinity names hosts, not even
to keep off them (tests/karpenter). Where it makes the nodes, only a pinned pod has such a rule: that needs no
new node. The others are kept off doomed nodes by those nodes' taints, and by a wish; and they are made when
the pinned ones have their nodes, which they could else take.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from spottrain_operator.api import native_gangs
from spottrain_operator.api.native_gangs import GangApi
from spottrain_operator.api.node_pools import Pool, Preset
from spottrain_operator.api.observed import Observed, Placement
from spottrain_operator.api.training_job import Status
from spottrain_operator.policies import avoid, gang

KARPENTER: Final = "karpenter."
"""What the labels begin with that Karpenter and its providers know."""


def placements(
    o: Observed, status: Status, pool: Pool, pinned: Mapping[int, str], api: GangApi | None = None
) -> Iterator[Placement]:
    """Of the ranks that can be made now. `pinned`: host name by rank. `api`: of the group they are in."""
    soft = by_karpenter(o, pool)
    in_turn = soft and api is None and o.job.spec is not None and native_gangs.one_by_one(o.job.spec)
    doomed = avoid.doomed(o, status)
    for rank in gang.missing(o, status):
        pin = pinned.get(rank, "")
        if in_turn and not pin and _waited_for(o, status, pinned):
            continue
        leave = () if pin or in_turn else tuple(pinned.values())
        yield Placement(
            rank=rank,
            avoid=doomed,
            pin=pin,
            leave=leave,
            zoned=o.zoned,
            soft=soft and not pin,
            gang_api=api,
        )


def by_karpenter(o: Observed, pool: Pool) -> bool:
    """Whether Karpenter may be who makes the nodes: it has made some here, or the pods ask for its labels."""
    assert o.job.spec is not None
    if pool.preset not in (None, Preset.KARPENTER):
        return False  # another autoscaler's, to which a hard rule means no harm
    found = {rule["key"] for rule in pool.rules}
    asked = {*pool.selector, *found, *(o.job.spec.template["spec"].get("nodeSelector") or {})}
    return o.karpenter or pool.preset is Preset.KARPENTER or any(key.startswith(KARPENTER) for key in asked)


def _waited_for(o: Observed, status: Status, pinned: Mapping[int, str]) -> bool:
    """Whether a pinned rank has no node yet."""
    placed = {p.rank for p in o.pods if p.attempt == status.attempt and p.node}
    return any(rank not in placed for rank in pinned)

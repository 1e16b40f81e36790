"""Placement of an attempt's pods that are still to be created, so that autoscalers add nodes. Pure.

Karpenter adds no node for a pod whose required node affinity names hosts, not even to exclude them
(tests/karpenter). With Karpenter, only pinned pods therefore have such a rule, as they need no new node.
Taints and a preferred affinity keep the other pods away from nodes that end soon. Those pods are created
after the pinned ones have their nodes, because they could occupy these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from spottrain_operator.api import native_gangs
from spottrain_operator.api.native_gangs import GangApi
from spottrain_operator.api.node_pools import ChosenPool, Preset
from spottrain_operator.api.observed import Observed, Placement
from spottrain_operator.api.training_job import Status
from spottrain_operator.policies import avoid, gang

KARPENTER: Final = "karpenter."
"""Prefix of the labels of Karpenter and its providers."""


def placements(
    o: Observed, status: Status, pool: ChosenPool, pinned: Mapping[int, str], api: GangApi | None = None
) -> Iterator[Placement]:
    """Yields the ranks to create now. `pinned`: host name by rank. `api`: version of their group."""
    soft = by_karpenter(o, pool)
    in_turn = soft and api is None and o.job.spec is not None and native_gangs.one_by_one(o.job.spec)
    avoided = avoid.to_avoid(o, status)
    for rank in gang.missing(o, status):
        pin = pinned.get(rank, "")
        if in_turn and not pin and _waited_for(o, status, pinned):
            continue
        leave = () if pin or in_turn else tuple(pinned.values())
        yield Placement(
            rank=rank, avoid=avoided, pin=pin, leave=leave, zoned=o.zoned, soft=soft and not pin, gang_api=api
        )


def by_karpenter(o: Observed, pool: ChosenPool) -> bool:
    """Returns whether Karpenter may add the nodes: it provisioned some, or the pods require its labels."""
    assert o.job.spec is not None
    if pool.preset not in (None, Preset.KARPENTER):
        return False  # other autoscalers handle a required rule well
    found = {rule["key"] for rule in pool.rules}
    asked = {*pool.selector, *found, *(o.job.spec.template["spec"].get("nodeSelector") or {})}
    return o.karpenter or pool.preset is Preset.KARPENTER or any(key.startswith(KARPENTER) for key in asked)


def _waited_for(o: Observed, status: Status, pinned: Mapping[int, str]) -> bool:
    """Returns whether a pinned rank has no node yet."""
    placed = {p.rank for p in o.pods if p.attempt == status.attempt and p.node}
    return any(rank not in placed for rank in pinned)

"""Where a trainer pod may run: node selector, tolerations and affinity. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from spottrain_operator import names
from spottrain_operator.api.node_pools import ChosenPool
from spottrain_operator.api.observed import Placement
from spottrain_operator.api.training_job import Job, Status

Json = dict[str, Any]

REQUIRED: Final = "requiredDuringSchedulingIgnoredDuringExecution"
PREFERRED: Final = "preferredDuringSchedulingIgnoredDuringExecution"
SILENT_NODE: Final = tuple(
    {"key": f"node.kubernetes.io/{state}", "operator": "Exists", "effect": "NoExecute"}
    | {"tolerationSeconds": names.NODE_SILENCE}
    for state in ("not-ready", "unreachable")
)


def node_selector(template: Json, pool: ChosenPool, place: Placement) -> Json:
    return (template.get("nodeSelector") or {}) | pool.selector | dict(place.assigned.node_selector)


def tolerations(template: Json, pool: ChosenPool, place: Placement) -> list[Json]:
    """Returns ours first: of several tolerations that match a taint the first one applies."""
    ours = {t["key"] for t in SILENT_NODE}
    given = (*(template.get("tolerations") or ()), *pool.tolerated)
    kept = [*SILENT_NODE, *(t for t in given if t.get("key") not in ours)]
    return kept + [t for t in place.assigned.tolerations if t not in kept]


def affinity(template: Json, job: Job, status: Status, pool: ChosenPool, place: Placement) -> Json:
    """Returns the template's affinity with the rules of pool and placement, and with the gang's zone."""
    given = template.get("affinity") or {}
    nodes = _nodes(given.get("nodeAffinity") or {}, pool, place)
    peers = given.get("podAffinity") or {}
    if job.valid_spec.workers > 1 and job.valid_spec.capacity.same_zone and place.zoned:
        peers = peers | {REQUIRED: [*(peers.get(REQUIRED) or ()), _one_zone(job, status)]}
    return given | {name: rules for name, rules in (("nodeAffinity", nodes), ("podAffinity", peers)) if rules}


def _nodes(given: Json, pool: ChosenPool, place: Placement) -> Json:
    terms = (given.get(REQUIRED) or {}).get("nodeSelectorTerms") or [{}]
    for either in _required(pool, place):  # terms are alternatives: each needs the rule
        both = [(term, rule) for term in terms for rule in either]
        terms = [t | {"matchExpressions": [*(t.get("matchExpressions") or ()), rule]} for t, rule in both]
    wishes = [{"weight": 100, "preference": {"matchExpressions": [rule]}} for rule in _preferred(place)]
    required = {REQUIRED: {"nodeSelectorTerms": terms}} if terms != [{}] else {}
    preferred = {PREFERRED: [*(given.get(PREFERRED) or ()), *wishes]} if wishes else {}
    return given | required | preferred


def _required(pool: ChosenPool, place: Placement) -> Iterator[Sequence[Json]]:
    """Yields rules that a node must match; of several in one item it must match one.

    A template may tolerate every taint, so the taint of a node that ends soon is not enough.
    """
    for rule in pool.exclusions:
        yield [rule]
    if pool.rules:
        yield pool.rules
    if place.avoid and not place.soft:
        yield [_hosts("NotIn", place.avoid)]
    if place.zone:
        yield [{"key": names.ZONE_LABEL, "operator": "In", "values": [place.zone]}]


def _preferred(place: Placement) -> Iterator[Json]:
    if place.avoid and place.soft:
        yield _hosts("NotIn", place.avoid)
    if place.preferred_node:
        yield _hosts("In", [place.preferred_node])


def _hosts(operator: str, nodes: Sequence[str]) -> Json:
    return {"key": names.HOSTNAME_LABEL, "operator": operator, "values": sorted(nodes)}


def _one_zone(job: Job, status: Status) -> Json:
    """Returns the rule that keeps a gang in one zone: traffic between zones is slow and costs money."""
    labels = {names.JOB_UID_LABEL: job.key.uid, names.ATTEMPT_LABEL: str(status.attempt)}
    return {"labelSelector": {"matchLabels": labels}, "topologyKey": names.ZONE_LABEL}

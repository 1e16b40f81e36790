"""Parses and validates TrainingJobs: raw JSON becomes dataclasses, or sentences that say what is wrong. Pure.

A sentence names the field, what is wrong with it and what to do. Wrong types and unknown values are
reported together; rules across fields only for a spec without those.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from spottrain_operator.api import gpus, injected, sync, template_rules, upgrade
from spottrain_operator.api.node_pools import CapacityType, Pool, type_asked_for
from spottrain_operator.api.training_job import (
    INTERRUPT_LIMIT,
    AppliedDefaults,
    DeletionPolicy,
    Job,
    JobKey,
    Status,
    TrainingJobSpec,
)
from spottrain_operator.api.wire import decode, optional_timestamp, timestamp
from spottrain_operator.errors import InvalidSpec
from spottrain_operator.names import (
    CHECKPOINTS_FINALIZER,
    DEFAULTS_CONFIG_MAP,
    INTERRUPT_ANNOTATION,
    QUEUE_LABEL,
    QUEUE_PRIORITY_LABEL,
    TEAM_LABEL,
)

FIXED: Final = ("template", "training", "workers", "gpusPerWorker", "dataCache")
"""Fields of the spec that change only while no attempt runs.

A default that a later definition adds in one of them would change the hash of every running job.
"""


# --- from JSON to dataclasses -----------------------------------------------------------------------------
def parse_job(raw: Mapping[str, Any]) -> Job:
    """Parses a job. An invalid spec makes its `spec` None and its `invalid` a sentence."""
    meta, written = raw["metadata"], raw.get("status") or {}
    old = written if "ready" in written else None  # as version 0.3 wrote it
    status = parse_status(upgrade.status_of_0_3(old) if old is not None else written)
    spec, invalid = _spec_or_sentence(raw.get("spec"), status.defaults)
    labels, annotations = meta.get("labels") or {}, meta.get("annotations") or {}
    key, version = identity(raw)
    return Job(
        key=key,
        resource_version=version,
        generation=int(meta.get("generation", 1)),
        created=optional_timestamp(meta.get("creationTimestamp")),
        deleted=timestamp(meta["deletionTimestamp"]) if "deletionTimestamp" in meta else None,
        holds_checkpoints=CHECKPOINTS_FINALIZER in (meta.get("finalizers") or ()),
        spec=spec,
        invalid=invalid,
        status=status,
        template_hash=_template_hash(raw["spec"]) if spec is not None else "",
        old_status=old,
        team=labels.get(TEAM_LABEL, ""),
        queue=labels.get(QUEUE_LABEL, ""),
        queue_priority=labels.get(QUEUE_PRIORITY_LABEL, ""),
        interrupt=annotations.get(INTERRUPT_ANNOTATION, "")[:INTERRUPT_LIMIT],
    )


def identity(raw: Mapping[str, Any]) -> tuple[JobKey, int]:
    """Returns a job's key and resourceVersion. To parse the whole takes 50 times as long."""
    meta = raw["metadata"]
    key = JobKey(namespace=meta["namespace"], name=meta["name"], uid=meta["uid"])
    return key, int(meta["resourceVersion"])


def _template_hash(spec: Mapping[str, Any]) -> str:
    fixed = [spec.get(name, {} if name == "training" else None) for name in FIXED]  # 0.4 stored {} for none
    return hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()[:16]


def _spec_or_sentence(raw: Any, defaults: AppliedDefaults | None) -> tuple[TrainingJobSpec | None, str]:
    try:
        return parse_spec(raw, defaults), ""
    except InvalidSpec as error:
        return None, str(error)
    except Exception as error:
        # A template that the schema accepted must not stop the operator, which serves the other jobs.
        kind = type(error).__name__
        return None, f"spec cannot be read ({kind}: {error}); compare spec.template with a PodSpec"


def parse_spec(raw: Any, defaults: AppliedDefaults | None = None) -> TrainingJobSpec:
    """Parses a spec and fills in defaults. Raises InvalidSpec for what the CRD's schema cannot reject, or has
    not seen."""
    spec = decode(TrainingJobSpec, _of_0_3(raw), "spec")
    return with_defaults(spec, defaults or AppliedDefaults())


def _of_0_3(raw: dict[str, Any]) -> dict[str, Any]:
    """Returns a spec that 0.3 has stored with today's names; the schema refuses the old ones in new objects.

    It can go with the release after 0.4. Raises InvalidSpec for what cannot be translated.
    """
    if raw.get("queueName"):
        raise InvalidSpec(
            f"spec.queueName was removed in spottrain 0.4; set the label {QUEUE_LABEL} on the TrainingJob"
        )
    capacity = dict(raw.get("capacity") or {})
    if "maxCost" in capacity:
        capacity.setdefault("maxCostUSD", capacity["maxCost"])
    if "deadline" in capacity:
        capacity.setdefault("cheapest", {"deadline": capacity["deadline"]})
    if "pools" in capacity:
        pools = capacity["pools"]
        capacity["pools"] = [p | {"platform": p["preset"]} if p.get("preset") else p for p in pools]
    return raw | {"capacity": capacity}


def with_defaults(spec: TrainingJobSpec, defaults: AppliedDefaults) -> TrainingJobSpec:
    """Returns the spec with defaults filled in. Raises InvalidSpec for what does not fit together."""
    full = spec.with_defaults(defaults)
    if problem := _problem(full):
        raise InvalidSpec(problem)
    return full


def parse_status(raw: Mapping[str, Any]) -> Status:
    return decode(Status, raw, "status")


# --- rules that no schema can express ---------------------------------------------------------------------
def _problem(spec: TrainingJobSpec) -> str:
    """Returns a sentence about fields that do not fit together; "" where the spec is valid."""
    pod = spec.template.get("spec")
    if not isinstance(pod, dict):
        return "spec.template.spec must be a pod spec"
    if words := gpus.problem(pod, spec.gpus_per_worker):
        return words
    checks = (sync.problem, template_rules.problem, _other_capacity, injected.problem)
    return next((words for check in checks if (words := check(spec))), "")


def _other_capacity(spec: TrainingJobSpec) -> str:
    """Rejects a node selector for another capacity type than spec.capacity's."""
    asked, wanted = type_asked_for(spec.template["spec"].get("nodeSelector") or {}), spec.capacity.type
    if asked is None or asked[1] is wanted:
        return ""
    label, kind = asked
    return (
        f"spec.template.spec.nodeSelector has {label}, and spec.capacity.type is {wanted}: "
        f"leave the label out, or set capacity.type to {kind}"
    )


def place_problem(spec: TrainingJobSpec, status: Status) -> str:
    """Returns a sentence about a missing or unfit place of checkpoints, once defaults are filled in."""
    checkpoint = spec.checkpoint
    where = f"set it, or checkpointPrefix in ConfigMap {DEFAULTS_CONFIG_MAP} or in the chart's jobDefaults"
    if status.defaults is not None or status.attempt:  # nothing is filled in any more, and a URI is refused
        where = "this job was accepted without one, so create the job again with checkpoint.uri"
    if checkpoint.synced and not checkpoint.uri:
        return f"checkpoint.mode Sync needs checkpoint.uri, to which the folder is uploaded; {where}"
    if spec.on_spot and checkpoint.managed and not checkpoint.uri:
        return (
            f"spot capacity needs checkpoint.uri, because the work is lost with a reclaimed node; {where}; "
            "or set capacity.type to OnDemand, or checkpoint.mode to Self in a new job if the image keeps "
            "its own checkpoints"
        )
    if spec.deletion_policy is DeletionPolicy.DELETE and not checkpoint.uri:
        return f"deletionPolicy Delete needs checkpoint.uri, because only checkpoints can be deleted; {where}"
    s3_only = checkpoint.encryption is not None or checkpoint.path_style is not None
    if s3_only and checkpoint.uri and not checkpoint.uri.startswith("s3://"):
        return (
            "spec.checkpoint.encryption and pathStyle apply to s3:// URIs only, and the default place of "
            f"this job's checkpoints is {checkpoint.uri}; leave them out"
        )
    return ""


# --- pools: valid only together with the operator's settings ----------------------------------------------
def pools_of(
    spec: TrainingJobSpec, default: Pool, named: Mapping[str, Pool], usual: Sequence[str] = ()
) -> tuple[Pool, ...]:
    """Returns the job's pools in order of preference. Raises InvalidSpec.

    A pool with only a name refers to one of `named`, the chart's. All pools get the job's type, unless that
    is SpotFirst or Cheapest. `usual`: names of the pools of a job whose spec has none.
    """
    wanted = spec.capacity.type
    pools = tuple(_known(pool, named) for pool in spec.capacity.pools)
    pools = pools or _usual(wanted, usual, named) or _of_default(wanted, default)
    if problem := _types_problem(pools, wanted):
        raise InvalidSpec(problem)
    if not wanted.mixes:
        pools = tuple(replace(pool, type=wanted) for pool in pools)
    if problem := _labels_problem(pools, spec.template["spec"].get("nodeSelector") or {}):
        raise InvalidSpec(problem)
    return pools


def _known(pool: Pool, named: Mapping[str, Pool]) -> Pool:
    if pool.platform is not None:
        return pool
    if pool.name not in named:
        raise InvalidSpec(f"{unknown_pool('spec.capacity.pools', pool.name, named)}; or set its platform")
    own = ("node_selector", "tolerations", "notice_seconds")
    given = {name: value for name in own if (value := getattr(pool, name))}
    return replace(named[pool.name], **given)


def _usual(wanted: CapacityType, names: Sequence[str], named: Mapping[str, Pool]) -> tuple[Pool, ...]:
    """Returns those of the default pools that fit the job's capacity type."""
    if unknown := [name for name in names if name not in named]:
        raise InvalidSpec(unknown_pool("the default pools", unknown[0], named))
    pools = tuple(named[name] for name in names)
    if not pools or wanted.mixes:
        return pools
    # A pool without a type is of type Spot, and may be of any.
    for kind in (wanted, CapacityType.SPOT):
        if fit := tuple(pool for pool in pools if pool.type is kind):
            return fit
    raise InvalidSpec(
        f"none of the default pools ({', '.join(names)}) is of type {wanted}, which spec.capacity.type "
        "asks for; name a pool in spec.capacity.pools"
    )


def unknown_pool(where: str, name: str, named: Iterable[str]) -> str:
    known = ", ".join(sorted(named)) or "none"
    return f"{where}: the operator knows no pool {name}; the chart's value pools names: {known}"


def _of_default(wanted: CapacityType, default: Pool) -> tuple[Pool, ...]:
    """Returns the default pool; for SpotFirst and Cheapest with detected labels, one pool per type."""
    if not wanted.mixes or not default.finds_labels:
        return (default,)
    on_demand = replace(default, name=f"{default.name}-on-demand", type=CapacityType.ON_DEMAND)
    return (replace(default, type=CapacityType.SPOT), on_demand)


def _types_problem(pools: tuple[Pool, ...], wanted: CapacityType) -> str:
    """Returns a sentence where a pool's type contradicts the job's, or where one of two types is missing."""
    types = {pool.type for pool in pools}
    if wanted.mixes and (missing := {CapacityType.SPOT, CapacityType.ON_DEMAND} - types):
        return (
            f"spec.capacity.pools has no pool of type {min(missing)}, and capacity.type {wanted} needs one: "
            f"{', '.join(f'{p.name} is {p.type}' for p in pools)}"
        )
    for pool in pools:  # Spot is also the type of a pool that has none
        if not wanted.mixes and pool.type not in (CapacityType.SPOT, wanted):
            return (
                f"spec.capacity.pools: {pool.name} is of type {pool.type}, and spec.capacity.type is "
                f"{wanted}, which holds for all pools; set capacity.type to {pool.type} or SpotFirst, or "
                "leave the pool out"
            )
    return ""


def _labels_problem(pools: tuple[Pool, ...], given: Mapping[str, str]) -> str:
    """Returns a sentence where a pool and the template require different values of one label."""
    for pool in pools:
        for label, value in pool.selector.items():
            if given.get(label, value) != value:
                return (
                    f"spec.template.spec.nodeSelector has {label}: {given[label]}, and pool {pool.name} "
                    f"has {label}: {value}; leave it out of one of them"
                )
    return ""

"""Parses and validates TrainingJobs: raw JSON becomes dataclasses, or sentences that say what is wrong. Pure.

A sentence names the field, what is wrong with it and what to do. Wrong types and unknown values are
reported together; rules across fields only for a spec without those.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import cache
from typing import Any, Final, TypeVar, cast

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError, to_json
from spottrain.contract import TimeSplit

from spottrain_operator.api import gpus, injected, sync, template_rules, upgrade
from spottrain_operator.api.node_pools import CapacityType, Pool, type_asked_for
from spottrain_operator.api.training_job import (
    AppliedDefaults,
    DeletionPolicy,
    Job,
    JobKey,
    Status,
    TrainingJobSpec,
)
from spottrain_operator.api.wire import camel, mistake, optional_timestamp, timestamp
from spottrain_operator.errors import InvalidSpec
from spottrain_operator.names import (
    CHECKPOINTS_FINALIZER,
    DEFAULTS_CONFIG_MAP,
    QUEUE_LABEL,
    QUEUE_PRIORITY_LABEL,
    TEAM_LABEL,
)

T = TypeVar("T")
FIXED: Final = ("template", "training", "workers", "gpusPerWorker", "dataCache")
"""Fields of the spec that change only while no attempt runs.

A default that a later definition adds in one of them would change the hash of every running job.
"""


# --- from JSON to dataclasses -----------------------------------------------------------------------------
def parse_job(raw: Mapping[str, Any]) -> Job:
    """Parses a job. An invalid spec makes its `spec` None and its `invalid` a sentence."""
    meta, written = raw["metadata"], raw.get("status") or {}
    old = written if upgrade.is_of_0_3(written) else None
    status = parse_status(upgrade.status_of_0_3(old) if old is not None else written)
    spec, invalid = _spec_or_sentence(raw.get("spec"), status.defaults)
    labels = meta.get("labels") or {}
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
    )


def identity(raw: Mapping[str, Any]) -> tuple[JobKey, int]:
    """Returns a job's key and resourceVersion. To parse the whole takes 50 times as long."""
    meta = raw["metadata"]
    key = JobKey(namespace=meta["namespace"], name=meta["name"], uid=meta["uid"])
    return key, int(meta["resourceVersion"])


def _template_hash(spec: Mapping[str, Any]) -> str:
    fixed = [spec.get(name) for name in FIXED]
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
    spec: TrainingJobSpec
    spec, wrong = _decoded(TrainingJobSpec, _of_0_3(raw), "spec")
    if wrong:
        raise InvalidSpec("; ".join(wrong))
    return with_defaults(spec, defaults or AppliedDefaults())


def _of_0_3(raw: Any) -> Any:
    """Returns a spec that 0.3 has stored with today's names; the schema refuses the old ones in new objects.

    It can go with the release after 0.4. Raises InvalidSpec for what cannot be translated.
    """
    if isinstance(raw, Mapping) and raw.get("queueName"):
        raise InvalidSpec(
            f"spec.queueName was removed in spottrain 0.4; set the label {QUEUE_LABEL} on the TrainingJob"
        )
    old = raw.get("capacity") if isinstance(raw, Mapping) else None
    if not isinstance(old, Mapping):
        return raw
    new = dict(old)
    if "maxCost" in old:
        new.setdefault("maxCostUSD", old["maxCost"])
    if "deadline" in old:
        new.setdefault("cheapest", {"deadline": old["deadline"]})
    if isinstance(old.get("pools"), list):
        new["pools"] = [_pool_of_0_3(pool) for pool in old["pools"]]
    return dict(raw) | {"capacity": new}


def _pool_of_0_3(pool: Any) -> Any:
    named = isinstance(pool, Mapping) and pool.get("preset")
    return dict(pool) | {"platform": pool["preset"]} if named else pool


def with_defaults(spec: TrainingJobSpec, defaults: AppliedDefaults) -> TrainingJobSpec:
    """Returns the spec with defaults filled in. Raises InvalidSpec for what does not fit together."""
    full = spec.with_defaults(defaults)
    if problem := _problem(full):
        raise InvalidSpec(problem)
    return full


def parse_status(raw: Mapping[str, Any]) -> Status:
    return decode(Status, raw, "status")


def decode(cls: type[T], raw: Any, path: str) -> T:
    """Converts JSON to a dataclass. Raises InvalidSpec with a sentence for each field that does not fit."""
    value, wrong = _decoded(cls, raw, path)
    if wrong:
        raise InvalidSpec("; ".join(wrong))
    return cast(T, value)


def _decoded(cls: Any, raw: Any, path: str) -> tuple[Any, list[str]]:
    """Returns the dataclass, or None and what is wrong."""
    try:
        return _adapter(cls).validate_json(_as_text([raw]))[0], []
    except RecursionError:  # [[[[[[...
        return None, [f"{path or 'it'} is nested too deeply"]
    except ValidationError as error:
        return None, [mistake(each, path, skip=1) for each in error.errors(include_url=False)]


def _as_text(raw: list[Any]) -> bytes:
    """Returns JSON. pydantic needs a third of the time of json, which takes what pydantic refuses."""
    try:
        return to_json(raw)
    except PydanticSerializationError:
        # A trainer's error may contain half of a surrogate pair, which is not valid JSON.
        return json.dumps(raw, ensure_ascii=False).encode(errors="replace")


@cache
def _adapter(cls: Any) -> TypeAdapter[Any]:
    """Of a list, because pydantic accepts no configuration for a dataclass itself."""
    return TypeAdapter(cast(Any, list)[cls], config=ConfigDict(alias_generator=camel, strict=True))


def well_typed(value: Any) -> bool:
    """Returns whether a dataclass matches its type hints, with numbers that JSON can represent."""
    raw = {f.name: getattr(value, f.name) for f in fields(value)}
    raw = {name: asdict(item) if isinstance(item, TimeSplit) else item for name, item in raw.items()}
    decoded, wrong = _decoded(type(value), raw, "")
    return not wrong and _sane(asdict(decoded))


def _sane(item: Any) -> bool:
    if isinstance(item, dict):
        return all(map(_sane, item.values()))
    if isinstance(item, int):
        return 0 <= item < 2**53
    return math.isfinite(item) if isinstance(item, float) else True


# --- rules that no schema can express ---------------------------------------------------------------------
def _problem(spec: TrainingJobSpec) -> str:
    """Returns a sentence about fields that do not fit together; "" where the spec is valid."""
    pod = spec.template.get("spec")
    if not isinstance(pod, dict):
        return "spec.template.spec must be a pod spec"
    if words := gpus.problem(pod, spec.gpus_per_worker):
        return words
    checks = (sync.problem, template_rules.problem, _other_capacity, injected.problem, _init_problem)
    return next((words for check in checks if (words := check(spec))), "")


def _init_problem(spec: TrainingJobSpec) -> str:
    """Rejects an initFrom that is the job's own place of checkpoints, which may be the default one."""
    given = spec.checkpoint.init_from
    if given is None or not given.uri or given.uri.rstrip("/") != spec.checkpoint.uri.rstrip("/"):
        return ""
    return (
        f"spec.checkpoint.initFrom.uri {given.uri} is the job's own checkpoint URI, from which it resumes "
        "anyway; name another job's URI, or leave initFrom out"
    )


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
    where = (
        f"set it, or checkpointPrefix in the ConfigMap {DEFAULTS_CONFIG_MAP} of the job's namespace or in "
        "the chart's jobDefaults"
    )
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
    pools = tuple(_known(pool, named) for pool in spec.capacity.pools)
    pools = pools or _usual(spec, usual, named) or _of_default(spec, default)
    if not spec.capacity.type.mixes:
        for pool in pools:
            _check_type(pool, spec.capacity.type)
        pools = tuple(replace(pool, type=spec.capacity.type) for pool in pools)
    else:
        _check_both_types(pools, spec.capacity.type)
    _check_labels(pools, spec.template["spec"].get("nodeSelector"))
    return pools


def _known(pool: Pool, named: Mapping[str, Pool]) -> Pool:
    if pool.platform is not None:
        return pool
    if pool.name not in named:
        known = f"it knows {', '.join(sorted(named))}" if named else "it knows none"
        raise InvalidSpec(
            f"spec.capacity.pools: {pool.name} has no platform, and the operator knows no "
            f"pool of this name ({known}; the chart's value pools names them)"
        )
    own = ("node_selector", "tolerations", "notice_seconds")
    given = {name: value for name in own if (value := getattr(pool, name))}
    return replace(named[pool.name], **given)


def _usual(spec: TrainingJobSpec, names: Sequence[str], named: Mapping[str, Pool]) -> tuple[Pool, ...]:
    """Returns those of the default pools that fit the job's capacity type."""
    if unknown := [name for name in names if name not in named]:
        raise InvalidSpec(unknown_pool("the default pools", unknown[0], named))
    pools = tuple(named[name] for name in names)
    if not pools or spec.capacity.type.mixes:
        return pools
    wanted = spec.capacity.type
    # A pool without a type is of type Spot, and may be of any.
    fit = [p for p in pools if p.type is wanted] or [p for p in pools if p.type is CapacityType.SPOT]
    if not fit:
        raise InvalidSpec(
            f"none of the default pools ({', '.join(names)}) is of type {wanted}, which spec.capacity.type "
            "asks for; name a pool in spec.capacity.pools"
        )
    return tuple(fit)


def unknown_pool(where: str, name: str, named: Iterable[str]) -> str:
    known = ", ".join(sorted(named)) or "none"
    return f"{where}: the operator knows no pool {name}; the chart's value pools names: {known}"


def _of_default(spec: TrainingJobSpec, default: Pool) -> tuple[Pool, ...]:
    """Returns the default pool; for SpotFirst and Cheapest with detected labels, one pool per type."""
    if not spec.capacity.type.mixes or not default.finds_labels:
        return (default,)
    on_demand = replace(default, name=f"{default.name}-on-demand", type=CapacityType.ON_DEMAND)
    return (replace(default, type=CapacityType.SPOT), on_demand)


def _check_type(pool: Pool, wanted: CapacityType) -> None:
    """Raises InvalidSpec where a pool's type contradicts the job's; Spot, the default, is ignored."""
    if pool.type not in (CapacityType.SPOT, wanted):
        raise InvalidSpec(
            f"spec.capacity.pools: {pool.name} is of type {pool.type}, and spec.capacity.type is {wanted}, "
            f"which holds for all pools; set capacity.type to {pool.type} or SpotFirst, or leave the pool out"
        )


def _check_both_types(pools: tuple[Pool, ...], wanted: CapacityType) -> None:
    for kind in (CapacityType.SPOT, CapacityType.ON_DEMAND):
        if not any(pool.type is kind for pool in pools):
            raise InvalidSpec(
                f"spec.capacity.pools has no pool of type {kind}, and capacity.type {wanted} needs one: "
                f"{', '.join(f'{p.name} is {p.type}' for p in pools)}"
            )


def _check_labels(pools: tuple[Pool, ...], given: Any) -> None:
    """Raises InvalidSpec where a pool and the template require different values of one label."""
    for pool in pools:
        for label, value in pool.selector.items() if isinstance(given, dict) else ():
            if given.get(label, value) != value:
                raise InvalidSpec(
                    f"spec.template.spec.nodeSelector has {label}: {given[label]}, and pool {pool.name} "
                    f"has {label}: {value}; leave it out of one of them"
                )

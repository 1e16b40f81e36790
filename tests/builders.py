"""Builders with defaults, for tests of the operator: say only what the test is about."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from spottrain.contract import EXIT_CODE_OF, Outcome, Progress, TerminationMessage
from spottrain_operator.api.bookkeeping import NO_BOOKS, AttemptNodes, Bookkeeping
from spottrain_operator.api.node_pools import NOTHING, Pool, chosen
from spottrain_operator.api.observed import Ended, NodeView, Notice, Observed, PodView, Refusal, Sample
from spottrain_operator.api.training_job import (
    AttemptRecord,
    ConditionStatus,
    Job,
    JobKey,
    Status,
)
from spottrain_operator.api.validation import parse_job
from spottrain_operator.control.actions import Create, Delete, Plan
from spottrain_operator.names import API_VERSION, KIND, Condition, Platform, pod_name

NOW = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)
KEY = JobKey(namespace="ns", name="job", uid="uid-1")
OWNER = {"apiVersion": API_VERSION, "kind": KIND, "name": KEY.name, "uid": KEY.uid, "controller": True}
"""In a pod's ownerReferences."""
POOL = chosen(Pool(name="default", platform=Platform.AWS), NOTHING)


def after(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


def raw_spec(**more: Any) -> dict[str, Any]:
    """A spec as the API server gives it, with its defaults filled in at the top level."""
    container = {"name": "trainer", "image": "example.com/train:1"}
    return {
        "template": {"spec": {"containers": [container]}},
        "training": {},
        "checkpoint": {"uri": "s3://bucket/run"},
        "capacity": {},
        "failurePolicy": {},
    } | more


def raw_job(
    spec: dict[str, Any] | None = None, *, status: Status | None = None, **meta: Any
) -> dict[str, Any]:
    metadata = {"namespace": KEY.namespace, "name": KEY.name, "uid": KEY.uid, "resourceVersion": "1"}
    raw: dict[str, Any] = {"metadata": metadata | {"generation": 1} | meta, "spec": spec or raw_spec()}
    return raw | ({"status": status.to_json()} if status else {})


def make_job(spec: dict[str, Any] | None = None, *, status: Status | None = None, **meta: Any) -> Job:
    return parse_job(raw_job(spec, status=status, **meta))


def started(attempt: int = 1, *, trained: bool = True, **more: Any) -> Status:
    """The status of a job whose attempt has been started and seen, and whose runtime has once `trained`."""
    records = tuple(
        AttemptRecord(
            number=number,
            pod=pod_name(KEY.name, KEY.uid, number),
            capacity_type="Spot",
            started=NOW - timedelta(minutes=10),
            node="node-a" if number == attempt else "node-z",
            cause="" if number == attempt else "SpotNotice",
            pool="default",
            created_workers=1,
            ended=None if number == attempt else NOW - timedelta(minutes=11),
            start_step=0 if trained and (number == 1 or number < attempt) else None,
        )
        for number in range(1, attempt + 1)
    )
    values: dict[str, Any] = {"attempt": attempt, "attempts": records, "interruptions": attempt - 1}
    return Status(**(values | more))


def make_pod(attempt: int = 1, rank: int = 0, **more: Any) -> PodView:
    """A pod that runs on node-a since ten minutes."""
    name = pod_name(KEY.name, KEY.uid, attempt, rank)
    defaults: dict[str, Any] = {
        "name": name,
        "namespace": KEY.namespace,
        "uid": f"uid-of-{name}",
        "job": KEY,
        "resource_version": 1,
        "attempt": attempt,
        "rank": rank,
        "created": NOW - timedelta(minutes=10),
        "phase": "Running",
        "node": "node-a",
        "ip": "10.0.0.1",
        "grace": 110,
        "holds_outcome": True,
    }
    if "ended" not in more and more.get("phase", "Running") == "Running" and more.get("node", "node-a"):
        defaults["running_since"] = NOW - timedelta(minutes=9)
    return PodView(**(defaults | more))


def ended_pod(
    attempt: int = 1, code: int = 0, *, message: str = "", reason: str = "", **more: Any
) -> PodView:
    """A pod whose trainer has ended just now."""
    end = Ended(exit_code=code, message=message, reason=reason, finished=NOW - timedelta(seconds=1))
    phase = "Succeeded" if code == 0 else "Failed"
    fields: dict[str, Any] = {"phase": phase, "ended": end} | more
    return make_pod(attempt, **fields)


def word(outcome: Outcome, **more: Any) -> str:
    return TerminationMessage(outcome=outcome, **more).to_json()


def told(outcome: Outcome, attempt: int = 1, *, pod: dict[str, Any] | None = None, **more: Any) -> PodView:
    """A pod that ended with a message of ours, and the exit code that goes with it."""
    return ended_pod(attempt, EXIT_CODE_OF[outcome], message=word(outcome, **more), **(pod or {}))


def deleted(seconds_ago: float = 10, grace: int = 30) -> dict[str, Any]:
    """For make_pod: somebody asked for its deletion."""
    return {"deleted": after(grace - seconds_ago), "deletion_grace": grace}


def notice(seconds: float = 100, source: str = "AWS spot/instance-action") -> Notice:
    return Notice(deadline=after(seconds), source=source, seen=NOW - timedelta(seconds=10))


def make_node(name: str = "node-a", **more: Any) -> NodeView:
    values: dict[str, Any] = {"name": name, "resource_version": 1, "hostname": name, "zone": "z1"}
    return NodeView(**(values | more))


def sample(step: int = 5, attempt: int = 1, **more: Any) -> Sample:
    progress: dict[str, Any] = {
        "state": "Training",
        "attempt": attempt,
        "step": step,
        "totalSteps": 100,
    } | more
    return Sample(progress=Progress(**progress), at=NOW)


def make_observed(
    *pods: PodView,
    job: Job | None = None,
    nodes: tuple[NodeView, ...] = (make_node(),),
    admitted: bool = True,
    refusal: Refusal | None = None,
    sample: Sample | None = None,
    now: datetime = NOW,
    annotated_at: datetime | None = None,
    books: Bookkeeping = NO_BOOKS,
) -> Observed:
    return Observed(
        now=now,
        job=job or make_job(status=started()),
        pods=tuple(sorted(pods, key=lambda p: p.attempt)),
        nodes={node.name: node for node in nodes},
        default_pool=POOL,
        admitted=admitted,
        refusal=refusal,
        sample=sample,
        books=books,
        annotated_at={pod.uid: annotated_at for pod in pods} if annotated_at is not None else {},
    )


def books_of(*attempts: Sequence[str]) -> Bookkeeping:
    """The bookkeeping of a job whose attempts, from the first one on, had these nodes by rank."""
    nodes = (AttemptNodes(number=number, names=tuple(names)) for number, names in enumerate(attempts, 1))
    return Bookkeeping(nodes=tuple(nodes))


# --- what a plan says -----------------------------------------------------------------------------------
def status_of(made: Plan) -> Status:
    assert made.status is not None
    return made.status


def condition(of: Plan | Status, kind: Condition) -> ConditionStatus:
    found = (status_of(of) if isinstance(of, Plan) else of).condition(kind)
    assert found is not None, kind
    return found


def manifests(made: Plan) -> list[dict[str, Any]]:
    """Of the pods that it creates."""
    return [a.manifest for a in made.after if isinstance(a, Create)]


def preferred_node(pod: dict[str, Any]) -> str:
    """Returns the host name that a gang's new pod prefers, because its rank had that node; "" without one."""
    affinity = (pod["spec"].get("affinity") or {}).get("nodeAffinity") or {}
    wishes = affinity.get("preferredDuringSchedulingIgnoredDuringExecution") or ()
    rules = [rule for wish in wishes for rule in wish["preference"]["matchExpressions"]]
    return next((rule["values"][0] for rule in rules if rule["operator"] == "In"), "")


def removed(made: Plan) -> set[int]:
    """The ranks whose pods it deletes."""
    return {a.pod.rank for a in (*made.before, *made.after) if isinstance(a, Delete)}

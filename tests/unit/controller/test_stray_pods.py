"""Pods that look like a job's own, and those that only the operator's cache knows."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from spottrain_operator.api.observed import Plan
from spottrain_operator.api.views import pod_view
from spottrain_operator.control.plan import plan
from spottrain_operator.names import Condition

from tests.builders import KEY, condition, make_job, make_observed, raw_spec, started
from tests.unit.controller.fake_cluster import World


async def _running(spec: dict[str, object] | None = None) -> World:
    w = World(spec)
    await w.begin()
    return w


def _copy(w: World, name: str, *, owner: bool) -> dict[str, Any]:
    """What `kubectl get -o yaml`, an edit and `kubectl create` make of a pod of ours."""
    raw = copy.deepcopy(w.cluster.pods[w.pod(1)])
    raw["metadata"] |= {"name": name, "uid": f"uid-{name}"}
    if not owner:
        del raw["metadata"]["ownerReferences"]
    raw["status"] = {"phase": "Pending"}
    del raw["spec"]["nodeName"]
    w.cluster.pods[name] = raw
    w.cluster._bump(raw)
    return raw


@pytest.mark.parametrize("owner", [True, False])
async def test_a_copy_of_a_pod_is_no_rank(owner: bool) -> None:
    w = await _running({"workers": 2})
    before = w.status
    _copy(w, "copy", owner=owner)
    await w.settle()
    assert w.status == before and "copy" in w.cluster.pods
    copied = w.cluster.pods["copy"]["metadata"]
    copied |= {"deletionTimestamp": "2026-03-01T12:00:30Z", "deletionGracePeriodSeconds": 0}
    w.cluster._bump(w.cluster.pods["copy"])
    await w.settle()
    assert "copy" not in w.cluster.pods, "nobody but the operator can take its finalizer off"
    assert w.status == before


async def test_a_pod_of_our_name_without_an_owner_is_not_adopted() -> None:
    w = World()
    await w.look()
    await w.look()
    name = w.pod(1)
    assert name in w.cluster.pods
    del w.cluster.pods[name]["metadata"]["ownerReferences"]
    w.cluster._bump(w.cluster.pods[name])
    w._start()
    await w.settle()
    accepted = condition(w.status, Condition.ACCEPTED)
    assert accepted.reason == "PodNameTaken"


@pytest.mark.parametrize(
    ("version", "ours"), [("spottrain.io/v1alpha1", True), ("acme.example/v1", False), ("v1", False)]
)
async def test_an_owner_is_known_by_its_group_too(version: str, ours: bool) -> None:
    w = await _running()
    raw = w.cluster.pods[w.pod(1)]
    raw["metadata"]["ownerReferences"][0]["apiVersion"] = version
    assert (pod_view(raw) is not None) == ours


def test_a_pod_that_no_scheduler_takes_is_looked_at_again_though_no_event_comes() -> None:
    """The watch's ADDED tells nothing new of a pod that is known from the reply to its POST."""
    job = make_job(
        raw_spec(), status=started(1, attempts=(started().attempts[0].__class__(number=1, pool="default"),))
    )
    made: Plan = plan(make_observed(job=job))
    assert made.after and made.recheck_after is not None and made.recheck_after.total_seconds() <= 1.1


async def test_a_pod_that_no_scheduler_takes_is_said_to_wait_for_it() -> None:
    w = World()
    while await w.look() is not None and w.pod(1) not in w.cluster.pods:
        pass
    await w.reconciler(KEY)
    scheduled = condition(w.status, Condition.SCHEDULED)
    assert scheduled.message == f"pod {w.pod(1)} waits for the scheduler"

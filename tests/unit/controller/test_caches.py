"""The caches' indexes say what a scan of all objects would, whatever came and went."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from spottrain_operator.api.observed import NodeView, PodView
from spottrain_operator.api.training_job import JobKey
from spottrain_operator.control.caches import NodeCache, PodCache
from spottrain_operator.policies.placement import MOST_AVOIDED
from spottrain_operator.policies.pod_end import trainer_ended

from tests.builders import make_node, make_pod, notice

JOBS = [JobKey(namespace=ns, name=name, uid=uid) for ns in ("a", "b") for name in "xy" for uid in "12"]
NODES = ["", "n1", "n2", "n3"]
POD_STEPS = st.lists(
    st.tuples(
        st.sampled_from(("put", "put", "put", "remove", "drop")),
        st.integers(0, 5),
        st.sampled_from(JOBS),
        st.sampled_from(NODES),
        st.integers(1, 12),
        st.sampled_from([{}, {}, {"rank": 1}, {"running_since": None}, {"ip": ""}, {"phase": "Failed"}]),
    ),
    max_size=40,
)


@settings(deadline=None)
@given(POD_STEPS)
def test_pods_are_found_by_job_name_and_node(
    steps: list[tuple[str, int, JobKey, str, int, dict[str, Any]]],
) -> None:
    cache = PodCache()
    for step, number, job, node, version, more in steps:
        pod = replace(make_pod(**more), uid=f"p{number}", job=job, node=node, resource_version=version)
        if step == "remove":
            cache.remove(pod.uid)
        else:
            getattr(cache, step)(pod)
        pods = list(cache)
        for key in JOBS:
            assert set(cache.of(key)) == {p for p in pods if p.job == key}
            same_name = {p.job for p in pods if (p.job.namespace, p.job.name) == (key.namespace, key.name)}
            assert cache.other_lives(key) == same_name - {key}
            for nodes in ((), ("n1",), ("n1", "n3", "none")):
                there = [p for p in pods if p.node in nodes and p.job != key]
                assert sorted(cache.others_on(nodes, key), key=_uid) == sorted(there, key=_uid)
        for node in NODES[1:]:
            assert cache.jobs_on(node) == {p.job for p in pods if p.node == node}
        assert cache.jobs() == {p.job for p in pods}
        asked = {p for p in pods if p.rank == 0 and p.running_since and p.ip and not trainer_ended(p)}
        assert set(cache.trainers()) == asked and cache.trainers(ending=True) == []
    for pod in cache:
        cache.drop(pod)
    assert not cache._by, "nothing is left behind"


def _uid(pod: PodView) -> str:
    return pod.uid


LOOKS: list[dict[str, Any]] = [
    {},
    {"zone": ""},
    {"zone": "", "karpenter": True},
    {"hostname": "shared"},
    {"notice": notice()},
    {"leaving": "cordoned"},
    {"fault": "taint nvidia.com/gpu.unhealthy", "zone": ""},
]
NODE_STEPS = st.lists(
    st.tuples(
        st.sampled_from(("put", "put", "put", "remove", "drop")),
        st.integers(0, 5),
        st.sampled_from(LOOKS),
        st.integers(1, 12),
    ),
    max_size=40,
)


@settings(deadline=None)
@given(NODE_STEPS)
def test_facts_of_all_nodes_are_those_of_a_scan(steps: list[tuple[str, int, dict[str, Any], int]]) -> None:
    cache = NodeCache()
    for step, number, look, version in steps:
        node = make_node(f"n{number}", **({"resource_version": version} | look))
        if step == "remove":
            cache.remove(node.name)
        else:
            getattr(cache, step)(node)
        nodes = list(cache)
        assert cache.zoned == (not nodes or any(n.zone for n in nodes))
        assert cache.karpenter == any(n.karpenter for n in nodes)
        for names in ((), ("shared",), ("n1", "shared", "none")):
            assert cache.with_hostnames(names) == {n.name: n for n in nodes if n.hostname in names}
        assert cache.noticed() == {n.name: n for n in nodes if n.notice or n.leaving or n.fault}
    for node in cache:
        cache.drop(node)
    assert not cache._by and not cache.noticed()


def test_of_many_nodes_with_a_notice_those_are_avoided_that_nothing_else_keeps_pods_off() -> None:
    def name(nodes: list[NodeView]) -> set[str]:
        return {node.name for node in nodes}

    faulty = [make_node(f"faulty-{n}", fault="GPU has fallen off the bus") for n in range(10)]
    cordoned = [make_node(f"cordoned-{n}", leaving="taint") for n in range(50)]
    early = [make_node(f"early-{n}", notice=notice(10 + n)) for n in range(50)]
    late = [make_node(f"late-{n}", notice=notice(100 + n)) for n in range(60)]
    cache = NodeCache()
    for node in (*cordoned, *early, *faulty, *late):
        cache.put(node)
    kept = set(cache.noticed())
    assert len(kept) == MOST_AVOIDED and name(faulty) | name(late) <= kept
    assert {n for n in kept if n.startswith("early")} == name(early[20:])
    assert cache.put(replace(early[0], resource_version=2, fault="GPU")) and "early-0" in cache.noticed()

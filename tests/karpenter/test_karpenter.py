"""What the real Karpenter does for jobs of the real operator, and to them: nodes, consolidation, deletion.

Each test has NodePools of its own, so that none sees another's nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from localcluster.karpenter import ZONES
from spottrain.contract import Outcome
from spottrain_operator.names import SOURCE_ANNOTATION, ZONE_LABEL

from tests.api.kube import Json, Kube, wait_for
from tests.api.scene import Scene
from tests.builders import preferred_node, word
from tests.karpenter.autoscaler import (
    CAPACITY_LABEL,
    DISRUPTED,
    DISRUPTING,
    POOL_LABEL,
    SCALING,
    Autoscaler,
    deleted,
    disrupted,
    hostname,
    zone,
)
from tests.support.pages import manifests

SAVED = word(Outcome.INTERRUPTED, step=9, durableStep=9, startStep=0)
STAMP = "karpenter.sh/nodeclaim-termination-timestamp"
GPU_TAINT = {"key": "nvidia.com/gpu", "value": "true", "effect": "NoSchedule"}


def capacity(pool: str, **labels: str) -> Json:
    own = {
        "name": pool,
        "platform": "Karpenter",
        "nodeSelector": {POOL_LABEL: pool} | labels,
    }
    return {"type": "Spot", "pools": [own]}


def in_a_zone(pool: str) -> Json:
    return capacity(pool, **{ZONE_LABEL: ZONES[1]})


def test_a_gang_without_nodes_gets_all_of_them_on_spot_in_one_zone(
    autoscaler: Autoscaler, scenes: Iterator[Scene]
) -> None:
    """Of the several zones of its NodePool. Karpenter may make a node or two in others, which stay empty."""
    scene = next(scenes)
    scene.create(workers=3, capacity=capacity("gang"))
    pods = scene.wait_gang(1, 3)
    scene.wait_condition("Scheduled", "False", "Unschedulable")
    assert not any(pod["spec"].get("nodeName") for pod in pods), "all of them wait at once"
    autoscaler.make_pool("gang", "gpu-1", consolidate_after="10m", taints=[GPU_TAINT])
    pods = autoscaler.start(scene, 1, 3)
    scene.wait_condition("Running", "True")
    nodes = {name: autoscaler.node(name) or {} for pod in pods if (name := pod["spec"]["nodeName"])}
    assert len(nodes) == 3
    assert {node["metadata"]["labels"][CAPACITY_LABEL] for node in nodes.values()} == {"spot"}
    assert len({zone(node) for node in nodes.values()}) == 1
    record = scene.status()["attempts"][0]
    assert (record["capacityType"], record["pool"]) == ("Spot", "gang")
    assert record["node"] in nodes


def test_a_claim_that_is_deleted_interrupts_the_gang_and_one_node_is_asked_for(
    autoscaler: Autoscaler, scenes: Iterator[Scene]
) -> None:
    scene = next(scenes)
    # What Karpenter stamps with this time is the NodeClaim, and not the node that the operator sees.
    autoscaler.make_pool("taken", "gpu-1", consolidate_after="10m", terminationGracePeriod="1h")
    before = autoscaler.claims_ever_made()
    scene.create(workers=3, capacity=in_a_zone("taken"))
    pods = autoscaler.start(scene, 1, 3)
    scene.wait_condition("Running", "True")
    assert autoscaler.claims_ever_made() == before + 3, "in a zone that is named none is made too many"
    nodes = [pod["spec"]["nodeName"] for pod in pods]
    hosts = [hostname(autoscaler.node(name) or {}) for name in nodes]
    claim = autoscaler.claim_of(nodes[1])["metadata"]["name"]
    autoscaler.delete_claim(claim)
    told = wait_for("the doomed rank to be told and deleted", lambda: told_to_go(scene, pods[1]))
    assert told["metadata"]["annotations"][SOURCE_ANNOTATION] == f"taint {DISRUPTED}"
    doomed = autoscaler.node(nodes[1]) or {}
    assert "deletionTimestamp" in doomed["metadata"], "it is there while its pod saves"
    assert {"key": DISRUPTED, "effect": "NoSchedule"} in doomed["spec"]["taints"]
    assert STAMP in autoscaler.claim_of(nodes[1])["metadata"]["annotations"]
    assert STAMP not in doomed["metadata"]["annotations"]
    assert not deleted(scene, pods[0]) and not deleted(scene, pods[2]), "they stop with it by themselves"
    for pod in (pods[1], pods[0], pods[2]):
        scene.end(pod, 75, SAVED)

    again = scene.wait_gang(2, 3)
    assert list(map(preferred_node, again)) == [hosts[0], "", hosts[2]]
    again = autoscaler.start(scene, 2, 3)
    scene.wait_condition("Running", "True")
    places = [pod["spec"]["nodeName"] for pod in again]
    assert {nodes[0], nodes[2]} < set(places) and nodes[1] not in places
    assert {zone(autoscaler.node(name) or {}) for name in places} == {ZONES[1]}
    wait_for("the doomed node to go", lambda: autoscaler.node(nodes[1]) is None, seconds=SCALING)
    scene.end(again[0], 0, word(Outcome.DONE, step=20, durableStep=20, startStep=9))
    scene.wait_condition("Succeeded", "True")
    assert scene.counters() == (2, 0, 1), "an interruption, and no failure"
    record = scene.status()["attempts"][0]
    assert record["cause"] == "SpotNotice" and not record.get("charged")
    assert f"taint {DISRUPTED}: the node ends at " in record["evidence"]
    assert autoscaler.claims_ever_made() == before + 4, "one for the one that is lost"


def test_a_replacement_has_its_node_while_the_trainer_on_the_doomed_one_saves(
    autoscaler: Autoscaler, scenes: Iterator[Scene]
) -> None:
    scene = next(scenes)
    autoscaler.make_pool("lone", "gpu-1", consolidate_after="10m")
    scene.create(capacity=capacity("lone"))
    (pod,) = autoscaler.start(scene, 1, 1)
    scene.wait_condition("Running", "True")
    scene.see_runtime()  # only our runtime waits at the gate
    autoscaler.delete_claim(autoscaler.claim_of(pod["spec"]["nodeName"])["metadata"]["name"])
    (again,) = autoscaler.start(scene, 2, 1)
    assert again["spec"]["nodeName"] != pod["spec"]["nodeName"]
    assert told_to_go(scene, pod), "it is still there"
    scene.end(pod, 75, SAVED)
    wait_for("its end to be written", lambda: scene.status()["attempts"][0].get("exitCode") == 75)
    assert scene.counters() == (2, 0, 1)


def test_consolidation_spares_a_trainer_and_not_one_that_gives_leave(
    autoscaler: Autoscaler, scenes: Iterator[Scene]
) -> None:
    """Two half-empty nodes in each of two pools, alike but for the annotation on what runs there."""
    spared = two_half_empty(autoscaler, "spared", scenes)
    wait_for("Karpenter to hold them for under-used", lambda: all_idle(autoscaler, "spared"), seconds=SCALING)
    given = two_half_empty(autoscaler, "given", scenes, annotations={"karpenter.sh/do-not-disrupt": "false"})
    taken = wait_for("Karpenter to take one of two", lambda: first_deleted(given), seconds=DISRUPTING)
    pod = taken.wait_attempt(1)
    lost = pod["spec"]["nodeName"]
    taken.end(pod, 75, SAVED)
    autoscaler.start(taken, 2, 1)
    wait_for("the emptied node to go", lambda: autoscaler.node(lost) is None, seconds=DISRUPTING)
    assert len(autoscaler.nodes("given")) == 1, "the other one had room"
    assert taken.counters() == (2, 0, 1)
    record = taken.status()["attempts"][0]
    assert record["cause"] == "SpotNotice", "Karpenter does not say why it deletes a node"

    assert not any(disrupted(node) for node in autoscaler.nodes("spared"))
    assert len(autoscaler.nodes("spared")) == 2
    assert not any(deleted(scene, scene.wait_attempt(1)) for scene in spared)
    assert [scene.counters() for scene in spared] == [(1, 0, 0)] * 2


# --- steps ----------------------------------------------------------------------------------------------
def told_to_go(scene: Scene, pod: Json) -> Json | None:
    live = scene.kube.get(scene.path(pod))
    return live if live is not None and "deletionTimestamp" in live["metadata"] else None


def two_half_empty(
    autoscaler: Autoscaler, pool: str, scenes: Iterator[Scene], **metadata: Any
) -> list[Scene]:
    """Two jobs, each on a node of its own that had no room for both, and has now."""
    autoscaler.make_pool(pool, "cpu-4", consolidate_after="1s")
    namespace = f"fill-{pool}"
    autoscaler.kube.make_namespace(namespace)
    fillers = [filler(autoscaler.kube, namespace, f"{pool}-{n}", pool) for n in range(2)]
    wait_for("nodes for the fillers", lambda: all_bound(autoscaler.kube, fillers), seconds=SCALING)
    jobs = [next(scenes) for _ in range(2)]
    for scene in jobs:
        trainer = {"name": "trainer", "image": "x", "resources": {"requests": {"cpu": "1"}}}
        template = {"metadata": metadata, "spec": {"containers": [trainer]}}
        scene.create(gpusPerWorker=0, capacity=capacity(pool), template=template)
        autoscaler.start(scene, 1, 1)
        scene.wait_condition("Running", "True")
    for path in fillers:
        autoscaler.kube.call("DELETE", path, {"gracePeriodSeconds": 0})
    assert len(autoscaler.nodes(pool)) == 2
    return jobs


def filler(kube: Kube, namespace: str, name: str, pool: str) -> str:
    """Its path. With one trainer its node is full; without it there is room for two."""
    container = {"name": "filler", "image": "x", "resources": {"requests": {"cpu": "2500m"}}}
    spec: Json = {"containers": [container], "nodeSelector": {POOL_LABEL: pool, CAPACITY_LABEL: "spot"}}
    spec["automountServiceAccountToken"] = False
    path = f"/api/v1/namespaces/{namespace}/pods"
    kube.call("POST", path, {"metadata": {"name": name}, "spec": spec})
    return f"{path}/{name}"


def all_bound(kube: Kube, paths: list[str]) -> bool:
    return all((kube.get(path) or {})["spec"].get("nodeName") for path in paths)


def all_idle(autoscaler: Autoscaler, pool: str) -> bool:
    """Whether Karpenter has waited `consolidateAfter` for each node."""
    claims = autoscaler.claims(pool)
    idle = [
        any(c["type"] == "Consolidatable" and c["status"] == "True" for c in claim["status"]["conditions"])
        for claim in claims
    ]
    return bool(idle) and all(idle)


def first_deleted(scenes: list[Scene]) -> Scene | None:
    return next((s for s in scenes if (pod := s.pod(1)) is not None and deleted(s, pod)), None)


def test_the_node_pool_of_the_page_on_eks_is_one_that_karpenter_knows(kube: Kube) -> None:
    pools = manifests("NodePool")
    assert pools
    for _, pool in pools:
        query = "fieldValidation=Strict&dryRun=All"
        kube.call("POST", f"/apis/karpenter.sh/v1/nodepools?{query}", pool)

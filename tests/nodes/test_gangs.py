"""A gang over real nodes: its pods find each other by name, one node goes, and nothing is lost."""

from __future__ import annotations

from tests.support.lab import Lab, Raw, paced


def apart(job: Raw) -> Raw:
    """Each pod on a node of its own."""
    term = {
        "topologyKey": "kubernetes.io/hostname",
        "labelSelector": {"matchLabels": {"spottrain.io/job": job["metadata"]["name"]}},
    }
    anti = {"requiredDuringSchedulingIgnoredDuringExecution": [term]}
    job["spec"]["template"]["spec"]["affinity"] = {"podAntiAffinity": anti}
    return job


def gang(lab: Lab) -> Raw:
    container = {"env": paced(first=0.25, later=0.02)}
    capacity = {"sameZone": False}  # each of the two nodes is a zone of its own
    steps = {"maxSteps": 300}
    return apart(lab.job(workers=2, training=steps, container=container, capacity=capacity))


def test_one_node_of_a_gang_is_reclaimed_and_only_its_rank_asks_for_another(lab: Lab) -> None:
    lab.apply(gang(lab))
    lab.wait_for_step(20)
    first = lab.status()["attempts"][0]
    nodes = [rank["node"] for rank in first["ranks"]]
    assert sorted(nodes) == sorted(lab.cluster.nodes), "the two ranks train on two nodes"
    lab.cluster.reclaim(nodes[1], 40)
    lab.wait("the second attempt's pods", lambda: lab.status().get("attempt") == 2 and len(_of(lab, 2)) == 2)
    pinned = [p["metadata"]["annotations"].get("spottrain.io/pinned-to") for p in _of(lab, 2)]
    assert pinned == [nodes[0], None]
    lab.cluster.restore(nodes[1])
    status = lab.wait_for_phase("Succeeded", seconds=240)
    one, *between, two = status["attempts"]
    # The lost rank was kept off the doomed node; the fresh one of that name may have its successor.
    causes = [(attempt["cause"], attempt["evidence"]) for attempt in between]
    assert [cause for cause, _ in causes] in ([], ["Replaced"]), causes
    assert (one["cause"], status["interruptions"], status.get("failures", 0)) == ("SpotNotice", 1, 0)
    assert [r["exitCode"] for r in one["ranks"]] == [75, 75], "all ranks stopped at one step, and saved it"
    assert one["lastStep"] == one["durableStep"] == two["startStep"]
    assert [r["node"] for r in two["ranks"]] == nodes, (causes, status["attempts"])


def test_a_gang_is_suspended_and_resumed_with_another_number_of_workers(lab: Lab) -> None:
    lab.apply(gang(lab))
    lab.wait_for_step(20)
    lab.kubectl.run("patch", "trainingjob", "job", "--type=merge", "-p", '{"spec":{"suspend":true}}')
    status = lab.wait_for_phase("Suspended")
    saved = status["attempts"][0]["durableStep"]
    assert saved == status["attempts"][0]["lastStep"] and status["attempts"][0]["cause"] == "Suspended"
    change = '{"spec":{"suspend":false,"workers":1}}'
    lab.kubectl.run("patch", "trainingjob", "job", "--type=merge", "-p", change)
    status = lab.wait_for_phase("Succeeded", seconds=180)
    assert status["attempts"][1]["startStep"] == saved
    assert (status.get("interruptions", 0), status.get("failures", 0)) == (0, 0)


def _of(lab: Lab, attempt: int) -> list[Raw]:
    pods = [p for p in lab.pods() if p["metadata"]["labels"]["spottrain.io/attempt"] == str(attempt)]
    return sorted(pods, key=lambda p: int(p["metadata"]["labels"]["spottrain.io/rank"]))

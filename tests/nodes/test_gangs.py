"""A gang over two nodes: its pods find each other by name, one node goes, and nothing is lost."""

from __future__ import annotations

from tests.builders import preferred_node
from tests.support.lab import Lab, Raw, paced

NOTICE = 15


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
    container = {"env": paced(first=0.25, later=0.1)}
    capacity = {"sameZone": False}  # each of the two nodes is a zone of its own
    steps, every = {"maxSteps": 400}, {"interval": "10steps"}
    return apart(lab.job(workers=2, training=steps, container=container, capacity=capacity, checkpoint=every))


def test_one_node_of_a_gang_is_reclaimed_and_then_it_is_resumed_with_another_number_of_workers(
    lab: Lab,
) -> None:
    lab.apply(gang(lab))
    lab.wait_for_step(12, seconds=240)
    nodes = [pod["spec"]["nodeName"] for pod in _of(lab, 1)]
    assert sorted(nodes) == sorted(lab.cluster.nodes), "the two ranks train on two nodes"
    lost = nodes.index(lab.expendable_node())
    lab.cluster.reclaim(nodes[lost], NOTICE)
    lab.wait("the second attempt's pods", lambda: lab.status().get("attempt") == 2 and len(_of(lab, 2)) == 2)
    assert list(map(preferred_node, _of(lab, 2))) == [
        "" if r == lost else node for r, node in enumerate(nodes)
    ]
    lab.cluster.restore(nodes[lost])
    one, between, two = _trains_again(lab)
    # The lost rank was kept off the doomed node; the fresh one of that name may have its successor.
    causes = [(attempt["cause"], attempt["evidence"]) for attempt in between]
    assert [cause for cause, _ in causes] in ([], ["Replaced"]), causes
    assert one["cause"] == "SpotNotice"
    assert one["exitCode"] == 75 and not one.get("ranks"), "all ranks stopped at one step, and saved it"
    assert 12 <= two["startStep"] == one["lastStep"] == one["durableStep"]
    assert {pod["spec"]["nodeName"] for pod in _of(lab, two["number"])} == set(nodes), (causes, two)
    _is_resumed_with_one_worker(lab)


def _trains_again(lab: Lab) -> tuple[Raw, list[Raw], Raw]:
    """The attempts: that of the notice, those that never trained, and the one that trains now."""
    ended = lab.wait(
        "the end of the first attempt", lambda: (a := lab.status()["attempts"][0]).get("endTime") and a
    )
    lab.wait_for_step(ended["lastStep"] + 3, seconds=240)
    status = lab.wait("its first step", lambda: (s := lab.status())["attempts"][-1].get("startStep") and s)
    assert (status["interruptions"], status.get("failures", 0)) == (1, 0)
    one, *between, two = status["attempts"]
    return one, between, two


def _is_resumed_with_one_worker(lab: Lab) -> None:
    lab.kubectl.run("patch", "trainingjob", "job", "--type=merge", "-p", '{"spec":{"suspend":true}}')
    status = lab.wait_for_phase("Suspended")
    last = status["attempts"][-1]
    assert last["durableStep"] == last["lastStep"] and last["cause"] == "Suspended"
    change = '{"spec":{"suspend":false,"workers":1}}'
    lab.kubectl.run("patch", "trainingjob", "job", "--type=merge", "-p", change)
    lab.wait_for_step(last["lastStep"] + 3, seconds=240)
    status = lab.wait("its first step", lambda: (s := lab.status())["attempts"][-1].get("startStep") and s)
    assert len(_of(lab, status["attempt"])) == 1
    assert status["attempts"][-1]["startStep"] == last["durableStep"]
    assert (status["interruptions"], status.get("failures", 0)) == (1, 0)


def _of(lab: Lab, attempt: int) -> list[Raw]:
    pods = [p for p in lab.pods() if p["metadata"]["labels"]["spottrain.io/attempt"] == str(attempt)]
    return sorted(pods, key=lambda p: int(p["metadata"]["labels"]["spottrain.io/rank"]))

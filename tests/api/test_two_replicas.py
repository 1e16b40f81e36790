"""Two operator processes and one Lease: the leader is killed, cut off, stopped for a while, asked to end.

The times are shorter than the defaults. Judged by the API server's audit log: no pod's name was POSTed with
success twice, and the counters are what was done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from localcluster.apiserver import ApiServer
from spottrain.contract import Outcome

from tests.api.killer import KillerProxy, Write
from tests.api.kube import Json, Kube, wait_for
from tests.api.line import Line
from tests.api.scene import OperatorProcess, Scene
from tests.api.test_sigkill import WRITES, posted, through
from tests.builders import word

LEASE_SECONDS = "4"


def lease(kube: Kube, namespace: str) -> Json:
    path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/spottrain-operator"
    spec: Json = (kube.get(path) or {}).get("spec", {})
    return spec


def wait_leads(kube: Kube, namespace: str, identity: str) -> None:
    wait_for(f"{identity} to lead", lambda: lease(kube, namespace).get("holderIdentity") == identity)


Start = Callable[..., OperatorProcess]


@pytest.fixture
def start(server: ApiServer, namespace: str) -> Iterator[Start]:
    """Starts a replica, and waits until its caches are filled."""
    with ExitStack() as running:

        def begin(identity: str, kubeconfig: Path = server.kubeconfig) -> OperatorProcess:
            settings = {"lease_namespace": namespace, "identity": identity, "lease_seconds": LEASE_SECONDS}
            replica = OperatorProcess(kubeconfig=kubeconfig, namespace=namespace, **settings)
            running.enter_context(replica)
            replica.wait_ready()
            return replica

        yield begin


@pytest.fixture
def scene(kube: Kube, namespace: str) -> Scene:
    return Scene(kube=kube, namespace=namespace, job="job")


def run_job(scene: Scene) -> tuple[Json, str]:
    """A job that trains; its pod and node."""
    scene.create()
    pod = scene.wait_attempt(1)
    node = scene.bind(pod)
    scene.wait_condition("Running", "True")
    scene.see_runtime()
    return pod, node


def interrupt(scene: Scene, old: Json, node: str) -> Json:
    """A notice, and the old pod's end; the next attempt's pod, which runs."""
    scene.give_notice(node, 60)
    new = scene.wait_attempt(2)
    finish_first(scene, old)
    scene.bind(new)
    return new


def finish_first(scene: Scene, old: Json) -> None:
    wait_for("the old pod's deletion", lambda: "deletionTimestamp" in (scene.pod(1) or {})["metadata"])
    scene.end(old, 75, word(Outcome.INTERRUPTED, step=9, durableStep=9))
    wait_for("the old pod to go", lambda: scene.pod(1) is None)


def finish(scene: Scene, pod: Json, server: ApiServer) -> None:
    """The job's success, and the judgement."""
    scene.end(pod, 0, word(Outcome.DONE, startStep=9))
    scene.wait_condition("Succeeded", "True")
    assert scene.counters() == (2, 0, 1)
    assert [a["cause"] for a in scene.status()["attempts"]] == ["SpotNotice", "Done"]
    names = posted(server, scene.namespace)
    assert len(names) == 2 and set(names.values()) == {1}, names


def test_a_standby_is_ready_and_decides_nothing(
    kube: Kube, namespace: str, start: Start, scene: Scene
) -> None:
    start("a")
    wait_leads(kube, namespace, "a")
    standby = start("b")
    run_job(scene)
    log = standby.log.read_text()
    assert "caches are filled" in log and "a leads; b stands by" in log
    assert f"{namespace}/job/" not in log


def test_a_killed_leader_is_replaced(
    kube: Kube, namespace: str, server: ApiServer, start: Start, scene: Scene
) -> None:
    first = start("a")
    wait_leads(kube, namespace, "a")
    start("b")
    old, node = run_job(scene)
    first.kill()
    new = interrupt(scene, old, node)
    assert lease(kube, namespace)["holderIdentity"] == "b" and lease(kube, namespace)["leaseTransitions"] == 1
    finish(scene, new, server)


def test_a_leader_that_is_restarted_in_its_pod_goes_on_at_once(
    kube: Kube, namespace: str, start: Start, scene: Scene
) -> None:
    """Its name in the Lease is its own, and the process before is dead."""
    first = start("a")
    wait_leads(kube, namespace, "a")
    first.kill()
    first.start()
    run_job(scene)
    assert lease(kube, namespace)["leaseTransitions"] == 0


def test_a_rolling_restart_hands_over_and_restarts_no_attempt(
    kube: Kube, namespace: str, server: ApiServer, start: Start, scene: Scene
) -> None:
    first = start("a")
    wait_leads(kube, namespace, "a")
    second = start("b")
    old, node = run_job(scene)
    assert first.stop() == 0
    assert "a released the Lease" in first.log.read_text()
    wait_leads(kube, namespace, "b")
    start("c")
    assert second.stop() == 0
    wait_leads(kube, namespace, "c")
    assert scene.counters() == (1, 0, 0)
    finish(scene, interrupt(scene, old, node), server)


def test_a_leader_that_is_cut_off_ends_and_comes_back_as_a_standby(
    kube: Kube, namespace: str, server: ApiServer, start: Start, scene: Scene, tmp_path: Path
) -> None:
    with Line(kube) as line:
        first = start("a", line.kubeconfig(server.kubeconfig, tmp_path))
        wait_leads(kube, namespace, "a")
        start("b")
        old, node = run_job(scene)
        line.cut()
        scene.give_notice(node, 60)
        assert first.wait_end() == 1
        assert "lost leadership, exiting: could not renew the Lease" in first.log.read_text()
        new = scene.wait_attempt(2)
        line.mend()
        first.start()
        finish_first(scene, old)
        scene.bind(new)
        finish(scene, new, server)
        wait_leads(kube, namespace, "b")


LATE = [
    pytest.param(w, id=w.name, marks=() if w.name == "the next pod is made" else pytest.mark.heavy)
    for w in WRITES
    if w.name in ("the pod is deleted", "the status has the next attempt", "the next pod is made")
]


@pytest.mark.parametrize("write", LATE)
def test_a_leader_that_is_stopped_while_another_takes_over_changes_nothing_when_it_returns(
    write: Write,
    kube: Kube,
    namespace: str,
    server: ApiServer,
    start: Start,
    scene: Scene,
    tmp_path: Path,
) -> None:
    """It is stopped with a write on its way, which arrives when the other has long done the same."""
    with KillerProxy(kube) as proxy:
        first = start("a", through(proxy, tmp_path))
        wait_leads(kube, namespace, "a")
        start("b")
        old, node = run_job(scene)
        proxy.hold(write, first.pause)
        scene.give_notice(node, 60)
        wait_for(f"the stop at: {write.name}", proxy.fired.is_set)
        wait_leads(kube, namespace, "b")
        new = scene.wait_attempt(2)
        first.resume()
        proxy.deliver.set()
        assert first.wait_end() == 1
        wait_for("the late write to arrive", lambda: proxy.delivered is not None)
        first.start()
        finish_first(scene, old)
        scene.bind(new)
        finish(scene, new, server)


def test_a_pod_that_a_former_leader_makes_of_a_past_attempt_is_deleted_at_once(
    kube: Kube, namespace: str, start: Start, scene: Scene, tmp_path: Path
) -> None:
    """The POST arrives when the attempt is over and its pod is gone, so that its name is free."""
    (post,) = [w for w in WRITES if w.name == "the next pod is made"]
    with KillerProxy(kube) as proxy:
        first = start("a", through(proxy, tmp_path))
        wait_leads(kube, namespace, "a")
        start("b")
        old, node = run_job(scene)
        proxy.hold(post, first.pause)
        scene.give_notice(node, 60)
        wait_for("the stop", proxy.fired.is_set)
        second = scene.wait_attempt(2)
        finish_first(scene, old)
        other = scene.bind(second)
        scene.give_notice(other, 60)
        third = scene.wait_attempt(3)
        scene.end(second, 75, word(Outcome.INTERRUPTED, step=12, durableStep=12))
        wait_for("the second pod to go", lambda: scene.pod(2) is None)
        proxy.deliver.set()
        wait_for("the late POST", lambda: proxy.delivered == 201)
        wait_for("the pod that it has made to go", lambda: scene.pod(2) is None)
        first.resume()
        assert first.wait_end() == 1
        scene.bind(third)
        scene.end(third, 0, word(Outcome.DONE, startStep=12))
        scene.wait_condition("Succeeded", "True")
        assert scene.counters() == (3, 0, 2)

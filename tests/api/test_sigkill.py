"""SIGKILL of the real operator process between any two writes of a restart.

The next process goes on from there. Checked at the end: the counters, the outcome of both attempts, and
from the audit log that no pod's name was POSTed with success twice.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from localcluster.apiserver import ApiServer
from spottrain.contract import Outcome

from tests.api.killer import KillerProxy, Write
from tests.api.kube import Kube, wait_for
from tests.api.scene import OperatorProcess, Scene
from tests.builders import word

WRITES = [
    Write(
        name="the pod is told its deadline", method="PATCH", resource="/pods/", body="termination-deadline"
    ),
    Write(name="the pod is deleted", method="DELETE", resource="/pods/"),
    Write(name="the status has the next attempt", method="PATCH", resource="/status", body='"attempt": 2'),
    Write(name="the next pod is made", method="POST", resource="/pods"),
    Write(name="the status has the old outcome", method="PATCH", resource="/status", body='"exitCode": 75'),
    Write(name="the old pod is released", method="PATCH", resource="/pods/", body="$deleteFromPrimitiveList"),
    Write(name="the status has the success", method="PATCH", resource="/status", body='"Succeeded"'),
]


def posted(server: ApiServer, namespace: str) -> Counter[str]:
    """Names of the pods that were POSTed with success."""
    names: Counter[str] = Counter()
    for line in server.audit_log.read_text().splitlines():
        entry = json.loads(line)
        ref = entry.get("objectRef", {})
        about = (entry["verb"], ref.get("resource"), ref.get("subresource"), ref.get("namespace"))
        made = entry.get("responseStatus", {}).get("code") == 201 and "dryRun" not in entry["requestURI"]
        if about == ("create", "pods", None, namespace) and made:
            names[ref["name"]] += 1
    return names


@pytest.fixture
def proxy(kube: Kube) -> Iterator[KillerProxy]:
    with KillerProxy(kube) as proxy:
        yield proxy


def through(proxy: KillerProxy, folder: Path) -> Path:
    path = folder / "kubeconfig"
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "p", "cluster": {"server": f"http://127.0.0.1:{proxy.port}"}}],
        "users": [{"name": "p", "user": {}}],
        "contexts": [{"name": "p", "context": {"cluster": "p", "user": "p"}}],
        "current-context": "p",
    }
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.mark.parametrize("write", WRITES, ids=[w.name for w in WRITES])
def test_a_kill_after(
    write: Write, server: ApiServer, kube: Kube, namespace: str, proxy: KillerProxy, tmp_path: Path
) -> None:
    scene = Scene(kube=kube, namespace=namespace, job="job")
    with OperatorProcess(kubeconfig=through(proxy, tmp_path), namespace=namespace) as operator:
        scene.create()
        old = scene.wait_attempt(1)
        node = scene.bind(old)
        scene.wait_condition("Running", "True")
        scene.see_runtime()
        proxy.arm(write, operator.kill)
        scene.give_notice(node, 60)
        _restart(
            proxy,
            operator,
            write,
            "the pod is told",
            "the pod is deleted",
            "the status has the next",
            "the next",
        )
        new = scene.wait_attempt(2)
        wait_for("the old pod's deletion", lambda: "deletionTimestamp" in (scene.pod(1) or {})["metadata"])
        scene.end(old, 75, word(Outcome.INTERRUPTED, step=9, durableStep=9))
        _restart(proxy, operator, write, "the status has the old", "the old")
        wait_for("the old pod to go", lambda: scene.pod(1) is None)
        scene.bind(new)
        scene.end(new, 0, word(Outcome.DONE, startStep=9))
        _restart(proxy, operator, write, "the status has the success")
        scene.wait_condition("Succeeded", "True")
        wait_for("no finalizer to be left", lambda: not scene.pods()[0]["metadata"].get("finalizers"))
    assert scene.counters() == (2, 0, 1)
    first, second = scene.status()["attempts"]
    assert (first["cause"], first["exitCode"], first["durableStep"]) == ("SpotNotice", 75, 9)
    assert second["cause"] == "Done"
    names = posted(server, namespace)
    assert len(names) == 2 and set(names.values()) == {1}, names


def _restart(proxy: KillerProxy, operator: OperatorProcess, write: Write, *names: str) -> None:
    """Where this part of the story is to kill it: it has been killed, and is started again."""
    if write.name.startswith(names):
        wait_for(f"the kill after: {write.name}", proxy.fired.is_set)
        operator.start()

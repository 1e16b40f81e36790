"""How long jobs are without an operator when the leader of two goes: `make bench-failover ROUNDS=5`.

Two operator processes with the default times of the Lease, on a real etcd and API server. In turn the
leader is killed, asked to end, and stopped (SIGSTOP, until the other leads). In the same moment a node gets a
notice, and the seconds are counted until the other process leads, and until it has deleted the node's pod.

The last line is JSON. Exit code 1 where `duplicates` (names of pods that were POSTed with success more than
once) or `miscounted` is not 0.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "dev"))
sys.path.insert(0, str(Path(__file__).parents[1]))

from localcluster.apiserver import ApiServer, api_server
from spottrain.contract import Outcome

from tests.api.kube import Json, Kube, wait_for
from tests.api.scene import OperatorProcess, Scene
from tests.api.test_sigkill import posted
from tests.builders import word

CRD = Path(__file__).resolve().parents[1] / "crds" / "trainingjobs.yaml"
NAMESPACE = "failover"
LEASE = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/spottrain-operator"
FAULTS = ("killed", "asked to end", "stopped")


@dataclass
class Pair:
    """A leader, a standby, and a job that trains."""

    kube: Kube
    server: ApiServer
    scene: Scene
    attempt: int = 1
    leads: dict[str, list[float]] = field(default_factory=lambda: {fault: [] for fault in FAULTS})
    """Seconds until the standby led, by fault."""
    acts: dict[str, list[float]] = field(default_factory=lambda: {fault: [] for fault in FAULTS})
    """Seconds until it had deleted the pod."""

    def __post_init__(self) -> None:
        self._names = (f"operator-{number}" for number in itertools.count(1))
        self.leader_name, self.leader = self.start()
        self.wait_leads(self.leader_name)
        self.standby_name, self.standby = self.start()
        self.pod: Json = self.scene.run()
        self.scene.wait_condition("Running", "True")
        self.scene.see_runtime()

    def start(self) -> tuple[str, OperatorProcess]:
        name = next(self._names)
        settings = {"lease_namespace": NAMESPACE, "identity": name}
        process = OperatorProcess(kubeconfig=self.server.kubeconfig, namespace=NAMESPACE, **settings)
        process.start()
        process.wait_ready()
        return name, process

    def wait_leads(self, name: str) -> None:
        def look() -> bool:
            lease = self.kube.get(LEASE) or {}
            return bool(lease.get("spec", {}).get("holderIdentity") == name)

        wait_for(f"{name} to lead", look)

    def round(self, fault: str) -> None:
        strike: dict[str, Callable[[], object]] = {
            "killed": self.leader.kill,
            "asked to end": self.leader.terminate,
            "stopped": self.leader.pause,
        }
        node: str = (self.scene.kube.get(self.scene.path(self.pod)) or {})["spec"]["nodeName"]
        began = time.monotonic()
        strike[fault]()
        self.scene.give_notice(node, 100)
        self.wait_leads(self.standby_name)
        self.leads[fault].append(time.monotonic() - began)
        wait_for("the pod's deletion", self._deleted)
        self.acts[fault].append(time.monotonic() - began)
        self._go_on()
        if fault == "stopped":
            self.leader.resume()
        if fault != "killed":
            self.leader.wait_end()
        self.leader_name, self.leader = self.standby_name, self.standby
        self.standby_name, self.standby = self.start()

    def _deleted(self) -> bool:
        return "deletionTimestamp" in (self.kube.get(self.scene.path(self.pod)) or {})["metadata"]

    def _go_on(self) -> None:
        """The old pod ends, and the next attempt trains."""
        self.scene.end(self.pod, 75, word(Outcome.INTERRUPTED, step=self.attempt, durableStep=self.attempt))
        self.attempt += 1
        self.pod = self.scene.wait_attempt(self.attempt)
        self.scene.bind(self.pod)
        self.scene.wait_condition("Running", "True")

    def figures(self, rounds: int) -> dict[str, object]:
        made = posted(self.server, NAMESPACE)
        counters = self.scene.counters()
        return {
            "rounds": rounds,
            "duplicates": sum(count > 1 for count in made.values()),
            "miscounted": int(counters != (self.attempt, 0, self.attempt - 1)),
            "failover_s": _summary(self.leads),
            "failover_to_deletion_s": _summary(self.acts),
        }


def _summary(seconds: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    return {
        fault: {"median": round(statistics.median(every), 1), "longest": round(max(every), 1)}
        for fault, every in seconds.items()
        if every
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="of each fault")
    rounds = parser.parse_args().rounds
    with api_server() as server:
        kube = Kube.from_kubeconfig(server.kubeconfig)
        kube.install(CRD)
        kube.make_namespace(NAMESPACE)
        pair = Pair(kube=kube, server=server, scene=Scene(kube=kube, namespace=NAMESPACE, job="job"))
        try:
            for number in range(rounds):
                for fault in FAULTS:
                    pair.round(fault)
                    print(f"round {number + 1}: {fault}: {pair.leads[fault][-1]:.1f} s", flush=True)
            figures = pair.figures(rounds)
        finally:
            for process in (pair.leader, pair.standby):
                process.kill()
    print(json.dumps(figures))
    return 1 if figures["duplicates"] or figures["miscounted"] else 0


if __name__ == "__main__":
    sys.exit(main())

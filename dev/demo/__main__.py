"""The story of `make demo`, from top to bottom; prints a timeline, a table and, last, one JSON line.

Two jobs run the GPT example with the same seed: `gpt` loses its node in the middle of training, `gpt-alone`
is left in peace on the other node. Both must end with the same weights, and with the same loss at each step.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import yaml

from demo.figures import attempts_table, digests_equal, figures, losses_equal
from demo.kubectl import Kubectl, Watch
from demo.record import JobRecord
from demo.target import ROOT, NotPossible, Target, existing_target, local_pool, local_target
from demo.timeline import Timeline

Raw = dict[str, Any]
STEPS = int(os.environ.get("STEPS", "240"))
NOTICE_SECONDS = float(os.environ.get("NOTICE_SECONDS", "120"))
LABEL = "app.kubernetes.io/part-of=spottrain-demo"
"""On the demo's own jobs: it deletes no other, also in a namespace that a user has named."""
LOCAL = os.environ.get("CLUSTER", "local") == "local"


def main() -> int:
    started = time.time()
    try:
        target = local_target(NOTICE_SECONDS) if LOCAL else existing_target()
    except NotPossible as problem:
        print(f"demo: {problem}", file=sys.stderr)
        return 2
    line = story(target, Timeline())
    target.restore()
    line |= {"peak_disk_gb": peak_disk_gb(), "seconds": round(time.time() - started, 1)}
    print(json.dumps(line))
    return 0 if line["outcome"] == "Succeeded" and line["digests_equal"] else 1


def story(target: Target, timeline: Timeline) -> Raw:
    """Runs both jobs, interrupts the first in mid-training, and measures. Returns the JSON line."""
    kubectl = target.kubectl
    run = f"run-{int(time.time())}"
    interrupted = JobRecord("gpt", "gpt", timeline, kubectl)
    alone = JobRecord("gpt-alone", "gpt-alone", timeline, kubectl)
    kubectl.run("delete", "trainingjob", "-l", LABEL)
    ours = "spottrain.io/job in (gpt,gpt-alone)"
    wait_for(timeline, "the end of earlier pods", 150, lambda: not kubectl.items("pods", "-l", ours))

    def on_pod(kind: str, pod: Raw) -> None:
        interrupted.on_pod(kind, pod)
        alone.on_pod(kind, pod)

    watch = Watch(kubectl, "pods", on_pod)
    try:
        timeline.say("you", "kubectl apply -f gpt.yaml")
        kubectl.apply(job(target, "gpt", run))
        wait_for(timeline, "gpt on its node", 120, lambda: bool((a := interrupted.latest()) and a.node))
        timeline.say("you", "kubectl apply -f gpt-alone.yaml   (the same job, to compare with)")
        kubectl.apply(job(target, "gpt-alone", run, node=target.other_node(interrupted.attempts[1].node)))
        published = interrupt_in_mid_training(target, timeline, interrupted)
        jobs = {name: wait_until_ended(kubectl, timeline, name) for name in ("gpt", "gpt-alone")}
        if published is not None:
            see_node_end(kubectl, timeline, interrupted.attempts[1].node)
    finally:
        watch.stop()
    interrupted.join_logs()
    alone.join_logs()
    print(f"\n{attempts_table(jobs['gpt']['status'])}\n")
    equal = losses_equal(interrupted, alone) and digests_equal(interrupted, alone)
    return figures(jobs["gpt"], interrupted, published) | {"digests_equal": equal}


def job(target: Target, name: str, run: str, *, node: str | None = None) -> Raw:
    """The example's manifest with this cluster's image, store and pool; deterministic, on one thread."""
    manifest: Raw = copy.deepcopy(yaml.safe_load((ROOT / "examples" / "gpt-stdlib.yaml").read_text()))
    manifest["metadata"] = {"name": name, "labels": dict([LABEL.split("=")])}
    spec = manifest["spec"]
    container = spec["template"]["spec"]["containers"][0]
    container["image"] = target.image
    container["env"] = [*container.get("env", []), {"name": "OMP_NUM_THREADS", "value": "1"}]
    spec["training"] |= {"maxSteps": STEPS, "deterministic": True, "seed": 7}
    spec["checkpoint"] |= {"uri": f"{target.uri}/{run}/{name}", "interval": "20s"}
    spec["checkpoint"] |= {"endpoint": target.endpoint} if target.endpoint else {}
    spec["checkpoint"] |= {"credentialsSecretRef": {"name": target.secret}} if target.secret else {}
    spec["capacity"] = {"type": "Spot", "pools": [local_pool(node) if node else target.pool]}
    return manifest


def interrupt_in_mid_training(target: Target, timeline: Timeline, record: JobRecord) -> float | None:
    """Waits for a third of the steps, then takes the node (or the pod) away."""

    def deep_enough() -> bool:
        attempt = record.latest()
        return bool(attempt and attempt.losses and max(attempt.losses) >= STEPS // 3)

    wait_for(timeline, f"step {STEPS // 3} of gpt", 900, deep_enough)
    attempt = record.attempts[1]
    what = (
        f"notice: {attempt.node} ends in {NOTICE_SECONDS:.0f} s"
        if LOCAL
        else f"kubectl delete pod {attempt.pod}"
    )
    timeline.say("cloud" if LOCAL else "you", what, mark=True)
    return target.interrupt(attempt.pod, attempt.node)


def see_node_end(kubectl: Kubectl, timeline: Timeline, node: str) -> None:
    """The notice was no empty threat: kubelet, container runtime and the Node object are gone."""
    wait_for(timeline, f"the end of {node}", NOTICE_SECONDS + 30, lambda: kubectl.get("node", node) is None)
    timeline.say("cloud", f"{node} is gone, as announced")


def wait_until_ended(kubectl: Kubectl, timeline: Timeline, name: str) -> Raw:
    """The job once it is Succeeded or Failed."""
    found: list[Raw] = []

    def ended() -> bool:
        found[:] = kubectl.items("trainingjobs", f"--field-selector=metadata.name={name}")
        return bool(found) and found[0].get("status", {}).get("phase") in ("Succeeded", "Failed")

    wait_for(timeline, f"the end of {name}", 1800, ended)  # minutes more on a busy machine
    timeline.say(name, found[0]["status"]["phase"], mark=True)
    return found[0]


def wait_for(timeline: Timeline, what: str, seconds: float, done: Callable[[], bool]) -> None:
    """Polls `done`; after `seconds` says what did not come."""
    until = time.time() + seconds
    while not done():
        if time.time() > until:
            raise SystemExit(f"demo: {what} did not come within {seconds:.0f} s; see `make cluster-status`.")
        time.sleep(0.5)


def peak_disk_gb() -> float | None:
    """What the local cluster's tool measured; None on a cluster that is not ours."""
    if not LOCAL:
        return None
    from localcluster import layout
    from localcluster.shell import read_json

    return float(read_json(layout.default_paths().measures)["peak_gb"])


if __name__ == "__main__":
    sys.exit(main())

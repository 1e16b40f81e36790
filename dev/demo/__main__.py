"""The story of `make demo`, from top to bottom: two jobs of one seed, one of which loses its node.

`gpt` gets a notice midway through training and goes on on the other node; `gpt-alone` is left in peace
there. Both must end with the same weights, and with the same loss at each step.

    CLUSTER=processes    a cluster that this starts: real control plane, containers are processes (the
    default) CLUSTER=containers   a cluster that this starts: real kubelets and containers (root, Debian)
    CLUSTER=existing     that of your kube-context, whose nodes are never touched
"""

from __future__ import annotations

import copy
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, Final

import yaml
from localcluster.progress import line
from localcluster.shell import ClusterError

from demo.figures import attempts_table, digests_equal, figures, losses_equal, meaning
from demo.kubectl import Kubectl, Watch
from demo.record import JobRecord
from demo.report import write_report
from demo.target import ROOT, NotPossible, Target, open_target
from demo.timeline import Timeline

Raw = dict[str, Any]
STEPS: Final = int(os.environ.get("STEPS", "40"))
LABEL: Final = "app.kubernetes.io/part-of=spottrain-demo"
"""On the demo's own jobs: it deletes no other, also in a namespace that a user has named."""

ENDINGS: Final = {
    "processes": "The cluster has ended, and nothing of it stays; `make cluster-up` gives one to play with.",
    "containers": "The cluster runs on; `python3 dev/cluster.py down` ends it.",
    "existing": "spottrain and the jobs stay; `helm uninstall spottrain -n spottrain-system` removes it.",
}


class Interrupted(Exception):
    """Ctrl-C or SIGTERM."""


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    began, kind = time.monotonic(), os.environ.get("CLUSTER", "processes")
    try:
        with open_target(kind) as target:
            equal = story(target, Timeline())
        line(f"\n{ENDINGS[kind]} It took {time.monotonic() - began:.0f} s.")
    except Interrupted:
        line(f"demo: stopped. {ENDINGS.get(kind, '')}")
        return 130
    except (NotPossible, ClusterError, RuntimeError) as problem:
        line(f"demo: {problem}")
        return 2
    return 0 if equal else 1


def _interrupt(number: int, _frame: object) -> None:
    for again in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(again, signal.SIG_IGN)  # while the cluster ends, `lifecycle` takes one for "at once"
    raise Interrupted


def story(target: Target, timeline: Timeline) -> bool:
    """Runs both jobs and interrupts the first one. Returns whether both ended alike, as they must."""
    kubectl = target.kubectl
    run = f"run-{int(time.time())}"
    interrupted = JobRecord("gpt", "gpt", timeline, kubectl)
    alone = JobRecord("gpt-alone", "gpt-alone", timeline, kubectl, quiet=True)
    kubectl.run("delete", "trainingjob", "-l", LABEL)
    ours = "spottrain.io/job in (gpt,gpt-alone)"
    wait_for("the end of earlier pods", 150, lambda: not kubectl.items("pods", "-l", ours))

    def on_pod(kind: str, pod: Raw) -> None:
        interrupted.on_pod(kind, pod)
        alone.on_pod(kind, pod)

    watch = Watch(kubectl, "pods", on_pod)
    try:
        timeline.say("you", f"kubectl apply -f gpt.yaml         ({STEPS} steps on one GPU of a spot node)")
        kubectl.apply(job(target, "gpt", run))
        wait_for("gpt on its node", 120, lambda: bool((a := interrupted.latest()) and a.node))
        timeline.say(
            "you", "kubectl apply -f gpt-alone.yaml   (the same job on the other node, to compare with)"
        )
        kubectl.apply(job(target, "gpt-alone", run, node=target.other_node(interrupted.attempts[1].node)))
        published = interrupt_midway(target, timeline, interrupted)
        jobs = {name: wait_until_ended(kubectl, timeline, name) for name in ("gpt", "gpt-alone")}
        if target.notice_seconds:
            see_node_end(target, timeline, interrupted.attempts[1].node)
    finally:
        watch.stop()
    interrupted.join_logs()
    alone.join_logs()
    print(f"\n{attempts_table(jobs['gpt']['status'])}\n", flush=True)
    equal = losses_equal(interrupted, alone) and digests_equal(interrupted, alone)
    print(meaning(figures(jobs["gpt"], interrupted, published), equal=equal), flush=True)
    line(f"\nAll of it on one page, by `spottrain report gpt`: {write_report(target, 'gpt')}")
    return equal and jobs["gpt"]["status"]["phase"] == "Succeeded"


def job(target: Target, name: str, run: str, *, node: str | None = None) -> Raw:
    """The example's manifest with this cluster's image, store and pool; in fp32, deterministic, on one
    thread.
    """
    manifest: Raw = copy.deepcopy(yaml.safe_load((ROOT / "examples" / "gpt-stdlib.yaml").read_text()))
    manifest["metadata"] = {"name": name, "labels": dict([LABEL.split("=")])}
    spec = manifest["spec"]
    container = spec["template"]["spec"]["containers"][0]
    container["image"] = target.image
    container["env"] = [*container.get("env", []), {"name": "OMP_NUM_THREADS", "value": "1"}]
    spec["training"] |= {"precision": "fp32", "compile": False, "maxSteps": STEPS}
    spec["training"] |= {"deterministic": True, "seed": 7}
    spec["checkpoint"] |= {"uri": f"{target.uri}/{run}/{name}", "interval": "10s"}
    spec["checkpoint"] |= {"endpoint": target.endpoint} if target.endpoint else {}
    spec["checkpoint"] |= {"credentialsSecretRef": {"name": target.secret}} if target.secret else {}
    spec["capacity"] = {"type": "Spot", "pools": [target.pool_of(node)]}
    return manifest


def interrupt_midway(target: Target, timeline: Timeline, record: JobRecord) -> float | None:
    """Waits for a third of the steps, then takes the node (or the pod) away."""

    def deep_enough() -> bool:
        attempt = record.latest()
        return bool(attempt and attempt.losses and max(attempt.losses) >= STEPS // 3)

    wait_for(f"step {STEPS // 3} of gpt", 900, deep_enough)
    attempt = record.attempts[1]
    if target.notice_seconds:
        timeline.say("cloud", f"notice: {attempt.node} ends in {target.notice_seconds:.0f} s", mark=True)
    else:
        timeline.say("you", f"kubectl delete pod {attempt.pod}", mark=True)
    return target.interrupt(attempt.pod, attempt.node)


def see_node_end(target: Target, timeline: Timeline, node: str) -> None:
    """The notice was no empty threat: the machine and its Node object go."""
    wait_for(
        f"the end of {node}", target.notice_seconds + 30, lambda: target.kubectl.get("node", node) is None
    )
    timeline.say("cloud", f"{node} is gone, as announced")


def wait_until_ended(kubectl: Kubectl, timeline: Timeline, name: str) -> Raw:
    """The job once it is Succeeded or Failed."""
    found: list[Raw] = []

    def ended() -> bool:
        found[:] = kubectl.items("trainingjobs", f"--field-selector=metadata.name={name}")
        return bool(found) and found[0].get("status", {}).get("phase") in ("Succeeded", "Failed")

    wait_for(f"the end of {name}", 1800, ended)  # minutes more on a busy machine
    timeline.say(name, found[0]["status"]["phase"], mark=True)
    return found[0]


def wait_for(what: str, seconds: float, done: Callable[[], bool]) -> None:
    """Polls `done`; after `seconds` says what did not come."""
    until = time.monotonic() + seconds
    while not done():
        if time.monotonic() > until:
            raise RuntimeError(f"{what} did not come within {seconds:.0f} s")
        time.sleep(0.5)


if __name__ == "__main__":
    sys.exit(main())

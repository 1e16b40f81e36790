"""From a cloud's notice to a safe step and the next attempt, on real nodes: `make bench NAME=notice N=100`.

One job on the local cluster's two nodes. N times a notice is published on the metadata service of the node
that trains; the agent reads it, the operator tells and deletes the pod, the trainer saves and ends, and the
next attempt trains on the other node. Then the notice is withdrawn, and the node takes the attempt after.
Times are the trainer's own words, by the machine's one clock.

The last line is JSON: p50_s and p99_s of notice -> the runtime knows (goal: p99 <= 3 s), signal -> durable,
pod deleted -> next container runs -> its first step, saved_of_noticed (goal: >= 0.99), charged_failures (0).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import uuid
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "dev"), str(ROOT)]

import subprocess  # noqa: E402

from demo.kubectl import Watch  # noqa: E402
from demo.record import Attempt, JobRecord  # noqa: E402
from demo.target import (  # noqa: E402
    credentials_secret,
    install_local_chart,
    local_kubectl,
    make_bucket,
    make_namespace,
)
from demo.timeline import Timeline, unix  # noqa: E402
from localcluster.api import Cluster  # noqa: E402

from tests.support.lab import BUCKET, Lab, fresh_nodes, paced  # noqa: E402

NOTICE_SECONDS = 60
GOAL_P99 = 3.0


class Silent(Timeline):
    def _write(self, text: str) -> None:
        pass


def lab() -> Lab:
    subprocess.run([sys.executable, str(ROOT / "dev" / "cluster.py"), "up"], check=True)
    cluster = Cluster.attach()
    install_local_chart(local_kubectl(cluster, "default"))
    make_bucket(cluster.s3_endpoint, cluster.s3_access_key, cluster.s3_secret_key, BUCKET)
    kubectl = local_kubectl(cluster, f"bench-{uuid.uuid4().hex[:8]}")
    fresh_nodes(cluster, kubectl)
    make_namespace(kubectl, kubectl.namespace)
    kubectl.apply(credentials_secret(cluster.s3_access_key, cluster.s3_secret_key))
    return Lab(cluster=cluster, kubectl=kubectl, uri=f"s3://{BUCKET}/{kubectl.namespace}")


def play(here: Lab, rounds: int, minutes: float) -> tuple[JobRecord, dict[int, float], dict[str, Any]]:
    """The job's record, when each attempt's notice was published, and its status at the end."""
    record = JobRecord("job", "job", Silent(), here.kubectl)
    watch = Watch(here.kubectl, "pods", record.on_pod)
    published: dict[int, float] = {}
    policy = {"maxInterruptions": 1000, "maxFailures": 0}
    steps = {"maxSteps": 1_000_000}
    here.apply(here.job(training=steps, failurePolicy=policy, container={"env": paced(first=0.1, later=0.1)}))
    try:
        until = time.monotonic() + 60 * minutes
        for number in range(1, rounds + 1):
            if time.monotonic() > until:
                break
            here.wait(f"training in attempt {number}", partial(trains, record, number), seconds=120)
            node = record.attempts[number].node
            published[number] = here.cluster.reclaim(node, NOTICE_SECONDS)
            here.wait(f"the end of attempt {number}", partial(ended, record, number), seconds=90)
            fresh_nodes(here.cluster, here.kubectl)  # withdrawn, and the taint gone
            if number % 10 == 0:
                print(f"{number} of {rounds} notices", flush=True)
        last = max(published) + 1
        here.wait("training in the last attempt", lambda: trains(record, last), seconds=120)
        time.sleep(1)
        return record, published, here.status()
    finally:
        watch.stop()
        here.kubectl.run("delete", "namespace", here.kubectl.namespace, "--wait=false")


def trains(record: JobRecord, number: int) -> bool:
    attempt = record.attempts.get(number)
    return attempt is not None and len(attempt.losses) >= 5


def ended(record: JobRecord, number: int) -> bool:
    return record.attempts[number].exit_code is not None


def summary(record: JobRecord, published: dict[int, float], status: dict[str, Any]) -> dict[str, Any]:
    knows, durable, runs, first, saved = [], [], [], [], 0
    for number, at in published.items():
        one, two = record.attempts[number], record.attempts[number + 1]
        word = json.loads(one.message)
        knows.append(word["signalledAt"] - at)
        durable.append(word.get("durableSeconds") or 0.0)
        saved += word["outcome"] == "interrupted" and word["durableStep"] == word["step"]
        runs.append(two.running_at - one.delete_at)
        if (step := stamp(two, "first-step")) is not None:
            first.append(step - two.running_at)
    return {
        "notices": len(knows),
        "p50_s": round(statistics.median(knows), 3),
        "p99_s": round(quantile(knows, 0.99), 3),
        "signal_to_durable_s": spread(durable),
        "deleted_to_running_s": spread(runs),
        "running_to_first_step_s": spread(first),
        "saved_of_noticed": saved / len(knows),
        "charged_failures": status.get("failures", 0),
        "interruptions": status.get("interruptions", 0),
    }


def stamp(attempt: Attempt, name: str) -> float | None:
    event = attempt.event(name)
    return unix(event["at"]) if event else None


def quantile(values: list[float], share: float) -> float:
    """The smallest that so many are not above."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def spread(values: list[float]) -> dict[str, float]:
    found = {"p50": statistics.median(values), "p99": quantile(values, 0.99), "greatest": max(values)}
    return {name: round(value, 3) for name, value in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=120, help="no further notice after that")
    options = parser.parse_args()
    figures = summary(*play(lab(), options.rounds, options.minutes))
    print(json.dumps(figures))
    good = figures["p99_s"] <= GOAL_P99 and figures["saved_of_noticed"] >= 0.99
    return 0 if good and not figures["charged_failures"] else 1


if __name__ == "__main__":
    sys.exit(main())

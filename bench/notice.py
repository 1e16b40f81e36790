"""From a cloud's notice to a safe step and the next attempt, on nodes whose containers are processes.

One job on two nodes of a real control plane. N times a notice is published on the metadata service of the
node that trains; the agent reads it, the operator tells and deletes the pod, the trainer saves and ends, and
the next attempt trains on the other node. Then the notice is withdrawn, and the node takes the attempt after.
Times are the trainer's own words, by the machine's one clock.

The last line is JSON: p50_s and p99_s of notice -> the runtime knows, signal -> durable, pod deleted -> next
container runs -> its first step, saved_of_noticed, charged_failures.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

from demo.kubectl import Watch
from demo.record import Attempt, JobRecord
from demo.target import local_kubectl, make_bucket
from demo.timeline import Timeline, unix
from localcluster.binaries import DEMO_PROGRAMS
from processcluster import install, lifecycle

from bench import needs
from bench.spread import percentiles, quantile
from tests.support.lab import BUCKET, Lab, fresh_nodes, new_lab, paced

NOTICE_SECONDS: Final = 60


@contextmanager
def lab() -> Iterator[Lab]:
    """A cluster of its own, with spottrain installed and a namespace for the job."""
    with lifecycle.temporary_cluster() as running:
        cluster = running.cluster
        install.install(cluster)
        make_bucket(cluster, BUCKET)
        with new_lab(cluster, local_kubectl(cluster, "default"), {}) as lab:
            yield lab


def play(here: Lab, rounds: int, minutes: float) -> tuple[JobRecord, dict[int, float], dict[str, Any]]:
    """The job's record, when each attempt's notice was published, and its status at the end."""
    record = JobRecord("job", "job", Timeline(), here.kubectl, quiet=True)
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
        "p99_s": quantile(knows, 0.99),
        "signal_to_durable_s": percentiles(durable),
        "deleted_to_running_s": percentiles(runs),
        "running_to_first_step_s": percentiles(first),
        "saved_of_noticed": saved / len(knows),
        "charged_failures": status.get("failures", 0),
        "interruptions": status.get("interruptions", 0),
    }


def stamp(attempt: Attempt, name: str) -> float | None:
    event = attempt.event(name)
    return unix(event["at"]) if event else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=120, help="no further notice after that")
    options = parser.parse_args()
    needs.programs(*DEMO_PROGRAMS)
    with lab() as here:
        figures = summary(*play(here, options.rounds, options.minutes))
    print(json.dumps(figures))
    return 1 if figures["charged_failures"] else 0


if __name__ == "__main__":
    sys.exit(main())

"""What a person waits for: the start of `spottrain`, a list of 1,000 jobs; and the size of a report's page.

The start is that of a cold process. The jobs are on a real API server, each with ten attempts in its status.
The page is that of a million steps in a hundred attempts.

The last line is JSON: start_s (help and version), list_s (what 1,000 jobs take, its rows and bytes of the
API server's answer), report_bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from localcluster import layout
from localcluster.apiserver import api_server
from spottrain.core.series import Series

from bench import needs
from bench.spread import spread, timed
from tests.api.kube import MERGE, Kube, jobs
from tests.api.scene import job_body
from tests.support import report_scenes
from tests.support.costs import COST, GOODPUT, attempt

CRD: Final = Path(__file__).resolve().parents[1] / "crds" / "trainingjobs.yaml"
SPOTTRAIN: Final = (str(Path(sys.executable).with_name("spottrain")),)
NAMESPACE: Final = "many"
EVIDENCE: Final = (
    "AWS spot/instance-action: the node ends at 2026-11-26T18:35:11Z; step 800 was saved 4.2 s after it"
)
CONDITIONS: Final = ("Accepted", "Scheduled", "Running", "CheckpointDurable")


def status() -> dict[str, Any]:
    """As of a job that has been interrupted nine times."""
    condition = {
        "status": "True",
        "reason": "Training",
        "message": "the trainer of attempt 10 runs",
        "lastTransitionTime": "2026-11-26T10:00:00Z",
    }
    notice = {"cause": "SpotNotice", "evidence": EVIDENCE, "exitCode": 75, "charged": False}
    return {
        "phase": "Running",
        "attempt": 10,
        "interruptions": 9,
        "knownDurableStep": 800,
        "conditions": [condition | {"type": kind} for kind in CONDITIONS],
        "attempts": [attempt(number, **notice) for number in range(1, 11)],
        "progress": {
            "state": "Training",
            "step": 812,
            "totalSteps": 5000,
            "loss": "2.31",
            "etaSeconds": "7800",
        },
        "cost": COST,
        "goodput": GOODPUT,
    }


def create(kube: Kube, count: int) -> None:
    kube.make_namespace(NAMESPACE)
    body = {"status": status()}

    def one(number: int) -> None:
        name = f"job-{number:04d}"
        kube.create_job(NAMESPACE, job_body(name))
        kube.call("PATCH", f"{jobs(NAMESPACE, name)}/status", body, kind=MERGE)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(one, range(count)))


def run(*words: str, env: dict[str, str] | None = None) -> str:
    done = subprocess.run([*SPOTTRAIN, *words], env=env, capture_output=True, text=True, check=True)
    return done.stdout


def starts(rounds: int) -> dict[str, Any]:
    run("--version")  # what Python compiles once
    return {
        word: spread([timed(lambda word=word: run(f"--{word}")) for _ in range(rounds)])  # type: ignore[misc]
        for word in ("help", "version")
    }


def lists(count: int, rounds: int) -> dict[str, Any]:
    needs.programs("etcd", "kube-apiserver", "kubectl")
    programs = layout.default_paths().bin
    env = os.environ | {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    with api_server(programs=programs) as server:
        kube = Kube.from_kubeconfig(server.kubeconfig)
        kube.install(CRD)
        create(kube, count)
        words = ("list", "-n", NAMESPACE, f"--kubeconfig={server.kubeconfig}")
        rows = len(run(*words, env=env).splitlines()) - 1
        if rows != count:
            raise SystemExit(f"{rows} rows are not {count} jobs")
        seconds = spread([timed(lambda: run(*words, env=env)) for _ in range(rounds)])
        raw = timed(lambda: kube.call("GET", jobs(NAMESPACE)))
        size = len(json.dumps(kube.call("GET", jobs(NAMESPACE))))
    return {"seconds": seconds, "rows": rows, "answer_bytes": size, "answer_s": round(raw, 3)}


def report_bytes() -> int:
    from spottrain_cli.report.facts import of_series
    from spottrain_cli.report.page import page

    first = report_scenes.series(0, 0, 10_000, every=10, outcome="interrupted")
    report = of_series("s3://bucket/run", [_later(first, number) for number in range(100)], now=time.time())
    return len(page(report).encode())


def _later(series: Series, number: int) -> Series:
    """The same as attempt `number`, after all those before it."""
    ahead = 10_000 * number
    facts = replace(series.attempt, term=number, number=number, startStep=ahead, step=ahead + 10_000)
    points = tuple(point._replace(step=point.step + ahead) for point in series.points)
    return Series(attempt=facts, points=points)


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.cli", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args(words)
    began = starts(options.rounds)
    print(f"starts: {began}", flush=True)
    size = report_bytes()
    print(f"a report of a million steps: {size} bytes", flush=True)
    listed = lists(options.jobs, max(1, options.rounds // 2))
    figures = {"start_s": began, "list": listed, "jobs": options.jobs, "report_bytes": size}
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

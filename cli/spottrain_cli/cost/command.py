"""`spottrain cost`: what a job, or the jobs of a namespace, cost, from what the operator wrote in the status.

Exit code 0: answered; 1: a sentence says why not; 2: invalid arguments.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from datetime import UTC, datetime
from typing import Final

from spottrain.cli.output import Answer
from spottrain.errors import RunError

from spottrain_cli import kubectl
from spottrain_cli.cost import report as cost_report
from spottrain_cli.cost import sums as cost_sums
from spottrain_cli.cost.status import KIND, JobCost, jobs
from spottrain_cli.kubectl import Access

ABOUT: Final = "What a job cost, what it saved, and where its time went. Reads the cluster by kubectl."


def main(argv: list[str]) -> int:
    given = _arguments(argv)
    try:
        answer = _answer(given, now=datetime.now(UTC))
        print(json.dumps(answer.facts, indent=1) if given.output == "json" else "\n".join(answer.lines))
        sys.stdout.flush()
    except RunError as error:
        print(f"spottrain: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # such as by `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _answer(given: argparse.Namespace, *, now: datetime) -> Answer:
    if given.file:
        return _of_file(given, now=now)
    access = Access(
        context=given.context,
        kubeconfig=given.kubeconfig,
        namespace=given.namespace,
        all_namespaces=given.all_namespaces,
    )
    found = jobs(kubectl.get(access, given.job), "kubectl's answer")
    if given.job:
        return cost_report.report(found[0], now=now)
    return cost_sums.summary(found, where=_place(given), now=now)


def _of_file(given: argparse.Namespace, *, now: datetime) -> Answer:
    source = "the input" if given.file == kubectl.STDIN else given.file
    document = kubectl.read_file(given.file, source)
    found = [job for job in jobs(document, source) if given.namespace in ("", job.namespace)]
    where = f"{source}, namespace {given.namespace}," if given.namespace else source
    if given.job:
        return cost_report.report(_named(found, given.job, where), now=now)
    if not isinstance(document, dict) or document.get("kind") != KIND:
        return cost_sums.summary(found, where=where.rstrip(","), now=now)
    if not found:
        raise RunError(f"{source} has no job in namespace {given.namespace}")
    return cost_report.report(found[0], now=now)


def _place(given: argparse.Namespace) -> str:
    if given.all_namespaces:
        return "any namespace"
    return f"namespace {given.namespace}" if given.namespace else "the current namespace"


def _named(found: list[JobCost], name: str, source: str) -> JobCost:
    own = [job for job in found if job.name == name]
    if len(own) > 1:
        places = ", ".join(sorted({job.namespace for job in own}))
        raise RunError(f"{source} has {len(own)} jobs of the name {name}: choose by --namespace ({places})")
    if not own:
        there = ", ".join(sorted({job.name for job in found})) or "none"
        raise RunError(f"{source} has no job of the name {name}; its jobs: {there}")
    return own[0]


# --- arguments ------------------------------------------------------------------------------------------
def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="spottrain cost", description=ABOUT)
    parser.add_argument(
        "job", nargs="?", default="", metavar="JOB", help="a TrainingJob; without it: all, and sums"
    )
    parser.add_argument("-n", "--namespace", default="", metavar="NS", help="default: that of the context")
    parser.add_argument("-A", "--all-namespaces", action="store_true", help="the jobs of all namespaces")
    parser.add_argument("--context", default="", metavar="NAME", help="kubectl's context")
    parser.add_argument("--kubeconfig", default="", metavar="FILE", help="kubectl's configuration")
    parser.add_argument(
        "--file",
        default="",
        metavar="FILE",
        help="JSON by `kubectl get tj -o json` instead of a cluster; - is stdin; -n chooses in it",
    )
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text")
    given = parser.parse_args(argv)
    if given.job and given.all_namespaces:
        parser.error("a JOB is in one namespace: leave out --all-namespaces, or JOB")
    if given.namespace and given.all_namespaces:
        parser.error("leave out --namespace or --all-namespaces")
    if given.file and (given.all_namespaces or given.context or given.kubeconfig):
        parser.error("--file asks no cluster: leave out --all-namespaces, --context and --kubeconfig")
    return given

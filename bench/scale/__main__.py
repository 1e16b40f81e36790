"""Thousands of jobs on a real control plane with fake nodes.

    --scenario burst       125 jobs of 8 workers beside Kubernetes' Job controller
    --scenario singles     the same with 1,000 jobs of one worker
    --scenario gang        the same with one job of 1,024 workers
    --scenario storm       notices for 30 % of the nodes of 1,000 running jobs within a minute
    --scenario capacity    5,000 jobs of 2 workers: memory, restart, failover, waits of reconciles

`--scenario storm --help` has the options of one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, Final

from bench import needs
from bench.scale import burst, capacity, storm

SCENARIOS: Final[dict[str, tuple[ModuleType, Mapping[str, Any]]]] = {
    "burst": (burst, {}),
    "singles": (burst, {"jobs": 1000, "workers": 1, "rounds": 3}),
    "gang": (burst, {"jobs": 1, "workers": 1024, "rounds": 3}),
    "storm": (storm, {}),
    "capacity": (capacity, {}),
}
PROGRAMS: Final = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl", "kwok")


def play(scenario: ModuleType, words: Sequence[str], defaults: Mapping[str, Any] | None = None) -> int:
    """Runs a scenario. Returns 1 where one of the figures in its BAD is not 0."""
    parser: argparse.ArgumentParser = scenario.arguments()
    parser.set_defaults(**(defaults or {}))
    options = parser.parse_args(words)
    needs.programs(*PROGRAMS)  # first: the namespace has no way out
    needs.network_of_its_own()
    figures = asyncio.run(scenario.run(options))
    print(json.dumps(figures))
    return 1 if any(figures[name] for name in scenario.BAD) else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter, add_help=False
    )
    parser.add_argument("--scenario", choices=SCENARIOS)
    chosen, words = parser.parse_known_args()
    if chosen.scenario is None and {"-h", "--help"} & set(words):
        parser.print_help()
        return 0
    scenario, defaults = SCENARIOS[chosen.scenario or "burst"]
    return play(scenario, words, defaults)


if __name__ == "__main__":
    sys.exit(main())

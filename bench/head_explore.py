"""Larger worlds than tests/unit/runtime/checkpoint/test_head_model.py has time for. The last line is JSON.

Exit code 1 when a rule is broken; a world that is larger than --limit states is said to be incomplete.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.headexplore import Explorer, Result
from tests.support.headscenarios import LARGE, LONGER, SCENARIOS


def told(result: Result) -> Result:
    said = "all" if result.complete else "the first"
    name = result.scenario
    print(f"{name}: {said} {result.states} states, {result.moves} moves, {result.heads} HEADs", flush=True)
    if result.violation:
        print("\n  ".join((result.violation, *result.trace)), flush=True)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=int, default=3_000_000, help="states per world (1 GB per 2 million)")
    options = parser.parse_args()
    results = [told(Explorer(scenario).run(options.limit)) for scenario in (*SCENARIOS, *LONGER, *LARGE)]
    figures = {
        "worlds": len(results),
        "complete": sum(result.complete for result in results),
        "states": sum(result.states for result in results),
        "moves": sum(result.moves for result in results),
        "violations": sum(bool(result.violation) for result in results),
    }
    print(json.dumps(figures))
    return 1 if figures["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())

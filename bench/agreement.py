"""What it costs that all ranks agree on saves and stops, in processes on loopback, beside gloo's all_reduce.

    python bench/agreement.py --ranks 2

Microseconds, the slowest rank's median: `per_boundary_us` within an order, `per_order_us` where one is taken
(`leader_order_us` on rank 0), `per_allreduce_us` of one element. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.gangs import gang


def measure(size: int, number: int) -> dict[str, float]:
    with gang(size) as ranks:
        for rank in ranks:
            rank.tell("measure", number)
        results = [rank.answer() for rank in ranks]
    orders, reduces, boundaries = zip(*results, strict=True)
    return {
        "ranks": size,
        "per_boundary_us": round(max(boundaries), 2),
        "per_order_us": round(max(orders), 1),
        "leader_order_us": round(orders[0], 1),
        "per_allreduce_us": round(max(reduces), 1),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--number", type=int, default=1000)
    options = parser.parse_args()
    print(json.dumps(measure(options.ranks, options.number)))

"""Spot or on-demand, on recorded availability: `make bench NAME="spot --traces FOLDER"`.

FOLDER has uniform_progress_windows.json and its traces. Two things are replayed: what the operator's choice
between spot and on-demand costs (`choice`, `zones`), and how much of the paid time becomes saved work with
the runtime's interval between saves (`goodput`). The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from bench.spot import choice, goodput


def main() -> int:
    parser = argparse.ArgumentParser(
        description="\n\n".join(each or "" for each in (__doc__, choice.__doc__, goodput.__doc__)),
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--traces", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--every", type=int, default=1, help="replay one window in this many")
    options = parser.parse_args()
    try:
        figures = goodput.figures_of(options.traces) | choice.figures_of(options.traces, options.every)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())

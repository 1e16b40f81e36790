"""Runs a benchmark, keeps its figures as a record, and writes bench/RESULTS.md: `make bench NAME=checkpoint`.

python -m bench                              # what there is
python -m bench scale --scenario gang        # words after the name are the benchmark's: NAME="scale --help"
python -m bench.scale --jobs 5 --rounds 1    # the same program without a record, for a probe
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from bench import record
from bench.benchmarks import BENCHMARKS, listed, recorded_as


def main(words: Sequence[str]) -> int:
    known = {each.name: each.module for each in BENCHMARKS.values() if each.name}
    if not words or words[0] not in known:
        if words:
            print(f"there is no benchmark {words[0]!r}", file=sys.stderr)
        print('make bench NAME=...    (with options: NAME="scale --scenario gang")\n')
        for name, about in listed():
            print(f"  {name:<34} {about}")
        return 2
    name, more = words[0], list(words[1:])
    command = [sys.executable, "-u", "-m", known[name], *more]
    output, code = record.run(command)
    if {"-h", "--help"} & set(more):
        return code
    shown = ["python", "-m", "bench", *words]
    return record.recorded(recorded_as(name, more), shown, output, code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

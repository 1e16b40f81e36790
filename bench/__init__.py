"""Benchmarks; `python -m bench` lists them.

`__main__` runs one and has `record` keep its figures, `benchmarks` has the goals, `page` writes RESULTS.md;
`needs` brings programs and packages, `spread` has medians and percentiles.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "dev"))  # the local control plane

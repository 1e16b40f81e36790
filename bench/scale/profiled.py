"""The operator under cProfile: `python -m bench.scale.profiled FILE`, which is written at SIGTERM."""

from __future__ import annotations

import cProfile
import sys

from spottrain_operator.__main__ import main

if __name__ == "__main__":
    profile = cProfile.Profile()
    try:
        code = profile.runcall(main)
    finally:
        profile.dump_stats(sys.argv[1])
    sys.exit(code)

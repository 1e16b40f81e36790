"""One process of the group `restart`: writes the Unix time of each step, prints the weights' digest.

spottrain run bench/gpu/script.py TIMES STEPS [tiny] [by-hand]
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from bench.gpu.trainings import FULL, TINY, WARM, Steps, by_hand, longer, timed_trainer


def main(times: str, steps: str, *words: str) -> None:
    size = longer(TINY if "tiny" in words else FULL, int(steps) - WARM)

    def done() -> None:
        with Path(times).open("a") as file:
            file.write(f"{time.time()}\n")

    if "by-hand" in words:

        class Marked(Steps):
            def done(self) -> None:
                super().done()
                done()

        by_hand(size, steps=Marked())
        return
    result = timed_trainer(lambda: None, done, size, deterministic=True).fit()
    print(f"digest {result.digest}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

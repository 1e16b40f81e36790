"""`make test`: all levels, the cluster level beside the others, because it mostly waits.

A test that fails is run a second time, alone, after everything else. If it then passes it is named as flaky
at the end, and the whole passes: mend it. More than FEW failures are not flaky, and nothing is run again.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

ROOT: Final = Path(__file__).resolve().parents[1]
CACHE: Final = ROOT / ".pytest_cache"
CLUSTER: Final = ("tests/cluster",)
OTHERS: Final = (
    *("-n", "2", "--dist", "loadfile"),
    *("tests/unit", "tests/contract", "tests/runs", "tests/s3", "tests/api"),
)
FEW: Final = 5
TESTS_FAILED: Final = 1
"""pytest's exit code for failed tests; the greater ones mean that pytest itself could not go on."""


def main(cluster: Sequence[str] = CLUSTER, others: Sequence[str] = OTHERS) -> int:
    """Runs pytest with each list of words at the same time. Returns the exit code."""
    began = time.monotonic()
    shutil.rmtree(CACHE, ignore_errors=True)  # it would also name the failures of earlier runs
    CACHE.mkdir()
    output = CACHE / "cluster-level.txt"
    print(
        f"The cluster level runs beside the others, its output is in {output.relative_to(ROOT)}.", flush=True
    )
    with output.open("w") as file, started("cluster", cluster, stdout=file) as one:
        with started("others", others) as other:
            codes = {"others": other.wait()}
        codes["cluster"] = one.wait()
    print(output.read_text(), flush=True)
    failed = {name: failed_tests(name) for name, code in codes.items() if code}
    flaky = 0 < sum(map(len, failed.values())) <= FEW and max(codes.values()) == TESTS_FAILED
    flaky = flaky and all(passes_alone(name, tests) for name, tests in failed.items())
    print(f"make test: {(time.monotonic() - began) / 60:.0f} min")
    for test in (test for tests in failed.values() for test in tests):
        print(f"{'flaky, passed alone' if flaky else 'FAILED'}: {test}")
    return 0 if flaky else max(codes.values())


def passes_alone(name: str, tests: Sequence[str]) -> bool:
    with started(name, tests) as process:
        return process.wait() == 0


@contextmanager
def started(
    name: str, words: Sequence[str], stdout: IO[str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Starts a pytest with a cache of its own, and ends it with the block."""
    command = [sys.executable, "-m", "pytest", "-o", f"cache_dir={CACHE / name}", *words]
    process = subprocess.Popen(command, cwd=ROOT, stdout=stdout, stderr=stdout)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)  # so that fixtures end what they have started
            process.wait()


def failed_tests(name: str) -> list[str]:
    try:
        return list(json.loads((CACHE / name / "v" / "cache" / "lastfailed").read_text()))
    except FileNotFoundError:
        return []


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())

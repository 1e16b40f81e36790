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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
CACHE: Final = ROOT / ".pytest_cache"
FEW: Final = 5
TESTS_FAILED: Final = 1
"""pytest's exit code for failed tests; the greater ones mean that pytest itself could not go on."""
OTHERS: Final = [
    *("-n", "2", "--dist", "loadfile"),
    *(f"tests/{level}" for level in ("unit", "contract", "runs", "s3", "api")),
]


def main() -> int:
    began = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    shutil.rmtree(CACHE, ignore_errors=True)  # it would also name the failures of earlier runs
    CACHE.mkdir()
    output = CACHE / "cluster-level.txt"
    print(
        f"The cluster level runs beside the others, its output is in {output.relative_to(ROOT)}.", flush=True
    )
    with output.open("w") as file, started("cluster", ["tests/cluster"], stdout=file) as cluster:
        with started("others", OTHERS) as others:
            codes = {"others": others.wait()}
        codes["cluster"] = cluster.wait()
    print(output.read_text(), flush=True)
    failed = {name: failed_tests(name) for name, code in codes.items() if code}
    flaky = all(code <= TESTS_FAILED for code in codes.values()) and 0 < count(failed) <= FEW
    flaky = flaky and run_again(failed)
    print(f"make test: {(time.monotonic() - began) / 60:.0f} min")
    for name in (name for names in failed.values() for name in names):
        print(f"{'flaky, passed alone' if flaky else 'FAILED'}: {name}")
    return 0 if flaky or not any(codes.values()) else 1


def count(failed: dict[str, list[str]]) -> int:
    return sum(map(len, failed.values()))


def run_again(failed: dict[str, list[str]]) -> bool:
    """Whether all of them pass when they run alone."""
    for name, tests in failed.items():
        with started(name, tests) as process:
            if process.wait():
                return False
    return True


@contextmanager
def started(name: str, words: list[str], stdout: object = None) -> Iterator[subprocess.Popen[bytes]]:
    """A pytest with a cache of its own; it is ended with us."""
    command = [sys.executable, "-m", "pytest", "-o", f"cache_dir={CACHE / name}", *words]
    process = subprocess.Popen(command, cwd=ROOT, stdout=stdout, stderr=stdout)  # type: ignore[call-overload]
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
    sys.exit(main())

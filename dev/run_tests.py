"""`make test`: every level that needs no more than `make demo` does.

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
from collections.abc import Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
CACHE: Final = ROOT / ".pytest_cache"
LEVELS: Final = ("nodes", "api", "runs", "s3", "contract", "unit")
"""Those first that mostly wait, and whose longest files are longest."""
ALL: Final = (
    *("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "-m", "not heavy"),
    *(f"tests/{level}" for level in LEVELS),
)
FEW: Final = 5
TESTS_FAILED: Final = 1
"""pytest's exit code for failed tests; the greater ones mean that pytest itself could not go on."""
NOT_HERE: Final = """\
Not in `make test`: what needs kubelets and images (make test-containers: root, Debian), the chart by Helm 3
(make test-chart), compilation, whole matrices and Google Cloud Storage (make test-heavy), and other programs
(make test-with)."""


def main(words: Sequence[str] = ALL) -> int:
    """Runs pytest. Returns the exit code."""
    began = time.monotonic()
    print(NOT_HERE, flush=True)
    shutil.rmtree(CACHE, ignore_errors=True)  # it would also name the failures of earlier runs
    code = run(words)
    failed = failed_tests() if code == TESTS_FAILED else []
    flaky = 0 < len(failed) <= FEW and run(["-n", "0", *failed]) == 0
    print(f"make test: {(time.monotonic() - began) / 60:.1f} min")
    for test in failed:
        print(f"{'flaky, passed alone' if flaky else 'FAILED'}: {test}")
    return 0 if flaky else code


def run(words: Sequence[str]) -> int:
    process = subprocess.Popen([sys.executable, "-m", "pytest", *words], cwd=ROOT)
    try:
        return process.wait()
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)  # so that fixtures end what they have started
            process.wait()


def failed_tests() -> list[str]:
    try:
        return list(json.loads((CACHE / "v" / "cache" / "lastfailed").read_text()))
    except FileNotFoundError:
        return []


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        code = main()
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)

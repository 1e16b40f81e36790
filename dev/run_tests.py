"""`make test`: every level that needs no more than `make demo` does, jobs on nodes beside the others: they
mostly wait.

A test that fails is run a second time, alone, after everything else. If it then passes it is named as flaky
at the end, and the whole passes: mend it. More than FEW failures are not flaky, and nothing is run again.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
CACHE: Final = ROOT / ".pytest_cache"
NODES: Final = ("-n", "0", "-m", "not heavy", "tests/nodes")
OTHERS: Final = (
    *("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "-m", "not heavy"),
    *(f"tests/{level}" for level in ("api", "runs", "s3", "contract", "unit")),
)
"""Those first whose longest files are longest."""
FEW: Final = 5
TESTS_FAILED: Final = 1
"""pytest's exit code for failed tests; the greater ones mean that pytest itself could not go on."""
NOT_HERE: Final = """\
Not in `make test`: what needs kubelets and images (make test-containers: root, Debian), the chart by Helm 3
(make test-chart), compilation, whole matrices, rarer cases and Google Cloud Storage (make test-heavy), and
other programs (make test-with). tests/nodes runs beside the others, and is shown when it has ended."""


class Run:
    """One pytest, with a cache of its own, which names the tests that failed."""

    def __init__(self, name: str, words: Sequence[str], *, output: Path | None = None) -> None:
        self._cache, self._output = CACHE / name, output
        command = [sys.executable, "-m", "pytest", "-o", f"cache_dir={self._cache}", *words]
        stdout = output.open("w") if output else None
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=stdout, stderr=stdout)

    def wait(self) -> int:
        """Its exit code; shows what it has said to a file."""
        code = self._process.wait()
        if self._output:
            print(f"\n{self._output.read_text()}", flush=True)
        return code

    def stop(self) -> None:
        """By SIGINT, so that fixtures end what they have started."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait()

    def failed(self) -> list[str]:
        try:
            return list(json.loads((self._cache / "v" / "cache" / "lastfailed").read_text()))
        except FileNotFoundError:
            return []


def main(nodes: Sequence[str] = NODES, others: Sequence[str] = OTHERS) -> int:
    """Runs pytest with both lists of words at the same time. Returns the exit code."""
    began = time.monotonic()
    print(NOT_HERE, flush=True)
    shutil.rmtree(CACHE, ignore_errors=True)  # it would also name the failures of earlier runs
    CACHE.mkdir()
    runs = [Run("nodes", nodes, output=CACHE / "nodes.txt"), Run("others", others)]
    try:
        codes = [0, 0]
        first = threading.Thread(target=lambda: codes.__setitem__(0, runs[0].wait()), daemon=True)
        first.start()
        codes[1] = runs[1].wait()
        first.join()
    finally:
        for run in runs:
            run.stop()
    failed = [test for run in runs for test in run.failed()]
    flaky = 0 < len(failed) <= FEW and max(codes) == TESTS_FAILED and passes_alone(failed)
    print(f"make test: {(time.monotonic() - began) / 60:.1f} min")
    for test in failed:
        print(f"{'flaky, passed alone' if flaky else 'FAILED'}: {test}")
    return 0 if flaky else max(codes)


def passes_alone(tests: Sequence[str]) -> bool:
    run = Run("alone", ["-n", "0", *tests])
    try:
        return run.wait() == 0
    finally:
        run.stop()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        code = main()
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)

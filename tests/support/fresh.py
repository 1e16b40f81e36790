"""Runs code in processes of their own without paying for `import torch` each time.

Run as a program it imports torch once, and forks a child per command. The child executes the code as a new
interpreter would: nothing of spottrain is imported, and PyTorch's settings are as they are at its start.
"""

from __future__ import annotations

import gc
import json
import os
import select
import subprocess
import sys
import tempfile
from pathlib import Path


class Fresh:
    """The test's side."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, code: str, seconds: float = 60) -> str:
        """What the code prints. Fails with its errors if its exit code is not 0."""
        assert self._process.stdin and self._process.stdout
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder, "script.py")
            script.write_text(code)
            self._process.stdin.write(f"{folder}\n")
            self._process.stdin.flush()
            assert select.select([self._process.stdout], [], [], seconds)[0], (
                f"no end in {seconds} s:\n{code}"
            )
            status = json.loads(self._process.stdout.readline())
            assert status == 0, f"exit code {status}:\n{Path(folder, 'stderr').read_text()}"
            return Path(folder, "stdout").read_text()

    def close(self) -> None:
        with self._process:
            assert self._process.stdin
            self._process.stdin.close()


# --- the program --------------------------------------------------------------------------------------
def _serve() -> None:
    import torch.utils.data

    assert torch
    gc.collect()
    gc.freeze()  # else each child copies and visits all of torch at its end
    for line in sys.stdin:
        folder = line.strip()
        child = os.fork()
        if child == 0:
            return _execute(folder)
        _, status = os.waitpid(child, 0)
        print(json.dumps(os.waitstatus_to_exitcode(status)), flush=True)


def _execute(folder: str) -> None:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(os.path.join(folder, name), os.O_CREAT | os.O_WRONLY | os.O_APPEND), number)
    path = Path(folder, "script.py")
    exec(compile(path.read_text(), path, "exec"), {"__name__": "__main__", "__file__": str(path)})


if __name__ == "__main__":
    _serve()

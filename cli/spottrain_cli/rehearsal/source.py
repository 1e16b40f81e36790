"""The folder of a manifest: what of it goes into each pod, as a copy of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from spottrain_cli.errors import UsageError

MOST_BYTES: Final = 500_000_000
SKIPPED: Final = frozenset({".git", ".venv", "venv", "__pycache__", "node_modules"})


def copy_beside(manifest: Path, to: Path) -> None:
    """Copies what lies beside the manifest: in a git checkout without what git ignores.

    Raises UsageError where that is too much for a copy in each pod.
    """
    folder, total = manifest.parent, 0
    for path in _files(folder):
        total += path.stat().st_size
        if total > MOST_BYTES:
            raise UsageError(
                f"the folder {folder} holds more than {MOST_BYTES / 1e6:.0f} MB beside {manifest.name}, too "
                "much for a copy in each pod; keep script and manifest in a folder without data"
            )
        place = to / path.relative_to(folder)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, place)


def _files(folder: Path) -> Iterator[Path]:
    listed = subprocess.run(
        ["git", "-C", str(folder), "ls-files", "-z", "--cached", "--others", "--exclude-standard", "."],
        capture_output=True, check=False,
    ) if shutil.which("git") else None  # fmt: skip
    if listed is not None and listed.returncode == 0:
        names = [os.fsdecode(name) for name in listed.stdout.split(b"\0") if name]
        yield from (folder / name for name in names if (folder / name).is_file())
        return
    for root, folders, names in os.walk(folder):
        folders[:] = [each for each in folders if each not in SKIPPED]
        yield from (Path(root) / name for name in names if (Path(root) / name).is_file())

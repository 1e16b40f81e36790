"""`spottrain sync` around an example, as a process, and what it has committed."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Self

from spottrain.contract import Env
from spottrain.storage.local import FolderStore
from spottrain.sync.manifest import SyncManifest, read_manifest

from tests.runs.launched import Launched
from tests.support.examples import EXAMPLES, Kind

IN_IMAGE: Final = "/train/"
"""Where the image has the examples."""


class Synced(Launched):
    """An attempt of an example of checkpoint.mode Sync, in a folder of its own, as in a new pod."""

    def __init__(self, example: str, python: Path, root: Path, attempt: int, *, at: str, **env: str) -> None:
        folder = root / f"{at}-{attempt}"
        folder.mkdir()
        self.store = root / at
        basic = {
            Env.JOB_NAME: example,
            Env.JOB_UID: f"uid-{at}",
            Env.ATTEMPT: str(attempt),
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "PYTHONUNBUFFERED": "1",
        }
        command = sync_command(Kind(name=example).spec, python, folder / "checkpoints", self.store)
        super().__init__(folder, command, **basic | env)

    def commits(self, more: int, seconds: float = 120) -> Self:
        """Waits for so many commits more."""
        wanted, give_up = newest(self.store)[0] + more, time.monotonic() + seconds
        while newest(self.store)[0] < wanted:
            assert self.code is None, f"it ended ({self.code}) before commit {wanted}:\n{self.log}"
            assert time.monotonic() < give_up, f"no commit {wanted} within {seconds} s:\n{self.log}"
            time.sleep(0.05)
        return self


def sync_command(spec: Mapping[str, Any], python: Path, folder: Path, store: Path) -> list[str]:
    """Returns the command that does on a laptop what the sidecar and the container do in a pod."""
    checkpoint = spec["checkpoint"]
    ((rule, value),) = checkpoint["syncWhen"].items()
    program, script, *words = spec["template"]["spec"]["containers"][0]["command"]
    assert program == "python"
    words = [word.replace(checkpoint["syncPath"], str(folder)) for word in words]
    when = f"{rule.removesuffix('Seconds')}={value}"
    ours = [sys.executable, "-m", "spottrain", "sync", str(folder), "--to", str(store), "--when", when]
    return [*ours, "--", str(python), script.replace(IN_IMAGE, f"{EXAMPLES}/"), *words]


def newest(store: Path) -> tuple[int, SyncManifest]:
    """Returns number and contents of the newest committed checkpoint; 0 and nothing without one."""
    head = store / "HEAD"
    entries = json.loads(head.read_text())["checkpoints"] if head.exists() else []
    if not entries:
        return 0, SyncManifest(step=0)
    last = max(entries, key=lambda entry: int(entry["step"]))
    return last["step"], read_manifest(FolderStore(store), last["key"])


def content(store: Path, path: str) -> bytes:
    """Returns a file of the newest committed checkpoint."""
    return b"".join((store / key).read_bytes() for key in newest(store)[1].files[path].chunks)

"""What the folder was filled from: so that no start takes a person's files for its own.

It is an attribute of the folder, or where there are none a file: a script that lists its folder sees its own
files alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from spottrain.core import log
from spottrain.errors import ConfigurationError
from spottrain.sync.tree import PRIVATE

NAME: Final = "record.json"
ATTRIBUTE: Final = "user.spottrain.sync"


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    uri: str
    run: str
    """The start that wrote it: a pod and its attempt. On a laptop each start has its own."""
    ready: bool
    """Whether the restore is over; false: it was cut off, and is done again."""
    worth: bool = field(default=False, compare=False)
    """Whether there was something in the folder, at the start or since, that was to be stored."""

    def write(self, root: Path) -> None:
        text = json.dumps(asdict(self))
        try:
            folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.setxattr(folder, ATTRIBUTE, text.encode())
                os.fsync(folder)
            finally:
                os.close(folder)
        except (OSError, AttributeError):  # there are none on this file system, or on macOS
            notes = notes_of(root)
            notes.mkdir(exist_ok=True)
            fresh = notes / f"{NAME}.new"
            with fresh.open("w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(fresh, notes / NAME)
            if notes.parent == root:
                log.event("sync-notes-inside", folder=notes)

    @classmethod
    def read(cls, root: Path) -> Record | None:
        with contextlib.suppress(OSError, AttributeError, ValueError, TypeError):
            return cls(**json.loads(os.getxattr(root, ATTRIBUTE)))
        with contextlib.suppress(OSError, ValueError, TypeError):
            return cls(**json.loads((notes_of(root) / NAME).read_text()))
        return None


def notes_of(root: Path) -> Path:
    """Returns the place for half-done downloads and replaced files: a folder beside `root`.

    It is in `root` where a rename cannot come from outside: a mount, or a parent that is not ours to write.
    """
    real = root.resolve()
    if _is_mount(real) or not os.access(real.parent, os.W_OK | os.X_OK):
        return root / PRIVATE
    return real.with_name(f".{real.name}{PRIVATE}")


def _is_mount(folder: Path) -> bool:
    """Bind mounts count, which `os.path.ismount` does not know."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
    except OSError:
        return folder.is_mount()
    escaped = re.sub(r"[ \t\n\\]", lambda found: f"\\{ord(found[0]):03o}", str(folder))
    return any(line.split()[4] == escaped for line in mounts.splitlines())


def is_restored(found: Record | None, mine: Record, *, empty: bool, stored: bool, folder: Path) -> bool:
    """Returns whether a start restores into the folder; otherwise the folder stays as it is. Pure.

    Args:
        found: The folder's record.
        mine: URI and run of this start.
        empty: Whether nothing else is in the folder.
        stored: Whether there is a checkpoint to restore.
        folder: For the message.

    Raises:
        ConfigurationError: There is a checkpoint, and the folder holds files that are not known to be of it.
    """
    ours = found is not None and found.uri == mine.uri
    if not stored or (found == mine and mine.ready):
        return False
    if empty or ours:
        return True
    raise ConfigurationError(
        f"{folder} is not empty, and {mine.uri} has a checkpoint that belongs there: nothing was changed. "
        "Move the files away to restore the checkpoint, or name another folder or another checkpoint URI"
    )

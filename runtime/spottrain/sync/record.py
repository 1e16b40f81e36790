"""What the folder holds, as a file in it: so that no start takes a person's files for its own."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from spottrain.errors import ConfigurationError
from spottrain.sync.tree import PRIVATE

NAME: Final = "record.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    uri: str
    run: str
    """The start that wrote it: a pod and its attempt. On a laptop each start has its own."""
    ready: bool
    """Whether the restore is over; false: it was cut off, and is done again."""

    def write(self, root: Path) -> None:
        folder = root / PRIVATE
        folder.mkdir(exist_ok=True)
        fresh = folder / f"{NAME}.new"
        with fresh.open("w") as file:
            json.dump(asdict(self), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, folder / NAME)

    @classmethod
    def read(cls, root: Path) -> Record | None:
        with contextlib.suppress(OSError, ValueError, TypeError):
            return cls(**json.loads((root / PRIVATE / NAME).read_text()))
        return None


class Start(StrEnum):
    """What to do with the folder at the start."""

    KEEP = "keep"
    """Leave it as it is: there is nothing to restore, or this start goes on with what is there."""
    RESTORE = "restore"


def decide(found: Record | None, mine: Record, *, empty: bool, stored: bool, folder: Path) -> Start:
    """Decides what happens to the folder. Pure.

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
        return Start.KEEP
    if empty or ours:
        return Start.RESTORE
    raise ConfigurationError(
        f"{folder} is not empty, and {mine.uri} has a checkpoint that belongs there: nothing was changed. "
        "Move the files away to restore the checkpoint, or name another folder or another checkpoint URI"
    )

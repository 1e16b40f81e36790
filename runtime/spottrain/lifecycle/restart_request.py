"""How a rank asks for all ranks of its pod to be started again: it writes into a file of the launcher's.

The launcher's side is `Again`, a rank's is `ask`. For a rank that leaves because the next start will do
better, as after a lack of memory: its peers wait in a collective that it cannot join any more, and no process
group outlives that. Only where one pod holds all ranks; of several pods the operator's next attempt starts
all. See docs/adr/0010-out-of-memory.md.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping

from spottrain.contract import AGAIN_FILE
from spottrain.core import log


class Again:
    """For the ranks of one launcher. Where there is no folder for the file, no rank can ask."""

    def __init__(self) -> None:
        self._file = None
        try:
            self._file = tempfile.NamedTemporaryFile(prefix="spottrain-again-")  # noqa: SIM115 - to the end
        except OSError as error:
            log.event("cannot-start-again", why=error)

    @property
    def env(self) -> dict[str, str]:
        """What the ranks are told."""
        return {} if self._file is None else {AGAIN_FILE: self._file.name}

    @property
    def asked(self) -> bool:
        return self._file is not None and os.fstat(self._file.fileno()).st_size > 0

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def begin(self) -> None:
        """A new round, of which nobody has asked for another yet."""
        if self._file is not None:
            os.ftruncate(self._file.fileno(), 0)


def ask(env: Mapping[str, str], why: str) -> bool:
    """In a rank, just before it ends. False where nobody will start it again by itself."""
    path = env.get(AGAIN_FILE)
    if not path:
        return False
    try:
        with open(path, "a") as file:
            file.write(f"{why}\n")
    except OSError as error:
        log.event("cannot-start-again", why=error)
        return False
    return True

"""Lets a rank request a restart of all ranks of its pod, through a file of the launcher.

`Again` is the launcher's side, `ask` a rank's. A rank does so if it leaves because the next start will do
better, such as after running out of memory. Its peers wait in a collective that it cannot join any more, and
no process group survives that. It works only if one pod holds all ranks; with several pods, the operator's
next attempt restarts all. See docs/adr/0010-out-of-memory.md.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping

from spottrain.contract import AGAIN_FILE
from spottrain.core import log


class Again:
    """Receives restart requests of one launcher's ranks; without a folder for the file there are none."""

    def __init__(self) -> None:
        self._file = None
        try:
            self._file = tempfile.NamedTemporaryFile(prefix="spottrain-again-")  # noqa: SIM115 - to the end
        except OSError as error:
            log.event("cannot-restart", why=error)

    @property
    def env(self) -> dict[str, str]:
        """Environment variables for the ranks."""
        return {} if self._file is None else {AGAIN_FILE: self._file.name}

    @property
    def asked(self) -> bool:
        return self._file is not None and os.fstat(self._file.fileno()).st_size > 0

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def begin(self) -> None:
        """Starts a new round without requests."""
        if self._file is not None:
            os.ftruncate(self._file.fileno(), 0)


def ask(env: Mapping[str, str], why: str) -> bool:
    """Requests a restart, just before this rank ends. Returns False if there will be no automatic restart."""
    path = env.get(AGAIN_FILE)
    if not path:
        return False
    try:
        with open(path, "a") as file:
            file.write(f"{why}\n")
    except OSError as error:
        log.event("cannot-restart", why=error)
        return False
    return True

"""Models that a script saves by `trainer.save_model()` or `save_pretrained()`, into a folder of its pod.

What it saves after its training is stored when the script ends, beside the final weights. What it saves
earlier or later is lost with the pod, which is logged.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from spottrain.contract import HEAD_KEY
from spottrain.core import log
from spottrain.lifecycle.life import Phase
from spottrain.lifecycle.session import Session

NO_MODEL: Final = re.compile(r"checkpoint-\d+|\..*")
"""Folders that are no model: the Trainer's checkpoints, and ours."""
LOGS: Final = "runs"
"""Folder beside a model, of TensorBoard."""
CLOCK_SECONDS: Final = 1.0
"""A file system's clock may be so much behind."""
DURING: Final = (
    "it was saved during the training, into a folder that a reclaim deletes. What the script saves after its "
    "training is stored"
)
AFTER: Final = "the job was done with its training, before this was saved; what was trained is at {output}"


class SavedModels:
    """Notes where the script saves models. `noting` wraps the methods that do."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._begun: dict[Path, float] = {}
        """When each folder was first saved to after the training, in Unix seconds."""
        self._lost: set[str] = set()

    def noting(self, method: Callable[..., Any], argument: str, usual: Any = None) -> Callable[..., Any]:
        """Returns a method that also notes the folder that it saves to.

        `argument`: its parameter with the folder; `usual`: the folder without that.
        """
        signature = inspect.signature(method)

        @functools.wraps(method)
        def saving(*args: Any, **kwargs: Any) -> Any:
            began = time.time()
            result = method(*args, **kwargs)
            folder = signature.bind(*args, **kwargs).arguments.get(argument) or usual
            if folder is not None and self._session.world.first:
                self.note(Path(folder).resolve(), began)
            return result

        return saving

    def note(self, folder: Path, began: float) -> None:
        """Notes a folder that was saved to since `began`, in Unix seconds."""
        session = self._session
        if NO_MODEL.fullmatch(folder.name) or not folder.is_dir():
            return
        if session.phase is Phase.DONE:
            self._tell_lost(folder, AFTER.format(output=session.board.facts.output_uri))
        elif session.phase is Phase.STORED:
            self._begun.setdefault(folder, began)
        elif session.phase.begun:
            self._tell_lost(folder, DURING)

    def _tell_lost(self, folder: Path, why: str) -> None:
        if why not in self._lost:
            self._lost.add(why)
            log.event("model-not-stored", folder=str(folder), why=why)

    def files(self) -> dict[str, Path]:
        """Returns the files that were written there, by their paths below the folder that has all of them.

        In a folder that was saved to, these are also the files beside the model since the start, such as a
        tokenizer that the script had stored before.
        """
        if not self._begun:
            return {}
        top = os.path.commonpath(self._begun)
        return {
            path.relative_to(top).as_posix(): path
            for folder, began in self._begun.items()
            for path in _files(folder)
            if path.stat().st_ctime + CLOCK_SECONDS
            >= (self._session.born if path.parent == folder else began)
        }


def _files(folder: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        folders[:] = [
            each
            for each in folders
            if each != LOGS
            and not NO_MODEL.fullmatch(each)
            and not Path(place, each, HEAD_KEY).exists()  # a checkpoint URI
        ]
        yield from (path for name in names if (path := Path(place, name)).is_file())

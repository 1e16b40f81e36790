"""The best evaluation so far, and the one whose checkpoint is kept. Used by `trainer`, alike on all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable

from spottrain.checkpoint.save import Save


class Best:
    """`loss`: lowest of all evaluations; `kept`: of the checkpoint that HEAD keeps as the best."""

    def __init__(self, loss: float | None = None, kept: float | None = None) -> None:
        self.loss = loss
        self._kept = kept
        self._before: float | None = None
        self._save: Save | None = None
        """Of `_kept`, as long as it is not committed; `_before` holds until then."""

    @property
    def kept(self) -> float | None:
        """Asked when a save is made: that of the best so far was committed by now, or never will be."""
        save = self._save
        if save is not None and (save.finished.is_set() or save.abandoned):
            self._save = None
            self._kept = self._kept if save.committed else self._before
        return self._kept

    def note(self, loss: float) -> bool:
        """Whether it is better than what is kept. A loss that is no number never is."""
        if not math.isfinite(loss):
            return False
        self.loss = loss if self.loss is None else min(self.loss, loss)
        return self.kept is None or loss < self.kept

    def keep(self, loss: float, save: Callable[[], Save | None]) -> None:
        """`save` makes the checkpoint, which holds this loss as the best."""
        self._before, self._kept = self.kept, loss
        self._save = save()

"""`Best`: the lowest evaluation loss so far, and that of the checkpoint kept as the best."""

from __future__ import annotations

import math
from collections.abc import Callable

from spottrain.checkpoint.saver import Save


class Best:
    """Equal on all ranks. `loss`: lowest of all evaluations; `kept`: of the checkpoint that HEAD keeps."""

    def __init__(self, loss: float | None = None, kept: float | None = None) -> None:
        self.loss = loss
        self._kept = kept
        self._before: float | None = None
        self._save: Save | None = None
        """Save of `_kept` until it is committed; `_before` is the value if it never is."""

    @property
    def kept(self) -> float | None:
        """Loss of the best checkpoint. If its save has ended without a commit, that of the one before."""
        save = self._save
        if save is not None and (save.finished.is_set() or save.abandoned):
            self._save = None
            self._kept = self._kept if save.committed else self._before
        return self._kept

    def note(self, loss: float) -> bool:
        """Records a loss. Returns whether it is better than `kept`; a NaN or infinite loss never is."""
        if not math.isfinite(loss):
            return False
        self.loss = loss if self.loss is None else min(self.loss, loss)
        return self.kept is None or loss < self.kept

    def keep(self, loss: float, save: Callable[[], Save | None]) -> None:
        """Calls `save`, which makes the best checkpoint; its state already has `loss` as `kept`."""
        self._before, self._kept = self.kept, loss
        self._save = save()

"""Estimates the time of a save at a preemption notice and compares it with the notice period.

seconds = one step + copy + 1.2 x bytes / bandwidth + 2
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from spottrain.core import log
from spottrain.core.progress import ProgressBoard

MARGIN: Final = 1.2
"""Safety factor on the upload time: a shared network is slower at times."""
COMMIT_SECONDS: Final = 2.0
"""Seconds for the manifest and HEAD: a few round trips, one of them retried."""
FULL_SHARE: Final = 0.8
"""Share of the notice period. A save estimated to take more may not fit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NoticeBudget:
    """`bytes`: of this rank's part; `bandwidth`: of its uploads, in bytes per second; `grace`: seconds."""

    bytes: int
    bandwidth: float
    step_seconds: float
    copy_seconds: float
    grace: float

    @property
    def seconds(self) -> float:
        upload = MARGIN * self.bytes / self.bandwidth
        return self.step_seconds + self.copy_seconds + upload + COMMIT_SECONDS

    @property
    def share(self) -> float:
        return self.seconds / self.grace

    @property
    def fits(self) -> bool:
        return self.share <= FULL_SHARE

    @property
    def warning(self) -> str:
        """A sentence if the save may not fit into the notice period, else empty."""
        if self.fits:
            return ""
        return (
            f"a save at a notice is estimated to take {self.seconds:.0f} s (a step "
            f"{self.step_seconds:.1f} s, {self.bytes / 1e9:.2f} GB at {self.bandwidth / 1e6:.0f} MB/s) of "
            f"{self.grace:.0f} s of notice: an interruption may lose the steps since the last periodic save. "
            "Use nodes with a longer notice, a faster way to the store, more workers, a smaller state, or a "
            "shorter interval of saves"
        )


class BudgetReport:
    """Shows the budget on the board, with its warning after the session's own, such as of torchrun.

    It is logged where the warning comes or goes: the numbers vary a little with each save.
    """

    def __init__(self, board: ProgressBoard) -> None:
        self._board, self._warning = board, board.facts.warning
        self._warns: bool | None = None

    def report(self, budget: NoticeBudget) -> None:
        warning = " ".join(filter(None, (self._warning, budget.warning)))
        self._board.update(emergency_seconds=budget.seconds, grace_seconds=budget.grace, warning=warning)
        if self._warns is bool(budget.warning):
            return
        self._warns = bool(budget.warning)
        log.event(
            "emergency-budget",
            seconds=budget.seconds,
            grace=budget.grace,
            share=budget.share,
            bytes=budget.bytes,
            bandwidth=int(budget.bandwidth),
            step_seconds=budget.step_seconds,
            warning=budget.warning or None,
        )

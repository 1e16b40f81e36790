"""How long a commit takes, by the bandwidth of the commits before. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from spottrain.lifecycle.notice_budget import COMMIT_SECONDS

MIN_BYTES: Final = 2**20
"""An upload of less says little about the bandwidth."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bandwidth:
    """Bytes per second of the uploads so far; 0: not measured."""

    rate: float = 0.0

    def after(self, sent: int, seconds: float) -> Bandwidth:
        """Returns the bandwidth after another upload: the latest counts, for networks change."""
        return Bandwidth(rate=sent / seconds) if sent >= MIN_BYTES and seconds > 0 else self


def commit_seconds(bytes: int, bandwidth: Bandwidth) -> float:
    """Estimated seconds of a commit that sends this much; without a measurement, of its requests alone."""
    return COMMIT_SECONDS + (bytes / bandwidth.rate if bandwidth.rate else 0.0)

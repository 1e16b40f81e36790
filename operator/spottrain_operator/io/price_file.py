"""The price lists as files: mounted ConfigMaps, which the kubelet replaces when they change."""

from __future__ import annotations

import logging
from pathlib import Path

from spottrain_operator.api.prices import NO_PRICES, PriceList, overlaid, parse

logger = logging.getLogger(__name__)


class PriceFile:
    """Reads a file again when it has changed.

    Args:
        path: The file.
        optional: Whether it is usual that there is none, such as before the first run of a CronJob.
    """

    def __init__(self, path: Path, *, optional: bool = False) -> None:
        self._path = path
        self._optional = optional
        self._seen: object = None
        """What identifies the content, or the error of the last read."""
        self._prices = NO_PRICES

    def __call__(self) -> PriceList:
        """Returns the current prices. What cannot be read is unknown, and is logged once for each change."""
        try:
            stat = self._path.stat()
            seen: object = (stat.st_mtime_ns, stat.st_ino, stat.st_size)
            if seen != self._seen:
                self._prices = parse(self._path.read_text(encoding="utf-8"))
                self._tell()
        except (OSError, UnicodeDecodeError) as error:
            seen = str(error)
            if seen != self._seen:
                self._prices = NO_PRICES
                if not (self._optional and isinstance(error, FileNotFoundError)):
                    logger.warning("no price list, so its prices are unknown: %s", error)
        self._seen = seen
        return self._prices

    def _tell(self) -> None:
        logger.info("price list %s: %d kinds of capacity", self._path, len(self._prices.rates))
        for problem in self._prices.problems:
            logger.warning("price list %s: %s", self._path, problem)


class PriceFiles:
    """A person's own price list, and the one that a CronJob fetches; own rates count before fetched ones."""

    def __init__(self, own: Path, fetched: Path) -> None:
        self._own = PriceFile(own)
        self._fetched = PriceFile(fetched, optional=True)
        self._parts = (NO_PRICES, NO_PRICES)
        self._both = NO_PRICES

    def __call__(self) -> PriceList:
        """Returns the current prices of both files."""
        own, fetched = self._own(), self._fetched()
        if own is not self._parts[0] or fetched is not self._parts[1]:
            self._parts = (own, fetched)
            self._both = overlaid(own, fetched)
        return self._both

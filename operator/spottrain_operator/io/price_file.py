"""The price list as a file: a mounted ConfigMap, which the kubelet replaces when it changes."""

from __future__ import annotations

import logging
from pathlib import Path

from spottrain_operator.api.prices import NO_PRICES, PriceList, parse

logger = logging.getLogger(__name__)


class PriceFile:
    """Reads the file again when it has changed."""

    def __init__(self, path: Path) -> None:
        self._path = path
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
                logger.warning("no price list, so all prices are unknown: %s", error)
        self._seen = seen
        return self._prices

    def _tell(self) -> None:
        logger.info("price list %s: %d kinds of capacity", self._path, len(self._prices.rates))
        for problem in self._prices.problems:
            logger.warning("price list %s: %s", self._path, problem)

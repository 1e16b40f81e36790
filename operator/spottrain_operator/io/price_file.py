"""The price lists as files: mounted ConfigMaps, which the kubelet replaces when they change."""

from __future__ import annotations

import logging
from pathlib import Path

from spottrain_operator.api.prices import NO_PRICES, PriceList, overlaid, parse

logger = logging.getLogger(__name__)


class PriceFiles:
    """A person's own price list, and the one that a CronJob fetches; own rates count before fetched ones."""

    def __init__(self, own: Path, fetched: Path) -> None:
        self._paths = (own, fetched)
        self._seen: list[object] = [None, None]
        """What identifies the content of each file, or why it has none."""
        self._lists = [NO_PRICES, NO_PRICES]
        self._both = NO_PRICES

    def __call__(self) -> PriceList:
        """Returns the current prices. A file is read when it has changed; what cannot be read is unknown."""
        for number, path in enumerate(self._paths):
            if (seen := _version(path)) != self._seen[number]:
                self._seen[number] = seen
                # There need not be fetched prices, such as before the first run of the CronJob.
                self._lists[number] = _read(path, optional=number == 1)
                self._both = overlaid(*self._lists)
        return self._both


def _version(path: Path) -> object:
    try:
        stat = path.stat()
    except OSError as error:
        return str(error)
    return stat.st_mtime_ns, stat.st_ino, stat.st_size


def _read(path: Path, *, optional: bool) -> PriceList:
    try:
        prices = parse(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        if not (optional and isinstance(error, FileNotFoundError)):
            logger.warning("no price list, so its prices are unknown: %s", error)
        return NO_PRICES
    logger.info("price list %s: %d kinds of capacity", path, len(prices.rates))
    for problem in prices.problems:
        logger.warning("price list %s: %s", path, problem)
    return prices

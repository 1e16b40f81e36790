"""Reports a store that does not respond: log lines, and what /progress says."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from spottrain.core import log
from spottrain.core.progress import ProgressBoard
from spottrain.storage.base import Store
from spottrain.storage.outage import Outage, Silence, patient_store, watch

LOG_SECONDS: Final = 30.0
"""Between two log lines of one outage."""
WAIT_TEXT_LIMIT: Final = 1000


class OutageReport:
    """The report about one store. `limit`: returns the seconds after which the process gives up."""

    def __init__(
        self, store: Store, outage: Outage, board: ProgressBoard, limit: Callable[[], float]
    ) -> None:
        self._where = f"{store.uri} at {store.endpoint}" if store.endpoint else store.uri
        self._outage = outage
        self._board = board
        self._limit = limit
        self._logged_at = float("-inf")

    def tell(self, silence: Silence | None) -> None:
        """Logs an outage, periodically, and shows it in /progress. None: the store responds again."""
        if silence is None:
            self._logged_at = float("-inf")
            self._board.clock.store_responds()
            self._board.update(waiting_for="", waits=False)
            return log.event("store-reachable", store=self._where)
        since = log.rfc3339(time.time() - silence.seconds)
        words = f"{self._where} does not answer since {since}: {silence.why}"[:WAIT_TEXT_LIMIT]
        if waits := self._outage.patient:
            self._board.clock.store_silent()
        else:
            self._board.clock.store_responds()
        self._board.update(waiting_for=words, waits=waits)
        if silence.seconds - self._logged_at >= LOG_SECONDS or self._logged_at > silence.seconds:
            self._logged_at = silence.seconds
            name, limit = ("waiting-for-store", self._limit()) if waits else ("store-unreachable", None)
            log.event(name, store=self._where, seconds=silence.seconds, limit=limit, why=silence.why)


def watched(
    store: Store,
    outage: Outage,
    board: ProgressBoard,
    give_up: Callable[[Silence], None],
    limit: Callable[[], float],
    *,
    head_too: bool = False,
) -> Store:
    """Returns the store, waited for while `outage` is patient. A thread reports outages from here on.

    After `limit()` seconds without a response it calls `give_up` (see `storage.outage.watch`). `head_too`:
    see `patient_store`.
    """
    report = OutageReport(store, outage, board, limit)
    acts = (outage, report.tell, give_up, limit)
    threading.Thread(target=watch, args=acts, name="spottrain-outage", daemon=True).start()
    return patient_store(store, outage, head_too=head_too)

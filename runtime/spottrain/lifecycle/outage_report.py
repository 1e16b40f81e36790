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
    where = f"{store.uri} at {store.endpoint}" if store.endpoint else store.uri
    logged_at = float("-inf")

    def report(silence: Silence | None) -> None:
        """Logs an outage, periodically, and shows it in /progress. None: the store responds again."""
        nonlocal logged_at
        if silence is None:
            logged_at = float("-inf")
            board.clock.store_responds()
            board.update(waiting_for="", waits=False)
            return log.event("store-reachable", store=where)
        since = log.rfc3339(time.time() - silence.seconds)
        words = f"{where} does not answer since {since}: {silence.why}"[:WAIT_TEXT_LIMIT]
        if waits := outage.patient:
            board.clock.store_silent()
        else:
            board.clock.store_responds()
        board.update(waiting_for=words, waits=waits)
        if silence.seconds - logged_at >= LOG_SECONDS or logged_at > silence.seconds:
            logged_at = silence.seconds
            name, most = ("waiting-for-store", limit()) if waits else ("store-unreachable", None)
            log.event(name, store=where, seconds=silence.seconds, limit=most, why=silence.why)

    acts = (outage, report, give_up, limit)
    threading.Thread(target=watch, args=acts, name="spottrain-outage", daemon=True).start()
    return patient_store(store, outage, head_too=head_too)

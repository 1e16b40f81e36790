"""Reads a job's bookkeeping: from its ConfigMap, or from the status that version 0.3 wrote. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from spottrain_operator.api import upgrade
from spottrain_operator.api.bookkeeping import Bookkeeping
from spottrain_operator.api.validation import decode
from spottrain_operator.errors import InvalidSpec

DATA_KEY: Final = "bookkeeping.json"


def books_of_config_map(raw: Mapping[str, Any]) -> Bookkeeping:
    """Reads the bookkeeping. Raises InvalidSpec where somebody has changed it."""
    text = (raw.get("data") or {}).get(DATA_KEY, "")
    try:
        found = json.loads(text)
    except ValueError as error:
        raise InvalidSpec(f"{DATA_KEY} is not JSON: {error}") from error
    return decode(Bookkeeping, found, DATA_KEY)


def books_of_0_3(status: Mapping[str, Any]) -> Bookkeeping | None:
    """Returns the bookkeeping that version 0.3 wrote into a status; None where it had none."""
    found = upgrade.books_of_0_3(status)
    return decode(Bookkeeping, found, "status") if found is not None else None

"""Reads a job's bookkeeping: from its ConfigMap, or from the status that version 0.3 wrote. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

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

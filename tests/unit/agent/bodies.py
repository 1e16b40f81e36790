"""Bodies that no metadata service should send, and that none of the agent's parsers may trip over."""

from __future__ import annotations

from typing import Final

import pytest

GARBAGE: Final = [
    pytest.param("", id="empty"),
    pytest.param(" \n", id="blank"),
    pytest.param("no json", id="text"),
    pytest.param("<html><body>404 - Not Found</body></html>", id="a page"),
    pytest.param('{"action": "term', id="cut off"),
    pytest.param("[" * 100_000, id="deep"),
    pytest.param('{"a":' * 50_000, id="deep records"),
    pytest.param("9" * 10_000, id="a huge number"),
    pytest.param("x" * 200_000, id="huge"),
    pytest.param("\ufffd\x00\ufffd", id="not text"),
    pytest.param("null", id="null"),
    pytest.param("true", id="a truth"),
    pytest.param("3", id="a number"),
    pytest.param("NaN", id="not a number"),
    pytest.param('"terminate"', id="a bare string"),
]
"""None of these says anything on any cloud."""

LISTS: Final = [pytest.param(text, id=text[:30]) for text in ("[]", "[3]", "[null]", '[["Preempt"]]')]
RECORDS: Final = [pytest.param(text, id=text[:30]) for text in ("{}", '{"Events": {}}', '{"other": 1}')]

"""How the agent reads a cloud's times."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from spottrain_operator.agent import findings

TIME = datetime(2026, 11, 21, 10, 2, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    "text",
    [
        "2026-11-21T10:02:00Z",
        "2026-11-21T10:02:00.000Z",
        "2026-11-21T10:02:00",
        "2026-11-21T12:02:00+02:00",
        "Sat, 21 Nov 2026 10:02:00 GMT",
        "21 Nov 2026 10:02:00 GMT",
        "Sat, 21 Nov 2026 10:02:00 -0000",
        "Sat, 21 Nov 2026 05:02:00 -0500",
    ],
)
def test_a_time_is_read_in_each_form_that_the_clouds_use(text: str) -> None:
    assert findings.moment(text) == TIME


@pytest.mark.parametrize(
    "text",
    [
        "",
        "soon",
        "0001-01-01T00:00:00+14:00",
        "9999-12-31T23:59:59-14:00",
        "2026-13-45T99:00:00Z",
        "32 Nov 2026 10:02:00 GMT",
        "21 Nov 99999999999 10:02:00 GMT",
        "Mon, ",
        "x" * 100_000,
        None,
        3,
        True,
        1.5e300,
        [],
        {"time": "2026-11-21T10:02:00Z"},
    ],
    ids=lambda text: str(text)[:40],
)
def test_what_is_no_time_is_none(text: object) -> None:
    assert findings.moment(text) is None

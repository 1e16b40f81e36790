"""Tables of which `make test` plays a sample."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from _pytest.mark import ParameterSet


def sample(values: Iterable[object], *always: object) -> list[ParameterSet]:
    """`values` of a parameter, or tuples of several; heavy but for `always`."""
    return [
        pytest.param(
            *(each if isinstance(each, tuple) else (each,)),
            marks=[] if each in always else pytest.mark.heavy,
        )
        for each in values
    ]

"""HEAD's protocol in every interleaving of the worlds that take seconds; small ones are unit tests."""

from __future__ import annotations

import pytest

from tests.support.headscenarios import LONGER
from tests.support.headworld import Scenario
from tests.unit.runtime.checkpoint.test_head_model import explore


@pytest.mark.heavy
@pytest.mark.parametrize("scenario", LONGER, ids=lambda s: s.name)
def test_no_interleaving_breaks_a_rule(scenario: Scenario) -> None:
    explore(scenario)

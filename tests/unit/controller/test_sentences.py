"""What the operator says to people, all of it in one file: tests/unit/sentences.txt.

Other tests check reasons and field paths. A sentence that is changed is a change of that file, to be read
as a diff: `python -m tests.unit.controller.test_sentences` writes it anew.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from spottrain_operator.agent.settings import AgentSettings
from spottrain_operator.api.job_defaults import of_config_map
from spottrain_operator.api.observed import Observed
from spottrain_operator.api.prices import parse
from spottrain_operator.control.plan import plan
from spottrain_operator.errors import OperatorError
from spottrain_operator.settings import Settings
from spottrain_prices.settings import Settings as PricesSettings

from tests.builders import make_job, raw_spec
from tests.support.environment import read
from tests.unit.agent import test_process
from tests.unit.controller import (
    test_capacity,
    test_cheapest,
    test_gangs,
    test_hardware,
    test_interrupt,
    test_interruptions,
    test_job_defaults,
    test_kueue,
    test_lifecycle,
    test_max_cost,
    test_own_checkpoints,
    test_plan,
    test_prices,
    test_refusals,
    test_refused_specs,
    test_restart,
    test_runtime_attached,
    test_stale_views,
    test_starting,
    test_sync,
    test_what_is_told,
    test_words_from_outside,
)
from tests.unit.prices import test_wanted

ROOT = Path(__file__).parents[3]
PAGE = Path(__file__).parents[1] / "sentences.txt"


def scenes() -> Iterator[Observed]:
    """One look each, at all that there is to be told of."""
    for table in (test_plan.SCENES, test_starting.SAID, test_runtime_attached.SCENES):
        yield from (observed for observed, _ in table.values())
    yield from map(test_interruptions.observed, test_interruptions.ROWS.values())
    yield from (test_own_checkpoints.seen(pod) for pod in test_own_checkpoints.CHARGED.values())
    for module in (
        test_lifecycle,
        test_restart,
        test_what_is_told,
        test_stale_views,
        test_refusals,
        test_gangs,
        test_hardware,
        test_sync,
        test_capacity,
        test_kueue,
        test_cheapest,
        test_max_cost,
        test_interrupt,
    ):
        yield from module.TOLD


LONGEST = 200
"""Characters of a sentence; it names a page for the rest."""


def spoken() -> Iterator[str]:
    """Each condition, Event, cause and refusal as it is written, with all that it quotes."""
    for observed in scenes():
        made = plan(observed)
        status = made.status or observed.job.status
        yield from (condition.message for condition in status.conditions)
        yield from (event.message for event in made.events)
        yield from (text for record in status.attempts for text in (record.evidence, record.choice))
    yield from (words for words in refusals() if not words.startswith("SPOTTRAIN_"))


def told_of(observed: Observed) -> dict[str, str]:
    """Why attempts ended or are stopped, conditions and Events, by text, each once."""
    made = plan(observed)
    status = made.status or observed.job.status
    said = {r.evidence: f"attempt {r.cause or r.stopping}" for r in status.attempts if r.evidence}
    said |= {r.choice: f"choice {r.capacity_type}" for r in status.attempts if r.choice}
    told = [(c.message, f"{c.type} {c.status} {c.reason}") for c in status.conditions]
    for text, kind in (*told, *((e.message, f"Event {e.reason}") for e in made.events)):
        quoted = max((known for known in said if known in text), key=len, default="")
        if text and text != quoted:
            said[text.replace(quoted, "...") if quoted else text] = kind
    return said


def refusals() -> Iterator[str]:
    for _, raw in test_refused_specs.REFUSED:
        yield make_job(raw_spec(**raw)).invalid
    for name, value in test_words_from_outside.WRONG_SETTINGS:
        yield _error(read, Settings, {f"SPOTTRAIN_OPERATOR_{name}": value})
    for name, value in test_process.WRONG_SETTINGS:
        yield _error(read, AgentSettings, test_process.NODE | {f"SPOTTRAIN_AGENT_{name}": value})
    for name, value in test_wanted.WRONG_SETTINGS:
        yield _error(read, PricesSettings, test_wanted.REQUIRED | {f"SPOTTRAIN_PRICES_{name}": value})
    for data in test_job_defaults.UNUSABLE:
        yield _error(of_config_map, test_job_defaults.config_map(**data), "ns", ["a100"])
    for entry in test_prices.UNREADABLE:
        yield from parse(json.dumps([test_prices.SPOT | entry])).problems


def _error(call: Callable[..., Any], *given: Any) -> str:
    try:
        call(*given)
    except (ValueError, OperatorError) as error:
        return str(error)
    raise AssertionError(f"{given} is not refused")


def page() -> str:
    told: dict[str, str] = {}
    for observed in scenes():
        told = told_of(observed) | told
    lines = {*refusals(), *(f"{kind}: {text}" for text, kind in told.items())}
    return "".join(line.replace("\n", r"\n") + "\n" for line in sorted(lines))


def test_the_sentences_are_those_that_a_person_has_read() -> None:
    written = PAGE.read_text().splitlines()
    assert page().splitlines() == written, "run: python -m tests.unit.controller.test_sentences"


def test_a_sentence_is_short_and_names_pages_that_exist() -> None:
    said = set(spoken())
    assert [words for words in said if len(words) > LONGEST] == []
    pages = {page for words in said for page in re.findall(r"docs/[-\w/]+\.md", words)}
    assert pages and not [page for page in pages if not (ROOT / page).exists()]


if __name__ == "__main__":
    PAGE.write_text(page())

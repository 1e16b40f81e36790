"""The split of an attempt's time travels in the progress report and in the termination message."""

from __future__ import annotations

import json

import pytest
from spottrain.contract import Outcome, Progress, TerminationMessage, TimeSplit
from spottrain_operator.api.reports import bounded

SPLIT = TimeSplit(productive=60.5, startup=12.0, dataWait=3.0, other=1.0, unsaved=10.0)


def test_the_total_counts_unsaved_work_once() -> None:
    assert SPLIT.total == 76.5


def test_it_survives_a_report_and_a_message() -> None:
    report = Progress(state="Training", attempt=1, timeSplit=SPLIT, bestStep=3)
    assert Progress.from_json(report.to_json()) == report
    message = TerminationMessage(outcome=Outcome.DONE, timeSplit=SPLIT)
    assert TerminationMessage.from_json(message.to_json()) == message


def test_fields_of_a_newer_runtime_are_ignored() -> None:
    raw = json.dumps({"state": "Training", "attempt": 1, "timeSplit": {"productive": 2, "newer": 1}})
    assert Progress.from_json(raw).timeSplit == TimeSplit(productive=2.0)


NO_SPLITS = [
    '"x"',
    '{"productive": "x"}',
    '{"productive": -1}',
    '{"startup": NaN}',
    f'{{"other": {10**400}}}',
    "[1]",
]


@pytest.mark.parametrize("split", NO_SPLITS)
def test_a_report_with_a_bad_split_is_refused(split: str) -> None:
    with pytest.raises((TypeError, ValueError)):
        Progress.from_json(f'{{"state": "Training", "attempt": 1, "timeSplit": {split}}}')


@pytest.mark.parametrize("split", NO_SPLITS)
def test_a_message_with_a_bad_split_still_has_its_outcome(split: str) -> None:
    found = TerminationMessage.from_json(f'{{"outcome": "done", "step": 7, "timeSplit": {split}}}')
    assert found == TerminationMessage(outcome=Outcome.DONE, step=7)


@pytest.mark.parametrize("seconds", [float("nan"), float("inf")])
def test_seconds_that_no_clock_gives_are_not_well_typed(seconds: float) -> None:
    report = Progress(state="Training", attempt=1, timeSplit=TimeSplit(productive=seconds))
    assert bounded(report) is None

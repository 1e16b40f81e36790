"""How a store that does not answer is waited for, by a clock of the test's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from spottrain.errors import StoreDenied, StoreUnavailable
from spottrain.storage.base import Object
from spottrain.storage.local import FolderStore
from spottrain.storage.outage import FORGET_SECONDS, TELL_SECONDS, Outage, Silence, patient_store, watch


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def outage(clock: Clock) -> Outage:
    outage = Outage(clock=clock, sleep=clock.sleep)
    outage.patient = True
    return outage


def silent(outage: Outage) -> Silence:
    found = outage.silence
    assert found is not None
    return found


def refused() -> None:
    raise StoreUnavailable("connection refused")


class Enough(Exception):
    """Ends what would go on."""


class Down(FolderStore):
    """Fails so often."""

    failures = 0

    def get(self, key: str) -> Object | None:
        if self.failures:
            self.failures -= 1
            refused()
        return super().get(key)


def test_a_request_is_made_again_until_the_store_answers(tmp_path: Path, outage: Outage) -> None:
    store = Down(tmp_path)
    store.put("manifest", b"1")
    store.failures = 7
    found = patient_store(store, outage).get("manifest")
    assert found is not None and found.body == b"1" and store.failures == 0
    assert outage.silence is None, "it has answered"


def test_a_refusal_is_raised_at_once_and_is_an_answer(outage: Outage) -> None:
    asked = []

    def denied() -> None:
        asked.append(1)
        raise StoreDenied("no")

    with pytest.raises(StoreDenied):
        outage.through("x", denied)
    assert len(asked) == 1 and outage.silence is None


def test_while_it_trains_nothing_is_tried_again(outage: Outage) -> None:
    outage.patient = False
    with pytest.raises(StoreUnavailable):
        outage.through("x", refused)


def test_head_is_asked_once_for_its_owner_asks_again_and_can_be_told_to_stop(
    tmp_path: Path, outage: Outage
) -> None:
    store = Down(tmp_path)
    store.failures = 1
    with pytest.raises(StoreUnavailable):
        patient_store(store, outage).get("HEAD")
    assert silent(outage).why == "connection refused"


def test_the_silence_begins_with_the_first_request_that_had_no_answer(outage: Outage, clock: Clock) -> None:
    for _ in range(3):
        with pytest.raises(StoreUnavailable), outage.request("GET HEAD"):
            clock.now += 5.0
            refused()
        clock.now += 2.0
    assert silent(outage) == Silence(seconds=21.0, why="connection refused")


def test_a_request_that_has_no_answer_yet_is_silence_too(outage: Outage, clock: Clock) -> None:
    with outage.request("the first requests"):
        clock.now += 42.0
        assert silent(outage) == Silence(seconds=42.0, why="no response to the first requests")
    assert outage.silence is None


def test_a_large_body_may_take_its_time_and_its_failure_counts_from_then_on(
    outage: Outage, clock: Clock
) -> None:
    with pytest.raises(StoreUnavailable), outage.request("PUT weights", brief=False):
        clock.now += 900.0
        assert outage.silence is None
        refused()
    clock.now += 1.0
    assert silent(outage).seconds == 1.0


def test_an_answer_to_another_request_ends_the_silence(outage: Outage, clock: Clock) -> None:
    with outage.request("GET a"):
        clock.now += 30.0
        with outage.request("GET b"):
            clock.now += 1.0
        assert silent(outage).seconds == 0.0


def test_what_failed_once_and_is_not_asked_for_any_more_is_not_waited_for(
    outage: Outage, clock: Clock
) -> None:
    with pytest.raises(StoreUnavailable), outage.request("GET HEAD"):
        refused()
    clock.now += FORGET_SECONDS + 1
    assert outage.silence is None


def test_a_store_that_reads_and_does_not_write_is_not_waited_for_without_end(
    outage: Outage, clock: Clock
) -> None:
    def act() -> None:
        with outage.request("GET HEAD"):
            pass
        refused()

    def between() -> None:
        if silent(outage).seconds > 60:
            raise Enough

    with pytest.raises(Enough):
        outage.through("the final weights", act, brief=False, between=between)
    assert clock.now > 160
    outage.patient = False
    with outage.request("GET HEAD"):
        pass
    assert outage.silence is None, "nobody tries any more"


def watched(outage: Outage, clock: Clock, *pauses: float) -> tuple[list[Any], list[float]]:
    """Looks before each pause and after the last. Returns the seconds told, and those at which it gave up."""
    told: list[Any] = []
    given_up: list[float] = []
    left = list(pauses)

    def sleep(_: float) -> None:
        if not left:
            raise Enough
        clock.now += left.pop(0)

    with pytest.raises(Enough):
        watch(
            outage,
            lambda silence: told.append(silence and silence.seconds),
            lambda silence: given_up.append(silence.seconds),
            lambda: 60.0,
            sleep,
        )
    return told, given_up


def test_it_is_told_soon_and_given_up_at_the_limit(outage: Outage, clock: Clock) -> None:
    assert watched(outage, clock, 1000) == ([], [])
    with outage.request("GET HEAD"):
        told, given_up = watched(outage, clock, TELL_SECONDS - 1, 1, 60)
    assert told == [TELL_SECONDS, TELL_SECONDS + 60], "a slow answer is no news"
    assert given_up == [TELL_SECONDS + 60]


def test_that_it_answers_again_is_told_once(outage: Outage, clock: Clock) -> None:
    with pytest.raises(StoreUnavailable), outage.request("GET HEAD"):
        refused()
    pause = FORGET_SECONDS + 1  # the failure is forgotten then
    assert watched(outage, clock, TELL_SECONDS, pause, 1) == ([TELL_SECONDS, None], [])


def test_while_it_trains_it_is_told_and_never_given_up(outage: Outage, clock: Clock) -> None:
    outage.patient = False
    with outage.request("GET HEAD"):
        assert watched(outage, clock, 1000) == ([1000], [])

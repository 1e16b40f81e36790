"""Saved work of spot runs: what outlasts a run, with and without notices."""

from __future__ import annotations

from typing import Any

import pytest

from bench import goodput, record
from bench.goodput import (
    STANDARD,
    Learned,
    Setting,
    best_fixed,
    goodput_learned,
    measured,
    runs_of,
    saved,
    zone_row,
)
from bench.policy.traces import Trace

SETTING = Setting(save=10, restart=100)


def every(seconds: float) -> float:
    return 90.0


def test_work_after_the_last_save_is_lost() -> None:
    assert saved(100 + 2 * 100 + 50, SETTING, every, 0.0) == 180
    assert saved(100 + 2 * 100, SETTING, every, 0.0) == 180
    assert saved(100 + 2 * 100 - 1, SETTING, every, 0.0) == 90


def test_a_run_shorter_than_its_restart_saves_nothing() -> None:
    assert saved(100, SETTING, every, 1.0) == 0


def test_a_notice_saves_the_rest_except_for_the_last_save_itself() -> None:
    assert saved(100 + 100 + 50, SETTING, every, 1.0) == 90 + 40
    assert saved(100 + 100 + 50, SETTING, every, 0.5) == 90 + 20
    assert saved(100 + 100 + 5, SETTING, every, 1.0) == 90


def test_the_last_run_counts_only_if_its_end_was_seen() -> None:
    assert runs_of(Trace("zone", 60, (True, False, True, True, False))) == [60, 120]
    assert runs_of(Trace("zone", 60, (False, True, True, False, True))) == [120]


def test_the_interval_grows_with_time_without_loss_and_shrinks_with_losses() -> None:
    learned = Learned(SETTING)
    first = learned.seconds(0)
    assert learned.seconds(7200) > first
    for _ in range(5):
        learned.ended(600, 1.0)
    assert learned.seconds(0) < first


def test_runs_whose_end_was_noticed_do_not_shorten_the_interval_as_losses_do() -> None:
    noticed, lost = Learned(SETTING), Learned(SETTING)
    for _ in range(5):
        noticed.ended(6000, 0.05)
        lost.ended(6000, 1.0)
    assert noticed.seconds(0) > 2 * lost.seconds(0)


def recorded(date: str, stall: float) -> dict[str, Any]:
    median = {name: {"median": value} for name, value in (("stall_s", stall), ("durable_s_ours", 10.0))}
    return {"date": date, "figures": {"bytes": 2**30} | median}


def test_the_newest_records_say_what_a_save_and_a_restart_take() -> None:
    restart = {"cold": {"to_first_step": {"median": 74.0}}, "warm": {"to_first_step": {"median": 13.0}}}
    records = {
        "checkpoint": [recorded("2026-11-23T06:00Z", 0.2), recorded("2026-11-21T06:00Z", 0.1)],
        "restart": [{"date": "2026-11-22T06:00Z", "figures": restart}],
    }
    assert measured(records) == {
        "measured: 1 GiB, cold compile cache": Setting(0.2, 74.0, 10.0),
        "measured: 1 GiB, warm compile cache": Setting(0.2, 13.0, 10.0),
    }
    assert len(measured(record.stored())) == 2, "the records of this repository"


@pytest.mark.parametrize("lacks", ["checkpoint", "restart"])
def test_without_a_record_a_sentence_says_what_to_run(lacks: str) -> None:
    records = record.stored()
    del records[lacks]
    with pytest.raises(ValueError, match="run make bench-checkpoint and make bench-restart"):
        measured(records)


def test_no_learned_interval_beats_a_constant_world_by_much() -> None:
    runs = [7200.0] * 50
    best = best_fixed(runs, SETTING, 0.0)
    assert 0.9 * best < goodput_learned(runs, SETTING, 0.0) <= 1.01 * best


def test_notices_never_lower_goodput_and_the_ceiling_holds() -> None:
    row = zone_row([600.0, 5000.0, 40000.0, 1200.0, 9000.0], goodput.SETTINGS[STANDARD])
    assert row["goodput"] < row["goodput_with_notices"] < row["ceiling"]


def test_without_a_folder_a_sentence_says_what_to_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["bench.goodput"])
    monkeypatch.delenv("SPOTTRAIN_TRACES", raising=False)
    assert goodput.main() == 2
    assert "TRACES=FOLDER" in capsys.readouterr().err

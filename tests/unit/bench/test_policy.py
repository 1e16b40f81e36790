"""The simulator of spot traces: billing, overheads, the baselines, the optimum, polarity."""

from __future__ import annotations

import itertools
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from bench.policy import baselines
from bench.policy.__main__ import main
from bench.policy.optimum import least_cost
from bench.policy.ours import Ours
from bench.policy.simulate import Choice, Job, Outcome, Replay, Rule, Sight, View
from bench.policy.traces import PLENTIFUL, SCARCE, TraceError, read_trace, read_windows

TICK = 600.0


def job(work: float, deadline: float, overhead: float = 180.0) -> Job:
    """A job of so many ticks; on-demand costs 6 a tick, spot 2."""
    return Job(
        work=work * TICK, deadline=deadline * TICK, overhead=overhead, on_demand_price=36.0, spot_price=12.0
    )


def trace(ticks: str) -> list[bool]:
    return [tick == "#" for tick in ticks]


def replay(rule: Rule, ticks: str, of: Job, sight: Sight = "free") -> Outcome:
    return Replay(of, trace(ticks), TICK, sight).run(rule)


def scripted(*choices: Choice) -> Rule:
    def decide(view: View) -> Choice:
        return choices[len(view.seen) - 1]

    return decide


def test_a_start_costs_its_overhead_and_the_last_tick_is_billed_whole() -> None:
    outcome = replay(baselines.on_demand, ".....", job(work=2, deadline=5))
    assert (outcome.cost, outcome.on_demand_ticks, outcome.starts) == (18.0, 3, 1)
    assert outcome.finished == 3 * TICK


def test_an_interrupted_start_begins_anew_and_does_not_stack() -> None:
    of = job(work=1, deadline=9, overhead=900)
    outcome = replay(baselines.greedy, "#.#####", of)
    assert outcome.spot_ticks == 1 + 3  # 900 s of overhead after the second start, then 600 s of work
    assert outcome.starts == 2


def test_waiting_costs_nothing_and_a_move_pays_the_overhead() -> None:
    rule = scripted("wait", "spot", "on-demand", "on-demand")
    outcome = replay(rule, "..##", job(work=1, deadline=4))
    assert outcome.cost == pytest.approx(2 * 6.0)  # spot was not available in tick 1, so that it waited
    rule = scripted("wait", "spot", "on-demand", "on-demand")
    outcome = replay(rule, ".###", job(work=1.4, deadline=4))
    assert (outcome.spot_ticks, outcome.on_demand_ticks, outcome.starts) == (1, 1, 2)


def test_a_job_whose_deadline_passes_is_late() -> None:
    assert replay(baselines.greedy, "....", job(work=2, deadline=4)).late


def test_uniform_progress_waits_while_it_is_ahead_and_buys_while_it_is_behind() -> None:
    rule = baselines.uniform_progress
    chosen: list[Choice] = []

    def watched(view: View) -> Choice:
        chosen.append(rule(view))
        return chosen[-1]

    replay(watched, "##...#########", job(work=6, deadline=12, overhead=0))
    assert chosen[:6] == ["spot", "spot", "wait", "wait", "wait", "spot"]
    chosen.clear()
    replay(watched, ".#.....#......", job(work=6, deadline=12, overhead=0))
    assert chosen[:4] == ["wait", "spot", "wait", "on-demand"]  # after 1 of 6 ticks at 3 of 12 it is behind


def test_uniform_progress_returns_to_spot_only_when_ahead() -> None:
    of = job(work=6, deadline=12, overhead=TICK)
    view = View(of, TICK, now=2 * TICK, done=2 * TICK, running="on-demand", available=True)
    assert baselines.uniform_progress(view) == "on-demand"  # (2 + 2 x 1) x 6 / 12 is 2: not above
    view.done += 1.0
    assert baselines.uniform_progress(view) == "spot"


def test_the_safety_net_keeps_greedy_in_time() -> None:
    outcome = replay(baselines.with_safety_net(baselines.greedy), "." * 8, job(work=4, deadline=8))
    assert not outcome.late
    assert outcome.on_demand_ticks == 5


def brute_force(of: Job, ticks: str) -> float:
    options: tuple[Choice, ...] = ("spot", "on-demand", "wait")
    plans = itertools.product(options, repeat=len(ticks))
    outcomes = (replay(scripted(*plan), ticks, of) for plan in plans)
    return min((each.cost for each in outcomes if not each.late), default=math.inf)


@pytest.mark.parametrize("overhead", [0.0, 180.0, 720.0])
def test_the_optimum_is_the_least_of_all_plans(overhead: float) -> None:
    draw = random.Random(1)
    for _ in range(6):
        ticks = "".join(draw.choice("#.") for _ in range(6))
        of = job(work=draw.choice([2, 3, 4]), deadline=6, overhead=overhead)
        assert least_cost(of, trace(ticks), TICK) == pytest.approx(brute_force(of, ticks)), (ticks, of)


def test_no_rule_is_cheaper_than_the_optimum() -> None:
    draw = random.Random(2)
    of = job(work=24, deadline=34)
    ticks = "".join(draw.choice("###...") * draw.randint(1, 9) for _ in range(40))[:34]
    rules = (baselines.with_safety_net(baselines.uniform_progress), Ours())
    best = least_cost(of, trace(ticks), TICK)
    assert all(replay(rule, ticks, of).cost >= best - 1e-6 for rule in rules)


def test_with_paid_sight_a_rule_knows_only_what_it_asked_for() -> None:
    seen: list[list[bool | None]] = []

    def asks_second(view: View) -> Choice:
        seen.append(list(view.seen))
        return "spot" if len(view.seen) >= 2 and view.available else "wait"

    replay(asks_second, "#.##", job(work=1, deadline=4), "paid")
    assert seen[0] == [None]
    assert seen[1:3] == [[None, None], [None, False]]  # asked as if there were spot, then refused
    assert seen[-1] == [None, False, True, True]


def test_with_paid_sight_a_refused_request_costs_nothing() -> None:
    assert replay(baselines.greedy, "....", job(work=1, deadline=4), "paid").cost == 0.0


def folder_with(tmp_path: Path, scarce: list[int], plentiful: list[int], **more: Any) -> Path:
    windows = []
    for group, data in ((SCARCE, scarce), (PLENTIFUL, plentiful)):
        (tmp_path / f"{group}.json").write_text(json.dumps({"metadata": {"gap_seconds": 600}, "data": data}))
        windows.append({"group": group, "trace": f"{group}.json", "start_tick": 0, "ticks": 4} | more)
    (tmp_path / "uniform_progress_windows.json").write_text(json.dumps({"windows": windows}))
    return tmp_path


def test_windows_are_read_with_their_groups(tmp_path: Path) -> None:
    windows = read_windows(folder_with(tmp_path, [0, 0, 1, 0], [1, 1, 1, 0]))
    assert [window.group for window in windows] == [SCARCE, PLENTIFUL]
    assert windows[0].available == (False, False, True, False)


def test_an_inverted_copy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="1 = NOT available"):
        read_windows(folder_with(tmp_path, [1, 1, 0, 1], [0, 0, 0, 1]))


def test_a_window_beyond_its_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="outside"):
        read_windows(folder_with(tmp_path, [0, 0, 1, 0], [1, 1, 1, 0], start_tick=1))


@pytest.mark.parametrize(
    "text", ["", "[]", '{"metadata": {}, "data": [1]}', '{"metadata": {"gap_seconds": 0}, "data": [1]}']
)
def test_a_file_that_is_no_trace_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "zone.json").write_text(text)
    with pytest.raises(TraceError, match=r"zone\.json is not a trace"):
        read_trace(tmp_path / "zone.json")


def test_a_count_of_nodes_is_available_only_if_all_are(tmp_path: Path) -> None:
    (tmp_path / "zone.json").write_text(json.dumps({"metadata": {"gap_seconds": 60}, "data": [0, 3, 4]}))
    assert read_trace(tmp_path / "zone.json", nodes=4).available == (False, False, True)


def test_without_a_folder_a_sentence_says_what_to_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["bench.policy"])
    monkeypatch.delenv("SPOTTRAIN_TRACES", raising=False)
    assert main() == 2
    assert "TRACES=FOLDER" in capsys.readouterr().err

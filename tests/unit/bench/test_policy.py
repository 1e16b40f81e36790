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
from bench.policy.__main__ import job_of, main
from bench.policy.optimum import least_cost
from bench.policy.ours import Ours
from bench.policy.simulate import Choice, Job, Outcome, Replay, Rule, Sight, View, Zone
from bench.policy.traces import PLENTIFUL, SCARCE, TraceError, read_trace, read_windows
from bench.policy.zones import RoundRobin, replay_ours

TICK = 600.0


def job(work: float, deadline: float, overhead: float = 180.0, request: float = 0.0) -> Job:
    """A job of so many ticks; on-demand costs 6 a tick."""
    return Job(
        work=work * TICK, deadline=deadline * TICK, overhead=overhead, on_demand_price=36.0, request=request
    )


def zone(ticks: str, *prices: tuple[float, float], name: str = "zone") -> Zone:
    """A zone of so many ticks; 2 a tick, or prices in dollars per hour by tick."""
    return Zone(
        name, [tick == "#" for tick in ticks], [(since * TICK, usd) for since, usd in prices] or [(0, 12.0)]
    )


def replay(rule: Rule, ticks: str, of: Job, sight: Sight = "free") -> Outcome:
    return Replay(of, [zone(ticks)], TICK, sight).run(rule)


def scripted(*choices: Choice) -> Rule:
    def decide(view: View) -> Choice:
        return choices[len(view.seen)]

    return decide


def test_a_start_costs_its_overhead_and_the_last_tick_is_billed_whole() -> None:
    outcome = replay(baselines.on_demand, ".....", job(work=2, deadline=5))
    assert (outcome.cost, outcome.on_demand_ticks, outcome.starts) == (18.0, 3, 1)
    assert outcome.finished == 3 * TICK


def test_an_interrupted_start_is_made_again_in_full_and_does_not_stack() -> None:
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
    view = View(of, TICK, [], now=2 * TICK, done=2 * TICK, running="on-demand", known=(True,))
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
        assert least_cost(of, [zone(ticks)], TICK) == pytest.approx(brute_force(of, ticks)), (ticks, of)


def test_no_rule_is_cheaper_than_the_optimum() -> None:
    draw = random.Random(2)
    of = job(work=24, deadline=34)
    ticks = "".join(draw.choice("###...") * draw.randint(1, 9) for _ in range(40))[:34]
    rules = (baselines.with_safety_net(baselines.uniform_progress), Ours())
    best = least_cost(of, [zone(ticks)], TICK)
    assert all(replay(rule, ticks, of).cost >= best - 1e-6 for rule in rules)


def test_with_paid_sight_a_rule_knows_only_what_it_asked_for() -> None:
    seen: list[tuple[list[bool | None], bool | None]] = []

    def asks_second(view: View) -> Choice:
        seen.append(([known for (known,) in view.seen], view.spot))
        return "spot" if len(view.seen) >= 1 and view.available else "wait"

    replay(asks_second, "#.##", job(work=1, deadline=4), "paid")
    assert seen[:3] == [([], None), ([None], None), ([None], False)]  # asked, and then refused
    assert seen[-1] == ([None, False, True], True)


def test_with_paid_sight_a_refused_request_costs_nothing() -> None:
    assert replay(baselines.greedy, "....", job(work=1, deadline=4), "paid").cost == 0.0


def places(rule: Rule, of: Job, *zones: Zone, sight: Sight = "stopped") -> str:
    """Returns the ticks as s, o, or - for a job that stands still."""
    letters = {"spot": "s", "on-demand": "o", "wait": "-"}
    return "".join(letters[place] for place in Replay(of, zones, TICK, sight).run(rule).places)


def asks_at(*ticks: int) -> Rule:
    """Returns a rule that is on on-demand and asks for spot at these ticks; it stays on spot."""

    def decide(view: View) -> Choice:
        asks = len(view.seen) in ticks and view.available
        return "spot" if asks or view.running == "spot" else "on-demand"

    return decide


def test_a_request_stops_on_demand_until_it_is_refused_and_then_it_starts_again() -> None:
    of = job(work=8, deadline=20, overhead=300, request=2 * TICK)
    assert places(asks_at(2), of, zone("." * 20)) == "oo--" + "o" * 7  # 2 starts of half a tick
    outcome = Replay(of, [zone("." * 20)], TICK, "stopped").run(asks_at(2))
    assert (outcome.starts, outcome.on_demand_ticks, outcome.cost) == (2, 9, 9 * 6.0)


def test_a_request_that_is_granted_while_it_is_open_stops_the_job_only_until_then() -> None:
    of = job(work=8, deadline=20, overhead=300, request=3 * TICK)
    assert places(asks_at(2), of, zone("....################")) == "oo--sssssss"
    assert places(asks_at(2), of, zone("##.#############....")) == "oo-sssssss"
    assert places(asks_at(2), of, zone("################....")) == "oosssssss"


def test_with_paid_sight_on_demand_runs_on_during_a_refused_request() -> None:
    of = job(work=8, deadline=20, overhead=300, request=2 * TICK)
    assert places(asks_at(2), of, zone("." * 20), sight="paid") == "o" * 9


def test_a_job_that_waits_is_started_as_soon_as_there_is_spot() -> None:
    of = job(work=2, deadline=12, overhead=0)
    assert places(scripted("wait", "wait", "wait", "wait", "spot"), of, zone("...#" + "#" * 8)) == "---ss"


def test_a_rule_decides_after_an_interruption_and_not_while_a_request_is_open() -> None:
    told: list[tuple[int, tuple[int, ...]]] = []

    def watches(view: View) -> Choice:
        told.append((len(view.seen), view.interrupted))
        return "spot"

    Replay(job(work=4, deadline=9, request=TICK), [zone("##..#####")], TICK, "stopped").run(watches)
    assert told == [(0, ()), (1, ()), (2, (0,)), (3, ()), (5, ()), (6, ())]


def test_what_a_node_cost_that_is_taken_back_in_its_first_hour_is_refunded() -> None:
    five, six = zone("#####." + "#" * 20), zone("######." + "#" * 20)
    of = job(work=12, deadline=27, overhead=0)
    assert Replay(of, [five], TICK).run(baselines.greedy).refunded == 5 * 2.0
    assert Replay(of, [six], TICK).run(baselines.greedy).refunded == 0.0
    assert Replay(of, [five], TICK).run(baselines.greedy).cost == 12 * 2.0


def test_nothing_is_refunded_that_the_job_gave_back_itself() -> None:
    assert replay(scripted("spot", "on-demand", "on-demand"), "#####", job(1.5, 5)).refunded == 0.0


def test_a_tick_costs_the_price_at_its_beginning() -> None:
    changes = zone("#" * 9, (0, 12.0), (2, 24.0), (4, 6.0))
    outcome = Replay(job(work=6, deadline=9, overhead=0), [changes], TICK).run(baselines.greedy)
    assert outcome.cost == pytest.approx(2 * 2.0 + 2 * 4.0 + 2 * 1.0)


def test_a_price_holds_before_its_first_change_and_a_list_out_of_order_is_refused() -> None:
    assert zone("#", (5, 12.0), (6, 24.0)).price(0) == 12.0
    with pytest.raises(ValueError, match="prices of zone must be a list by time"):
        zone("#", (6, 12.0), (5, 24.0))


def test_the_optimum_moves_to_the_zone_that_becomes_cheap() -> None:
    zones = [zone("#" * 9, (0, 12.0), (3, 30.0)), zone("#" * 9, (0, 30.0), (3, 12.0))]
    assert least_cost(job(work=6, deadline=6, overhead=0), zones, TICK) == pytest.approx(6 * 2.0)
    assert least_cost(job(work=6, deadline=9, overhead=TICK), zones, TICK) == pytest.approx((3 + 5) * 2.0)


def test_a_job_of_several_zones_goes_where_there_is_spot() -> None:
    of = job(work=20, deadline=40, overhead=60)
    left, right = zone("###......." * 4, name="left"), zone("......###." * 4, name="right")
    both = replay_ours(of, [left, right], TICK, "free")
    assert both.on_demand_ticks == 0
    assert both.cost < min(replay_ours(of, [each], TICK, "free").cost for each in (left, right))


def test_a_refused_request_is_followed_by_one_in_the_other_zone() -> None:
    of = job(work=10, deadline=60, overhead=60, request=TICK)
    dry, wet = zone("." * 60, name="dry"), zone("#" * 60, name="wet")
    assert replay_ours(of, [dry, wet], TICK, "stopped").on_demand_ticks == 0
    robin = Replay(of, [wet, dry], TICK, "stopped", pick=RoundRobin()).run(baselines.uniform_progress)
    assert (robin.starts, robin.on_demand_ticks) == (1, 0)


def test_the_cheaper_of_two_zones_is_asked_first_and_a_move_is_made_when_prices_change_by_much() -> None:
    of = job(work=20, deadline=60, overhead=60)
    falls = zone("#" * 60, (0, 20.0), (10, 4.0), name="falls")
    constant = zone("#" * 60, (0, 12.0), name="constant")
    outcome = replay_ours(of, [falls, constant], TICK, "free")
    assert outcome.starts == 2
    assert outcome.cost == pytest.approx(10 * 2.0 + 11 * 4.0 / 6)


@pytest.mark.parametrize("sight", ["free", "paid", "stopped"])
def test_ours_is_in_time_on_any_trace_and_sight(sight: Sight) -> None:
    draw = random.Random(3)
    for _ in range(12):
        zones = [
            zone("".join(draw.choice(["#", "."]) * draw.randint(1, 9) for _ in range(60))[:60], name=name)
            for name in "ab"[: draw.randint(1, 2)]
        ]
        slack = draw.choice([2, 4, 12])
        of = job(30, 32 + slack, overhead=draw.choice([0, 180, 600]), request=draw.choice([TICK, 3 * TICK]))
        assert not replay_ours(of, zones, TICK, sight).late


def test_one_job_per_configuration_pays_for_boots_only_where_it_asks() -> None:
    assert job_of(52, 3).overhead == 180 and job_of(52, 3, "paid").overhead == 300
    assert job_of(52, 3, "paid").request == 0 < job_of(52, 3, "stopped").request


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

"""The operator's own rule, fed by the simulator."""

from __future__ import annotations

from spottrain_operator.policies.spot_or_on_demand import Overheads, Prices, Situation, choose
from spottrain_operator.policies.spot_runs import SpotRun

from bench.policy.simulate import Choice, View


class Ours:
    """Keeps the history that the operator would keep, and asks `choose`."""

    def __init__(self) -> None:
        self._history: tuple[SpotRun, ...] = ()
        self._recorded = 0

    def __call__(self, view: View) -> Choice:
        for tick in range(self._recorded, len(view.seen)):
            self._record(tick, view.seen[tick], view.tick)
        self._recorded = len(view.seen) - (view.seen[-1] is None)
        job = view.job
        situation = Situation(
            now=view.now,
            deadline=job.deadline,
            work_left=view.left,
            running=view.running,
            startup_left=view.overhead_left,
            spot=None if view.seen[-1] is None else view.available,
            history=self._history,
        )
        prices = Prices(spot=job.spot_price, on_demand=job.on_demand_price)
        overheads = Overheads(restart=job.overhead, on_demand_p99=0.0, decision=view.tick)
        return choose(situation, prices, overheads).choice

    def _record(self, tick: int, available: bool | None, seconds: float) -> None:
        """Extends the history by a tick's beginning; a tick of which nothing is known interrupts it."""
        now = tick * seconds
        last = self._history[-1] if self._history else None
        if available is None:
            return
        if last is None or (last.available != available or last.end < now - 1.5 * seconds):
            watched = last is not None and last.end >= now - 1.5 * seconds
            if last is not None and watched:
                ended = SpotRun(available=last.available, start=last.start, end=now)
                self._history = (*self._history[:-1], ended)
            self._history = (*self._history, SpotRun(available=available, start=now, end=now, ended=False))
        else:
            longer = SpotRun(available=available, start=last.start, end=now, ended=False)
            self._history = (*self._history[:-1], longer)

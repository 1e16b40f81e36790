"""The operator's own rules, fed by the simulator."""

from __future__ import annotations

from dataclasses import replace

from spottrain_operator.policies.spot_or_on_demand import Overheads, Prices, Situation, choose
from spottrain_operator.policies.spot_runs import SpotRun
from spottrain_operator.policies.spot_zones import SpotZone, rank

from bench.spot.simulate import Choice, View

History = tuple[SpotRun, ...]


class Ours:
    """Keeps the histories that the operator would keep; `choose` says where to run, `rank` in which zone."""

    def __init__(self) -> None:
        self._recorded = 0
        self._job: History = ()
        """What the job has seen in any zone."""
        self._zones: tuple[History, ...] = ()

    def __call__(self, view: View) -> Choice:
        self._record(view)
        zone, granted = self._best(view)
        job = view.job
        situation = Situation(
            now=view.now,
            deadline=job.deadline,
            work_left=view.left,
            running=view.running,
            startup_left=view.overhead_left,
            spot=view.spot,
            history=extended(self._job, view.spot, view.now, view.tick),
            granted=granted,
        )
        prices = Prices(spot=view.zones[zone].price(view.now), on_demand=job.on_demand_price)
        return choose(situation, prices, overheads_of(view)).choice

    def pick(self, view: View) -> int:
        """Returns the zone of the next request."""
        self._record(view)
        return self._best(view)[0]

    def _best(self, view: View) -> tuple[int, float | None]:
        """Returns the zone in which to be or to ask, and the chance of a request there (of several zones)."""
        if len(view.zones) == 1:
            return 0, None
        may = [index for index, known in enumerate(view.known) if known is not False] or range(
            len(view.zones)
        )
        held = view.zones[view.zone].name if view.running == "spot" else None
        zones = [
            SpotZone(
                name=view.zones[index].name,
                price=view.zones[index].price(view.now),
                history=extended(self._zones[index], view.known[index], view.now, view.tick),
            )
            for index in may
        ]
        best = rank(
            zones, overheads_of(view), now=view.now, running=held, value_of_time=view.job.on_demand_price
        )[0]
        return next(index for index in may if view.zones[index].name == best.name), best.chance

    def _record(self, view: View) -> None:
        """Adds the ticks that have passed since the last call, and an interruption at this one."""
        self._zones = self._zones or ((),) * len(view.zones)
        for number in range(self._recorded, len(view.seen)):
            seen, now = view.seen[number], number * view.tick
            anywhere = True if True in seen else False if False in seen else None
            self._job = extended(self._job, anywhere, now, view.tick)
            self._zones = tuple(
                extended(history, known, now, view.tick)
                for history, known in zip(self._zones, seen, strict=True)
            )
        self._recorded = len(view.seen)
        if view.interrupted:
            self._job = interrupted(self._job, view.now)
            self._zones = tuple(
                interrupted(history, view.now) if zone in view.interrupted else history
                for zone, history in enumerate(self._zones)
            )


def overheads_of(view: View) -> Overheads:
    return Overheads(
        restart=view.job.overhead, on_demand_p99=0.0, decision=view.tick, request=view.job.request
    )


def extended(history: History, available: bool | None, now: float, tick: float) -> History:
    """Adds the beginning of a tick; one of which nothing is known interrupts the history."""
    if available is None:
        return history
    last = history[-1] if history else None
    watched = last is not None and last.end >= now - 1.5 * tick and not last.ended
    if last is not None and watched:
        if last.available == available:
            return (*history[:-1], replace(last, end=now))
        history = (*history[:-1], replace(last, end=now, ended=True))
    return (*history, SpotRun(available=available, start=now, end=now, ended=False))


def interrupted(history: History, now: float) -> History:
    """Ends the run with spot that the history ends in."""
    if not history or history[-1].ended or not history[-1].available:
        return history
    return (*history[:-1], replace(history[-1], end=now, ended=True))

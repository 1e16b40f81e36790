"""The operator's own rule, fed by the simulator."""

from __future__ import annotations

from spottrain_operator.policies.spot_or_on_demand import Overheads, Place, Situation, choose

from bench.spot.simulate import Choice, View

PLACES: dict[Choice, Place] = {"spot": "spot", "on-demand": "on-demand", "wait": "nowhere"}


class Ours:
    """Remembers the last loss, which the operator has in the records of attempts."""

    def __init__(self) -> None:
        self._lost: float | None = None

    def __call__(self, view: View) -> Choice:
        if view.interrupted:
            self._lost = view.now
        if view.running == "wait" and view.granted:
            return "spot"
        job = view.job
        situation = Situation(
            now=view.now,
            begun=0.0,
            deadline=job.deadline,
            work=job.work,
            work_left=view.left,
            running=PLACES[view.running],
            lost=self._lost,
        )
        # A tick is what passes until the next decision.
        overheads = Overheads(restart=job.overhead, reserve=job.overhead, decision=view.tick)
        return "spot" if choose(situation, overheads).spot else "on-demand"

"""The rules that ours is compared with. None of them sees the future."""

from __future__ import annotations

import math

from bench.spot.simulate import TINY, Choice, Rule, View


def with_safety_net(rule: Rule) -> Rule:
    """Returns `rule`, overruled where one more tick without progress would make the job late.

    The net is that of "Can't Be Late": in whole ticks, and a job that works on spot stays there.
    """

    def decide(view: View) -> Choice:
        left = math.floor((view.job.deadline - view.now) / view.tick + TINY)
        needed = math.ceil((view.left + view.job.overhead) / view.tick - TINY / view.tick)
        if needed < left:
            return rule(view)
        return "spot" if view.running == "spot" and view.works else "on-demand"

    return decide


def on_demand(view: View) -> Choice:
    """Never uses spot."""
    return "on-demand"


def greedy(view: View) -> Choice:
    """Waits for spot as long as the safety net allows."""
    return "spot" if view.available else "wait"


def spot_else_on_demand(view: View) -> Choice:
    """Uses on-demand whenever there is no spot."""
    return "spot" if view.available else "on-demand"


def uniform_progress(view: View) -> Choice:
    """Keeps the share of work done above the share of time passed (NSDI'24)."""
    job = view.job
    if view.running == "on-demand":
        ahead = view.done > (view.now + 2 * job.overhead) * job.work / job.deadline
        return "spot" if view.available and ahead else "on-demand"
    if view.available:
        return "spot"
    return "wait" if view.done >= job.work * view.now / job.deadline else "on-demand"

"""One rank of a real gang: a process that a test commands line by line and that answers in JSON (`gangs`)."""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from spottrain.distributed.control_channel import ControlChannel, connect
from spottrain.distributed.stop_agreement import StopAgreement, led
from spottrain.distributed.world import World
from spottrain.errors import PeerLost
from torch.nn.parallel import DistributedDataParallel

TOTAL = 40


def loop(
    agreement: StopAgreement, rng: random.Random, step_once: Callable[[], object]
) -> tuple[int, list[int]]:
    """Where this rank ended, and where it saved."""
    saves: list[int] = []
    step = 0
    orders = agreement.begin(0, TOTAL)
    while not orders.stop and step < TOTAL:
        step_once()
        step += 1
        orders = agreement.at_boundary(step, save_due=lambda: rng.random() < 0.3)
        saves += [step] if orders.save else []
    return step, saves


def _pause(rng: random.Random, most: float) -> None:
    time.sleep(rng.uniform(0, most))


class Worker:
    def __init__(self, world: World, control: ControlChannel) -> None:
        self.world, self.control = world, control

    def scene(self, shared: random.Random, own: random.Random, step_once: Callable[[], object]) -> Any:
        """One run, in which random ranks ask for a stop at random moments."""
        agreement = led(self.control)
        times = [shared.uniform(0, 0.08) for _ in range(shared.choice([0, 1, 1, 1, 2, 3]))]
        rank_of = [shared.randrange(self.world.size) for _ in times]
        timers = [
            threading.Timer(after, agreement.request_stop, [1000.0 + after, "test"])
            for after, rank in zip(times, rank_of, strict=True)
            if rank == self.world.rank
        ]
        for timer in timers:
            timer.start()
        ended = loop(agreement, own, step_once)
        for timer in timers:
            timer.cancel()
            timer.join()
        return ended

    def scenes(self, number: int, seed: int) -> Any:
        """Without any collective: each rank has its own pace, and nothing holds the ranks together."""
        shared, own = random.Random(seed), random.Random(f"{seed} {self.world.rank}")
        ends = []
        for _ in range(number):
            pace = own.choice([0.0, 0.0005, 0.003])
            ends.append(self.scene(shared, own, partial(_pause, own, pace)))
        return ends

    def ddp(self, number: int, seed: int) -> Any:
        """With gradients averaged: a rank that did a step more would wait for ever."""
        shared, own = random.Random(seed), random.Random(f"{seed} {self.world.rank}")
        torch.manual_seed(seed)
        model = DistributedDataParallel(torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def step_once() -> None:
            _pause(own, 0.005)
            optimizer.zero_grad()
            model(torch.rand(8, 4) + self.world.rank).sum().backward()
            optimizer.step()

        ends = [self.scene(shared, own, step_once) for _ in range(number)]
        return [ends, [parameter.tolist() for parameter in model.parameters()]]

    def fork(self) -> Any:
        """A child, as a loader's worker, that outlives its parent."""
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        return child

    def collect(self) -> Any:
        """Rank 0: parts of a save of which one rank's never comes."""
        self.control.send_to_leader("save", b"")
        return [part is not None for part in self.control.collect("save", timeout=60.0)]

    def part(self) -> Any:
        self.control.send_to_leader("save", b"")

    def train(self) -> Any:
        """Until somebody is lost."""
        agreement = led(self.control)
        step = 0
        try:
            agreement.begin(0, None)
            while True:
                time.sleep(0.001)
                step += 1
                agreement.at_boundary(step, save_due=lambda: False)
        except PeerLost as lost:
            return str(lost)

    def leave(self) -> Any:
        self.control.close()
        dist.destroy_process_group()


def main() -> None:
    world = World.from_env(os.environ)
    dist.init_process_group("gloo")
    worker = Worker(world, connect(world, host=os.environ["MASTER_ADDR"]))
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(getattr(worker, name)(*arguments)), flush=True)


if __name__ == "__main__":
    main()

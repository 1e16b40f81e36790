"""Lines between ranks that a test moves itself: nothing arrives before the test lets it."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final, cast

from spottrain.distributed.control_channel import ControlChannel
from spottrain.distributed.stop_agreement import Order, StopAgreement
from spottrain.distributed.world import World
from spottrain.errors import PeerLost


class Nothing(Exception):
    """This rank would wait now."""


@dataclass
class Wire:
    """Both directions between rank 0 and one other rank."""

    orders: deque[Any] = field(default_factory=deque)
    requests: deque[Any] = field(default_factory=deque)


@dataclass
class FakeLine:
    """Rank 0 has all wires, another rank has its own."""

    world: World
    wires: dict[int, Wire]
    lost: PeerLost | None = None
    arrived: list[tuple[int, Any]] = field(default_factory=list)
    """At rank 0: requests that it has not read."""

    @property
    def gone(self) -> list[int]:
        return []

    def broadcast(self, name: str, facts: Any) -> None:
        for wire in self.wires.values():
            wire.orders.append(json.loads(json.dumps(facts)))

    def receive(self, name: str) -> Any:
        orders = self.wires[self.world.rank].orders
        if not orders:
            raise Nothing
        return orders.popleft()

    def send_to_leader(self, name: str, facts: Any) -> None:
        self.wires[self.world.rank].requests.append(json.loads(json.dumps(facts)))

    def take(self, name: str) -> list[tuple[int, Any]]:
        found, self.arrived = self.arrived, []
        return found


@dataclass
class Player:
    """One rank's loop, a boundary at a time."""

    agreement: StopAgreement
    step: int
    total: int
    begun: bool = False
    stopped: bool = False
    saves: tuple[int, ...] = ()

    @property
    def ended(self) -> bool:
        return self.stopped or (self.begun and self.step == self.total)

    def go_on(self, save: bool) -> bool:
        """Comes to the next boundary, or waits at one. False when it waits."""
        try:
            self.act(self._ask(save))
        except Nothing:
            return False
        return True

    def _ask(self, save: bool) -> Order:
        if not self.begun:
            return self.agreement.begin(self.step, self.total)
        return self.agreement.at_boundary(self.step + 1, save=save)

    def act(self, orders: Order) -> None:
        self.step += self.begun
        self.begun = True
        self.stopped = orders.stop
        if orders.save:
            self.saves += (self.step,)


STEP_SECONDS: Final = 0.1


@dataclass
class Gang:
    """Ranks whose every move the test chooses. The clock moves with rank 0's steps."""

    players: list[Player]
    lines: list[FakeLine]
    wires: dict[int, Wire]
    now: list[float]

    @classmethod
    def of(cls, size: int, *, total: int, start: int = 0) -> Gang:
        wires = {rank: Wire() for rank in range(1, size)}
        worlds = [World(rank=rank, size=size, local_rank=rank, local_size=size) for rank in range(size)]
        lines = [FakeLine(world, wires) for world in worlds]
        now = [0.0]
        players = [
            Player(StopAgreement(cast(ControlChannel, line), clock=lambda: now[0]), start, total)
            for line in lines
        ]
        return cls(players, lines, wires, now)

    def move(self, rank: int, *, seconds: float = STEP_SECONDS, save: bool = False) -> bool:
        """A step of this rank, in so many seconds, as far as rank 0's clock is concerned."""
        player = self.players[rank]
        if player.ended:
            return False
        self.now[0] += seconds if rank == 0 else 0
        return player.go_on(save)

    def ask_for_stop(self, rank: int, deadline: float) -> None:
        self.players[rank].agreement.request_stop(deadline, "SIGTERM")

    def deliver(self, rank: int) -> bool:
        """Rank 0 receives one request of this rank."""
        requests = self.wires[rank].requests if rank else None
        if not requests:
            return False
        self.lines[0].arrived.append((rank, requests.popleft()))
        return True

    def finish(self) -> None:
        """Everybody goes on until everybody has ended. Fails where nobody can."""
        while not all(player.ended for player in self.players):
            if not any([self.move(rank) for rank in range(len(self.players))]):
                raise AssertionError(f"nobody can go on: {self.players}")

    def state(self) -> str:
        """Equal for gangs that cannot be told apart from here on."""
        facts: list[object] = [self.wires, self.lines[0].arrived]
        for player in self.players:
            agreement = player.agreement
            orders = agreement._steps
            inside = [agreement.stop_deadline, agreement.stop_reason, orders.last, orders.until]
            inside.append(round(self.now[0] - orders.made_at, 6))
            facts += [player.step, player.begun, player.stopped, player.saves, *inside]
        return repr(facts)

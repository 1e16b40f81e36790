"""Breadth-first search of all that can happen in `headworld.py`. Called by the model tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from spottrain.checkpoint.head.compare_and_swap import Finished, Put, Step, begin
from spottrain.checkpoint.head.state import Claiming, Identity, beyond
from spottrain.errors import RunError

from tests.support.headrules import Violation, check_leases, demand
from tests.support.headworld import NAMES, Ids, Process, Rules, Scenario, Store, World, whole

State = tuple[int, ...]
"""store, flying, faults left, crashes left, whether HEAD may yet vanish, then the processes; all interned."""
FIXED = 5
ALONE = 8
"""Requests within which a process that nobody disturbs must come to the end of a change."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    scenario: str
    states: int
    moves: int
    heads: int
    complete: bool
    """False when the bound on states was reached first."""
    violation: str = ""
    trace: tuple[str, ...] = ()


@dataclass
class Explorer:
    scenario: Scenario
    rules: Rules = field(default_factory=Rules)

    def __post_init__(self) -> None:
        self.world = World(scenario=self.scenario, rules=self.rules)
        self.stores, self.processes, self.puts, self.sets = Ids(), Ids(), Ids(), Ids()
        self._moves: dict[tuple[int, int], list[tuple[str, int, int, int, int, int]]] = {}
        self._landings: dict[tuple[int, int], int] = {}
        self._alone: set[tuple[int, int]] = set()
        self._claimable: set[Store] = set()
        self._leased: set[State] = set()
        self.came: dict[State, tuple[State | None, str, str]] = {}
        """State -> the one before it, who moved, and how."""

    def run(self, limit: int) -> Result:
        gc.disable()  # millions of small tuples, and no cycles among them
        try:
            return self._run(limit)
        finally:
            gc.enable()

    def _run(self, limit: int) -> Result:
        store, processes = self.world.first()
        ids = [self.processes(p) for p in processes]
        first: State = (
            self.stores(store),
            self.sets(frozenset()),
            self.scenario.faults,
            self.scenario.crashes,
            int(self.scenario.vanish),
            *ids,
        )
        self.came = {first: (None, "", "")}
        queue, moves = [first], 0
        for state in queue:  # grows while it is walked
            try:
                for who, label, after in self._successors(state):
                    moves += 1
                    if after not in self.came:
                        self.came[after] = (state, who, label)
                        queue.append(after)
                        self._check(after)
            except Violation as violation:
                return self._result(moves, False, str(violation), self._trace(state))
            if len(queue) > limit:
                return self._result(moves, False)
        return self._result(moves, True)

    def _result(self, moves: int, complete: bool, violation: str = "", trace: tuple[str, ...] = ()) -> Result:
        return Result(
            scenario=self.scenario.name,
            states=len(self.came),
            moves=moves,
            heads=len(self.world.etags.things),
            complete=complete,
            violation=violation,
            trace=trace,
        )

    def _trace(self, state: State) -> tuple[str, ...]:
        labels: list[str] = []
        at: State | None = state
        while at is not None:
            at, who, label = self.came[at]
            labels.append(f"{who}: {label}" if who else label)
        return tuple(reversed(labels))

    # --- what can happen next ---------------------------------------------------------------------
    def _successors(self, state: State) -> Iterator[tuple[str, str, State]]:
        yield from self._by_processes(state)
        yield from self._by_the_network(state)
        if state[4]:
            gone = self.stores(replace(self.stores.things[state[0]], head=None))
            yield "", "HEAD vanishes", (gone, *state[1:4], 0, *state[FIXED:])

    def _by_processes(self, state: State) -> Iterator[tuple[str, str, State]]:
        store, flying, faults, crashes, vanish = state[:FIXED]
        for place in range(FIXED, len(state)):
            before, behind, who = state[FIXED:place], state[place + 1 :], NAMES[place - FIXED]
            for label, process, after, flies, fault, crash in self._moves_of(state[place], store):
                if fault > faults or crash > crashes:
                    continue
                air = flying if flies < 0 else self.sets(self.sets.things[flying] | {flies})
                rest = (faults - fault, crashes - crash, vanish)
                yield who, label, (after, air, *rest, *before, process, *behind)

    def _moves_of(self, process: int, store: int) -> list[tuple[str, int, int, int, int, int]]:
        known = self._moves.get((process, store))
        if known is None:
            known = self._moves[process, store] = [
                (
                    move.label,
                    self.processes(move.process),
                    self.stores(move.store),
                    self.puts(move.flies) if move.flies else -1,
                    move.faults,
                    move.crashes,
                )
                for move in self.world.moves(self.processes.things[process], self.stores.things[store])
            ]
        return known

    def _by_the_network(self, state: State) -> Iterator[tuple[str, str, State]]:
        """A request in the air lands. One that would be refused changes nothing, so it need not land."""
        flying: frozenset[int] = self.sets.things[state[1]]
        for put in flying:
            after = self._landed(put, state[0])
            if after != state[0]:
                yield "", "a late put lands", (after, self.sets(flying - {put}), *state[2:])

    def _landed(self, put: int, store: int) -> int:
        if (put, store) not in self._landings:
            after, _ = self.world.apply(self.puts.things[put], self.stores.things[store])
            self._landings[put, store] = self.stores(after)
        return self._landings[put, store]

    # --- what must hold in a state ----------------------------------------------------------------
    def _check(self, state: State) -> None:
        people = state[FIXED:]
        if people not in self._leased:
            self._leased.add(people)
            processes: list[Process] = [self.processes.things[i] for i in people]
            check_leases([p.lease for p in processes if p.lease is not None])
        for number in people:
            if (number, state[0]) not in self._alone:
                self._alone.add((number, state[0]))
                self._check_alone(self.processes.things[number], self.stores.things[state[0]])

    def _check_alone(self, process: Process, store: Store) -> None:
        """Undisturbed, whoever is in the middle of a change ends it, and a newcomer can claim."""
        if process.step is not None:
            self._finishes(process.step, store, by_rule=True)
        if store not in self._claimable:
            self._claimable.add(store)
            owner = store.head.jobUID if store.head else "A"
            newcomer = Identity(job_uid=owner, job="newcomer", attempt=99)
            lost = self.scenario.vanish or "copy" in self.scenario.tools  # a copy that was cut short
            claim = Claiming(who=newcomer, remains=whole(store))
            self._finishes(
                begin(claim, "newcomer"), store, by_rule=lost and bool(beyond(claim.remains, store.head))
            )

    def _finishes(self, step: Step, store: Store, *, by_rule: bool) -> None:
        """`by_rule`: whether a refusal is an end, too."""
        for number in range(ALONE):
            if isinstance(step, Finished):
                return
            request = self.rules.request(step)
            try:
                if isinstance(request, Put):
                    store, reply = self.world.apply(request, store)
                else:
                    reply = self.world.read(store)
                step = self.rules.on(step, reply, f"alone{number}")
            except RunError as error:
                demand(by_rule, f"the newest attempt cannot claim: {error}")
                return
        demand(isinstance(step, Finished), "alone and undisturbed, a change does not come to an end")

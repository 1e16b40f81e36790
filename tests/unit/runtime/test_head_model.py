"""HEAD's protocol in every interleaving of a small world, and broken protocols that the search must catch.

bench/head_explore.py runs larger worlds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import pytest
from spottrain.cas import Finished, Missing, NoAnswer, Put, Refused, Reply, Request, Step, Writing
from spottrain.errors import Superseded
from spottrain.head import (
    Claiming,
    ClaimPolicy,
    Committing,
    Entry,
    Head,
    Identity,
    State,
    Tenure,
    present,
)

from tests.support.headexplore import Explorer
from tests.support.headscenarios import FALL_BACK, SCENARIOS, SUCCESSION, SWEEP, TWO_ATTEMPTS, VANISH, head
from tests.support.headworld import UNCONDITIONAL, Rules, Scenario

LIMIT = 400_000
"""States of one world; more would mean that a change made the protocol much wider."""


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.name)
def test_no_interleaving_breaks_a_rule(scenario: Scenario) -> None:
    result = Explorer(scenario).run(LIMIT)
    print(f"{result.scenario}: {result.states} states, {result.moves} moves, {result.heads} HEADs")
    assert not result.violation, "\n".join((result.violation, *result.trace))
    assert result.complete, f"more than {LIMIT} states"


# --- protocols that are wrong ------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True, slots=True)
class ClaimingWhateverTheAttempt(Claiming):
    def decide(self, head: Head | None, nonce: str) -> Head | None:
        if head is None or head.jobUID != self.who.job_uid:
            return super(ClaimingWhateverTheAttempt, self).decide(head, nonce)
        return replace(head, attempt=self.who.attempt, term=head.term + 1, nonce=nonce, state=State.ACTIVE)


@dataclass(frozen=True, kw_only=True, slots=True)
class CommittingWhoeverOwns(Committing):
    def decide(self, head: Head | None, nonce: str) -> Head | None:
        return replace(present(head), nonce=nonce, checkpoints=(self.entry, *present(head).checkpoints[:1]))


@dataclass(frozen=True, kw_only=True, slots=True)
class PruningByStep(Committing):
    def decide(self, head: Head | None, nonce: str) -> Head | None:
        body = super(PruningByStep, self).decide(head, nonce)
        if body is None:
            return None
        entries = (self.entry, *present(head).checkpoints)
        best = sorted(entries, key=lambda entry: entry.step)[-self.keep :]
        return replace(body, checkpoints=tuple(entry for entry in entries if entry in best))


def claiming(who: Identity, policy: ClaimPolicy) -> Claiming:
    return ClaimingWhateverTheAttempt(who=who, policy=policy)


def committing_anyway(tenure: Tenure, entry: Entry, keep: int) -> Committing:
    return CommittingWhoeverOwns(tenure=tenure, entry=entry, keep=keep)


def pruning_by_step(tenure: Tenure, entry: Entry, keep: int) -> Committing:
    return PruningByStep(tenure=tenure, entry=entry, keep=keep)


def without_if_match(step: Step) -> Request:
    request = step.request  # type: ignore[union-attr]
    return replace(request, if_match=UNCONDITIONAL) if isinstance(request, Put) else request


def creating_on_404(step: Step, reply: Reply, nonce: str) -> Step:
    if isinstance(step, Writing) and isinstance(reply, Missing):
        return replace(step, seen=None)
    return step.on(reply, nonce)  # type: ignore[union-attr]


def optimistic(step: Step, reply: Reply, nonce: str) -> Step:
    if isinstance(step, Writing) and isinstance(reply, NoAnswer):
        return Finished(head=step.body, etag="?", dropped=step.dropped)
    return step.on(reply, nonce)  # type: ignore[union-attr]


def pessimistic(lost: type[Reply]) -> Callable[[Step, Reply, str], Step]:
    def on(step: Step, reply: Reply, nonce: str) -> Step:
        if isinstance(step, Writing) and isinstance(reply, lost):
            raise Superseded("taken for granted")
        return step.on(reply, nonce)  # type: ignore[union-attr]

    return on


def sweeping_all(keys: Iterable[str], head: Head, tenure: Tenure) -> list[str]:
    return [key for key in keys if key.rsplit("/", 1)[0] + "/" not in head.keys]


MUTANTS = {
    "every body has the same nonce": (SUCCESSION, Rules(nonce=lambda name, number: "same")),
    "a 404 on If-Match falls back to creating HEAD": (VANISH, Rules(on=creating_on_404)),
    "pruning goes by step": (FALL_BACK, Rules(committing=pruning_by_step)),
    "HEAD is written without If-Match": (SUCCESSION, Rules(request=without_if_match)),
    "a claim ignores the attempt": (TWO_ATTEMPTS, Rules(claiming=claiming)),
    "a commit ignores who owns HEAD": (SUCCESSION, Rules(committing=committing_anyway)),
    "no answer counts as done": (SUCCESSION, Rules(on=optimistic)),
    "no answer counts as failed": (SUCCESSION, Rules(on=pessimistic(NoAnswer))),
    "a refusal counts as superseded without a look": (SUCCESSION, Rules(on=pessimistic(Refused))),
    "the sweep ignores terms": (SWEEP, Rules(orphans=sweeping_all)),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_search_finds_a_broken_protocol(name: str) -> None:
    scenario, rules = MUTANTS[name]
    result = Explorer(scenario, rules).run(LIMIT)
    print(f"{name}: {result.violation} after {result.states} states, {len(result.trace) - 1} moves deep")
    assert result.violation


def test_a_job_that_is_done_stays_done_only_because_the_claim_looks() -> None:
    scenario = replace(SUCCESSION, head=head(5, 4, state=State.DONE))
    assert not Explorer(scenario).run(LIMIT).violation
    assert "done" in Explorer(scenario, Rules(claiming=claiming)).run(LIMIT).violation

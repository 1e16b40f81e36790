"""HEAD's protocol in every interleaving of a small world, and broken protocols that the search must catch.

Larger worlds are heavy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from spottrain.checkpoint.head.admin import Adopting, Pruning, repaired
from spottrain.checkpoint.head.compare_and_swap import (
    Finished,
    Missing,
    NoAnswer,
    Put,
    Refused,
    Reply,
    Request,
    Step,
    Writing,
)
from spottrain.checkpoint.head.state import (
    BEST,
    Claiming,
    Committing,
    Entry,
    Head,
    HeadState,
    Lease,
    present,
    unnamed,
)
from spottrain.contract import term_of_key
from spottrain.errors import Superseded

from tests.support.headexplore import Explorer
from tests.support.headscenarios import (
    BEST_KEPT,
    COPIED_AGAIN,
    COPIED_OVER,
    FALL_BACK,
    LONGER,
    PRUNED,
    PRUNED_TWICE,
    SCENARIOS,
    SUCCESSION,
    SWEEP,
    TWO_ATTEMPTS,
    VANISH,
    VANISH_REPAIRED,
    VANISH_SWEPT,
    head,
)
from tests.support.headworld import UNCONDITIONAL, Rules, Scenario
from tests.support.heavy import sample

LIMIT = 400_000
"""States of one world; more would mean that a change made the protocol much wider."""


def explore(scenario: Scenario) -> None:
    result = Explorer(scenario).run(LIMIT)
    print(f"{result.scenario}: {result.states} states, {result.moves} moves, {result.heads} HEADs")
    assert not result.violation, "\n".join((result.violation, *result.trace))
    assert result.complete, f"more than {LIMIT} states"


@pytest.mark.parametrize("scenario", sample([*SCENARIOS, *LONGER], *SCENARIOS), ids=lambda s: s.name)
def test_no_interleaving_breaks_a_rule(scenario: Scenario) -> None:
    explore(scenario)


# --- protocols that are wrong ------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Broken:
    """An intent that decides by another rule than its own."""

    intent: Any
    rule: Callable[[Any, Head | None, str], Head | None]

    def decide(self, head: Head | None, nonce: str) -> Head | None:
        return self.rule(self.intent, head, nonce)


def claiming_whatever_the_attempt(intent: Claiming, head: Head | None, nonce: str) -> Head | None:
    if head is None or head.jobUID != intent.who.job_uid:
        return intent.decide(head, nonce)
    return replace(head, attempt=intent.who.attempt, term=head.term + 1, nonce=nonce, state=HeadState.ACTIVE)


def claiming_whatever_is_there(intent: Claiming, head: Head | None, nonce: str) -> Head | None:
    return replace(intent, remains=()).decide(head, nonce)


def committing_whoever_owns(intent: Committing, head: Head | None, nonce: str) -> Head | None:
    return replace(present(head), nonce=nonce, checkpoints=(intent.entry, *present(head).checkpoints[:1]))


def pruning_by_step(intent: Committing, head: Head | None, nonce: str) -> Head | None:
    if (body := intent.decide(head, nonce)) is None:
        return None
    entries = (intent.entry, *present(head).checkpoints)
    best = sorted(entries, key=lambda entry: entry.step)[-intent.keep :]
    return replace(body, checkpoints=tuple(entry for entry in entries if entry in best))


def beside_the_old_best(intent: Committing, head: Head | None, nonce: str) -> Head | None:
    if (body := intent.decide(head, nonce)) is None:
        return None
    marked = {entry.key for entry in present(head).checkpoints if entry.keptAs == BEST}
    entries = (replace(e, keptAs=BEST) if e.key in marked else e for e in body.checkpoints)
    return replace(body, checkpoints=tuple(entries))


def over_the_best(intent: Committing, head: Head | None, nonce: str) -> Head | None:
    seen = present(head)
    plain = tuple(replace(e, keptAs="") if e.keptAs == BEST else e for e in seen.checkpoints)
    return intent.decide(replace(seen, checkpoints=plain), nonce)


def pruning_under_a_job(intent: Pruning, head: Head | None, nonce: str) -> Head | None:
    seen = present(head)
    left = tuple(entry for entry in seen.checkpoints if entry.key not in intent.doomed)
    return replace(seen, nonce=nonce, checkpoints=left) if left != seen.checkpoints else None


def adopting_whoever_owns(intent: Adopting, head: Head | None, nonce: str) -> Head | None:
    term = term_of_key(intent.entry.key)
    assert term is not None
    done = replace(head, state=HeadState.DONE, term=term - 1) if head else None
    body = intent.decide(done, nonce)
    return replace(body, term=head.term + 1) if body and head else body


def broken(**rules: Callable[[Any, Head | None, str], Head | None]) -> Rules:
    """The protocol with one intent that decides by another rule."""
    [(name, rule)] = rules.items()
    right = getattr(Rules(), name)
    changed: dict[str, Any] = {name: lambda *facts: Broken(right(*facts), rule)}
    return Rules(**changed)


def without_if_match(step: Step) -> Request:
    request = step.request  # type: ignore[union-attr]
    return replace(request, if_match=UNCONDITIONAL) if isinstance(request, Put) else request


def tools_without_if_match(step: Step) -> Request:
    by_tool = isinstance(step, Writing) and isinstance(step.intent, Pruning | Adopting)
    return without_if_match(step) if by_tool else step.request  # type: ignore[union-attr]


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


def deleting_at_once(after: type[Reply]) -> Callable[[Step, Reply, str], Step]:
    def on(step: Step, reply: Reply, nonce: str) -> Step:
        if isinstance(step, Writing) and isinstance(step.intent, Pruning) and isinstance(reply, after):
            return Finished(head=step.body, etag="?", dropped=step.dropped)
        return step.on(reply, nonce)  # type: ignore[union-attr]

    return on


def repairing_at_the_lost_term(entries: Iterable[Entry], keys: Iterable[str], nonce: str) -> Head:
    head = repaired(entries, keys, None, nonce=nonce)
    return replace(head, term=head.term - 1)


def tidying_under_a_job(keys: Iterable[str], head: Head) -> list[str]:
    return unnamed(keys, head, below=head.term + 1)


def sweeping_all(keys: Iterable[str], head: Head, lease: Lease) -> list[str]:
    return [key for key in keys if key.rsplit("/", 1)[0] + "/" not in head.keys]


def sweeping_without_owning(keys: Iterable[str], head: Head, lease: Lease) -> list[str]:
    return unnamed(keys, head, below=lease.term)


MUTANTS = {
    "every body has the same nonce": (SUCCESSION, Rules(nonce=lambda name, number: "same")),
    "a 404 on If-Match falls back to creating HEAD": (VANISH, Rules(on=creating_on_404)),
    "pruning goes by step": (FALL_BACK, broken(committing=pruning_by_step)),
    "HEAD is written without If-Match": (SUCCESSION, Rules(request=without_if_match)),
    "a claim ignores the attempt": (TWO_ATTEMPTS, broken(claiming=claiming_whatever_the_attempt)),
    "a claim starts over where HEAD is gone": (VANISH, broken(claiming=claiming_whatever_is_there)),
    "a HEAD that is made again has the term of the lost one": (
        VANISH_REPAIRED,
        Rules(repaired=repairing_at_the_lost_term),
    ),
    "a commit ignores who owns HEAD": (SUCCESSION, broken(committing=committing_whoever_owns)),
    "no answer counts as done": (SUCCESSION, Rules(on=optimistic)),
    "no answer counts as failed": (SUCCESSION, Rules(on=pessimistic(NoAnswer))),
    "a refusal counts as superseded without a look": (SUCCESSION, Rules(on=pessimistic(Refused))),
    "the sweep ignores terms": (SWEEP, Rules(orphans=sweeping_all)),
    "the sweep does not look whether HEAD is still its own": (
        VANISH_SWEPT,
        Rules(orphans=sweeping_without_owning),
    ),
    "a new best leaves the old one its mark": (BEST_KEPT, broken(committing=beside_the_old_best)),
    "a commit counts the best among the others": (BEST_KEPT, broken(committing=over_the_best)),
    "a person prunes under a running job": (PRUNED, broken(pruning=pruning_under_a_job)),
    "a pruning deletes what it failed to drop": (PRUNED, Rules(on=deleting_at_once(Refused))),
    "an unanswered pruning counts as done": (PRUNED_TWICE, Rules(on=deleting_at_once(NoAnswer))),
    "a pruning goes without If-Match": (PRUNED, Rules(request=tools_without_if_match)),
    "a person tidies what a running job uploads": (PRUNED, Rules(leftovers=tidying_under_a_job)),
    "a copy takes HEAD from whoever owns it": (COPIED_OVER, broken(adopting=adopting_whoever_owns)),
    "a copy is written without a condition": (COPIED_AGAIN, Rules(request=tools_without_if_match)),
}


def test_the_documentation_counts_the_broken_protocols() -> None:
    page = Path(__file__).parents[4] / "docs" / "start" / "what.md"
    assert f"{len(MUTANTS)} deliberately broken variants" in page.read_text()


@pytest.mark.parametrize("name", MUTANTS)
def test_the_search_finds_a_broken_protocol(name: str) -> None:
    scenario, rules = MUTANTS[name]
    result = Explorer(scenario, rules).run(LIMIT)
    print(f"{name}: {result.violation} after {result.states} states, {len(result.trace) - 1} moves deep")
    assert result.violation


def test_a_job_that_is_done_stays_done_only_because_the_claim_looks() -> None:
    scenario = replace(SUCCESSION, head=head(5, 4, state=HeadState.DONE))
    assert not Explorer(scenario).run(LIMIT).violation
    assert "done" in Explorer(scenario, broken(claiming=claiming_whatever_the_attempt)).run(LIMIT).violation

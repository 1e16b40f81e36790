"""A job's life as a story: what is there at each look, and the facts that must follow, as short words.

Facts of a look: `phase=Waiting`, `attempt=2`, `failures=0`, `interruptions=1`, `noProgress=0`, `durable=9`,
`state=Training`; `interrupted` until an attempt trains again, and `outage` while the store does not respond;
each condition as `Running=False/NodeNotReady`; each event as `warns=Reason` or `tells=Reason`; of attempts
`cause1=Failed`, `reason1=...`, `stopping1=Moved`, `charged1`, and of the last one `on=Spot` and `pool=a`;
what is done, by ranks: `creates=0,1`, `deletes=0` (`deletes-of-2`: of that attempt), `releases=0`,
`annotates=1`, `provides=services`, `holds=True`, `ends` (the object is deleted); `start=+10`
(seconds from now) or `start=now`; `again=30` (whole seconds), and `unwritten` where the status is as before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from spottrain_operator.api.bookkeeping import NO_BOOKS
from spottrain_operator.api.observed import Observed, PodView
from spottrain_operator.api.training_job import AttemptRecord, Status
from spottrain_operator.control.actions import (
    Annotate,
    Create,
    Delete,
    DeleteJob,
    Hold,
    Plan,
    Provide,
    Release,
)
from spottrain_operator.control.plan import plan
from spottrain_operator.names import RANK_LABEL

from tests.builders import after, make_job, make_node, make_observed, raw_spec, started


def facts(made: Plan, o: Observed) -> list[str]:
    """The facts of this plan, and of the status after it."""
    status = made.status or o.job.status
    found = [f"phase={status.phase}", f"attempt={status.attempt}", f"failures={status.failures}"]
    found += [f"interruptions={status.interruptions}", f"noProgress={status.no_progress}"]
    found += [f"durable={status.known_durable_step}", f"state={status.state}"]
    found += ["interrupted"] * (status.interruption_time is not None)
    found += ["outage"] * (status.store_unreachable_time is not None)
    found += [f"{c.type}={c.status}/{c.reason}" for c in status.conditions]
    found += [f"{'warns' if e.warning else 'tells'}={e.reason}" for e in made.events]
    for record in status.attempts:
        found += _of_attempt(record)
    if status.attempts:
        found += [f"on={status.attempts[-1].capacity_type}", f"pool={status.attempts[-1].pool}"]
    found += _done(made)
    if status.next_start is not None:
        found.append(f"start=+{(status.next_start - o.now).total_seconds():g}")
    else:
        found.append("start=now")
    if made.recheck_after is not None:
        found.append(f"again={made.recheck_after.total_seconds():.0f}")
    return found + ["unwritten"] * (made.status is None)


def _of_attempt(record: AttemptRecord) -> Iterator[str]:
    n = record.number
    if record.cause:
        yield f"cause{n}={record.cause}"
    if record.stopping:
        yield f"stopping{n}={record.stopping}"
    if record.reason:
        yield f"reason{n}={record.reason}"
    if record.charged:
        yield f"charged{n}"


def _done(made: Plan) -> Iterator[str]:
    actions = (*made.before, *made.after)
    for kind, word in ((Delete, "deletes"), (Release, "releases"), (Annotate, "annotates")):
        pods = [a.pod for a in actions if isinstance(a, kind)]
        if pods:
            yield f"{word}={','.join(str(rank) for rank in sorted(pod.rank for pod in pods))}"
            yield from (f"{word}-of-{number}" for number in {pod.attempt for pod in pods})
    created = [
        a.manifest["metadata"]["labels"].get(RANK_LABEL, "0") for a in actions if isinstance(a, Create)
    ]
    if created:
        yield f"creates={','.join(created)}"
    yield from (f"provides={a.kind}" for a in actions if isinstance(a, Provide))
    yield from (f"holds={a.on}" for a in actions if isinstance(a, Hold))
    yield from ("ends" for a in actions if isinstance(a, DeleteJob))


def check(expected: str, made: Plan, o: Observed) -> None:
    """Each word is a fact, or the beginning of one up to `/` or `=`; `!word`: no fact begins so."""
    known = facts(made, o)
    for word in expected.split():
        if word.startswith("!"):
            assert not [fact for fact in known if fact.startswith(word[1:])], (word, known)
        else:
            assert [f for f in known if f == word or f.startswith((f"{word}/", f"{word}="))], (word, known)


def follows(expected: str, o: Observed) -> Plan:
    """The plan of one look, of which these facts are true."""
    made = plan(o)
    check(expected, made, o)
    return made


class Story:
    """A job that is looked at again and again; each look knows what the one before wrote."""

    def __init__(self, status: Status | None = None, **spec: Any) -> None:
        self.status, self.spec, self.books = status or started(), spec, NO_BOOKS

    def look(
        self, expected: str, *pods: PodView, at: float = 0, nodes: Any = None, spec: Any = None, **more: Any
    ) -> Plan:
        """`spec`: fields that a person changes, from now on; `meta`: of the job's metadata."""
        self.spec |= spec or {}
        job = make_job(raw_spec(**self.spec), status=self.status, **more.pop("meta", {}))
        nodes = (make_node(),) if nodes is None else tuple(nodes)
        shown = {name: more.pop(name) for name in ("sample", "annotated_at", "admitted") if name in more}
        o = replace(make_observed(*pods, job=job, nodes=nodes, now=after(at), **shown), **more)
        made = follows(expected, replace(o, books=self.books))
        self.status, self.books = made.status or self.status, made.books or self.books
        return made

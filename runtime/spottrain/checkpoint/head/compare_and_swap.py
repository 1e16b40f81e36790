"""One change of HEAD by compare-and-swap: explicit states, no I/O.

A driver sends each state's `request` to the store and passes the reply to `on`, which returns the next state.
An intent of `state.py` decides the new HEAD. tests/unit/runtime/checkpoint/test_head_model.py drives it
with a store that loses, delays and repeats requests.

    Reading ──found, absent──▶ intent.decide ──▶ Writing ──stored──▶ Finished
       ▲                            │ None              │ refused (412, 409) or no answer
       │                            └──▶ Finished       ▼
       └──────────────── own nonce: Finished; old ETag: write again; else decide again

A write that is sent again has the same body and nonce, so it does not matter which copy arrives.
"""

from __future__ import annotations

from dataclasses import dataclass

from spottrain.checkpoint.head.state import Head, Intent, present


@dataclass(frozen=True, slots=True)
class Get:
    """GET HEAD."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Put:
    """PUT HEAD if its ETag is `if_match`; with None, only if HEAD does not exist (If-None-Match: *)."""

    head: Head
    if_match: str | None


Request = Get | Put


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    head: Head
    etag: str


@dataclass(frozen=True, slots=True)
class Absent:
    """404 on a GET."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredHead:
    etag: str


@dataclass(frozen=True, slots=True)
class Refused:
    """412 or 409: another writer was first, or an earlier copy of this request was."""

    why: str = ""


@dataclass(frozen=True, slots=True)
class Missing:
    """404 on a PUT with If-Match."""


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """Timeout, broken connection or 5xx: a PUT may have been applied, or may still be applied later."""

    why: str = ""


Reply = Found | Absent | StoredHead | Refused | Missing | NoAnswer


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    intent: Intent
    sent: Writing | None = None
    """The write whose outcome this read determines."""

    @property
    def request(self) -> Request:
        return Get()

    def on(self, reply: Reply, nonce: str) -> Step:
        match reply:
            case Found():
                return self._found(reply, nonce)
            case Absent():
                if self.sent is None:
                    return self._decide(None, nonce)
                if self.sent.seen is None:
                    return self.sent
                present(None)
        return self

    def _found(self, found: Found, nonce: str) -> Step:
        if self.sent is not None:
            if found.head.nonce == self.sent.body.nonce:
                return Finished(head=found.head, etag=found.etag, dropped=self.sent.dropped)
            if self.sent.seen is not None and found.etag == self.sent.seen.etag:
                return self.sent
        return self._decide(found, nonce)

    def _decide(self, seen: Found | None, nonce: str) -> Step:
        body = self.intent.decide(seen.head if seen else None, nonce)
        if body is not None:
            return Writing(intent=self.intent, seen=seen, body=body)
        assert seen is not None, "every intent writes if HEAD is absent"
        return Finished(head=seen.head, etag=seen.etag)


@dataclass(frozen=True, kw_only=True, slots=True)
class Writing:
    intent: Intent
    seen: Found | None
    body: Head

    @property
    def request(self) -> Request:
        return Put(head=self.body, if_match=self.seen.etag if self.seen else None)

    @property
    def dropped(self) -> tuple[str, ...]:
        """Keys that this write drops from HEAD, oldest last; after it succeeds they may be deleted."""
        old = self.seen.head.checkpoints if self.seen else ()
        return tuple(entry.key for entry in old if entry.key not in self.body.keys)

    def on(self, reply: Reply, nonce: str) -> Step:
        match reply:
            case StoredHead(etag=etag):
                return Finished(head=self.body, etag=etag, dropped=self.dropped)
            case Missing():
                present(None)
        return Reading(intent=self.intent, sent=self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """HEAD as last known, and the keys that this process's write dropped from it."""

    head: Head
    etag: str
    dropped: tuple[str, ...] = ()


Step = Reading | Writing | Finished


def begin(intent: Intent, nonce: str, known: Found | None = None) -> Step:
    """Returns the first state of a change; `known`, HEAD as last seen, saves the first read."""
    reading = Reading(intent=intent)
    return reading.on(known, nonce) if known else reading

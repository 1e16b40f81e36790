"""What every store promises, whichever it is: the stores' own tests call these."""

from __future__ import annotations

import hashlib

import pytest
from spottrain.storage.base import AlreadyExists, KeyMissing, Object, PreconditionFailed, Store


def put_if_absent_refuses_what_exists(store: Store) -> None:
    etag = store.put_if_absent("k", b"1")
    with pytest.raises(AlreadyExists):
        store.put_if_absent("k", b"2")
    assert store.get("k") == Object(body=b"1", etag=etag)


def put_if_match_wants_the_very_etag_and_never_creates(store: Store) -> None:
    first = store.put_if_absent("k", b"1")
    second = store.put_if_match("k", b"2", first)
    with pytest.raises(PreconditionFailed):
        store.put_if_match("k", b"3", first)
    with pytest.raises(KeyMissing):
        store.put_if_match("other", b"3", second)
    assert store.get("k") == Object(body=b"2", etag=second)


def folders_are_those_directly_below(store: Store) -> None:
    for key in ("HEAD", "a/HEAD", "a/x/HEAD", "a/x/y/k", "ab/k", "b"):
        store.put(key, b"1")
    assert store.folders("") == ["a/", "ab/"]
    assert store.folders("a/") == ["a/x/"]
    assert store.folders("a/x/y/") == [] and store.folders("b/") == [] and store.folders("none/") == []


def a_range_fills_several_buffers_and_gives_its_digest(store: Store) -> None:
    body = bytes(range(250))
    store.put("k", body)
    into = bytearray(b"#" * 220)
    view, none = memoryview(into), memoryview(b"")
    assert store.read_into("k", 5, none, view[10:110], none, view[110:210].cast("H")) == ""
    assert into == b"#" * 10 + body[5:205] + b"#" * 10
    digest = store.read_into("k", 40, view[:1], view[100:], hashed=True)
    assert into[:1] + into[100:] == body[40:161] and digest == hashlib.sha256(body[40:161]).hexdigest()
    assert store.read_into("k", 7, none, hashed=True) == hashlib.sha256().hexdigest()

"""What a job is known to have run out of memory with, over a folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from spottrain.errors import StoreUnavailable
from spottrain.storage.base import Store
from spottrain.storage.open import open_store
from spottrain.techniques.oom_history import OOMHistory


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path))


def test_the_least_of_what_was_too_large_counts(store: Store) -> None:
    job = OOMHistory(store=store, job_uid="local-my train")
    assert job.least() is None
    assert job.note(8, rank=1) and job.note(32) and job.least() == 8
    assert job.note(8, rank=0), "two ranks may run out in the same step"
    assert job.note(4) and OOMHistory(store=store, job_uid="local-my train").least() == 4
    (first,) = (key for key in store.list("out-of-memory/") if key.endswith("/000000008.json"))
    found = store.get(first)
    assert found is not None
    assert json.loads(found.body) == {"jobUID": "local-my train", "microBatchSize": 8, "rank": 1}


def test_another_job_knows_nothing_of_it(store: Store) -> None:
    OOMHistory(store=store, job_uid="A").note(8)
    assert OOMHistory(store=store, job_uid="B").least() is None


def test_without_a_store_nothing_is_kept() -> None:
    job = OOMHistory(store=None, job_uid="A")
    assert job.least() is None and not job.note(8)


def test_what_the_store_does_not_take_or_does_not_show_is_not_relied_on(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = OOMHistory(store=store, job_uid="A")
    monkeypatch.setattr(type(store), "list", lambda self, prefix: [])
    assert not job.note(8)

    def broken(self: Store, key: str, body: object) -> str:
        raise StoreUnavailable("no answer")

    monkeypatch.setattr(type(store), "put_if_absent", broken)
    assert not job.note(4)
    assert 'event=batch-size too_large=4 kept=False why="no answer"' in capsys.readouterr().out

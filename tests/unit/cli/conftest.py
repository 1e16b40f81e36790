"""A checkpoint URI, and `spottrain checkpoints` over it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from spottrain.checkpoint.head.owner import ClaimPolicy, HeadOwner, Identity
from spottrain.checkpoint.head.state import Entry, Head
from spottrain.contract import OnExisting
from spottrain.storage.open import open_store

from tests.support.command import checkpoints as main
from tests.support.headcheckpoints import save
from tests.support.sentences import Sentences, renewing, told

__all__ = ["told"]


class Ran(NamedTuple):
    code: int
    out: str
    err: str


class Place:
    """A folder of checkpoints. `place("list", ...)` runs the command over it."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.store = open_store(str(folder))
        self._capsys = capsys

    def __call__(self, verb: str, *words: str) -> Ran:
        code = main([verb, self.store.uri, *words])
        return Ran(code, *self._capsys.readouterr())

    def facts(self, verb: str, *words: str) -> Any:
        ran = self(verb, *words, "-o", "json")
        assert not ran.err
        return json.loads(ran.out)

    def owner(
        self, uid: str = "A", attempt: int = 1, on_existing: OnExisting = OnExisting.FAIL, claims: bool = True
    ) -> HeadOwner:
        who = Identity(job_uid=uid, job=f"job-{uid}", attempt=attempt)
        it = HeadOwner(self.store, who, ClaimPolicy(on_existing=on_existing))
        if claims:
            it.claim()
        return it

    def holds(self, *steps: int, uid: str = "A", best: int | None = None) -> HeadOwner:
        """A run that is under way and has committed these steps, oldest first."""
        it = self.owner(uid)
        for step in steps:
            save(self.store, it, step, best=step == best, keep=10)
        return it

    def ended(self, *steps: int, uid: str = "A", best: int | None = None, done: bool = False) -> Head:
        self.holds(*steps, uid=uid, best=best).release(done)
        return self.head

    @property
    def head(self) -> Head:
        return Head.from_json(self.body("HEAD"))

    @property
    def steps(self) -> list[int]:
        return [entry.step for entry in self.head.checkpoints]

    def entry(self, step: int) -> Entry:
        return next(each for each in self.head.checkpoints if each.step == step)

    def body(self, key: str) -> bytes:
        found = self.store.get(key)
        assert found is not None
        return found.body

    def flip_a_bit(self, key: str) -> None:
        body = self.body(key)
        self.store.put(key, body[:-1] + bytes([body[-1] ^ 1]))


@pytest.fixture
def place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Place:
    return Place(tmp_path / "run", capsys)


@pytest.fixture(scope="session")
def sentences() -> Iterator[Sentences]:
    sentences = Sentences(Path(__file__).parent)
    yield sentences
    sentences.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if renewing():
        items[:] = [item for item in items if "told" in getattr(item, "fixturenames", ())]

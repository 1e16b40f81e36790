"""`spottrain checkpoints release`: the way out where a dead owner holds a checkpoint URI."""

from __future__ import annotations

from pathlib import Path

import pytest
from spottrain.checkpoint.head.owner import ClaimPolicy, Entry, HeadOwner, Identity
from spottrain.cli.checkpoints import main
from spottrain.cli.release import release
from spottrain.contract import OnExisting
from spottrain.errors import ConfigurationError, Superseded
from spottrain.storage.base import Store
from spottrain.storage.open import open_store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path))


def owner(store: Store, uid: str, attempt: int = 1) -> HeadOwner:
    return HeadOwner(
        store,
        Identity(job_uid=uid, job=f"job-{uid}", attempt=attempt),
        ClaimPolicy(on_existing=OnExisting.RESUME),
    )


def commit(holder: HeadOwner, step: int) -> None:
    holder.commit(Entry(key=holder.new_key(step), step=step, time=1.0, bytes=1), keep=2)


def test_another_job_may_go_on_from_what_a_dead_owner_left(store: Store) -> None:
    dead = owner(store, "dead")
    dead.claim()
    commit(dead, 7)
    with pytest.raises(ConfigurationError, match="spottrain checkpoints release URI"):
        owner(store, "next").claim()
    assert "it keeps 1 checkpoint of" in release(store, sure=True).lines[0]
    claim = owner(store, "next").claim()
    assert claim is not None and [entry.step for entry in claim.resume] == [7]


def test_an_owner_that_was_alive_after_all_commits_nothing_more(store: Store) -> None:
    ghost = owner(store, "ghost")
    ghost.claim()
    release(store, sure=True)
    with pytest.raises(Superseded):
        commit(ghost, 8)


def test_without_a_word_that_the_owner_is_gone_nothing_changes(store: Store) -> None:
    owner(store, "alive").claim()
    with pytest.raises(ConfigurationError, match="nothing was changed"):
        release(store, sure=False)
    with pytest.raises(ConfigurationError, match="in use by job job-alive"):
        owner(store, "next").claim()


def test_a_uri_without_head_and_one_that_is_free_are_said(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = store.uri
    assert main(["release", folder, "--yes"]) == 1
    assert "there is no HEAD object" in capsys.readouterr().err
    holder = owner(store, "a")
    holder.claim()
    holder.release()
    assert main(["release", folder]) == 0
    assert "released already" in capsys.readouterr().out


def test_a_mistyped_folder_is_said_and_not_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for uri in (str(tmp_path / "typo"), f"file://{tmp_path}/typo"):
        assert main(["release", uri, "--yes"]) == 1
        assert f"there is no folder {tmp_path}/typo; check the URI" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []

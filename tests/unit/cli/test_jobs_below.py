"""`spottrain checkpoints jobs`: the URIs below a prefix, and those whose jobs are deleted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from spottrain.checkpoint.head.owner import HeadOwner, Identity
from spottrain.checkpoint.head.state import HeadState
from spottrain.storage.local import FolderStore
from spottrain_cli.checkpoints.jobs_below import Found, deleted_only, find, jobs_of

from tests.support.command import checkpoints as main
from tests.support.headcheckpoints import save


def run_at(folder: Path, job: str, uid: str, *steps: int, ends: bool = True) -> HeadOwner:
    store = FolderStore(folder)
    owner = HeadOwner(store, Identity(job_uid=uid, job=job, attempt=1))
    owner.claim()
    for step in steps:
        save(store, owner, step)
    if ends:
        owner.release()
    return owner


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    root = tmp_path / "runs"
    run_at(root / "ml" / "gpt", "ml/gpt", "u1", 3, 5)
    run_at(root / "ml" / "bert", "ml/bert", "u2", 7)
    run_at(root / "nlp" / "gpt", "nlp/gpt", "u3", ends=False)
    (root / "other" / "data" / "too" / "deep").mkdir(parents=True)
    run_at(root / "other" / "data" / "too" / "deep", "x/deep", "u9", 1)
    return root


def job(namespace: str, name: str, uid: str, **more: Any) -> dict[str, Any]:
    return {"metadata": {"namespace": namespace, "name": name, "uid": uid}, "spec": {"checkpoint": {}}} | more


def cluster(tmp_path: Path, *items: dict[str, Any]) -> str:
    file = tmp_path / "jobs.json"
    file.write_text(json.dumps({"kind": "List", "items": items}))
    return str(file)


def listed(prefix: Path, capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    where = str(prefix) if prefix.is_absolute() else f"./{prefix}"
    assert main(["jobs", where, "-o", "json", *words]) == 0
    uris: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["uris"]
    return uris


def names(uris: list[dict[str, Any]], prefix: Path) -> list[str]:
    return [entry["uri"].removeprefix(f"{prefix}/") for entry in uris]


def test_the_uris_two_folders_below_are_listed_with_their_owners(
    prefix: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uris = listed(prefix, capsys)
    assert names(uris, prefix) == ["ml/bert", "ml/gpt", "nlp/gpt"]
    assert [(u["job"], u["jobUID"], u["state"], u["checkpoints"]) for u in uris] == [
        ("ml/bert", "u2", "released", 1),
        ("ml/gpt", "u1", "released", 2),
        ("nlp/gpt", "u3", "active", 0),
    ]
    assert main(["jobs", str(prefix / "ml")]) == 0
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 3 and "u1" in table[2] and "ago" in table[2]


def test_a_prefix_that_is_itself_a_run_is_one_uri(prefix: Path) -> None:
    assert [it.uri for it in find(FolderStore(prefix / "ml" / "gpt"))] == [(prefix / "ml" / "gpt").as_uri()]


def test_deleted_are_those_that_no_job_of_the_cluster_uses(
    prefix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    by_uri = job("ml", "other", "u7", spec={"checkpoint": {"uri": f"{prefix}/ml/bert/"}})
    uris = listed(prefix, capsys, "--deleted", "--file", cluster(tmp_path, by_uri))
    assert names(uris, prefix) == ["ml/gpt", "nlp/gpt"]
    default = {"defaults": {"checkpoint": {"uri": f"{prefix}/ml/gpt"}}}
    known = job("ml", "gpt", "u8", status=default)
    uris = listed(prefix, capsys, "--deleted", "--file", cluster(tmp_path, by_uri, known))
    assert names(uris, prefix) == ["nlp/gpt"]
    same_uid = job("nlp", "renamed", "u3", spec={"checkpoint": {"uri": "s3://elsewhere/x"}})
    uris = listed(prefix, capsys, "--deleted", "--file", cluster(tmp_path, by_uri, known, same_uid))
    assert uris == []


@pytest.mark.parametrize(
    ("found", "of_job"),
    [
        ("s3://bucket/runs/ml/gpt", "s3://bucket//runs/ml/gpt"),
        ("s3://bucket/runs/ml/gpt", "s3://bucket/runs//ml/gpt//"),
        ("gs://bucket/runs/ml/gpt", "gs://bucket///runs/ml/gpt/"),
        ("s3://bucket/runs/100%25/gpt", "s3://bucket//runs/100%25/gpt"),
        ("/mnt/my runs/ml/gpt", "file:///mnt/my%20runs/ml/gpt"),
        ("file:///mnt/my%20runs/ml/gpt", "file:///mnt/my runs//ml/gpt/"),
        ("/mnt/runs/./ml/gpt", "file:///mnt/other/../runs/ml/gpt"),
    ],
)
def test_a_uri_is_in_use_however_its_job_spells_it(found: str, of_job: str) -> None:
    items = [job("ml", "x", "u1", spec={"checkpoint": {"uri": of_job}})]
    assert deleted_only([Found(uri=found, head=None)], jobs_of({"items": items}, "here")) == []


@pytest.mark.parametrize(
    ("found", "of_job"),
    [
        ("s3://bucket/runs/ml/gpt", "gs://bucket/runs/ml/gpt"),
        ("s3://bucket/runs/ml/gpt", "s3://other/runs/ml/gpt"),
        ("s3://bucket/runs/ml/gpt", "s3://bucket/runs/ml/gpt2"),
        ("s3://bucket/runs/my run", "s3://bucket/runs/my%20run"),
        ("s3://bucket/runs/ml/gpt", "s3://[bucket/runs/ml/gpt"),
    ],
)
def test_another_place_is_not_in_use(found: str, of_job: str) -> None:
    items, it = [job("ml", "x", "u1", spec={"checkpoint": {"uri": of_job}})], Found(uri=found, head=None)
    assert deleted_only([it], jobs_of({"items": items}, "here")) == [it]


def test_a_prefix_that_is_a_relative_path_is_the_same_place(
    prefix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(prefix.parent)
    known = job("ml", "x", "u8", spec={"checkpoint": {"uri": (prefix / "ml" / "gpt").as_uri()}})
    uris = listed(Path("runs"), capsys, "--deleted", "--file", cluster(tmp_path, known))
    assert [u["uri"] for u in uris] == ["./runs/ml/bert", "./runs/nlp/gpt"]


def test_a_job_without_a_uri_yet_keeps_the_place_that_it_may_get(
    prefix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uris = listed(prefix, capsys, "--deleted", "--file", cluster(tmp_path, job("ml", "gpt", "new")))
    assert names(uris, prefix) == ["ml/bert", "nlp/gpt"]


def test_what_was_deleted_already_is_not_listed_again_and_an_unreadable_head_is(
    prefix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["delete", str(prefix / "ml" / "gpt"), "--yes"]) == 0
    (prefix / "ml" / "bert" / "HEAD").write_text("{")
    capsys.readouterr()
    uris = listed(prefix, capsys, "--deleted", "--file", cluster(tmp_path))
    assert [(u["uri"].rpartition("/")[2], u["state"]) for u in uris] == [
        ("bert", "unreadable"),
        ("gpt", "active"),
    ]
    assert [u["state"] for u in listed(prefix, capsys)] == ["unreadable", "deleted", "active"]


@pytest.mark.parametrize("document", ["{}", "[]", '{"items": [5]}', "nonsense"])
def test_what_is_no_list_of_jobs_deletes_nothing(
    document: str, prefix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.json"
    file.write_text(document)
    assert main(["jobs", str(prefix), "--deleted", "--file", str(file)]) in (1, 2)
    assert str(file) in capsys.readouterr().err


# --- delete, by the URI alone -------------------------------------------------------------------------------
def test_a_uri_in_use_is_not_deleted_and_its_owner_is_named(
    prefix: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["delete", str(prefix / "nlp" / "gpt"), "--yes"]) == 1
    said = capsys.readouterr().err
    assert "job nlp/gpt (UID u3, attempt 1) is using this URI; nothing was deleted" in said
    assert "spottrain checkpoints release URI" in said


def test_without_a_yes_nothing_is_deleted(prefix: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = FolderStore(prefix / "ml" / "gpt").list("")
    assert main(["delete", str(prefix / "ml" / "gpt")]) == 2
    assert "nobody confirmed it" in capsys.readouterr().err
    assert FolderStore(prefix / "ml" / "gpt").list("") == before


def test_what_earlier_jobs_left_goes_only_where_that_is_asked_for(
    prefix: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uri, store = str(prefix / "ml" / "gpt"), FolderStore(prefix / "ml" / "gpt")
    head = find(store)[0].head
    assert head is not None
    assert main(["copy", str(prefix / "ml" / "bert"), "--to", str(prefix / "ml" / "new")]) == 0
    done = HeadOwner(FolderStore(prefix / "ml" / "new"), Identity(job_uid="copied", job="x", attempt=2))
    assert done.claim() is not None
    done.release(True)
    assert main(["copy", uri, "--to", str(prefix / "ml" / "new")]) == 0  # beside what the finished job has
    assert main(["delete", str(prefix / "ml" / "new"), "--yes"]) == 0
    left = find(FolderStore(prefix / "ml" / "new"))[0].head
    assert left is not None and (left.state, len(left.checkpoints)) == (HeadState.DONE, 1)
    assert main(["delete", str(prefix / "ml" / "new"), "--earlier-jobs", "--yes"]) == 0
    assert FolderStore(prefix / "ml" / "new").list("") == ["HEAD"]

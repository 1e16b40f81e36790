"""`spottrain checkpoints jobs` and `delete` against the real S3 server, and a job that is applied again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from spottrain.checkpoint.head.owner import ClaimPolicy, HeadOwner, Identity
from spottrain.checkpoint.head.state import HeadState
from spottrain.contract import OnExisting
from spottrain.errors import ConfigurationError
from spottrain.storage.s3 import S3Store

from tests.support.command import checkpoints as main
from tests.support.headcheckpoints import save
from tests.support.s3server import S3Server


def owner_at(
    bucket: str, server: S3Server, job: str, uid: str, on_existing: OnExisting = OnExisting.FAIL
) -> tuple[S3Store, HeadOwner]:
    store = S3Store(bucket, f"runs/{job}", endpoint=server.endpoint)
    policy = ClaimPolicy(on_existing=on_existing)
    return store, HeadOwner(store, Identity(job_uid=uid, job=job, attempt=1), policy)


@pytest.fixture
def prefix(bucket: str, server: S3Server) -> str:
    for job, uid, ends in (("ml/gpt", "u1", True), ("ml/bert", "u2", True), ("nlp/gpt", "u3", False)):
        store, owner = owner_at(bucket, server, job, uid)
        owner.claim()
        save(store, owner, 5)
        store.put("logs/attempt-000001/rank-00000/000001.log", b"x")
        if ends:
            owner.release()
    return f"s3://{bucket}/runs"


def ran(server: S3Server, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    code = main([words[0], words[1], "--endpoint", server.endpoint, *words[2:], "-o", "json"])
    said = capsys.readouterr()
    return code, json.loads(said.out) if said.out else said.err


def test_uris_of_deleted_jobs_are_listed_and_deleted(
    prefix: str, bucket: str, server: S3Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    meta = {"namespace": "ml", "name": "bert", "uid": "u2"}
    status = {"defaults": {"checkpoint": {"uri": f"{prefix}/ml/bert"}}}
    cluster = tmp_path / "jobs.json"
    cluster.write_text(json.dumps({"items": [{"metadata": meta, "spec": {}, "status": status}]}))
    code, answer = ran(server, capsys, "jobs", prefix)
    assert code == 0 and [u["uri"] for u in answer["uris"]] == [
        f"{prefix}/{job}" for job in ("ml/bert", "ml/gpt", "nlp/gpt")
    ]
    deleted = ("jobs", prefix, "--deleted", "--file", str(cluster))
    _, answer = ran(server, capsys, *deleted)
    assert [(u["job"], u["state"]) for u in answer["uris"]] == [("ml/gpt", "released"), ("nlp/gpt", "active")]

    code, said = ran(server, capsys, "delete", f"{prefix}/nlp/gpt", "--yes")
    assert code == 1 and "job nlp/gpt (UID u3, attempt 1) is using this URI" in said
    assert ran(server, capsys, "delete", f"{prefix}/ml/gpt", "--yes")[0] == 0
    assert S3Store(bucket, "runs/ml/gpt", endpoint=server.endpoint).list("") == ["HEAD"]
    _, answer = ran(server, capsys, *deleted)
    assert [u["job"] for u in answer["uris"]] == ["nlp/gpt"]


def test_more_folders_than_one_page_of_a_listing_are_found(bucket: str, server: S3Server) -> None:
    store = S3Store(bucket, "many", endpoint=server.endpoint)
    names = [f"n{number:04}/" for number in range(1003)]
    for name in names:
        folder = server.folder / bucket / "many" / name
        folder.mkdir(parents=True)
        (folder / "HEAD").write_bytes(b"x")
    assert store.folders("") == names


def test_a_job_that_is_applied_again_is_asked_resume_or_fresh(
    prefix: str, bucket: str, server: S3Server, capsys: pytest.CaptureFixture[str]
) -> None:
    _, again = owner_at(bucket, server, "ml/gpt", "next")
    with pytest.raises(
        ConfigurationError, match=r"resume from there, or start fresh\? Set checkpoint.onExisting"
    ):
        again.claim()
    claim = owner_at(bucket, server, "ml/gpt", "next", OnExisting.RESUME)[1].claim()
    assert claim is not None and [entry.step for entry in claim.resume] == [5]


def test_after_a_deletion_a_job_of_the_same_name_may_start_fresh_and_not_otherwise(
    prefix: str, bucket: str, server: S3Server, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ran(server, capsys, "delete", f"{prefix}/ml/gpt", "--job-uid", "u1", "--yes")[0] == 0
    for policy in (OnExisting.FAIL, OnExisting.RESUME):
        with pytest.raises(
            ConfigurationError, match=r"were deleted, so there is nothing to resume; .* to Fresh"
        ):
            owner_at(bucket, server, "ml/gpt", "next", policy)[1].claim()
    store, fresh = owner_at(bucket, server, "ml/gpt", "next", OnExisting.FRESH)
    claim = fresh.claim()
    assert claim is not None and claim.resume == ()
    save(store, fresh, 1)
    code, said = ran(server, capsys, "delete", store.uri, "--job-uid", "u1", "--yes")  # a late cleanup pod
    assert code == 1 and "belong to job ml/gpt (UID next)" in said
    fresh.release()
    _, answer = ran(server, capsys, "list", store.uri)
    assert answer["head"]["state"] == HeadState.RELEASED
    assert [entry["step"] for entry in answer["checkpoints"]] == [1]

"""`spottrain report` against the real S3 server."""

from __future__ import annotations

import pytest
from spottrain.contract import series_key
from spottrain.storage.s3 import S3Store
from spottrain_cli import jobs
from spottrain_cli.app import main
from spottrain_cli.report.reading import read_of_job

from tests.support import report_scenes as scenes
from tests.support.s3server import S3Server


def test_a_page_is_made_of_a_uri_and_a_job_s_series_is_found(
    bucket: str, server: S3Server, capsys: pytest.CaptureFixture[str]
) -> None:
    store = S3Store(bucket, "run", endpoint=server.endpoint)
    for each in scenes.all_series():
        store.put(series_key(each.attempt.term), each.to_bytes())
    store.put("series/notes.txt", b"somebody's")
    assert main(["report", store.uri, "--endpoint", server.endpoint, "-o", "-"]) == 0
    assert "Done, 3 attempts, 2 interruptions" in capsys.readouterr().out
    raw = scenes.job()
    raw["spec"]["checkpoint"] = {"uri": store.uri, "endpoint": server.endpoint}
    found, note = read_of_job(jobs.job(raw, "a test"), "")
    assert len(found) == 3 and not note


def test_a_bucket_that_is_not_there_is_a_sentence(
    bucket: str, server: S3Server, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", f"s3://{bucket}-not/run", "--endpoint", server.endpoint, "-o", "-"]) == 3
    assert capsys.readouterr().err.startswith("spottrain: ")
    raw = scenes.job()
    raw["spec"]["checkpoint"] = {"uri": f"s3://{bucket}-not/run", "endpoint": server.endpoint}
    found, note = read_of_job(jobs.job(raw, "a test"), "")
    assert not found and "cannot be read from here" in note and f"{bucket}-not" in note

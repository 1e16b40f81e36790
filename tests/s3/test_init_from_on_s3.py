"""A training that begins from the weights below another job's prefix, whose answers are lost at first."""

from __future__ import annotations

from pathlib import Path

import pytest
from spottrain.contract import Env, ExitCode, Reason
from spottrain.storage.s3 import S3Store

from tests.runs.conftest import SCRIPT
from tests.runs.launched import OURS, Launched
from tests.support.faultproxy import Fault, FaultProxy, Request, Treatment
from tests.support.s3server import S3Server


class Lost:
    """The first requests for the base's weights are lost: one more than the store tries by itself."""

    def __init__(self, count: int) -> None:
        self.left = count

    def __call__(self, request: Request) -> Treatment:
        if "/base/final/model.safetensors" not in request.path or not self.left:
            return Treatment()
        self.left -= 1
        return Treatment(fault=Fault.REQUEST_LOST)


@pytest.mark.heavy
def test_it_begins_from_another_jobs_prefix_and_waits_for_its_store(
    server: S3Server, bucket: str, proxy: FaultProxy, tmp_path: Path
) -> None:
    def run(prefix: str, **env: str) -> Launched:
        (folder := tmp_path / prefix).mkdir()
        (folder / "train.py").write_text(SCRIPT)
        place = {Env.JOB_UID: prefix, Env.CHECKPOINT_URI: f"s3://{bucket}/{prefix}"}
        return Launched(folder, [*OURS, "train.py"], **place, **env)

    plain: dict[str, str] = {Env.CHECKPOINT_ENDPOINT: server.endpoint}
    run("base", **plain).done()
    head = S3Store(bucket, "base", endpoint=server.endpoint).get("HEAD")
    begins = {Env.INIT_FROM: f"s3://{bucket}/base"}
    expected = run("plain", **plain, **begins).done()
    proxy.reset(lost := Lost(6))
    found = run("p", **{Env.CHECKPOINT_ENDPOINT: proxy.endpoint()}, **begins).done()
    assert "event=initialized" in found.log and not lost.left
    assert _digest(found.log) == _digest(expected.log)
    assert S3Store(bucket, "base", endpoint=server.endpoint).get("HEAD") == head, "it is only read"

    refused = run("q", **plain, **{Env.INIT_FROM: "s3://no-such-bucket-of-ours/base"})
    refused.ends(ExitCode.BAD_CONFIGURATION)
    assert refused.message.reason == Reason.BUCKET_NOT_FOUND
    assert refused.message.message.startswith("checkpoint.initFrom s3://no-such-bucket-of-ours/base: ")


def _digest(log: str) -> str:
    return log.split("event=done", 1)[1].split("digest=")[1].split()[0]

"""A runtime that was injected into an image without boto3 trains on S3 by the boto3 that it brings."""

from __future__ import annotations

from pathlib import Path

import pytest
from spottrain.cli.inject import inject
from spottrain.contract import Env, Outcome
from spottrain.storage.s3 import S3Store

from tests.runs.conftest import SCRIPT
from tests.runs.launched import Launched
from tests.support.plainenv import plain_python
from tests.support.s3server import S3Server


@pytest.mark.heavy
def test_it_trains_on_s3(server: S3Server, bucket: str, direct: S3Store, tmp_path: Path) -> None:
    python = plain_python(tmp_path / "image")
    inject(tmp_path / "volume")
    (tmp_path / "train.py").write_text(SCRIPT + "\nimport boto3\nprint('boto3 at', boto3.__file__)\n")
    env = {
        Env.JOB_UID: "uid",
        Env.CHECKPOINT_URI: f"s3://{bucket}/p",
        Env.CHECKPOINT_ENDPOINT: server.endpoint,
        Env.LOGS: "keep",
    }
    run = Launched(tmp_path, [str(python), str(tmp_path / "volume" / "launch.py"), "train.py"], **env).done()
    assert f"boto3 at {tmp_path}/volume/lib/boto3/" in run.log
    assert run.message.outcome is Outcome.DONE and run.message.step == 24
    keys = list(direct.list(""))
    assert "HEAD" in keys and "final/model.safetensors" in keys
    assert any(key.startswith("logs/") for key in keys)  # by the log capture, a process of its own

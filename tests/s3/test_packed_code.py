"""A script's folder, packed and sent to a real S3 server, is what `spottrain run --code` trains with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from spottrain_cli.submit.pack import pack, send

from tests.support.s3server import S3Server


def test_a_packed_folder_is_sent_once_and_run_from_the_store(
    server: S3Server, bucket: str, tmp_path: Path
) -> None:
    project = tmp_path / "project"
    (project / "lib").mkdir(parents=True)
    (project / "lib" / "words.py").write_text("SAID = 'from the packed folder'")
    (project / "train.py").write_text("import sys\nfrom lib.words import SAID\nprint(SAID, sys.argv[1:])")
    prefix, env = f"s3://{bucket}/runs", os.environ | {"NO_PROXY": "*"}
    packed = pack(project)
    assert send(packed, prefix, server.endpoint) == send(packed, prefix, server.endpoint)
    words = ["run", "--endpoint", server.endpoint, "--checkpoint", f"{prefix}/job", "--log-format", "logfmt"]
    code = f"{prefix}/{packed.key}"
    ran = subprocess.run(
        [sys.executable, "-m", "spottrain", *words, "--code", code, "train.py", "--lr", "1"],
        cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False
    )  # fmt: skip
    assert "from the packed folder ['--lr', '1']" in ran.stdout, ran.stderr

"""fake-gcs-server on loopback: the nearest to Google Cloud Storage that runs here. Used by tests/s3.

It keeps generations and their preconditions on uploads; it ignores those on compose (so ours composes
nothing), asks for no credentials, and does not say whether a bucket or an object is missing.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.support.s3server import free_port, wait_for_port

STATE: Final = Path(os.environ.get("SPOTTRAIN_DEV_DIR", Path.home() / ".cache/spottrain/dev"))


@dataclass(frozen=True, kw_only=True, slots=True)
class GcsServer:
    port: int

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def make_bucket(self, name: str) -> None:
        request = urllib.request.Request(
            f"{self.endpoint}/storage/v1/b?project=test",
            data=json.dumps({"name": name}).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=10):
            pass


@contextlib.contextmanager
def running(folder: Path, public_port: int = 0) -> Iterator[GcsServer]:
    """`public_port`: where the URLs of upload sessions point, such as a proxy; 0: the server itself."""
    binary = STATE / "bin" / "fake-gcs-server"
    if not binary.is_file():
        raise RuntimeError(f"{binary} is missing; `make test-heavy` builds it")
    server = GcsServer(port=free_port())
    log = folder / "fake-gcs-server.log"
    address = f"127.0.0.1:{public_port or server.port}"
    command = [str(binary), "-backend", "memory", "-scheme", "http", "-host", "127.0.0.1"]
    command += ["-port", str(server.port), "-public-host", address, "-external-url", f"http://{address}"]
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        try:
            wait_for_port(process, server.port, log)
            yield server
        finally:
            process.kill()

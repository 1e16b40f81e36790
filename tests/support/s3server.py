"""The real S3 server (versitygw over a folder) on loopback. Used by tests/s3 and bench/."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

ACCESS_KEY: Final = "spottrain-test"
SECRET_KEY: Final = "spottrain-test-secret"
STATE: Final = Path(os.environ.get("SPOTTRAIN_DEV_DIR", Path.home() / ".cache/spottrain/dev"))
START_SECONDS: Final = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class S3Server:
    port: int
    folder: Path
    scheme: str = "http"
    pid: int = 0

    @property
    def endpoint(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"

    def make_bucket(self, name: str) -> None:
        (self.folder / name).mkdir(exist_ok=True)


def credentials(access_key: str = ACCESS_KEY, secret_key: str = SECRET_KEY) -> dict[str, str]:
    """Environment of a client; nothing on this machine may add to it."""
    nowhere = os.devnull
    return {
        "AWS_ACCESS_KEY_ID": access_key,
        "AWS_SECRET_ACCESS_KEY": secret_key,
        "AWS_REGION": "us-east-1",
        "AWS_CONFIG_FILE": nowhere,
        "AWS_SHARED_CREDENTIALS_FILE": nowhere,
        "AWS_EC2_METADATA_DISABLED": "true",
        "NO_PROXY": "127.0.0.1",
    }


@contextlib.contextmanager
def running(folder: Path, tls: tuple[Path, Path] | None = None) -> Iterator[S3Server]:
    """`tls`: files of the certificate and of its key."""
    binary = STATE / "bin" / "versitygw"
    if not binary.is_file():
        raise RuntimeError(f"{binary} is missing; `make programs` brings it")
    server = S3Server(port=free_port(), folder=folder / "data", scheme="https" if tls else "http")
    server.folder.mkdir(parents=True)
    log = folder / "versitygw.log"
    environment = os.environ | {"ROOT_ACCESS_KEY": ACCESS_KEY, "ROOT_SECRET_KEY": SECRET_KEY}
    command = [str(binary), "--port", f"127.0.0.1:{server.port}", "--quiet"]
    command += ["--cert", str(tls[0]), "--key", str(tls[1])] if tls else []
    command += ["posix", str(server.folder)]
    with (
        log.open("wb") as output,
        subprocess.Popen(command, env=environment, stdout=output, stderr=output) as process,
    ):
        try:
            wait_for_port(process, server.port, log)
            yield replace(server, pid=process.pid)
        finally:
            process.kill()


def wait_for_port(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    give_up = time.monotonic() + START_SECONDS
    while time.monotonic() < give_up and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.05)
    raise RuntimeError(f"{log.stem} did not start on port {port}: {log.read_text()[-2000:]}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

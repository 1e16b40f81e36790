"""What `spottrain sync` costs: seconds to durable beside boto3 alone, bytes of unchanged files, memory.

Each round uploads the same files to the real S3 server on this machine: once by the whole command, once by a
process that calls boto3's `upload_file` for each file, in turn. Seconds are those of the upload: ours from
the start of the commit until HEAD names it, the client's of its calls. Memory is the peak of resident memory
of the whole process, including Python and boto3.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from bench import needs
from tests.support import s3server

FILES: Final = 4
BARE: Final = """
import sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import boto3
from botocore.config import Config
endpoint, bucket, folder = sys.argv[1:]
client = boto3.client("s3", endpoint_url=endpoint, config=Config(s3={"addressing_style": "path"}))
files = [each for each in Path(folder).iterdir() if each.is_file()]
began = time.monotonic()
with ThreadPoolExecutor(len(files)) as pool:
    list(pool.map(lambda each: client.upload_file(str(each), bucket, each.name), files))
print("seconds", time.monotonic() - began)
"""


def measured(command: list[str], environment: dict[str, str]) -> tuple[str, float]:
    """Runs a process. Returns its output, and the peak of its resident memory in MiB."""
    process = subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE)
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{command} ended with {process.returncode}: {output}")
    return output, usage.ru_maxrss / 1024


def committed(output: str) -> tuple[float, int]:
    """Returns seconds and bytes of the commit in the log."""
    found = re.search(r"event=sync-committed .*?seconds=([\d.]+) bytes=\d+ sent=(\d+)", output)
    if found is None:
        raise RuntimeError(f"no commit: {output}")
    return float(found[1]), int(found[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=512)
    given = parser.parse_args()
    needs.programs("versitygw")
    with tempfile.TemporaryDirectory() as place, s3server.running(Path(place) / "server") as server:
        environment = {**os.environ, **s3server.credentials(), "SPOTTRAIN_LOG_FORMAT": "logfmt"}
        folder = Path(place) / "folder"
        folder.mkdir()
        for number in range(FILES):
            with (folder / f"rank-{number}.pt").open("wb") as file:
                for _ in range(given.mib // FILES):  # a child's peak begins with its parent's memory
                    file.write(os.urandom(2**20))
        ours: list[float] = []
        bare: list[float] = []
        resent: list[int] = []
        memory: list[float] = []
        for number in range(given.rounds):
            uri = f"s3://round-{number}/run"
            server.make_bucket(f"round-{number}")
            server.make_bucket(f"bare-{number}")
            command = [sys.executable, "-m", "spottrain", "sync", str(folder), "--to", uri]
            command += ["--endpoint", server.endpoint, "--", "true"]
            output, peak = measured(command, environment)
            ours.append(committed(output)[0])
            memory.append(peak)
            bare_command = [sys.executable, "-c", BARE, server.endpoint, f"bare-{number}", str(folder)]
            bare.append(float(measured(bare_command, environment)[0].split()[1]))
            again = [*command[:-1], "touch", *map(str, folder.glob("*.pt"))]
            output, peak = measured(again, environment)
            resent.append(committed(output)[1])
            memory.append(peak)
            for bucket in (f"round-{number}", f"bare-{number}"):
                subprocess.run(["rm", "-rf", str(server.folder / bucket)], check=True)
    figures = {
        "mib": given.mib,
        "rounds": given.rounds,
        "durable_seconds": round(statistics.median(ours), 3),
        "bare_client_seconds": round(statistics.median(bare), 3),
        "upload_over_bare_client": round(
            statistics.median(b / o for b, o in zip(bare, ours, strict=True)), 3
        ),
        "unchanged_bytes_sent": max(resent),
        "peak_memory_mib": round(max(memory), 1),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()

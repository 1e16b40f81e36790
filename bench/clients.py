"""What bench.checkpoint measures ours against, each in a process of its own that is asked line by line.

bare    boto3 with parts of the same size over as many connections
dcp     torch's distributed checkpoint, async_save over fsspec and s3fs
s3tc    s3torchconnector's S3Checkpoint
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import torch
from spottrain.checkpoint.plain_state import model_state, optimizer_state
from spottrain.contract import CHUNK_BYTES

from bench.spread import timed

CONNECTIONS: Final = 8
"""Of one upload and of one restore, on both sides: the default of `S3Store`."""
BUCKET: Final = "bench"


class Training:
    """A model and its optimizer, of about `gib` GiB in all: as many numbers for AdamW twice over."""

    def __init__(self, gib: float) -> None:
        torch.manual_seed(0)
        layers = max(1, round(gib * 2**30 / (12 * 1024 * 1024)))
        self.model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(layers)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def tree(self) -> dict[str, Any]:
        return {
            "model": model_state(self.model),
            "optimizer": optimizer_state(self.model, self.optimizer),
        }

    def tensors(self) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for value in self.tree()["optimizer"]["state"].values():
            found += value.values()
        return found + list(self.tree()["model"].values())

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())


class Bare:
    """boto3 with parts of the same size over as many connections, and no checks but its own."""

    def __init__(self, endpoint: str, body: bytes) -> None:
        import boto3
        from botocore.config import Config

        config = Config(max_pool_connections=CONNECTIONS, s3={"addressing_style": "path"})
        self.client = boto3.client("s3", endpoint_url=endpoint, config=config)
        self.body = body
        self.parts = range(0, len(body), CHUNK_BYTES)
        self.into = bytearray(len(body))
        self.into[:] = body  # touched, which the tensors of our restore are not

    def upload(self, key: str) -> None:
        where = {"Bucket": BUCKET, "Key": key}
        upload = where | {"UploadId": self.client.create_multipart_upload(**where)["UploadId"]}

        def part(number: int) -> dict[str, Any]:
            body = self.body[self.parts[number] : self.parts[number] + CHUNK_BYTES]
            reply = self.client.upload_part(Body=body, PartNumber=number + 1, **upload)
            return {"ETag": reply["ETag"], "PartNumber": number + 1}

        with ThreadPoolExecutor(CONNECTIONS) as pool:
            done = list(pool.map(part, range(len(self.parts))))
        self.client.complete_multipart_upload(MultipartUpload={"Parts": done}, **upload)

    def download(self, key: str) -> None:
        def part(begin: int) -> None:
            end = min(begin + CHUNK_BYTES, len(self.body))
            reply = self.client.get_object(Bucket=BUCKET, Key=key, Range=f"bytes={begin}-{end - 1}")
            self.into[begin:end] = reply["Body"].read()

        with ThreadPoolExecutor(CONNECTIONS) as pool:
            list(pool.map(part, self.parts))


def bare_child(endpoint: str, size: int) -> None:
    """A process of its own, as our uploader is. Reads "upload KEY" or "download KEY", answers seconds."""
    bare = Bare(endpoint, os.urandom(1 << 20) * (size >> 20))
    print("ready", flush=True)
    for line in sys.stdin:
        what, key = line.split()
        print(timed(lambda key=key, what=what: getattr(bare, what)(key)), flush=True)  # type: ignore[misc]


class Child:
    """This file, in another process."""

    def __init__(self, *words: str, path: Path | None = None) -> None:
        env = os.environ | ({"PYTHONPATH": str(path)} if path else {})
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bench.clients", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )
        assert self.answer() == "ready"

    def answer(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        if not line:
            raise RuntimeError(f"the other process ended with {self.process.wait()}")
        return line

    def ask(self, line: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.answer()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def peer_child(kind: str, endpoint: str, gib: float) -> None:
    """Saves by somebody else's library when told to; answers (seconds blocked, seconds until durable)."""
    training = Training(gib)
    saves = {"dcp": dcp_s3fs, "s3tc": s3torchconnector}[kind](training, endpoint)
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(saves(line.strip())), flush=True)


def dcp_s3fs(training: Training, endpoint: str) -> Callable[[str], tuple[float, float]]:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]

    def save(name: str) -> tuple[float, float]:
        began = time.perf_counter()
        writer = FsspecWriter(
            f"s3://{BUCKET}/dcp/{name}",
            endpoint_url=endpoint,
            config_kwargs={"s3": {"addressing_style": "path"}},
        )
        future: Any = dcp.async_save(  # type: ignore[attr-defined]
            training.tree(), storage_writer=writer
        )
        blocked = time.perf_counter() - began
        future.result()
        return blocked, time.perf_counter() - began

    return save


def s3torchconnector(training: Training, endpoint: str) -> Callable[[str], tuple[float, float]]:
    from s3torchconnector import S3Checkpoint, S3ClientConfig

    client = S3Checkpoint(
        region="us-east-1", endpoint=endpoint, s3client_config=S3ClientConfig(force_path_style=True)
    )

    def save(name: str) -> tuple[float, float]:
        began = time.perf_counter()
        with client.writer(f"s3://{BUCKET}/s3tc/{name}") as writer:
            torch.save(training.tree(), writer)
        seconds = time.perf_counter() - began
        return seconds, seconds

    return save


def main(kind: str, endpoint: str, size: str) -> None:
    """`size`: bytes for `bare`, GiB for the others."""
    if kind == "bare":
        bare_child(endpoint, int(size))
    else:
        peer_child(kind, endpoint, float(size))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""What a save costs, beside what it could cost at best and what others cost: `make bench-checkpoint`.

    stall      copy of the state, against memcpy of the same tensors and against torch.save to the same disk
    transfer   our uploader process and our restore, against a bare boto3 client with as many connections
    durable    seconds until another process could resume, for us, torch DCP over s3fs, and s3torchconnector
    work lost  what a training on the other core loses from the start of a save until it is durable

All sides alternate within one run, on the same tensors, against one versitygw on loopback. The last line is
JSON; each figure has its median, least and greatest. Exit code 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from spottrain import store as stores
from spottrain.cadence import Observed, auto_seconds
from spottrain.checkpoint.checkpointer import Checkpointer
from spottrain.checkpoint.manifest import Manifest
from spottrain.checkpoint.modelstate import model_state, optimizer_state
from spottrain.checkpoint.restore import read_trees
from spottrain.checkpoint.saver import Saver
from spottrain.checkpoint.transfer import Outgoing, Process
from spottrain.config import Run
from spottrain.contract import CHUNK_BYTES, Env
from spottrain.interruption import Interruption
from spottrain.session import Session
from spottrain.world import World

from tests.support import s3server

ROOT: Final = Path(__file__).parents[1]
CONNECTIONS: Final = 8
"""Of one upload and of one restore, on both sides: the default of `S3Store`."""
BUCKET: Final = "bench"
GOALS: Final = {
    "stall_over_memcpy": ("<=", 1.25),
    "stall_over_torch_save": ("<=", 0.08),
    "first_over_rest": ("<=", 1.1),
    "upload_over_bare_client": (">=", 0.85),
    "download_over_bare_client": (">=", 0.85),
}


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


def timed(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 5),
        "least": round(min(values), 5),
        "greatest": round(max(values), 5),
        "n": len(values),
    }


# --- stall ------------------------------------------------------------------------------------------
class Nowhere:
    """Takes the place of the uploader where only the copy is measured."""

    def share(self, arena: object) -> None: ...
    def close(self) -> None: ...
    def put(self, files: object, cancelled: object) -> Any:
        raise AssertionError("nothing is uploaded here")


def stall(training: Training, folder: Path, rounds: int) -> dict[str, Any]:
    saver = Saver(World(), None, Nowhere)
    saver.prepare(training.tree(), {})
    buffers = [torch.zeros_like(tensor) for tensor in training.tensors()]
    for buffer, tensor in zip(buffers, training.tensors(), strict=True):
        buffer.copy_(tensor)
    time.sleep(2.0)  # a first save comes minutes after the start; the memory is made resident meanwhile

    def ours() -> None:
        saver.snapshot(training.tree(), {}, 1)

    def memcpy() -> None:
        for buffer, tensor in zip(buffers, tensors, strict=True):
            buffer.copy_(tensor)

    def torch_save() -> None:
        torch.save(training.tree(), folder / "state.pt")

    tensors = training.tensors()
    first = timed(ours)
    times: dict[str, list[float]] = {"ours": [], "memcpy": [], "torch_save": []}
    for _ in range(rounds):
        for name, act in (("memcpy", memcpy), ("ours", ours), ("torch_save", torch_save)):
            times[name].append(timed(act))
    return {
        "stall_s": spread(times["ours"]),
        "memcpy_s": spread(times["memcpy"]),
        "torch_save_s": spread(times["torch_save"]),
        "first_save_s": round(first, 5),
        "stall_over_memcpy": ratio(times["ours"], times["memcpy"]),
        "stall_over_torch_save": ratio(times["ours"], times["torch_save"]),
        "first_over_rest": round(first / max(times["ours"]), 3),
    }


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Median of the ratios of the pairs."""
    return round(statistics.median(a / b for a, b in zip(ours, theirs, strict=True)), 4)


# --- transfer ---------------------------------------------------------------------------------------
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
        self.into[:] = body  # touched, as the other side's memory is

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
    """This very file, in another process, answering line by line."""

    def __init__(self, *words: str, path: Path | None = None) -> None:
        env = os.environ | ({"PYTHONPATH": str(path)} if path else {})
        self.process = subprocess.Popen(
            [sys.executable, __file__, *words],
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


def transfer(training: Training, endpoint: str, rounds: int) -> dict[str, Any]:
    saver = Saver(World(), None, lambda: Process({"uri": f"s3://{BUCKET}/ours", "endpoint": endpoint}))
    save = saver.snapshot(training.tree(), {}, 1)
    assert save.layout is not None
    store = stores.open(f"s3://{BUCKET}/ours", endpoint)
    bare = Child("--bare-child", endpoint, str(training.bytes))
    times: dict[str, list[float]] = {"up": [], "bare_up": [], "down": [], "bare_down": []}
    for number in range(rounds + 1):  # the first warms connections and pages, and does not count
        key = f"checkpoints/t000001-s{number:09d}-x/"
        files = [Outgoing(key=key + s.name, bytes=s.bytes, offset=s.offset) for s in save.layout.shards]
        began = time.perf_counter()
        sent = saver.send(files, lambda: False)
        up = time.perf_counter() - began
        bare_up = float(bare.ask(f"upload bare-{number}"))
        save.key = key
        manifest = manifest_of(saver, save, sent)
        down = timed(lambda key=key, manifest=manifest: read_trees(store, key, manifest))  # type: ignore[misc]
        bare_down = float(bare.ask(f"download bare-{number}"))
        if number:
            for name, value in zip(times, (up, bare_up, down, bare_down), strict=True):
                times[name].append(value)
        store.delete(list(sent))
    bare.close()
    saver.close()
    return {
        "upload_s": spread(times["up"]),
        "bare_upload_s": spread(times["bare_up"]),
        "download_s": spread(times["down"]),
        "bare_download_s": spread(times["bare_down"]),
        "upload_over_bare_client": ratio(times["bare_up"], times["up"]),
        "download_over_bare_client": ratio(times["bare_down"], times["down"]),
    }


def manifest_of(saver: Saver, save: Any, sent: Any) -> Manifest:
    from spottrain.checkpoint import saver as module

    return module._manifest(save, World(), [saver._report(save, sent)])


# --- durable ----------------------------------------------------------------------------------------
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


class Ours:
    """One claim of one job on the S3 server, as a training has it."""

    def __init__(self, training: Training, endpoint: str) -> None:
        uri = f"s3://{BUCKET}/job"
        env: dict[str, str] = {
            Env.JOB_UID: "bench",
            Env.CHECKPOINT_URI: uri,
            Env.CHECKPOINT_ENDPOINT: endpoint,
        }
        self.session = Session(env, Interruption(grace=30.0))
        self.session.run = Run.from_env(env, script="bench.py")
        self.session.attempt = 1
        self.training = training
        where = self.session.run.where
        self.checkpoints = Checkpointer(
            self.session, stores.open(uri, endpoint), transfer=lambda: Process(where)
        )
        self.checkpoints.claim()
        self.checkpoints.saver.prepare(training.tree(), {})
        self.step = 0

    def save(self) -> tuple[float, float]:
        """(seconds blocked, seconds until HEAD names it)."""
        self.step += 1
        began = time.perf_counter()
        self.checkpoints.start(self.checkpoints.saver.snapshot(self.training.tree(), {}, self.step))
        blocked = time.perf_counter() - began
        self.checkpoints.settle()
        if self.session.board.facts.durable_step != self.step:
            raise RuntimeError(self.session.board.facts.last_failure)
        return blocked, time.perf_counter() - began

    def close(self) -> None:
        self.checkpoints.release()
        self.checkpoints.saver.close()


def durable(training: Training, endpoint: str, gib: float, rounds: int, peers: Path) -> dict[str, Any]:
    ours = Ours(training, endpoint)
    children = {
        kind: Child("--peer-child", kind, endpoint, str(gib), path=peers)
        for kind in ("dcp", "s3tc")
        if peers.is_dir()
    }
    times: dict[str, list[tuple[float, float]]] = {"ours": [], **{kind: [] for kind in children}}
    for number in range(rounds + 1):
        found = {"ours": ours.save()}
        for kind, child in children.items():
            found[kind] = tuple(json.loads(child.ask(f"{number}")))
        for kind, value in found.items() if number else ():
            times[kind].append(value)
    for child in children.values():
        child.close()
    facts: dict[str, Any] = {}
    for kind, values in times.items():
        facts[f"durable_s_{kind}"] = spread([each[1] for each in values])
        facts[f"blocked_s_{kind}"] = spread([each[0] for each in values])
    return facts | work_lost(ours)


# --- work lost --------------------------------------------------------------------------------------
def work_lost(ours: Ours, saves: int = 3) -> dict[str, Any]:
    """A training of one thread, and what it does not do while saves are under way."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    a, b = torch.randn(512, 512), torch.randn(512, 512)

    def steps_in(seconds: float, until: Callable[[], bool] | None = None) -> tuple[int, float]:
        began, count = time.perf_counter(), 0
        while time.perf_counter() - began < seconds and not (until and until()):
            torch.mm(a, b)
            count += 1
        return count, time.perf_counter() - began

    lost: list[float] = []
    windows: list[float] = []
    for _ in range(saves):
        count, seconds = steps_in(3.0)
        rate = count / seconds
        ours.step += 1
        began = time.perf_counter()
        ours.checkpoints.start(ours.checkpoints.saver.snapshot(ours.training.tree(), {}, ours.step))
        count, _ = steps_in(600.0, lambda: ours.checkpoints.busy_with is None)
        window = time.perf_counter() - began
        lost.append(window - count / rate)
        windows.append(window)
    torch.set_num_threads(threads)
    stall = ours.checkpoints.saver.copy_seconds
    interval = auto_seconds(
        stall=stall, upload=statistics.median(windows), observed=Observed(trained=0.0, losses=0)
    )
    ours.close()
    return {
        "work_lost_s_per_save": spread(lost),
        "save_window_s": spread(windows),
        "auto_interval_s": round(interval, 1),
        "work_lost_percent": round(100 * statistics.median(lost) / interval, 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", type=Path, default=ROOT / "bench/.peers", help="folder of bench/peers.txt")
    parser.add_argument("--bare-child", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--peer-child", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.bare_child:
        bare_child(arguments.bare_child[0], int(arguments.bare_child[1]))
        return 0
    if arguments.peer_child:
        kind, endpoint, gib = arguments.peer_child
        peer_child(kind, endpoint, float(gib))
        return 0
    os.environ.update(s3server.credentials())
    training = Training(arguments.gib)
    with tempfile.TemporaryDirectory(dir=ROOT / "bench") as folder, s3server.running(Path(folder)) as server:
        server.make_bucket(BUCKET)
        found = {
            "bytes": training.bytes,
            "connections": CONNECTIONS,
            "threads": torch.get_num_threads(),
            **stall(training, Path(folder), arguments.rounds),
            **transfer(training, server.endpoint, arguments.rounds),
            **durable(training, server.endpoint, arguments.gib, arguments.rounds, arguments.peers),
        }
    missed = [
        name
        for name, (sign, goal) in GOALS.items()
        if (found[name] > goal) == (sign == "<=") and found[name] != goal
    ]
    print(json.dumps(found | {"missed": missed}))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

"""What a save costs, beside what it could cost at best and what others cost.

    stall      what a save stops a training, against memcpy of the same tensors and against torch.save
    folder     seconds until it is durable in a folder, against torch.save with fsync to the same disk
    transfer   our uploader process and our restore, against a bare boto3 client with as many connections
    durable    seconds until another process could resume, for us, torch DCP over s3fs, and s3torchconnector
    work lost  what a training on the other core loses from the start of a save until it is durable

All sides alternate within one run, on the same tensors, against one versitygw on loopback. The last line is
JSON; each figure has its median, least and greatest.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from spottrain.checkpoint.manager import CheckpointManager
from spottrain.checkpoint.reader import read_trees
from spottrain.checkpoint.saver import Saver, manifest, report_of
from spottrain.checkpoint.upload import Transfer
from spottrain.contract import Env
from spottrain.core.preemption import Preemption
from spottrain.core.run_config import RunConfig
from spottrain.distributed.world import World
from spottrain.lifecycle.save_interval import Losses, SlowerSteps, auto_seconds
from spottrain.lifecycle.session import Session
from spottrain.storage.open import open_store

from bench import needs
from bench.clients import BUCKET, CONNECTIONS, Child, Training
from bench.spread import ratio, spread, timed
from tests.support import s3server
from tests.support.s3server import S3Server


# --- stall ------------------------------------------------------------------------------------------
class Nowhere(Transfer):
    """Takes the place of the uploader where only the copy is measured."""

    def __init__(self) -> None: ...
    def share(self, arena: object) -> None: ...
    def forget(self) -> None: ...
    def close(self) -> None: ...
    def put(self, files: object, cancelled: object) -> Any:
        raise AssertionError("nothing is uploaded here")


BATCH: Final = 64
"""Samples of a step beside which a save copies: forward and backward take longer than a memcpy."""


class Loop:
    """Steps of a training as `Trainer` makes them, with a save at the boundary before one or without."""

    def __init__(self, training: Training, saver: Saver) -> None:
        self.training, self.saver = training, saver
        self.samples = torch.randn(BATCH, 1024)
        self.stalled = 0.0
        """Seconds of the last save in which the training stood still."""

    def step(self, save: bool) -> float:
        began = time.perf_counter()
        training, copier = self.training, threading.Thread()
        if save:
            stepped = training.tensors()
            made = self.saver.snapshot(training.tree(), {}, 1, stepped=stepped)
            copier = threading.Thread(target=self.saver.require_whole, args=[made])
            copier.start()
            self.stalled = time.perf_counter() - began
        training.model(self.samples).square().mean().backward()
        self.stalled += timed(self.saver.before_step)
        training.optimizer.step()
        training.optimizer.zero_grad(set_to_none=True)
        seconds = time.perf_counter() - began
        if save:
            copier.join()
        return seconds


def stall(training: Training, folder: Path, rounds: int) -> dict[str, Any]:
    saver = Saver(World(), Nowhere)
    saver.prepare(training.tree(), {})
    loop = Loop(training, saver)
    loop.step(False)
    buffers = [torch.zeros_like(tensor) for tensor in training.tensors()]
    for buffer, tensor in zip(buffers, training.tensors(), strict=True):
        buffer.copy_(tensor)
    time.sleep(2.0)  # a first save comes minutes after the start; the memory is made resident meanwhile

    def memcpy() -> None:
        for buffer, tensor in zip(buffers, tensors, strict=True):
            buffer.copy_(tensor)

    def torch_save() -> None:
        torch.save(training.tree(), folder / "state.pt")

    tensors = training.tensors()
    loop.step(True)
    first = loop.stalled
    times: dict[str, list[float]] = {name: [] for name in ("ours", "memcpy", "torch_save", "with", "without")}
    for _ in range(rounds):
        for name, act in (("memcpy", memcpy), ("torch_save", torch_save)):
            times[name].append(timed(act))
        times["without"].append(loop.step(False))
        times["with"].append(loop.step(True))
        times["ours"].append(loop.stalled)
    pairs = zip(times["with"], times["without"], strict=True)
    return {
        "stall_s": spread(times["ours"]),
        "memcpy_s": spread(times["memcpy"]),
        "torch_save_s": spread(times["torch_save"]),
        "first_save_s": round(first, 5),
        "stall_over_memcpy": ratio(times["ours"], times["memcpy"]),
        "stall_over_torch_save": ratio(times["ours"], times["torch_save"]),
        "first_over_memcpy": spread([first / each for each in times["memcpy"]]),
        "longer_step_over_memcpy": ratio([a - b for a, b in pairs], times["memcpy"]),
    }


# --- folder -----------------------------------------------------------------------------------------
def in_folder(training: Training, folder: Path, rounds: int) -> dict[str, Any]:
    saver = Saver(World(), lambda: Transfer({"uri": str(folder / "ours")}))
    save = saver.snapshot(training.tree(), {}, 1)
    store = open_store(str(folder / "ours"))

    def theirs() -> None:
        with (folder / "state.pt").open("wb") as file:
            torch.save(training.tree(), file)
            file.flush()
            os.fsync(file.fileno())

    times: dict[str, list[float]] = {"ours": [], "theirs": [], "restore": []}
    for number in range(rounds + 1):  # the first warms pages, and does not count
        save.key = f"checkpoints/t000001-s{number:09d}-x/"
        began = time.perf_counter()
        whole = manifest(save, [report_of(save, saver.send(save.uploads, lambda: False))])
        taken = {"ours": time.perf_counter() - began, "theirs": timed(theirs)}
        taken["restore"] = timed(lambda whole=whole: read_trees(store, save.key, whole))  # type: ignore[misc]
        for name, seconds in taken.items() if number else ():
            times[name].append(seconds)
        store.delete([item.key for item in save.uploads])
        os.sync()  # what one side leaves to the disk is not the other's
    saver.close()
    return {
        "folder_durable_s": spread(times["ours"]),
        "folder_restore_s": spread(times["restore"]),
        "folder_over_torch_save": ratio(times["ours"], times["theirs"]),
    }


# --- transfer ---------------------------------------------------------------------------------------
def transfer(training: Training, endpoint: str, rounds: int) -> dict[str, Any]:
    saver = Saver(World(), lambda: Transfer({"uri": f"s3://{BUCKET}/ours", "endpoint": endpoint}))
    save = saver.snapshot(training.tree(), {}, 1)
    store = open_store(f"s3://{BUCKET}/ours", endpoint)
    bare = Child("bare", endpoint, str(training.bytes))
    times: dict[str, list[float]] = {"up": [], "bare_up": [], "down": [], "bare_down": []}
    for number in range(rounds + 1):  # the first warms connections and pages, and does not count
        key = f"checkpoints/t000001-s{number:09d}-x/"
        items = [replace(item, key=key + item.key) for item in save.items]
        began = time.perf_counter()
        sent = saver.send(items, lambda: False)
        up = time.perf_counter() - began
        bare_up = float(bare.ask(f"upload bare-{number}"))
        save.key = key
        whole = manifest(save, [report_of(save, sent)])
        down = timed(lambda key=key, whole=whole: read_trees(store, key, whole))  # type: ignore[misc]
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


# --- durable ----------------------------------------------------------------------------------------
class Ours:
    """One claim of one job on the S3 server, as a training has it."""

    def __init__(self, training: Training, endpoint: str) -> None:
        uri = f"s3://{BUCKET}/job"
        env: dict[str, str] = {
            Env.JOB_UID: "bench",
            Env.CHECKPOINT_URI: uri,
            Env.CHECKPOINT_ENDPOINT: endpoint,
        }
        self.session = Session(env, Preemption(grace=30.0))
        self.session.run = RunConfig.from_env(env, script="bench.py")
        self.session.attempt = 1
        self.training = training
        where = self.session.run.where
        self.checkpoints = CheckpointManager(
            self.session, open_store(uri, endpoint), transfer=lambda: Transfer(where)
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
        self.checkpoints.wait_for_upload()
        if self.session.board.facts.durable_step != self.step:
            raise RuntimeError(self.session.board.facts.last_failure)
        return blocked, time.perf_counter() - began

    def close(self) -> None:
        self.checkpoints.release()
        self.checkpoints.saver.close()


def durable(training: Training, server: S3Server, gib: float, rounds: int, peers: Path) -> dict[str, Any]:
    endpoint, ours = server.endpoint, Ours(training, server.endpoint)
    children = {kind: Child(kind, endpoint, str(gib), path=peers) for kind in ("dcp", "s3tc")}
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
    return facts | work_lost(ours, server.pid)


# --- work lost --------------------------------------------------------------------------------------
def work_lost(ours: Ours, server: int, saves: int = 5) -> dict[str, Any]:
    """A training of one thread, and what it does not do while saves are under way.

    `server`: process of the store. A real one has processors of its own. On this machine it takes five times
    as many processor seconds as the uploader, so here it gets what the others leave.
    """
    for thread in os.listdir(f"/proc/{server}/task"):  # on Linux each has a niceness of its own
        os.setpriority(os.PRIO_PROCESS, int(thread), 19)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    a, b = torch.randn(512, 512), torch.randn(512, 512)
    slower, step, stepped = SlowerSteps(), 1, 0.0
    slower.save_over(step, stepped, None)

    def steps_until(over: Callable[[float], bool]) -> float:
        """Returns the seconds of the steps."""
        nonlocal step, stepped
        began, seconds = time.perf_counter(), 0.0
        while not over(seconds):
            torch.mm(a, b)
            step += 1
            seconds = time.perf_counter() - began
        stepped += seconds
        return seconds

    lost: list[float] = []
    windows: list[float] = []
    for _ in range(saves):
        before = step
        usual = steps_until(lambda seconds: seconds > 3.0) / (step - before)
        before = step
        ours.step += 1
        slower.save_began(step, stepped)
        began = time.perf_counter()
        ours.checkpoints.start(ours.checkpoints.saver.snapshot(ours.training.tree(), {}, ours.step))
        steps_until(lambda _: ours.checkpoints.busy_with is None)
        windows.append(time.perf_counter() - began)
        lost.append(windows[-1] - (step - before) * usual)
        slower.save_over(step, stepped, windows[-1])
    torch.set_num_threads(threads)
    cost = ours.checkpoints.saver.copy_seconds + slower.seconds
    interval = auto_seconds(cost=cost, upload=statistics.median(windows), losses=Losses())
    ours.close()
    return {
        "work_lost_s_per_save": spread(lost),
        "save_window_s": spread(windows),
        "auto_interval_s": round(interval, 1),
        "work_lost_percent": spread([100 * each / interval for each in lost]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    needs.programs("versitygw")
    peers = needs.peers()
    os.environ.update(s3server.credentials())
    training = Training(arguments.gib)
    with (
        tempfile.TemporaryDirectory(dir=needs.ROOT / "bench") as folder,
        s3server.running(Path(folder)) as server,
    ):
        server.make_bucket(BUCKET)
        found = {
            "bytes": training.bytes,
            "connections": CONNECTIONS,
            "threads": torch.get_num_threads(),
            **stall(training, Path(folder), arguments.rounds),
            **in_folder(training, Path(folder), arguments.rounds),
            **transfer(training, server.endpoint, arguments.rounds),
            **durable(training, server, arguments.gib, arguments.rounds, peers),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()

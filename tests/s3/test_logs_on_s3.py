"""What ranks print, stored on the real S3 server behind a network that fails: once, in order, and quietly."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from spottrain.contract import LOGS_PREFIX, Env, log_key
from spottrain.lifecycle.log_capture.uploader import Limits, LogUploader
from spottrain.storage.s3 import S3Store

from tests.support.faultproxy import Fault, FaultProxy, Request, Treatment

TEXTS = [f"part {number}\n".encode() for number in range(1, 7)]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Scene:
    """A shelf of one rank, and a store behind the proxy that gives up at once."""

    def __init__(self, proxy: FaultProxy, bucket: str) -> None:
        self.clock = Clock()
        self.said: list[str] = []
        store = S3Store(bucket, "p", endpoint=proxy.endpoint(), timeout=0.3, tries=1)
        limits = Limits(every=30.0)
        self.shelf = LogUploader(
            lambda: store, [0], attempt=2, say=self.said.append, limits=limits, clock=self.clock
        )

    def print(self, text: bytes) -> None:
        """And half a minute goes by."""
        self.shelf.add(0, text)
        self.later()

    def later(self) -> None:
        self.clock.now += 30.0
        self.shelf.send()


def stored(direct: S3Store) -> bytes:
    found = [direct.get(key) for key in direct.list(LOGS_PREFIX)]
    return b"".join(each.body for each in found if each is not None)


def puts(proxy: FaultProxy) -> list[Request]:
    return [exchange.request for exchange in proxy.exchanges if exchange.request.method == "PUT"]


@pytest.fixture
def scene(proxy: FaultProxy, bucket: str) -> Scene:
    return Scene(proxy, bucket)


def test_a_part_is_one_conditional_put_and_nothing_is_read_or_listed(
    scene: Scene, proxy: FaultProxy, direct: S3Store
) -> None:
    for text in TEXTS:
        scene.print(text)
    assert stored(direct) == b"".join(TEXTS) and scene.said == []
    assert [exchange.request.method for exchange in proxy.exchanges] == ["PUT"] * len(TEXTS)
    assert all(request.headers["if-none-match"] == "*" for request in puts(proxy))


@pytest.mark.parametrize(
    "fault",
    [
        Fault.REPLY_LOST,
        Fault.REPLY_HANGS,
        Fault.REPLY_CUT,
        Fault.ERROR_AFTER,
        Fault.REQUEST_LOST,
        Fault.REQUEST_CUT,
        Fault.ERROR_500,
        Fault.ERROR_503,
        Fault.TWICE,
    ],
)
def test_whatever_the_network_does_to_every_other_put_each_part_is_there_once_and_in_order(
    scene: Scene, proxy: FaultProxy, direct: S3Store, fault: Fault
) -> None:
    def every_other(request: Request) -> Treatment:
        hit = request.method == "PUT" and len(puts(proxy)) % 2 == 0
        return Treatment(fault=fault if hit else Fault.NONE)

    proxy.plan = every_other
    for text in TEXTS:
        scene.print(text)
    for _ in TEXTS:
        scene.later()
    proxy.settle()
    assert stored(direct) == b"".join(TEXTS)
    assert all("event=logs-failed" in line for line in scene.said)


def test_an_outage_is_one_line_and_afterwards_nothing_is_missing(
    scene: Scene, proxy: FaultProxy, direct: S3Store
) -> None:
    proxy.plan = lambda request: Treatment(fault=Fault.ERROR_503)
    for text in TEXTS:
        scene.print(text)
    assert len(scene.said) == 1
    proxy.plan = lambda request: Treatment()
    scene.later()
    assert stored(direct) == b"".join(TEXTS)


def test_parts_of_another_process_are_never_written_over(
    scene: Scene, proxy: FaultProxy, direct: S3Store
) -> None:
    direct.put(log_key(2, 0, 1), b"theirs\n")
    scene.print(TEXTS[0])
    assert stored(direct) == b"theirs\n" + TEXTS[0]


SCRIPT = """\
import os, sys
print("of Python", flush=True)
os.write(2, b"of C\\n")
os._exit(5)
"""


def test_a_run_on_s3_leaves_its_log_there_though_the_first_put_has_no_answer(
    proxy: FaultProxy, bucket: str, direct: S3Store, tmp_path: Path
) -> None:
    def lost(request: Request) -> Treatment:
        first = LOGS_PREFIX in request.path and not any(LOGS_PREFIX in each.path for each in puts(proxy))
        return Treatment(fault=Fault.REPLY_LOST if first else Fault.NONE)

    proxy.plan = lost
    (tmp_path / "train.py").write_text(SCRIPT)
    env = {
        Env.JOB_UID: "uid",
        Env.ATTEMPT: "2",
        Env.CHECKPOINT_URI: f"s3://{bucket}/p",
        Env.CHECKPOINT_ENDPOINT: proxy.endpoint(),
    }
    run = subprocess.run(
        [sys.executable, "-m", "spottrain", "run", "train.py"],
        cwd=tmp_path,
        env=os.environ | {str(name): value for name, value in env.items()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=60,
    )
    assert run.returncode == 5
    assert b"of Python\nof C\n" in run.stdout and stored(direct) == run.stdout
    assert [request.path.rpartition("/p/")[2] for request in puts(proxy) if LOGS_PREFIX in request.path] == [
        log_key(2, 0, 1)
    ] * 2, "asked again, and told that it was there"

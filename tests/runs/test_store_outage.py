"""A checkpoint store that cannot be reached when an attempt starts or ends: waited for, said, never charged.

Against the real S3 server, behind a proxy that loses every request while the store is `down`.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from spottrain.contract import WAITING_FOR_STORE, Env, ExitCode, Outcome, Reason

from tests.runs.conftest import SCRIPT, Lab, progress_of
from tests.runs.launched import Run
from tests.support import s3server
from tests.support.faultproxy import Fault, FaultProxy, Request, Treatment, plain
from tests.support.heavy import sample
from tests.support.s3server import S3Server

LOST = Treatment(fault=Fault.REQUEST_LOST)
LOOK_SECONDS, TELL_SECONDS = 0.05, 0.3
QUICK_UPLOADS = "from spottrain.storage import requests\nrequests.LONGEST_PAUSE = 0.1\n"
QUICK = (
    QUICK_UPLOADS
    + f"""\
from spottrain.checkpoint import manager
from spottrain.storage import outage
outage.LOOK_SECONDS, outage.TELL_SECONDS = {LOOK_SECONDS}, {TELL_SECONDS}
outage.LONGEST_PAUSE = manager.RETRY_SECONDS = 0.1
manager.CheckpointManager.__init__.__kwdefaults__["watch_seconds"] = 0.2
"""
)
"""What is said after 5 s of silence, tried again for 20 s and looked at every 30 s, at once."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3server.running(tmp_path_factory.mktemp("s3")) as it:
        yield it


class Cut:
    """The store goes down at the first request of this method whose path has `at` in it, until `mend`."""

    def __init__(self, method: str, at: str) -> None:
        self.method, self.at = method, at
        self.down = self.over = False

    def __call__(self, request: Request) -> Treatment:
        here = request.method == self.method and self.at in request.path
        self.down = (self.down or here) and not self.over
        return LOST if self.down else Treatment()

    def mend(self) -> None:
        self.over = True


@pytest.fixture
def store(server: S3Server, tmp_path: Path) -> Iterator[tuple[FaultProxy, dict[str, str]]]:
    """The proxy, and the environment of a job behind it."""
    bucket = tmp_path.name.replace("_", "-").lower()[:50]
    server.make_bucket(bucket)
    (tmp_path / "uploads").mkdir()
    (tmp_path / "uploads" / "sitecustomize.py").write_text(QUICK_UPLOADS)
    with FaultProxy(server.port).running() as proxy:
        yield proxy, at(proxy.endpoint(), bucket) | {"PYTHONPATH": str(tmp_path / "uploads")}


def at(endpoint: str, bucket: str = "bucket") -> dict[str, str]:
    return {
        Env.CHECKPOINT_URI: f"s3://{bucket}/run",
        Env.CHECKPOINT_ENDPOINT: endpoint,
        **s3server.credentials(),
    }


TRAINS = QUICK + SCRIPT
RANKS = (
    QUICK
    + """\
import torch, spottrain
model = torch.nn.Linear(1, 1)
spottrain.Trainer(
    model=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    train_dataset=[(torch.ones(1), torch.ones(1))] * 8,
    loss_fn=lambda m, b: ((m(b[0]) - b[1]) ** 2).mean(),
    max_steps=4,
    global_batch_size=2,
).fit()
"""
)


def told(run: Run, endpoint: str) -> str:
    """The line that says what is waited for."""
    log = run.until("event=waiting-for-store").log
    line = next(each for each in log.splitlines() if "event=waiting-for-store" in each)
    assert endpoint in line and "s3://" in line
    return line


def test_a_store_that_refuses_connections_ends_the_pod_with_a_code_of_its_own(lab: Lab) -> None:
    endpoint = f"http://127.0.0.1:{s3server.free_port()}"
    run = lab.run(TRAINS, env=at(endpoint) | {Env.STORE_WAIT: "1"})
    told(run, endpoint)
    run.ends(ExitCode.STORE_UNREACHABLE)
    message, split = run.message, run.message.timeSplit
    assert message.outcome is Outcome.STORE_UNREACHABLE and message.reason == Reason.STORE_UNAVAILABLE
    assert endpoint in message.message and "nothing was lost" in message.message
    assert split is not None and split.waiting > split.total - split.startup - 0.1, "it did nothing else"


@pytest.mark.heavy
def test_an_endpoint_that_never_answers_is_named_and_sigterm_ends_the_wait_uncharged(lab: Lab) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        endpoint = f"http://127.0.0.1:{mute.getsockname()[1]}"
        run = lab.run(TRAINS, env=at(endpoint) | {Env.PROGRESS_PORT: "0"})
        assert "no response to" in told(run, endpoint)
        progress = progress_of(run)
        assert progress.state == WAITING_FOR_STORE and endpoint in progress.waitingFor
        run.stopped()
        assert run.message.outcome is Outcome.INTERRUPTED


@pytest.mark.parametrize(
    ("method", "path", "attempt"),
    [
        ("PUT", "/run/HEAD", 1),  # the claim
        ("PUT", "final/manifest", 1),
        # the last checkpoint is that of the two ranks below
        *sample(
            [
                ("GET", "manifest.json", 2),
                ("GET", ".safetensors", 2),
                ("PUT", "s000000024", 1),
                ("PUT", "final/model", 1),
            ]
        ),
    ],
)
def test_an_outage_is_outlived_wherever_it_comes(
    lab: Lab, store: tuple[FaultProxy, dict[str, str]], method: str, path: str, attempt: int
) -> None:
    proxy, env = store
    if attempt == 2:
        lab.run(TRAINS, env=env | {"PAUSE": "0.1"}).until("step=2/").stopped()
    cut = Cut(method, path)
    proxy.reset(cut)
    run = lab.run(TRAINS, env=env | {Env.PROGRESS_PORT: "0"}, attempt=attempt)
    told(run, proxy.endpoint())
    assert progress_of(run).state == WAITING_FOR_STORE
    waited, began = progress_of(run).timeSplit, time.monotonic()
    time.sleep(0.3)
    seconds = time.monotonic() - began
    cut.mend()
    run.done()
    assert run.message.outcome is Outcome.DONE and run.message.step == 24
    assert waited is not None and run.message.timeSplit is not None
    assert run.message.timeSplit.waiting - waited.waiting >= seconds - 2 * LOOK_SECONDS


@pytest.mark.heavy
def test_a_done_that_could_not_be_said_is_said_by_the_next_attempt(
    lab: Lab, store: tuple[FaultProxy, dict[str, str]]
) -> None:
    proxy, env = store
    proxy.reset(Cut("PUT", "final/"))
    run = lab.run(TRAINS, env=env | {Env.STORE_WAIT: "1"}).ends(ExitCode.STORE_UNREACHABLE)
    assert run.message.durableStep == 24 and "nothing was lost" in run.message.message
    proxy.reset(plain)
    again = lab.run(TRAINS, env=env, attempt=2).done()
    assert not again.losses, "all its steps were durable"


def test_a_signal_while_the_claim_waits_ends_it_uncharged(
    lab: Lab, store: tuple[FaultProxy, dict[str, str]]
) -> None:
    proxy, env = store
    proxy.reset(Cut("PUT", "/run/HEAD"))
    run = lab.run(TRAINS, env=env | {Env.GRACE_SECONDS: "20"})
    told(run, proxy.endpoint())
    run.stopped()


def test_a_refusal_ends_it_at_once(lab: Lab, store: tuple[FaultProxy, dict[str, str]]) -> None:
    _, env = store
    run = lab.run(env=env | {"AWS_SECRET_ACCESS_KEY": "wrong"}).ends(ExitCode.BAD_CONFIGURATION)
    assert run.message.reason == Reason.STORE_DENIED and "waiting-for-store" not in run.log
    gone = lab.run(env=env | {Env.CHECKPOINT_URI: "s3://no-such-bucket/run"}).ends(ExitCode.BAD_CONFIGURATION)
    assert gone.message.reason == Reason.BUCKET_NOT_FOUND


@pytest.mark.heavy
def test_peers_of_the_rank_that_waits_say_nothing_that_would_be_charged(lab: Lab) -> None:
    endpoint = f"http://127.0.0.1:{s3server.free_port()}"
    runs = lab.ranks(2, RANKS, env=at(endpoint) | {Env.STORE_WAIT: "1"})
    told(runs[0], endpoint)
    runs[0].ends(ExitCode.STORE_UNREACHABLE)
    runs[1].stopped()  # as the launcher and the operator do when a rank has ended
    assert runs[0].message.outcome is Outcome.STORE_UNREACHABLE


def test_an_outage_in_mid_training_stops_nothing_and_is_said(
    lab: Lab, store: tuple[FaultProxy, dict[str, str]]
) -> None:
    proxy, env = store
    cut = Cut("GET", "/run/HEAD")
    run = lab.run(
        TRAINS,
        env=env | {Env.PROGRESS_PORT: "0", "PAUSE": "0.1"},
        training='{"maxSteps": 1000}',
        interval="1h",
    ).until("step=2/")
    proxy.plan = cut
    log = run.until("event=store-unreachable").log
    assert proxy.endpoint() in log.rpartition("event=store-unreachable")[2]
    progress = progress_of(run)
    assert progress.state == "Training" and proxy.endpoint() in progress.waitingFor
    cut.mend()
    run.until("event=store-reachable")
    assert not progress_of(run).waitingFor
    run.stopped()


@pytest.mark.heavy
def test_two_ranks_outlive_an_outage_at_their_end(lab: Lab, store: tuple[FaultProxy, dict[str, str]]) -> None:
    proxy, env = store
    cut = Cut("PUT", "s000000004")
    proxy.reset(cut)
    runs = lab.ranks(2, RANKS, env=env, interval="1h")
    told(runs[0], proxy.endpoint())
    cut.mend()
    assert [run.end() for run in runs] == [ExitCode.DONE] * 2, runs[0].log + runs[1].log


@pytest.mark.heavy
def test_the_pod_of_several_ranks_ends_with_the_code_of_the_one_that_waited(lab: Lab) -> None:
    endpoint = f"http://127.0.0.1:{s3server.free_port()}"
    run = lab.run(RANKS, env=at(endpoint) | {Env.STORE_WAIT: "1"}, nproc=2)
    told(run, endpoint)
    run.ends(ExitCode.STORE_UNREACHABLE)
    assert run.message.outcome is Outcome.STORE_UNREACHABLE and endpoint in run.message.message

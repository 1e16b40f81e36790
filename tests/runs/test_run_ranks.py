"""Two real processes with gloo: they save and stop together, and go on alone, together or with another."""

from __future__ import annotations

import itertools
import json
import os
import signal

import pytest
import torch.distributed as dist
from spottrain.contract import Env, ExitCode, Outcome
from spottrain.core.preemption import Preemption
from spottrain.distributed.process_group import peer_lost
from spottrain.distributed.world import World
from spottrain.lifecycle.session import Session

from tests.runs.conftest import Lab
from tests.runs.launched import Run, alive
from tests.support.heavy import sample

SCRIPT = """\
import os, sys, time
import torch, spottrain

spottrain.seed(3)
PAUSE = float(os.environ.get("PAUSE", "0"))
NOISE = float(os.environ.get("NOISE", "0"))


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 50

    def __getitem__(self, i):
        x = torch.randn(4, generator=torch.Generator().manual_seed(i))
        return i, x + NOISE * torch.randn(4), x.sum()


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, 15)
        self.norm = torch.nn.LayerNorm(15)
        self.drop = torch.nn.Dropout(0.2 if NOISE else 0.0)
        self.last = torch.nn.Linear(15, 1)

    def forward(self, x):
        return self.last(self.drop(self.norm(self.first(x)).relu())).squeeze(-1)


def loss(model, batch):
    time.sleep(PAUSE)
    sys.stdout.write(f"samples {trainer.step + 1} {batch[0].tolist()}\\n")
    sys.stdout.flush()
    return torch.nn.functional.mse_loss(model(batch[1]), batch[2])


model = Model()
if "SHARD" in os.environ:
    model = spottrain.shard(model, layers=[torch.nn.Linear])
trainer = spottrain.Trainer(
    model=model,
    optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
    train_dataset=Numbers(),
    loss_fn=loss,
    max_steps=20,
    global_batch_size=8,
    micro_batch_size=2,
    log_every=1,
    drop_last=True,
    deterministic=True,
)
trainer.fit()
print("after fit")
"""
NOISE = {"NOISE": "0.1"}
"""Random numbers in the data and in the model: they are each rank's own."""
SLOW = {"PAUSE": "0.05"}
KINDS = {"DDP": {}, "FSDP2": {"SHARD": "1"}}
TECHNIQUES = {
    "DDP": {"emaDecay": 0.9, "microBatchSize": "auto"},
    "FSDP2": {
        "emaDecay": 0.9,
        "optimizer": {"name": "sgd", "learningRate": 0.01, "momentum": 0.9},
        "microBatchSize": "auto",
        "activationCheckpointing": {"policy": "auto"},
    },
}
"""What each kind can, as its manifest says it."""


def samples(*runs: Run) -> dict[int, list[int]]:
    """What each step was trained on, by all ranks together."""
    found: dict[int, list[int]] = {}
    for run in runs:
        for line in run.log.splitlines():
            if line.startswith("samples "):
                _, step, numbers = line.split(maxsplit=2)
                found.setdefault(int(step), []).extend(json.loads(numbers))
    return {step: sorted(numbers) for step, numbers in found.items()}


def ends(runs: list[Run]) -> list[int]:
    """The exit codes. Where a rank does not end, all logs: it may wait for one that has failed."""
    try:
        return [run.end() for run in runs]
    except AssertionError as error:
        raise AssertionError("\n".join([str(error), *(run.log for run in runs)])) from None


def stopped(runs: list[Run], after: int = 6) -> list[int]:
    """Only the last rank is told to."""
    runs[0].until(f" step={after}/")
    runs[-1].send()
    return ends(runs)


def logged(losses: dict[int, str]) -> list[float]:
    return [float(losses[step].split("=")[1]) for step in sorted(losses)]


@pytest.mark.parametrize(
    ("kind", "techniques"),
    sample(itertools.product(KINDS, (False, True)), ("DDP", True)),
)
def test_two_ranks_that_were_stopped_go_on_bit_by_bit_each_with_its_own_random_numbers(
    lab: Lab, kind: str, techniques: bool
) -> None:
    env = NOISE | KINDS[kind]
    env |= {Env.TRAINING: json.dumps(TECHNIQUES[kind])} if techniques else {}
    plain = lab.ranks(2, SCRIPT, at="plain", attempt=1, env=env)
    assert ends(plain) == [ExitCode.DONE] * 2, plain[0].log + plain[1].log
    first = lab.ranks(2, SCRIPT, attempt=1, env=env | SLOW)
    assert stopped(first) == [ExitCode.INTERRUPTED] * 2, first[0].log + first[1].log
    step = first[0].message.step
    assert step == first[0].message.durableStep == max(first[0].losses)
    second = lab.ranks(2, SCRIPT, attempt=2, env=env)
    assert ends(second) == [ExitCode.DONE] * 2, second[0].log + second[1].log
    assert first[0].losses | second[0].losses == plain[0].losses
    assert second[0].digest == plain[0].digest
    assert min(samples(*second)) == step + 1


@pytest.mark.heavy
@pytest.mark.parametrize("kind", sample(KINDS, "FSDP2"))
def test_what_two_ranks_saved_one_goes_on_with_and_then_two_again(lab: Lab, kind: str) -> None:
    env = KINDS[kind]
    plain = lab.ranks(1, SCRIPT, at="plain", attempt=1, env=env)
    assert ends(plain) == [ExitCode.DONE], plain[0].log
    first = lab.ranks(2, SCRIPT, attempt=1, env=env | SLOW)
    assert stopped(first) == [ExitCode.INTERRUPTED] * 2, first[0].log
    second = lab.ranks(1, SCRIPT, attempt=2, env=env | SLOW)
    assert stopped(second, after=max(first[0].losses) + 2) == [ExitCode.INTERRUPTED], second[0].log
    third = lab.ranks(2, SCRIPT, attempt=3, env=env)
    assert ends(third) == [ExitCode.DONE] * 2, third[0].log
    assert "event=new-rank" in third[1].log and "event=new-rank" not in second[0].log + third[0].log

    done = [
        {step: got for step, got in samples(*runs).items() if step in runs[0].losses}
        for runs in (first, second, third)
    ]
    assert [min(each) for each in done[1:]] == [max(each) + 1 for each in done[:2]], "none is repeated"
    assert done[0] | done[1] | done[2] == samples(*plain), "and none is skipped"
    losses = first[0].losses | second[0].losses | third[0].losses
    assert logged(losses) == pytest.approx(logged(plain[0].losses), rel=1e-4)


def test_a_stop_of_the_launcher_ends_all_ranks_with_75_after_the_commit(lab: Lab) -> None:
    first = lab.run(SCRIPT, nproc=2, attempt=1, env=NOISE | SLOW).until(" step=6/")
    first.stopped()
    assert first.message.outcome is Outcome.INTERRUPTED
    assert first.message.step == first.message.durableStep == max(first.losses)
    assert first.log.count("status=75") == 2 and "event=launcher-end code=75" in first.log
    head = lab.head
    assert head["state"] == "released" and head["checkpoints"][0]["step"] == first.message.step


HAS_A_CHILD = """\
    if os.environ["RANK"] == "1" and trainer.step == 2 and not children:
        children.append(os.fork())
        if not children[0]:
            time.sleep(120)
            os._exit(0)
        print(f"child={children[0]}.", flush=True)
"""


def test_a_rank_that_is_killed_ends_the_other_which_loses_what_was_not_committed(lab: Lab) -> None:
    """Long before torch's time-out of 30 minutes, and while a child of its own lives on."""
    script = SCRIPT.replace(
        "def loss(model, batch):\n", f"children = []\n\n\ndef loss(model, batch):\n{HAS_A_CHILD}"
    )
    ranks = lab.ranks(2, script, attempt=1, interval="4steps", env=SLOW)
    child = int(ranks[1].until("child=").log.split("child=")[1].split(".")[0])
    ranks[0].until("event=committed").until(" step=5/")
    ranks[1].send(signal.SIGKILL)
    try:
        assert ends(ranks) == [ExitCode.INTERRUPTED_LOST, -signal.SIGKILL], ranks[0].log
        assert alive(child)
    finally:
        os.kill(child, signal.SIGKILL)
    assert ranks[0].message.reason == "PeerLost" and ranks[0].message.durableStep


# --- whose fault an exception is ------------------------------------------------------------------------
SECOND = World(rank=1, size=2, local_rank=1, local_size=2)
GLOO = RuntimeError("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.7]:40213\nmore")


def last_words(error: Exception, *, step: int = 0) -> Session:
    """Of rank 1, whose script raises `error` after so many steps, none of them saved."""
    session = Session({}, Preemption(grace=30.0))
    session.board.update(step=step)
    session.world = SECOND
    try:
        raise error
    except Exception as raised:
        session.fail(raised, "train.py")
    return session


@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError(104, "Connection reset by peer"),
        OSError("Connection reset by peer"),
        BrokenPipeError(32, "Broken pipe"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        RuntimeError("feature store: connection refused"),
        RuntimeError("Connection closed by peer while reading s3://features"),
        dist.DistBackendError("NCCL error: invalid usage: Duplicate GPU detected"),
    ],
)
def test_a_network_error_of_the_script_s_own_is_its_own(error: Exception) -> None:
    assert peer_lost(error, SECOND) is None
    words = last_words(error).message
    assert words is not None and words.outcome is Outcome.FAILED and words.reason == "ScriptFailed"


def test_what_gloo_says_of_a_rank_that_is_gone_is_told_as_that_wherever_it_is_raised() -> None:
    lost = peer_lost(GLOO, SECOND)
    assert lost is not None and "another rank is gone ([../gloo/transport" in str(lost)
    assert "more" not in str(lost) and peer_lost(GLOO, World()) is None
    for error in (
        RuntimeError(
            "[/w/third_party/gloo/gloo/transport/tcp/pair.cc:545] Read error: Connection reset by peer"
        ),
        dist.DistBackendError("NCCL error: ncclRemoteError: A call failed possibly due to a network error"),
        dist.DistNetworkError("The client socket has failed to connect (errno: 111 - Connection refused)."),
    ):
        assert peer_lost(error, SECOND) is not None
    for step, outcome in ((0, Outcome.INTERRUPTED), (3, Outcome.INTERRUPTED_LOST)):
        words = last_words(GLOO, step=step).message
        assert words is not None and words.outcome is outcome and words.reason == "PeerLost"


def test_what_the_control_channel_knows_counts_whatever_is_said() -> None:
    waited: list[float] = []

    def gone(seconds: float) -> bool:
        waited.append(seconds)
        return True

    assert peer_lost(dist.DistBackendError("NCCL error: unhandled system error"), SECOND, gone) is not None
    assert peer_lost(RuntimeError("a backward pass that was cut off"), SECOND, gone) is not None
    assert waited[0] > 0 and waited[1] == 0, "the script's own error is not held up"
    assert peer_lost(ValueError("x"), SECOND, gone) is None

"""`spottrain run --nproc N`: one process per rank, one signal to each, one end for all of them."""

from __future__ import annotations

import os
import signal
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from spottrain.cli.output import WRONG_USAGE
from spottrain.contract import Env, ExitCode, Outcome
from spottrain.lifecycle.launcher import Ended, gravest

from tests.runs.conftest import Lab
from tests.runs.launched import BASE, OURS, WAITS, Launched, Run, gone
from tests.support.pid1 import NAMESPACE, needs_root, pid_1_below
from tests.support.ports import free_port

COUNTS = (
    BASE
    + """
seen = []
ours = signal.getsignal(signal.SIGTERM)


def count(signum, frame):
    seen.append(signum)
    ours(signum, frame)


signal.signal(signal.SIGTERM, count)
wait()
until = time.time() + 0.3
while time.time() < until:
    time.sleep(0.05)
print(f"seen-{rank}={len(seen)}", flush=True)
session.end(Ending(Outcome.INTERRUPTED, f"Saved by rank {rank}."))
"""
)


def start(lab: Lab, script: str, nproc: int | str = 2, **env: str) -> Run:
    (lab.folder / "train.py").write_text(script)
    words = ["--nproc", str(nproc), "train.py", "--lr", "1"]
    return lab.start(words, {Env.CHECKPOINT_URI: str(lab.folder / "store"), **env})


def test_every_rank_runs_the_script_and_ends_with_its_code(tmp_path: Path) -> None:
    """A launcher from its first instruction on, which the zygote's are not."""
    nproc = 3
    script = BASE + "print(sys.argv[1:], session.world, os.getpgrp() == os.getpid(), flush=True)"
    (tmp_path / "train.py").write_text(script)
    run = Launched(tmp_path, [*OURS, "--nproc", str(nproc), "train.py", "--lr", "1"]).done()
    assert run.message.outcome is Outcome.UNTRAINED, "they only print"
    for rank in range(nproc):
        world = f"World(rank={rank}, size={nproc}, local_rank={rank}, local_size={nproc})"
        assert f"['--lr', '1'] {world} True" in run.log, "a process group of its own"
        assert f"event=start rank={rank} " in run.log


def test_an_exit_code_of_0_alone_is_not_told_as_done(lab: Lab) -> None:
    run = start(lab, "import os\nos._exit(0)", 2).done()
    assert run.words == "", "whether the training is done, nobody has said"


@pytest.mark.parametrize("how", ["launcher", "group", "twice", "ctrl-c twice"])
def test_each_rank_sees_a_signal_once(lab: Lab, how: str) -> None:
    run = start(lab, COUNTS).until("ready-0", "ready-1")
    if how == "group":
        run.send_group()
    elif how == "launcher":
        run.send()
    else:
        signum = signal.SIGINT if how.startswith("ctrl-c") else signal.SIGTERM
        run.send(signum).until("event=sigterm rank=0", "event=sigterm rank=1").send(signum)
    assert run.end() == ExitCode.INTERRUPTED, run.log
    seen = 0 if how.startswith("ctrl-c") else 1  # the script counts SIGTERM
    assert f"seen-0={seen}" in run.log and f"seen-1={seen}" in run.log
    assert run.message.outcome is Outcome.INTERRUPTED and run.message.message == "Saved by rank 0."


def test_a_signal_before_the_ranks_have_their_handlers_is_kept_for_them(lab: Lab) -> None:
    run = start(lab, WAITS).until("event=launched").stopped()
    assert run.message.outcome is Outcome.INTERRUPTED


def test_the_deadline_file_alone_ends_all_ranks(lab: Lab) -> None:
    deadline = lab.folder / "deadline"
    run = start(lab, WAITS, **{Env.DEADLINE_FILE: str(deadline)}).until("ready-0", "ready-1")
    deadline.write_text((datetime.now(UTC) + timedelta(seconds=20)).isoformat())
    assert run.end() == ExitCode.INTERRUPTED, run.log
    assert "event=deadline rank=" in run.log, "one that reads it ends, then the launcher ends the other"


def test_a_signal_to_one_rank_ends_the_others_too(lab: Lab) -> None:
    run = start(lab, WAITS, 3).until("ready-0", "ready-1", "ready-2")
    os.kill(run.pid_of(1), signal.SIGTERM)
    assert run.end() == ExitCode.INTERRUPTED, run.log


@pytest.mark.parametrize(
    ("fault", "code", "says"),
    [
        ("raise ValueError('two is odd')", 1, "Rank 1: ValueError: two is odd (train.py:"),
        ("sys.exit(3)", 3, "Rank 1: The script ended itself: sys.exit(3)."),
        ("os._exit(5)", 5, "Rank 1 ended with exit code 5."),
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            137,
            "Rank 1 was killed (SIGKILL), probably because it was out",
        ),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "Rank 1 died of SIGSEGV."),
    ],
)
def test_a_rank_that_fails_ends_the_others_and_is_named(lab: Lab, fault: str, code: int, says: str) -> None:
    run = start(lab, BASE + f"if rank == 1:\n    {fault}\n" + WAITS.removeprefix(BASE), 3).ends(code)
    assert run.message.outcome is Outcome.FAILED and run.message.reason == "ScriptFailed"
    assert says in run.message.message, run.message.message


def test_a_silent_death_is_the_cause_of_what_its_peers_say_failed(lab: Lab) -> None:
    faults = """
if rank == 1:
    while not os.path.exists("first-is-there"):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
open("first-is-there", "w").close()
wait()
raise RuntimeError("connection closed by peer")
"""
    run = start(lab, BASE + faults).ends(137)
    assert run.message.message.startswith("Rank 1 was killed (SIGKILL)")
    assert "RuntimeError: connection closed by peer (train.py:" in run.message.message


def test_a_bad_configuration_outranks_what_follows_from_it(lab: Lab) -> None:
    fault = (
        "from spottrain.errors import ConfigurationError\nif rank == 1:\n    raise ConfigurationError('no')\n"
    )
    run = start(lab, BASE + fault + WAITS.removeprefix(BASE)).ends(ExitCode.BAD_CONFIGURATION)
    assert run.message.outcome is Outcome.BAD_CONFIGURATION and run.message.message == "no"


def test_a_rank_that_hangs_is_killed_before_the_grace_ends(lab: Lab) -> None:
    hangs = "if rank == 1:\n    ready()\n    os.kill(os.getpid(), signal.SIGSTOP)\n"
    run = start(lab, BASE + hangs + WAITS.removeprefix(BASE), **{Env.GRACE_SECONDS: "2"}).until(
        "ready-0", "ready-1"
    )
    run.send()
    assert run.end() == ExitCode.INTERRUPTED_LOST, run.log
    assert run.message.outcome is Outcome.INTERRUPTED_LOST
    assert run.message.message.startswith("Rank 1 did not end in the time it had, and was killed.")
    assert "Saved by rank 0." in run.message.message and "event=ranks-killed ranks=1" in run.log


def test_no_rank_outlives_a_launcher_that_is_killed(lab: Lab) -> None:
    run = start(lab, WAITS, 3)
    pids = [run.pid_of(rank) for rank in range(3)]
    run.killed()
    assert all(gone(pid) for pid in pids), run.log


ORPHANS = (
    BASE
    + """
import subprocess
if rank == 0:
    subprocess.run(["sh", "-c", "sleep 1 & echo orphan=$!."])
else:
    lasting = subprocess.Popen(["sleep", "600"])
    print(f"lasting={lasting.pid}.", flush=True)
wait()
session.end(Ending(Outcome.INTERRUPTED, "Saved."))
"""
)


def test_orphans_are_reaped_and_no_process_of_a_rank_is_left_behind(lab: Lab) -> None:
    run = start(lab, ORPHANS).until("ready-0", "ready-1", "orphan=", "lasting=")
    orphan, lasting = (int(run.log.split(f"{name}=")[1].split(".")[0]) for name in ("orphan", "lasting"))
    assert int(Path(f"/proc/{orphan}/stat").read_text().rpartition(")")[2].split()[1]) == run.pid
    assert gone(orphan, zombie=False), "a zombie is left"
    run.stopped()
    assert gone(lasting)


@pytest.mark.parametrize(
    ("nproc", "env", "says"),
    [
        ("0", {}, "--nproc 0 must be auto or a whole number, at least 1"),
        ("2", {"RANK": "1", "WORLD_SIZE": "2"}, "--nproc 2: RANK=1 is set, so another launcher has started"),
        ("2", {Env.WORKERS: "2", Env.WORKER_INDEX: "2"}, "SPOTTRAIN_WORKER_INDEX=2 is not below"),
        ("1", {Env.WORKERS: "2", Env.WORKER_INDEX: "0"}, "must be host:port of pod 0"),
    ],
)
def test_what_cannot_be_a_gang_is_refused_in_a_sentence(
    lab: Lab, nproc: str, env: dict[str, str], says: str
) -> None:
    run = start(lab, WAITS, nproc, **env).ends(WRONG_USAGE)
    assert says in run.message.message and "Traceback" not in run.log


def test_a_rank_without_its_number_of_ranks_is_refused_in_a_sentence(lab: Lab) -> None:
    run = start(lab, WAITS, "1", RANK="1").ends(ExitCode.BAD_CONFIGURATION)
    assert "WORLD_SIZE is not set, but RANK=1" in run.message.message and "Traceback" not in run.log


@pytest.mark.parametrize("nproc", [1, 2])
def test_ranks_of_several_pods_count_on(lab: Lab, nproc: int) -> None:
    port = free_port()
    meets = {Env.WORKERS: "3", Env.RENDEZVOUS: f"localhost:{port}"}
    script = BASE + "print(session.world, os.environ['MASTER_ADDR'], os.environ['MASTER_PORT'], flush=True)"
    pods = [start(lab, script, nproc, **meets, **{Env.WORKER_INDEX: str(index)}) for index in (2, 1, 0)]
    assert [run.end() for run in pods] == [ExitCode.DONE] * 3, pods[0].log
    for local in range(nproc):
        world = f"World(rank={nproc + local}, size={3 * nproc}, local_rank={local}, local_size={nproc})"
        assert f"{world} localhost {port}" in pods[1].log


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_pod_that_waits_for_the_others_of_its_gang_can_be_stopped_and_has_lost_nothing(
    lab: Lab, nproc: int
) -> None:
    meets = {Env.WORKERS: "2", Env.WORKER_INDEX: "1", Env.RENDEZVOUS: f"nobody.invalid:{free_port()}"}
    run = start(lab, WAITS, nproc, **meets)
    time.sleep(1.0)  # nothing tells from outside that it waits; stopped before, it must end so as well
    run.send()
    assert run.end() == ExitCode.INTERRUPTED, run.log
    assert run.message.outcome is Outcome.INTERRUPTED


JOINS = """\
import torch.distributed as dist
dist.init_process_group("gloo")
import torch
one = torch.ones(1)
dist.all_reduce(one)
print(f"sum-{dist.get_rank()}={one.item():g}", flush=True)
dist.destroy_process_group()
"""


def test_the_ranks_meet_in_a_process_group(lab: Lab) -> None:
    run = start(lab, JOINS).done()
    assert "sum-0=2" in run.log and "sum-1=2" in run.log


@pytest.mark.parametrize(
    ("statuses", "rank", "code"),
    [
        ([0, 0], 0, 0),
        ([0, 75], 1, 75),
        ([75, 79], 1, 79),
        ([79, 76], 1, 76),
        ([76, 3, 4], 1, 3),
        ([1, 64], 1, 64),
        ([75, -9], 1, 137),
        ([0, -4], 1, 132),
    ],
)
def test_the_gravest_end_is_the_pods_and_the_first_of_those(
    statuses: list[int], rank: int, code: int
) -> None:
    worst = gravest([Ended(rank=rank, status=status) for rank, status in enumerate(statuses)])
    assert (worst.rank, worst.code) == (rank, code)


def test_what_was_killed_in_time_or_died_of_our_signal_is_lost_work_and_no_failure() -> None:
    assert Ended(rank=0, status=-9, killed=True).code == ExitCode.INTERRUPTED_LOST
    assert Ended(rank=0, status=-15, signalled=True).code == ExitCode.INTERRUPTED_LOST
    assert Ended(rank=0, status=-15).outcome is Outcome.FAILED


@needs_root
@pytest.mark.parametrize("nproc", ["1", "2"])
def test_at_pid_1_a_signal_ends_the_run_and_no_rank_takes_its_parent_for_deaf(
    tmp_path: Path, nproc: str
) -> None:
    (tmp_path / "train.py").write_text(WAITS)
    run = Launched(tmp_path, [*NAMESPACE, *OURS, "--nproc", nproc, "train.py"], **{Env.JOB_UID: "uid"})
    run.until(*(f"ready-{rank}" for rank in range(int(nproc))))
    os.kill(pid_1_below(run.pid), signal.SIGTERM)
    assert run.end() == ExitCode.INTERRUPTED, run.log
    assert run.message.outcome is Outcome.INTERRUPTED and "will-not-arrive" not in run.log

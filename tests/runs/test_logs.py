"""What ranks print is at the checkpoint URI too, however they end, and people see it as they always did."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from spottrain.contract import Env, ExitCode, Outcome, log_key
from spottrain.storage.local import FolderStore
from spottrain_cli.checkpoints.logs import logs

from tests.runs.conftest import Lab, Start, harm_scribe
from tests.runs.launched import BASE, OURS, WAITS, Launched, gone
from tests.support.heavy import sample
from tests.support.pid1 import NAMESPACE, needs_root


@pytest.fixture
def lab(lab: Lab) -> Lab:
    lab.logs = "keep"
    return lab


PRINTS = """\
import os, subprocess, sys
print("of Python", flush=True)
print("an error", file=sys.stderr, flush=True)
os.write(1, b"of C without ")
subprocess.run(["sh", "-c", "echo an end; echo of a child >&2"])
os.write(2, b"not ended")
"""
COUNTS = """\
import os, sys, time
number = 0
while True:
    number += 1
    print("line", number, flush=True)
    time.sleep(0.005)
"""
POD: dict[str, str] = {Env.JOB_UID: "uid", Env.ATTEMPT: "2", Env.LOGS: "keep"}


def stored(folder: Path, *, attempt: int = 1, rank: int = 0) -> str:
    """All parts, put together in order."""
    parts = sorted((folder / log_key(attempt, rank, 1)).parent.glob("*.log"))
    assert [int(part.stem) for part in parts] == list(range(1, len(parts) + 1)), "a part is missing"
    return b"".join(part.read_bytes() for part in parts).decode()


def until(what: str, condition: Callable[[], bool], seconds: float = 30) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, f"{what}: not within {seconds} s"
        time.sleep(0.02)


# --- one rank -------------------------------------------------------------------------------------------
def test_everything_that_is_printed_is_seen_as_ever_and_stored_byte_for_byte(lab: Lab) -> None:
    run = lab.run(PRINTS).done()
    assert "of Python\nan error\nof C without an end\nof a child\nnot ended" in run.log, "in its order"
    assert stored(lab.folder / "store") == run.log
    printed = logs(FolderStore(lab.folder / "store")).body
    assert printed is not None and b"".join(printed).decode() == run.log


def test_standard_output_and_error_go_each_to_its_own_place(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PRINTS)
    env: dict[str, str] = {
        Env.CHECKPOINT_URI: str(tmp_path / "store"),
        Env.TERMINATION_MESSAGE: str(tmp_path / "m"),
    }
    run = subprocess.run(
        [*OURS, "train.py"],
        cwd=tmp_path,
        env=os.environ | POD | env,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert run.returncode == 0
    assert run.stderr == "an error\nof a child\nnot ended"
    out = [line for line in run.stdout.splitlines() if "event=" not in line]
    assert out == ["of Python", "of C without an end"]
    both = stored(tmp_path / "store", attempt=2)
    assert sorted(both) == sorted(run.stdout + run.stderr), "the copy has all of both"


def test_an_interruption_ends_with_75_and_its_last_words_are_stored(lab: Lab) -> None:
    run = lab.run(WAITS).until("ready-0").stopped()
    assert run.message.outcome is Outcome.INTERRUPTED
    assert "event=end outcome=interrupted" in run.log and stored(lab.folder / "store") == run.log


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("raise ValueError('two is odd')", 1),
        ("os._exit(5)", 5),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137),
        pytest.param("sys.exit(3)", 3, marks=pytest.mark.heavy),
        pytest.param("import ctypes; ctypes.string_at(0)", 139, marks=pytest.mark.heavy),
        pytest.param("os.abort()", 134, marks=pytest.mark.heavy),
    ],
)
def test_however_the_script_ends_its_last_line_is_seen_and_stored(lab: Lab, end: str, code: int) -> None:
    lines = "for number in range(5000): print('line', number)\n"
    run = lab.run(f"import os, signal, sys\n{lines}os.write(2, b'last words\\n')\n{end}").ends(code)
    assert run.message.outcome is Outcome.FAILED
    text = stored(lab.folder / "store")
    assert text == run.log and "last words\n" in text
    if code > 128:
        assert "event=rank-ended of=0 status=SIG" in text, "what the rank cannot tell itself"


@needs_root
@pytest.mark.parametrize("end", sample(("os._exit(5)", "import ctypes; ctypes.string_at(0)"), "os._exit(5)"))
def test_at_pid_1_nothing_of_it_is_lost_either(tmp_path: Path, end: str) -> None:
    (tmp_path / "train.py").write_text(
        f"import os\nprint('x' * 200_000)\nos.write(1, b'last words\\n')\n{end}"
    )
    run = Launched(tmp_path, [*NAMESPACE, *OURS, "train.py"], **POD)
    assert run.end() in (5, 139), run.log
    assert "last words\n" in run.log and stored(tmp_path / "store", attempt=2) == run.log


def test_when_all_is_killed_at_once_what_was_stored_before_is_there(lab: Lab) -> None:
    folder = lab.folder / "store"
    run = lab.run(COUNTS, env=harm_scribe(lab.folder)).until("line 3\n")
    until("a second part", lambda: (folder / log_key(1, 0, 2)).exists())
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    assert len(children) == 2, "the rank and the scribe"
    for pid in [run.pid, *map(int, children)]:
        os.kill(pid, signal.SIGKILL)
    assert run.end() == -signal.SIGKILL
    text = stored(folder)
    assert text and run.log.startswith(text), "whole, in order, and nothing that nobody saw"


def test_when_only_its_parent_is_killed_the_rank_dies_too_and_all_is_stored(lab: Lab) -> None:
    run = lab.run(COUNTS).until("line 50\n").send(signal.SIGKILL).ends(-signal.SIGKILL)
    until("the rest", lambda: stored(lab.folder / "store") == run.log != "")


# --- stores that do not take it -------------------------------------------------------------------------
def test_a_store_that_takes_nothing_disturbs_nothing_and_is_told_once(lab: Lab) -> None:
    env = harm_scribe(lab.folder, "raise StoreUnavailable('the store answers 503')")
    lines = "import time\nfor n in range(100): print('line', n, flush=True); time.sleep(0.01)\n"
    run = lab.run(lines + PRINTS, env=env).done()
    assert all(f"line {number}\n" in run.log for number in range(100)) and "not ended" in run.log
    assert run.log.count("event=logs-failed") == 1 and "the store answers 503" in run.log
    assert not (lab.folder / "store" / "logs").exists()


def test_after_an_outage_all_of_it_is_stored(lab: Lab) -> None:
    broken = "if not os.path.exists('mended'): raise StoreUnavailable('503')"
    run = lab.run(COUNTS, env=harm_scribe(lab.folder, broken)).until("event=logs-failed").until("line 100\n")
    (lab.folder / "mended").touch()
    until("what was printed before", lambda: "line 100\n" in stored(lab.folder / "store"))
    run.killed()
    seen = [line for line in run.log.splitlines() if "logs-failed" not in line]
    until("the rest", lambda: stored(lab.folder / "store").splitlines() == seen)


def test_a_store_that_hangs_is_left_within_the_notice(lab: Lab) -> None:
    env = harm_scribe(lab.folder, "time.sleep(60)") | {Env.GRACE_SECONDS: "2"}
    run = lab.run(WAITS, env=env).until("ready-0")
    time.sleep(0.5)  # a part is under way by now
    assert run.send().end(40) == ExitCode.INTERRUPTED, run.log
    assert "event=end outcome=interrupted" in run.log


# --- the scribe -----------------------------------------------------------------------------------------
def scribe_of(pid: int) -> int | None:
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        if b"spottrain.lifecycle.log_capture" in Path(f"/proc/{child}/cmdline").read_bytes():
            return int(child)
    return None


def test_when_the_scribe_dies_the_training_goes_on_and_is_seen(lab: Lab) -> None:
    script = COUNTS.replace("while True:", "while not os.path.exists('enough'):")
    run = lab.run(script, env=harm_scribe(lab.folder)).until("line 10\n")
    until("a part", lambda: "line 10\n" in stored(lab.folder / "store"))
    scribe = scribe_of(run.pid)
    assert scribe is not None
    os.kill(scribe, signal.SIGKILL)
    run.until("event=logs-not-kept").until(f"line {_last(run.log) + 20}\n")
    (lab.folder / "enough").touch()
    run.done()
    assert "event=end outcome=untrained" in run.log
    assert "event=end outcome=untrained" in stored(lab.folder / "store"), "by another scribe"


def _last(log: str) -> int:
    return int(log.rsplit("\nline ", 1)[1].split()[0])


def test_a_signal_to_the_whole_group_does_not_end_the_scribe(lab: Lab) -> None:
    run = lab.run(WAITS).until("ready-0")
    until("a scribe", lambda: scribe_of(run.pid) is not None)
    os.killpg(run.pid, signal.SIGTERM)
    assert run.end() == ExitCode.INTERRUPTED, run.log
    assert "logs-not-kept" not in run.log and stored(lab.folder / "store") == run.log


@pytest.mark.parametrize("env", [{}, {Env.JOB_UID: "uid", Env.LOGS: "off"}])
def test_on_a_laptop_and_where_it_is_switched_off_there_is_neither_a_copy_nor_a_second_process(
    lab: Lab, env: dict[str, str]
) -> None:
    (lab.folder / "train.py").write_text(WAITS)
    run = lab.start(["--checkpoint", "store", "train.py"], env).until("ready-0")
    assert Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text() == ""
    run.stopped()
    assert not (lab.folder / "store" / "logs").exists()


def test_on_a_laptop_that_wants_it_attempts_are_numbered_by_what_is_there(lab: Lab) -> None:
    (lab.folder / "train.py").write_text(PRINTS)
    for attempt in (1, 2):
        run = lab.start(["--checkpoint", "store", "train.py"], {Env.LOGS: "keep"}).done()
        assert stored(lab.folder / "store", attempt=attempt) == run.log


# --- launchers ------------------------------------------------------------------------------------------
def test_each_rank_of_a_launcher_has_its_own_and_the_launcher_s_lines_are_with_the_first(
    start: Start, tmp_path: Path
) -> None:
    noise = "for n in range(300): print(f'rank {rank} line {n} ' + 'x' * 100, flush=True)\n"
    run = start(BASE + noise, *OURS, "--nproc", "3", "train.py", **POD).done()
    lines = run.log.splitlines()
    for rank in range(3):
        text = stored(tmp_path / "store", attempt=2, rank=rank)
        own = [f"rank {rank} line {n} " + "x" * 100 for n in range(300)]
        assert [line for line in text.splitlines() if line.startswith("rank ")] == own
        assert [line for line in lines if line.startswith(f"rank {rank} ")] == own, "no line is torn"
        assert ("event=launched" in text and "event=launcher-end" in text) is (rank == 0)


def test_a_rank_of_somebody_else_s_launcher_keeps_its_number(lab: Lab) -> None:
    runs = lab.ranks(2, PRINTS)
    assert [run.end() for run in runs] == [ExitCode.DONE] * 2, runs[1].log
    for rank, run in enumerate(runs):
        assert f"event=start rank={rank} " in run.log
        assert stored(lab.folder / "store", rank=rank) == run.log
    dead = lab.ranks(
        2, "import os, signal\nif os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert [run.end() for run in dead] == [ExitCode.DONE, 137], dead[1].log
    assert dead[1].message.message.startswith("Rank 1 was killed")


def test_a_rank_that_is_killed_ends_the_pod_and_both_logs_say_what_there_is_to_say(
    start: Start, tmp_path: Path
) -> None:
    fault = "if rank == 1:\n    print('farewell', flush=True)\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    start(BASE + fault + WAITS.removeprefix(BASE), *OURS, "--nproc", "2", "train.py", **POD).ends(137)
    assert "farewell\n" in stored(tmp_path / "store", attempt=2, rank=1)
    assert "Rank 1 was killed (SIGKILL)" in stored(tmp_path / "store", attempt=2, rank=0)


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("", 75),
        pytest.param("raise ValueError('two is odd')", 1, marks=pytest.mark.heavy),
        ("os._exit(5)", 5),
    ],
)
def test_without_a_launcher_of_ours_it_is_kept_from_the_session_s_begin_to_its_end(
    start: Start, tmp_path: Path, end: str, code: int
) -> None:
    script = f"print('before', flush=True)\n{BASE}print('after', flush=True)\n{end}\n"
    run = start(script + WAITS.removeprefix(BASE), sys.executable, "train.py", **POD)
    if not end:
        run.until("ready-0").send()
    assert run.end() in (code, 0), run.log  # nobody knows the code of a script that leaves by itself
    # The lines after the script's own come by way of the process that keeps the log, which outlives it.
    last = "after\n" if "os._exit" in end else "event=end outcome"
    until("the last line", lambda: last in run.log)
    until("all of it", lambda: stored(tmp_path / "store", attempt=2) == run.log.split("before\n")[1])


@needs_root
def test_without_a_launcher_of_ours_pid_1_keeps_its_output_to_itself_and_says_why(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(BASE + "print('after', flush=True)")
    run = Launched(tmp_path, [*NAMESPACE, sys.executable, "train.py"], **POD).ends(0)
    assert "event=logs-not-kept" in run.log and 'remedy="start the script by spottrain run"' in run.log
    assert "after\n" in run.log and not (tmp_path / "store" / "logs").exists()


def test_a_program_that_a_rank_starts_keeps_no_second_copy(start: Start, tmp_path: Path) -> None:
    inner = "import subprocess, sys; subprocess.run([sys.executable, 'inner.py'], check=True)"
    (tmp_path / "inner.py").write_text(
        "from spottrain.lifecycle.session import current\ncurrent()\nprint('inner')\n"
    )
    run = start(inner, *OURS, "train.py", **POD).done()
    assert run.log.count("inner\n") == 1 and stored(tmp_path / "store", attempt=2) == run.log


def test_the_scribe_ends_with_the_run(start: Start, tmp_path: Path) -> None:
    run = start(WAITS, *OURS, "train.py", **POD).until("ready-0")
    scribe = scribe_of(run.pid)
    assert scribe is not None
    run.stopped()
    assert gone(scribe)

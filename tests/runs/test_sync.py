"""`spottrain sync` as a real process: what it ends with, and what a restart finds after kills."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import re
import signal
import subprocess
import sys
import termios
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from spottrain.contract import (
    CHECKPOINTS_PREFIX,
    CHUNK_BYTES,
    Env,
    Outcome,
    Progress,
    SyncEnv,
    TerminationMessage,
)
from spottrain.storage.local import FolderStore
from spottrain.sync.folder import notes_of
from spottrain.sync.manifest import SyncManifest

from tests.support.heavy import sample
from tests.support.ports import free_port

SECONDS = 40.0
QUICK = ("--when", "renamed=step_*")
BOTH = pytest.mark.parametrize("number", sample((signal.SIGTERM, signal.SIGINT), signal.SIGTERM))
HEAVY = ("torch", "numpy", "transformers", "jax", "tensorflow")

# Writes step after step by a rename. Each file of a step holds its number. Goes on from the newest.
TRAIN = """
import os, pathlib, sys, time
folder = pathlib.Path(os.environ["SPOTTRAIN_SYNC_PATH"])
last = max((int(each.name[5:]) for each in folder.glob("step_*")), default=0)
assert (os.environ["SPOTTRAIN_RESUMED"] == "true") == bool(last), (last, os.environ["SPOTTRAIN_RESUMED"])
for step in range(last + 1, 10_000):
    fresh = folder / f"tmp_{step}"
    fresh.mkdir(exist_ok=True)
    for name in "abc":
        (fresh / name).write_text(str(step) * 5000)
        time.sleep(0.01)
    fresh.rename(folder / f"step_{step}")
    old = folder / f"step_{step - 2}"
    if old.exists():
        for each in old.iterdir():
            each.unlink()
        old.rmdir()
    time.sleep(0.05)
"""


# The folder is looked at each 0.1 s, not each second.
QUICK_LOOKS = """
import sys
if "spottrain" in sys.orig_argv and "sync" in sys.orig_argv:
    from spottrain.sync import watch
    watch.LOOK_SECONDS = 0.1
"""


class Place:
    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "quick").mkdir()
        (root / "quick" / "sitecustomize.py").write_text(QUICK_LOOKS)
        self.folder = root / "ckpt"
        self.store = root / "store"
        self.message = root / "message"
        self.running: list[subprocess.Popen[str]] = []

    def start(
        self,
        *words: str,
        env: Mapping[str, str] | None = None,
        terminal: Mapping[str, Any] | None = None,
    ) -> subprocess.Popen[str]:
        """Starts `spottrain sync` in a process group of its own, or in a terminal of its own."""
        ours = {key: value for key, value in os.environ.items() if not key.startswith("SPOTTRAIN_")}
        ours |= {
            Env.TERMINATION_MESSAGE: str(self.message),
            Env.GRACE_SECONDS: "20",
            "PYTHONPATH": os.pathsep.join([str(self.root / "quick"), *sys.path]),
        }
        ours |= env or {}
        command = [
            sys.executable,
            "-m",
            "spottrain",
            "sync",
            str(self.folder),
            "--to",
            str(self.store),
            *words,
        ]
        place = {"process_group": 0} if terminal is None else {"start_new_session": True, **terminal}
        process = subprocess.Popen(
            command, env=ours, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **place
        )
        self.running.append(process)
        return process

    def ended(self, process: subprocess.Popen[str]) -> tuple[int, str]:
        output, _ = process.communicate(timeout=SECONDS)
        return process.returncode, output

    def run(self, *words: str, env: Mapping[str, str] | None = None) -> tuple[int, str]:
        return self.ended(self.start(*words, env=env))

    def told(self) -> TerminationMessage:
        found = TerminationMessage.from_json(self.message.read_text())
        assert found is not None
        return found

    def commits(self) -> int:
        """Number of the newest commit; 0 without one."""
        head = FolderStore(self.store).get("HEAD")
        entries = json.loads(head.body)["checkpoints"] if head else []
        return max((entry["step"] for entry in entries), default=0)

    def wait_for_commit(self, number: int) -> None:
        wait(lambda: self.commits() >= number, f"commit {number}")


def wait(until: object, what: str) -> None:
    give_up = time.monotonic() + SECONDS
    while time.monotonic() < give_up:
        if until():  # type: ignore[operator]
            return
        time.sleep(0.05)
    raise AssertionError(f"{what} did not come")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    for process in place.running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def shell(text: str) -> tuple[str, ...]:
    return ("--", "sh", "-c", text)


def test_it_never_imports_torch_or_numpy(place: Place) -> None:
    text = (
        "import sys\nfrom spottrain.cli.main import main\n"
        f"code = main(['sync', {str(place.folder)!r}, '--to', {str(place.store)!r}, '--', 'touch', "
        f"{str(place.folder / 'a')!r}])\n"
        f"print('heavy:', [name for name in {HEAVY!r} if name in sys.modules], code)"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=SECONDS)
    assert "heavy: [] 0" in done.stdout, done.stdout + done.stderr


def test_after_exit_code_0_everything_is_stored_and_comes_back(place: Place) -> None:
    code, output = place.run(*shell('test $SPOTTRAIN_RESUMED = false && echo 1 > "$SPOTTRAIN_SYNC_PATH/a"'))
    assert code == 0, output
    assert place.told().outcome is Outcome.DONE
    (place.folder / "a").unlink()
    code, output = place.run(*shell('test $SPOTTRAIN_RESUMED = true && cat "$SPOTTRAIN_SYNC_PATH/a"; exit 7'))
    assert code == 7 and "\n1\n" in output, output
    assert place.told().outcome is Outcome.FAILED


def test_a_script_sees_its_own_files_alone_and_the_arguments_of_a_resume(place: Place) -> None:
    text = 'echo "sees: "$(ls -A "$SPOTTRAIN_SYNC_PATH")" $*"; echo 1 >> "$SPOTTRAIN_SYNC_PATH/a"; exit '
    words = ("--resume-args", "--resume 'a b'", "--", "sh", "-c")
    code, output = place.run(*words, f"{text} 0", "sh", "train")
    assert code == 0 and "sees:  train\n" in output, output
    (place.folder / "a").write_text("other")
    code, output = place.run(*words, f"{text} 9", "sh", "train")
    assert code == 9 and "sees: a train --resume a b\n" in output, output
    assert (notes_of(place.folder) / "replaced/1/a").read_text() == "other", "nothing is deleted"


def test_a_command_that_fails_commits_only_what_is_whole(place: Place) -> None:
    code, output = place.run(
        *QUICK,
        *shell("cd $SPOTTRAIN_SYNC_PATH; echo 1 > step_1; echo 2 > half; exit 3"),
    )
    assert code == 3, output
    place.run(*shell("true"))
    assert sorted(each.name for each in place.folder.iterdir() if not each.name.startswith(".")) == ["step_1"]


@BOTH
def test_a_program_that_saves_at_a_signal_loses_nothing(place: Place, number: signal.Signals) -> None:
    trap = (
        'trap "echo saved > $SPOTTRAIN_SYNC_PATH/last; exit 0" TERM INT; echo up; while :; do sleep 0.1; done'
    )
    process = place.start(*shell(trap))
    assert process.stdout is not None
    while "up" not in (line := process.stdout.readline()):
        assert line
    process.send_signal(number)
    code, output = place.ended(process)
    assert code == 75, output
    assert place.told().outcome is Outcome.INTERRUPTED and place.told().durableStep == 1
    assert place.told().durableSeconds is not None, "from the signal until it was stored"


def test_a_program_that_dies_of_the_signal_with_unfinished_files_ends_with_79(place: Place) -> None:
    process = place.start(
        *QUICK, *shell('cd "$SPOTTRAIN_SYNC_PATH"; echo 1 > step_1; echo 2 > half; exec sleep 60')
    )
    place.wait_for_commit(1)
    process.terminate()
    code, output = place.ended(process)
    assert code == 79, output
    assert place.told().outcome is Outcome.INTERRUPTED_LOST
    assert re.search(r"Stored: checkpoint \d\. Not stored: half", place.told().message), output


def test_a_deadline_stops_the_command(place: Place) -> None:
    deadline = place.root / "deadline"
    words = shell('cd "$SPOTTRAIN_SYNC_PATH"; echo 1 > step_1; exec sleep 60')
    process = place.start(*QUICK, *words, env={Env.DEADLINE_FILE: str(deadline)})
    place.wait_for_commit(1)
    deadline.write_text(datetime.fromtimestamp(time.time() + 15, UTC).isoformat())
    code, output = place.ended(process)
    assert code == 75, output


@pytest.mark.heavy
def test_a_command_that_ignores_the_signal_is_ended_before_the_grace_period_is_over(place: Place) -> None:
    ignore = 'trap "" TERM; echo up; while :; do sleep 0.1; done'
    process = place.start(*shell(ignore), env={Env.GRACE_SECONDS: "2"})
    assert process.stdout is not None
    while "up" not in (line := process.stdout.readline()):
        assert line
    process.terminate()
    assert place.ended(process)[0] == 79
    assert place.told().outcome is Outcome.INTERRUPTED_LOST


# A child of a shell: at a signal it needs a second more than the shell, then its step is whole.
CHILD = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(os.environ["SPOTTRAIN_SYNC_PATH"])
def save(number, frame):
    (folder / "signals").open("a").write(signal.Signals(number).name + "\\n")
    time.sleep(1)
    (folder / "tmp").write_text("saved")
    (folder / "tmp").rename(folder / "step_2")
    sys.exit(0)
for each in (signal.SIGTERM, signal.SIGINT):
    signal.signal(each, save)
(folder / "step_1").write_text("1")
(folder / "pid").write_text(str(os.getpid()))
while True:
    signal.pause()
"""


def start_shell(
    place: Place,
    *lines: str,
    env: Mapping[str, str] | None = None,
    terminal: Mapping[str, Any] | None = None,
) -> subprocess.Popen[str]:
    """Starts `bash run.sh`, which starts CHILD; returns when the child runs and its first step is stored."""
    (place.root / "child.py").write_text(CHILD)
    (place.root / "run.sh").write_text("\n".join(lines).format(python=sys.executable, root=place.root))
    process = place.start(*QUICK, "--", "bash", str(place.root / "run.sh"), env=env, terminal=terminal)
    place.wait_for_commit(1)
    wait(lambda: (place.folder / "pid").exists() and (place.folder / "pid").read_text(), "the child")
    return process


def child_of(place: Place) -> int:
    return int((place.folder / "pid").read_text())


def runs(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0]
    except FileNotFoundError:
        return False


@BOTH
def test_a_signal_reaches_the_child_of_a_shell_once_and_what_it_saves_is_stored(
    place: Place, number: signal.Signals
) -> None:
    process = start_shell(place, "{python} {root}/child.py", "echo more")
    process.send_signal(number)
    code, output = place.ended(process)
    assert code in (75, 79), output
    assert (place.folder / "signals").read_text() == f"{number.name}\n"
    assert (place.told().durableStep or 0) >= 2 and not runs(child_of(place)), output


@pytest.mark.heavy
def test_ctrl_c_in_a_terminal_reaches_the_child_of_a_shell_once(place: Place) -> None:
    ours, theirs = os.openpty()
    terminal = {"stdin": theirs, "preexec_fn": lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0)}
    process = start_shell(place, "{python} {root}/child.py", terminal=terminal)
    os.write(ours, b"\x03")
    code, output = place.ended(process)
    os.close(ours)
    os.close(theirs)
    assert code in (75, 79), output
    assert (place.folder / "signals").read_text() == "SIGINT\n"
    assert (place.told().durableStep or 0) >= 2 and not runs(child_of(place)), output


@pytest.mark.heavy
def test_what_a_shell_leaves_running_ends_before_the_last_upload(place: Place) -> None:
    process = start_shell(
        place, "{python} {root}/child.py &", "while ! test -e {root}/go; do sleep 0.1; done"
    )
    (place.root / "go").touch()
    code, output = place.ended(process)
    assert code == 0 and "sync-left-running" in output, output
    assert (place.folder / "signals").read_text() == "SIGTERM\n" and not runs(child_of(place))
    assert place.told().outcome is Outcome.DONE and place.told().durableStep == place.told().step


@pytest.mark.heavy
def test_what_ignores_the_signal_after_the_shell_has_ended_is_killed_and_the_rest_is_stored(
    place: Place,
) -> None:
    ignore = "(trap '' TERM; echo $BASHPID > $SPOTTRAIN_SYNC_PATH/pid; while :; do sleep 0.1; done) &"
    process = start_shell(
        place, ignore, "echo 1 > $SPOTTRAIN_SYNC_PATH/step_1", "wait", env={Env.GRACE_SECONDS: "8"}
    )
    (place.folder / "step_2").write_text("2")
    process.terminate()
    code, output = place.ended(process)
    assert code == 79 and place.told().durableStep == 2, output
    assert not runs(child_of(place))


@pytest.mark.heavy
def test_a_newer_start_fences_out_the_older_one(place: Place) -> None:
    old = place.start(*QUICK, "--", sys.executable, "-c", TRAIN)
    place.wait_for_commit(1)
    first, place.folder = place.folder, place.root / "other" / "ckpt"  # the same name: the same local job
    new = place.start(*QUICK, "--", sys.executable, "-c", TRAIN)
    code, output = place.ended(old)
    assert code == 76, output
    number = place.commits()
    place.wait_for_commit(number + 1)
    new.terminate()
    place.ended(new)
    assert first.is_dir()


@pytest.mark.parametrize("kills", sample((2, 8), 2))
def test_killed_at_random_points_a_restart_finds_a_whole_state(place: Place, kills: int) -> None:
    chance = random.Random(int(os.environ.get("SEED", "1")))
    newest = 0
    for _ in range(kills):
        number = place.commits()
        process = place.start(*QUICK, "--", sys.executable, "-c", TRAIN)
        place.wait_for_commit(number + 1)
        time.sleep(chance.uniform(0, 1.0))
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        process_ended(place.folder)
        if chance.random() < 0.5:
            place.folder = place.root / f"node-{newest}" / "ckpt"  # another node: the folder is gone
        found = restored_steps(place)
        assert found and max(found) >= newest, (found, newest)
        newest = max(found)


# One file, rewritten in place again and again: a zip, as torch.save writes it. Reading it checks its CRC.
REWRITE = """
import os, pathlib, sys, time, zipfile
path, size = pathlib.Path(os.environ["SPOTTRAIN_SYNC_PATH"]) / "ckpt.pt", int(sys.argv[1])
assert [each.name for each in path.parent.iterdir()] in ([], ["ckpt.pt"])
step = 0
if path.exists():
    with zipfile.ZipFile(path) as file:
        body = file.read("data")
    step = int.from_bytes(body[:8], "little")
    assert body == body[:8] * (size // 8)
print("begins at", step, *sys.argv[2:], flush=True)
while True:
    step += 1
    with zipfile.ZipFile(path, "w") as file, file.open("data", "w") as member:
        for _ in range(8):
            member.write(step.to_bytes(8, "little") * (size // 64))
    time.sleep(0.3)
"""


KILLS = int(os.environ.get("SPOTTRAIN_KILLS", "30"))


@pytest.mark.parametrize(
    ("kills", "size"), [(3, 2**22), pytest.param(KILLS, 200 * 10**6, marks=pytest.mark.heavy)]
)
def test_a_file_that_is_rewritten_in_place_comes_back_whole_after_kills_at_random_points(
    place: Place, kills: int, size: int
) -> None:
    chance = random.Random(int(os.environ.get("SEED", "1")))
    command = ("--resume-args", "--resume", "--", sys.executable, "-c", REWRITE, str(size))
    begun = [-1]
    for _ in range(kills):
        number = place.commits()
        process = place.start(*command)
        place.wait_for_commit(number + 1)
        time.sleep(chance.uniform(0, 1.0))
        (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        victims = chance.choice([[process.pid], [int(child)], [process.pid, int(child)]])
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        output, _ = process.communicate()
        assert "Traceback" not in output, output
        (line,) = [line.split() for line in output.splitlines() if line.startswith("begins at")]
        begun.append(int(line[2]))
        assert begun[-1] > begun[-2] and line[3:] == (["--resume"] if begun[-2] >= 0 else []), output
        if chance.random() < 0.5:
            place.folder = place.root / f"node-{begun[-1]}" / "ckpt"
    process = place.start(*command)
    place.wait_for_commit(place.commits() + 1)
    number = place.commits()
    wait(lambda: place.commits() > number, "the save after that")
    process.terminate()
    code, output = place.ended(process)
    assert code == 75 or (code == 79 and "Not stored: ckpt.pt" in output), output


def process_ended(folder: Path) -> None:
    """Waits until nobody writes: the command dies with its parent, but not in the same moment."""
    before: object = None

    def still() -> bool:
        nonlocal before
        now = sorted((str(each), each.stat().st_mtime_ns) for each in folder.iterdir())
        same, before = now == before, now
        time.sleep(0.2)
        return same

    wait(still, "a quiet folder")


def restored_steps(place: Place) -> list[int]:
    """Restores into the folder and requires the steps in it that the program keeps to be whole."""
    code, output = place.run(
        *QUICK, *shell('ls "$SPOTTRAIN_SYNC_PATH" > "$SPOTTRAIN_SYNC_PATH/../ls"; exit 9')
    )
    assert code == 9, output
    listed = (place.folder / ".." / "ls").read_text().split()
    names = [name for name in listed if name[:4] != "tmp_"]  # not renamed yet: the program's own
    assert all(name.startswith("step_") for name in names), names
    newest = sorted(names, key=lambda name: int(name[5:]))[-2:]
    for name in newest:  # one before them may be half deleted, as the program had it (docs/sync.md)
        for file in "abc":
            assert (place.folder / name / file).read_text() == name[5:] * 5000, name
    return [int(name[5:]) for name in names]


def test_a_stop_during_a_restore_ends_it_and_nothing_half_restored_is_left(place: Place) -> None:
    assert place.run(*shell('head -c 33554432 /dev/zero > "$SPOTTRAIN_SYNC_PATH/a"'))[0] == 0
    store = FolderStore(place.store)
    (key,) = store.list(CHECKPOINTS_PREFIX)
    found = store.get(key)
    assert found is not None
    small = SyncManifest.from_bytes(found.body)
    many = replace(small.files["a"], size=128 * CHUNK_BYTES, chunks=small.files["a"].chunks * 128)
    store.put(key, replace(small, files={"a": many}).to_bytes())  # 4 GiB: its restore takes a while
    place.folder = place.root / "other" / "ckpt"
    process = place.start(*shell(f"touch {place.root / 'began'}"))
    notes = place.folder.with_name(".ckpt.spottrain-sync")
    wait((notes / "incoming/0").exists, "the download")
    process.terminate()
    code, output = place.ended(process)
    assert code == 75 and "before the folder was restored" in output, output
    assert place.told().outcome is Outcome.INTERRUPTED
    assert not (place.folder / "a").exists() and not (place.root / "began").exists()
    assert not notes.exists()
    store.put(key, small.to_bytes())
    assert place.run(*shell('test $SPOTTRAIN_RESUMED = true -a -s "$SPOTTRAIN_SYNC_PATH/a"'))[0] == 0


# --- as a sidecar ---------------------------------------------------------------------------------------
POD: dict[str, str] = {
    Env.JOB_UID: "uid",
    Env.JOB_NAME: "job",
    Env.POD_UID: "pod-1",
    Env.ATTEMPT: "1",
    SyncEnv.WHEN: '{"renamed": "step_*"}',
}


def test_a_sidecar_stores_everything_when_all_others_have_ended(place: Place) -> None:
    port, result = free_port(), place.root / "result"
    env = {**POD, Env.PROGRESS_PORT: str(port), SyncEnv.RESULT_FILE: str(result)}
    process = place.start(env=env)
    wait(result.exists, "the result of the restore")
    assert json.loads(result.read_text())["resumed"] is False
    (place.folder / "step_1").write_text("1")
    place.wait_for_commit(1)
    (place.folder / "final").write_text("2")
    wait(lambda: progress_of(port).durableStep == 1, "the commit in /progress")
    process.terminate()
    code, output = place.ended(process)
    assert code == 0, output
    told = place.told()
    assert (told.outcome, told.step, told.durableStep) == (Outcome.DONE, 2, 1)
    assert "stored as checkpoint 2" in told.message
    again = {**POD, Env.ATTEMPT: "2", Env.POD_UID: "pod-2"}
    for last_exit, expected in (("", False), ("1:137", False), ("1:0", True)):
        result.unlink()
        place.folder = place.root / f"pod-{last_exit.replace(':', '-')}"
        process = place.start(env={**again, SyncEnv.RESULT_FILE: str(result), SyncEnv.LAST_EXIT: last_exit})
        wait(result.exists, "the result of the restore")
        assert (place.folder / "final").exists() is expected
        process.kill()


def progress_of(port: int) -> Progress:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/progress", timeout=5) as reply:
        return Progress.from_json(reply.read().decode())


@pytest.mark.heavy
def test_a_sidecar_leaves_its_message_before_a_deadline_and_goes_on(place: Place) -> None:
    deadline = place.root / "deadline"
    process = place.start(env={**POD, Env.DEADLINE_FILE: str(deadline)})
    wait(place.folder.is_dir, "the folder")
    (place.folder / "step_1").write_text("1")
    place.wait_for_commit(1)
    deadline.write_text(datetime.fromtimestamp(time.time() + 60, UTC).isoformat())
    wait(lambda: place.message.exists() and place.message.read_text(), "a message")
    assert place.told().outcome is Outcome.INTERRUPTED and place.told().durableStep == 1
    (place.folder / "step_2").write_text("2")
    place.wait_for_commit(2)
    process.terminate()
    assert place.ended(process)[0] == 75
    assert place.told().outcome is Outcome.INTERRUPTED and place.told().durableStep == 2


@pytest.mark.heavy
@BOTH
def test_after_a_deadline_that_took_nothing_away_the_end_stores_everything(
    place: Place, number: signal.Signals
) -> None:
    deadline, result = place.root / "deadline", place.root / "result"
    deadline.write_text(datetime.fromtimestamp(time.time() - 300, UTC).isoformat())
    process = place.start(env={**POD, Env.DEADLINE_FILE: str(deadline), SyncEnv.RESULT_FILE: str(result)})
    wait(result.exists, "the result of the restore")
    (place.folder / "step_1").write_text("1")
    place.wait_for_commit(1)
    (place.folder / "final").write_text("2")
    process.send_signal(number)
    code, output = place.ended(process)
    assert code == (0 if number == signal.SIGTERM else 75), output
    assert "stored as checkpoint 2" in place.told().message


# --- bad input ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--when", "often"), "--when 'often' is not valid"),
        (("--", "no-such-program"), "cannot be started"),
        (("--resume-args", "--resume", *shell("python train.py")), "the shell would take the arguments"),
        *sample(
            [
                (("--when", "marker=../x"), "must be a path below the folder"),
                (("--keep", "1"), "must be a whole number, at least 2"),
                (("--",), "there is no command after --"),
                (("--resume-args", "x"), "--resume-args needs a COMMAND after --"),
                (("--resume-args", "'", "--", "true"), "is not quoted as in a shell"),
                (("--to", "ftp://x"), "is not valid: use s3://"),
            ]
        ),
    ],
)
def test_bad_input_gets_a_sentence(place: Place, words: tuple[str, ...], sentence: str) -> None:
    code, output = place.run(*words)
    assert code in (2, 64) and sentence in output, output
    assert place.told().outcome is Outcome.BAD_CONFIGURATION


def test_a_path_that_is_no_folder_gets_a_sentence(place: Place) -> None:
    place.folder.write_text("")
    code, output = place.run(*shell("true"))
    assert code == 64 and "is not a folder" in output, output


def test_a_store_inside_the_folder_gets_a_sentence(place: Place) -> None:
    place.store = place.folder / "store"
    code, output = place.run(*shell("true"))
    assert code == 2 and "lie in each other" in output, output


def test_a_folder_with_files_of_a_person_is_left_alone(place: Place) -> None:
    assert place.run(*shell('echo 1 > "$SPOTTRAIN_SYNC_PATH/a"'))[0] == 0
    place.folder = place.root / "mine" / "ckpt"
    place.folder.mkdir(parents=True)
    (place.folder / "thesis").write_text("mine")
    code, output = place.run(*shell("true"))
    assert code == 64 and "is not empty" in output, output
    assert [each.name for each in place.folder.iterdir()] == ["thesis"]

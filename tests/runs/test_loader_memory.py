"""What loader workers really hold of their own, in real processes, and what whole runs make of it."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
from spottrain.core.container import ContainerMemory
from spottrain.data import Batches, Plan, worker_copies
from spottrain.diagnostics.loader_memory import Look, private_bytes, warning
from spottrain.lifecycle.worker_signals import worker_pids

from tests.runs.conftest import SCRIPT, Lab
from tests.support.heavy import sample

MIB = 2**20
COUNT = 800_000
GROWN = """
import sys
import numpy, torch
from spottrain.data import Batches, Plan
from spottrain.data.worker_copies import copy_of
from spottrain.lifecycle.worker_signals import worker_pids
from spottrain.diagnostics.loader_memory import private_bytes

COUNT = int(sys.argv[1])


class Set:
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        row = self.rows[index]
        return len(row) if isinstance(row, str) else float(row[0])


def rows():
    {rows}


dataset = Set(rows())
batches = Batches(dataset, Plan(size=COUNT, global_batch_size=8000, micro_batch_size=8000), num_workers=1)
stream = iter(batches)  # kept: its end is the workers'
for number, (step, parts) in enumerate(stream, 1):
    list(parts)
    batches.done(step)
    if number == batches.steps_per_epoch:
        break
(pid,) = worker_pids()
print(copy_of(dataset, method="fork").bytes, private_bytes(pid))
"""


def grown(rows: str) -> tuple[int, int]:
    """(estimated copy, private bytes of the worker after an epoch) of a set in an interpreter of its own."""
    script = GROWN.replace("{rows}", rows)
    done = subprocess.run(
        [sys.executable, "-c", script, str(COUNT)], capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr
    estimate, private = done.stdout.split()[-2:]
    return int(estimate), int(private)


@pytest.mark.heavy
@pytest.mark.skipif(worker_copies.start_method() != "fork", reason="workers are not forked by default here")
def test_a_forked_worker_comes_to_hold_a_copy_of_a_list_of_words_and_none_of_an_array() -> None:
    words, of_words = grown('return [f"/data/images/{number:012d}.jpeg" for number in range(COUNT)]')
    array, of_array = grown("return numpy.ones((COUNT, 10), dtype='float64')")  # as many bytes
    assert words == pytest.approx(COUNT * 80, rel=0.02) and array < MIB
    assert 0.7 * words < of_words - of_array < 1.4 * words, (words, of_words, of_array)
    assert of_array < 50 * MIB, of_array


class Leak:
    """Keeps what it has read, as a reader's cache without an end."""

    def __init__(self) -> None:
        self.kept: list[bytes] = []

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> int:
        self.kept.append(os.urandom(2 * MIB))
        return index


def test_a_reader_that_leaks_is_told_before_the_limit_is_reached() -> None:
    """By what Linux says of a real worker, after each step; the limit is as of a small container."""
    batches = Batches(Leak(), Plan(size=200, global_batch_size=4, micro_batch_size=4), num_workers=1)
    stream, before, start, text = iter(batches), Look(), 0, ""
    steps = 0
    while not text and steps < 40:
        steps += 1
        step, parts = next(stream)
        list(parts)
        batches.done(step)
        found = {pid: private_bytes(pid) or 0 for pid in worker_pids()}
        start = start or sum(found.values())
        memory = ContainerMemory(limit=start + 150 * MIB, used=sum(found.values()))
        now = Look(private=found, memory=memory)
        text, before = warning(before, now, seconds=1), now
    stream.close()
    assert text.startswith("1 loader worker(s) hold ") and memory.left > 0 and steps > 2, (steps, memory)
    assert not worker_pids(), "those that have ended are not asked"


def crowded(room: str) -> str:
    """The script with a set of Python objects, in a container that has so much left, as cgroups would say."""
    script = SCRIPT.replace(
        "class Augmented", "WORDS = [f'word {n}' * 9 for n in range(100_000)]\n\nclass Augmented"
    )
    script = script.replace("    def __len__(self):", "    words = WORDS\n    def __len__(self):", 1)
    script = script.replace("train_dataset=Augmented(),", "train_dataset=Held(),")
    return script.replace("class Model", HELD.replace("{room}", room) + "\n\nclass Model", 1)


HELD = """\
class Held(Augmented):
    def __init__(self):
        self.words = WORDS

    def __getitem__(self, i):
        time.sleep(float(os.environ.get("FETCH", "0")))
        return super().__getitem__(i)


import spottrain.data.worker_memory as room
from spottrain.core.container import ContainerMemory
room.memory_here = lambda: ContainerMemory(limit=2**30, used=2**30 - int({room}))
"""


def run(lab: Lab, room: str, **more: Any) -> str:
    it = lab.run(script=crowded(room), interval="1000steps", **more).done()
    return it.log


def test_a_given_number_runs_and_is_warned_of_before_its_workers_start(lab: Lab) -> None:
    log = run(lab, "10 * 2**20", env={"WORKERS": "2"})
    assert 'event=advice about=data text="2 worker(s) will take about 0.0' in log
    assert "the Python objects in train_dataset" in log and "training.data.numWorkers to 0" in log
    assert log.index("event=advice about=data") < log.index("event=first-step")
    assert log.count("event=advice about=data") == 1


AUTO = '{"data": {"numWorkers": "auto"}}'
JUDGED = """\
class Judged(Held):
    def __getitem__(self, i):
        worker = torch.utils.data.get_worker_info()
        print("fetched-in=" + ("trainer" if worker is None else "worker"), flush=True)
        return super().__getitem__(i)


class Model"""


def by_whom(log: str) -> set[str]:
    return {line.split("=")[-1] for line in log.splitlines() if "fetched-in=" in line}


@pytest.mark.parametrize(("left", "workers"), sample([("2**29", 1), ("10 * 2**20", 0)], ("10 * 2**20", 0)))
def test_of_the_number_that_is_found_there_are_as_many_as_fit_in_training_and_evaluation(
    lab: Lab, left: str, workers: int
) -> None:
    script = (
        crowded(left)
        .replace("class Model", JUDGED, 1)
        .replace("eval_dataset=Augmented()", "eval_dataset=Judged()")
    )
    it = lab.run(
        script=script,
        training=AUTO,
        env={"FETCH": "0.01", "EVAL": "1"},
        interval="1000steps",
    ).done()
    if workers:
        assert "event=loader-workers workers=" in it.log and "about=data" not in it.log
        assert "worker" in by_whom(it.log), "the first evaluation comes after the trial"
    else:
        assert "no loader worker instead of " in it.log and "event=loader-workers workers=0 wanted=" in it.log
        assert by_whom(it.log) == {"trainer"}

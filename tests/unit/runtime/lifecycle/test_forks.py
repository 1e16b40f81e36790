"""A fork of a run that watches for signals: whatever comes to the child is the child's."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import os, signal, time
early = lambda: os.kill(os.getpid(), signal.SIGTERM)
os.register_at_fork(after_in_child=early)  # before ours: as soon as there is a child
from spottrain.core.preemption import Preemption

interruption = Preemption(grace=30.0)
interruption.install()
before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
child = os.fork()
if not child:
    time.sleep(30)
    os._exit(0)
_, status = os.waitpid(child, 0)
time.sleep(0.6)  # longer than the watcher takes to hear
print(os.WIFSIGNALED(status) and os.WTERMSIG(status), interruption.stopping)
print(signal.pthread_sigmask(signal.SIG_BLOCK, []) == before)
os.kill(os.getpid(), signal.SIGTERM)
while not interruption.stopping:
    time.sleep(0.01)
os.write(1, b"heard\\n")  # at once, whole: the watcher writes a line of its own now
os._exit(0)
"""


def test_a_signal_to_a_child_that_was_forked_just_now_is_none_to_its_parent() -> None:
    done = subprocess.run([sys.executable, "-u", "-c", SCRIPT], capture_output=True, text=True, timeout=60)
    assert [line for line in done.stdout.splitlines() if "event=" not in line] == [
        "15 False",
        "True",
        "heard",
    ]

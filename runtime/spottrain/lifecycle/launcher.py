"""Starts the ranks of a pod for `spottrain run`, forwards signals to them, and ends after them.

The ranks are `spottrain run` again, with RANK set. A single rank has a launcher too if its output is stored:
some process must forward its last output however it ended. That rank continues in this program after a fork.
The launcher needs only the standard library and starts threads only to write or forward output: no handler,
lock or import of its own may delay the next signal. It must outlive ranks that fail, hang or are killed. See
ADR 0004 and 0008.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from spottrain.contract import (
    EXIT_CODE_OF,
    LAUNCHER,
    TIME_BEFORE,
    Env,
    Outcome,
    Reason,
    TerminationMessage,
    TimeSplit,
)
from spottrain.core import log, run_config
from spottrain.core.container import cores
from spottrain.core.preemption import MIN_BUDGET, POLL_SECONDS, SIGNALS, read_time
from spottrain.lifecycle import termination_message
from spottrain.lifecycle.log_capture.outputs import MARK, CapturedOutputs, seconds_for_logs
from spottrain.lifecycle.topology import LOOPBACK, Gang, reserve_port

FORCED_SHARE: Final = 0.95
"""Share of the notice after which ranks are killed: after their own 0.9, before the kubelet's SIGKILL."""
PEER_SECONDS: Final = 10.0
"""Seconds for the other ranks after one has failed: they cannot save, but report and release HEAD."""
REAP_SECONDS: Final = 5.0
"""Seconds for the kernel to end killed processes, if the deadline leaves them: at most half of the time until
then. A process stuck in a driver is left behind."""
MIN_REAP_SECONDS: Final = 0.5
SIGNALLED: Final = 128
"""Plus the signal number: the exit code that shells report for a process killed by a signal."""
OUTCOME_OF: Final = {
    int(code): outcome for outcome, code in EXIT_CODE_OF.items() if outcome is not Outcome.UNTRAINED
}

BROKEN: Final = (Outcome.FAILED, Outcome.BAD_CONFIGURATION, Outcome.STORE_UNREACHABLE)
"""Outcomes of a rank after which its peers cannot save."""

PR_SET_PDEATHSIG: Final = 1
PR_SET_CHILD_SUBREAPER: Final = 36


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How a rank ended."""

    rank: int
    status: int
    """Exit code, or minus the signal that killed the process."""
    killed: bool = False
    """Whether this launcher killed it after its time was up."""
    signalled: bool = False
    """Whether it had received SIGTERM from this launcher before."""
    said: Outcome | None = None
    """The outcome that the rank reported itself; it counts however the process ended."""

    @property
    def outcome(self) -> Outcome:
        """Outcome of the rank. If it was killed, or died of our signal, its unsaved steps are lost."""
        if self.said is not None:
            return self.said
        if self.killed or (self.signalled and -self.status in SIGNALS):
            return Outcome.INTERRUPTED_LOST
        return OUTCOME_OF.get(self.status, Outcome.FAILED)

    @property
    def code(self) -> int:
        if self.outcome is not Outcome.FAILED:
            return int(EXIT_CODE_OF[self.outcome])
        if self.said is not None and self.status <= 0:
            return int(EXIT_CODE_OF[self.said])
        return self.status if self.status > 0 else SIGNALLED - self.status

    @property
    def words(self) -> str:
        if self.said is not None and self.status < 0:
            return f"Rank {self.rank} had ended ({self.said}) when {_name(-self.status)} ended its process."
        if self.killed:
            return f"Rank {self.rank} did not end in the time it had, and was killed."
        if self.status == -signal.SIGKILL:
            return f"Rank {self.rank} was killed (SIGKILL), probably because it was out of memory."
        if self.status < 0:
            return f"Rank {self.rank} died of {_name(-self.status)}."
        return f"Rank {self.rank} ended with exit code {self.status}."


def gravest(ended: Sequence[Ended]) -> Ended:
    """Returns the end that counts for the pod: the gravest, and among equals the first, the likely cause."""
    return min(ended, key=lambda end: termination_message.GRAVEST_FIRST.index(end.outcome))


class Launcher:
    """Starts and watches the ranks of one pod.

    `command`: script and arguments. `env`: for the ranks, without what `gang` adds. `outputs`: the
    destination of the ranks' output; None: the launcher's own output. `born`: start of this process in Unix
    seconds. `waited`: seconds since then in which it waited for the other pods.
    """

    def __init__(
        self,
        gang: Gang,
        command: Sequence[str],
        env: Mapping[str, str],
        *,
        born: float,
        outputs: CapturedOutputs | None = None,
        waited: float = 0.0,
    ) -> None:
        self._gang = gang
        self._outputs = outputs
        self._command = command
        self._env = env
        self._born = born
        self._split = TimeSplit(waiting=waited)
        """Where the time until the start of the ranks went. The time that is not in it was start-up."""
        self._message_file = Path(env[Env.TERMINATION_MESSAGE]) if env.get(Env.TERMINATION_MESSAGE) else None
        self._grace = run_config.grace_seconds(env)
        self._deadline_file = run_config.deadline_file(env)
        self._signalled_at: float | None = None
        self._reports = termination_message.RankReports()
        self._alive: dict[int, int] = {}
        """Ranks by process ID."""
        self._ended: list[Ended] = []
        self._signalled = False
        self._stopping_since: float | None = None
        self._deadline = float("inf")
        self._peers_until = float("inf")
        self._killed = False

    def run(self) -> int | None:
        """Returns the exit code after all ranks ended; None in the forked process that is the single rank."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it were ignored, there would be no exit codes
        signal.pthread_sigmask(signal.SIG_BLOCK, {*SIGNALS, signal.SIGCHLD})
        _prctl(PR_SET_CHILD_SUBREAPER, 1)
        try:
            if self._outputs is not None:
                self._outputs.redirect()
            return self._conclude() if self._run_ranks() else None
        finally:
            self._reports.close()
            if self._outputs is not None:
                self._outputs.finish(seconds_for_logs(self._deadline))

    def _run_ranks(self) -> bool:
        """Runs all ranks from start to end. Returns False in the forked process that is the single rank."""
        with reserve_port(self._gang.bind or LOOPBACK) as reserved:
            port = self._gang.port or reserved.getsockname()[1]
            for local_rank in range(self._gang.nproc):
                pid = self._start(local_rank, port)
                if not pid:
                    return False
                self._alive[pid] = self._gang.rank(local_rank)
            if not self._alone:
                log.event("launched", processes=self._gang.nproc, world=self._gang.size, grace=self._grace)
            while self._alive and time.time() < self._leave_behind_at:
                if (found := _next_signal({*SIGNALS, signal.SIGCHLD})) in SIGNALS:
                    self._stop(time.time() + self._grace, signal.Signals(found), requested=True)
                self._reap()
                self._watch_time()
        return True

    # --- ranks ----------------------------------------------------------------------------------------
    @property
    def _alone(self) -> bool:
        """Whether there is only one rank here, which then logs for itself."""
        return self._gang.nproc == 1

    def _start(self, local_rank: int, port: int) -> int:
        """Starts a rank in its own process group: signals to the pod's first group reach it only via us.

        Returns its process ID; 0 in the forked process that is the single rank.
        """
        before = json.dumps({"born": self._born, "split": asdict(self._split)})
        told = {**self._reports.env, TIME_BEFORE: before}
        env = {**self._env, **self._gang.env_of(local_rank, port), **told}
        if self._outputs is not None:
            env.update(MARK)
        # Otherwise every rank uses all of the node's cores and they contend.
        env.setdefault("OMP_NUM_THREADS", str(max(1, math.floor(cores() / self._gang.nproc))))
        argv = [sys.executable, *_program(self._env), *self._command]
        launcher = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        try:
            os.setpgid(0, 0)
            _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # no rank may compute or write HEAD without a launcher
            if os.getppid() != launcher:
                os._exit(127)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            if self._outputs is not None:
                self._outputs.redirect(local_rank)
                self._outputs.leave_to_parent()
            signal.pthread_sigmask(signal.SIG_SETMASK, SIGNALS)  # blocked until the rank has its handlers
            if self._alone:
                os.environ.update(told)
                return 0
            os.execve(sys.executable, argv, env)
        except BaseException:
            os._exit(127)

    def _reap(self) -> None:
        """Reaps ranks, and at PID 1 also orphaned processes."""
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = found
                rank = self._alive.pop(pid, None)
                if rank is not None:
                    _kill_group(pid)  # loaders and uploader of the rank
                    self._note_end(rank, os.waitstatus_to_exitcode(status), self._reports.outcome_of(pid))
                elif self._outputs is not None and pid == self._outputs.pid:
                    self._outputs.died()

    def _note_end(self, rank: int, status: int, said: Outcome | None) -> None:
        killed = self._killed and status == -signal.SIGKILL
        end = Ended(rank=rank, status=status, killed=killed, signalled=self._signalled, said=said)
        self._ended.append(end)
        if not self._alone or status < 0:
            log.unhindered("rank-ended", of=rank, status=status if status >= 0 else _name(-status))
        if end.outcome in (Outcome.DONE, Outcome.UNTRAINED):
            return
        if end.outcome in BROKEN and self._stopping_since is None:
            self._peers_until = time.time() + min(PEER_SECONDS, FORCED_SHARE * self._grace)
        self._stop(time.time() + self._grace, signal.SIGTERM)

    # --- the end --------------------------------------------------------------------------------------
    def _stop(self, deadline: float, signum: signal.Signals | None, *, requested: bool = False) -> None:
        """Sets the deadline of the ranks; the earliest counts. Forwards the first signal, and no later one.

        `requested`: the whole pod must end, by a signal or the deadline file.
        """
        self._deadline = min(self._deadline, deadline)
        self._stopping_since = self._stopping_since or time.time()
        if requested:
            self._signalled_at = self._signalled_at or time.time()
        if signum is not None and not self._signalled:
            self._signalled = True
            for pid in self._alive:
                os.kill(pid, signum)  # not reaped yet, so the ID still belongs to this rank

    @property
    def _kill_at(self) -> float:
        if self._stopping_since is None:
            return float("inf")
        budget = max(self._deadline - self._stopping_since, MIN_BUDGET)
        return min(self._stopping_since + FORCED_SHARE * budget, self._peers_until)

    @property
    def _leave_behind_at(self) -> float:
        """When to end without waiting further for killed ranks."""
        kill_at = self._kill_at
        left = max((self._deadline - kill_at) / 2, MIN_REAP_SECONDS)
        return kill_at + min(left, REAP_SECONDS) if kill_at < float("inf") else kill_at

    def _watch_time(self) -> None:
        """Kills the ranks when their time is up."""
        deadline = read_time(self._deadline_file)
        if deadline is not None:
            self._stop(deadline, None, requested=True)  # the ranks read the file themselves
        if self._alive and not self._killed and time.time() >= self._kill_at:
            self._killed = True
            log.unhindered("ranks-killed", ranks=",".join(str(rank) for rank in self._alive.values()))
            for pid in self._alive:
                _kill_group(pid)

    def _conclude(self) -> int:
        """Writes the pod's termination message from the ranks' ends, and returns the exit code."""
        self._ended += [
            Ended(rank=rank, status=-signal.SIGKILL, killed=True, said=self._reports.outcome_of(pid))
            for pid, rank in self._alive.items()
        ]
        worst = gravest(self._ended)
        file = self._message_file
        if file is not None:  # first: writing to the log may block
            termination_message.revise(
                file, lambda found: self._message_of_launcher(worst, found), since=self._born
            )
        if not self._alone or worst.status < 0:
            log.unhindered("launcher-end", code=worst.code, why=worst.words)
        return worst.code

    def _message_of_launcher(
        self, worst: Ended, found: TerminationMessage | None
    ) -> TerminationMessage | None:
        """Returns a message if the ranks wrote none, a less grave one, or one that is not the cause."""
        if found is None and worst.outcome is Outcome.DONE:
            return None  # such as os._exit(0): exit code 0 alone does not mean that the training is done
        if found is not None and not termination_message.graver(worst.outcome, found.outcome):
            failed = found.outcome is worst.outcome is Outcome.FAILED
            told = worst.said is not None or found.reason == Reason.NODE_FAULT
            if not failed or worst.status > 0 or told:
                return None
            # A rank that died without a message is the cause of the failures that its peers report.
        reason = Reason.SCRIPT_FAILED if worst.outcome is Outcome.FAILED else ""
        attempt = self._env.get(Env.ATTEMPT, "")
        basis = found or TerminationMessage(
            outcome=worst.outcome,
            attempt=int(attempt) if attempt.isdecimal() else 0,
            signalledAt=self._signalled_at,
        )
        then = f" The ranks' own message: {found.message}" if found and found.message else ""
        return replace(basis, outcome=worst.outcome, reason=reason, message=worst.words + then)


def _program(env: Mapping[str, str]) -> list[str]:
    """How Python starts `spottrain run` again. An injected package is found by its launcher only."""
    if env.get(LAUNCHER):
        return [env[LAUNCHER]]
    # As a module, Python puts the working directory first on the path; `spottrain run` does not.
    safe = [] if os.getcwd() in sys.path else ["-P"]
    return [*safe, "-m", "spottrain", "run"]


def _next_signal(awaited: set[signal.Signals]) -> int | None:
    """Takes one of the blocked signals; None if none arrives within POLL_SECONDS."""
    if hasattr(signal, "sigtimedwait"):
        found = signal.sigtimedwait(awaited, POLL_SECONDS)
        return None if found is None else found.si_signo
    give_up = time.monotonic() + POLL_SECONDS  # macOS
    while not (pending := signal.sigpending() & awaited):
        if time.monotonic() > give_up:
            return None
        time.sleep(0.01)
    return signal.sigwait(pending)


def _name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    """Calls prctl on Linux; on other systems a killed launcher may leave ranks behind."""
    if sys.platform == "linux":
        _LIBC.prctl(option, value, 0, 0, 0)


_LIBC: Final = ctypes.CDLL(None)

"""`spottrain run` with several processes in the pod: starts the ranks, passes signals on, ends last.

Started by `__main__` in place of the script when there is more than one process to start; the ranks are
`spottrain run` again, with RANK set. One rank has a launcher too where its output is kept, for somebody must
pass on what it wrote last, however it ended; it goes on in this very program. One thread, standard library
only: no handler, lock or import of its own may keep it from the next signal. What it must outlive: ranks that
fail, hang or are killed. Where one asks for it, all are started again when all have ended (`again`). See ADR
0004, 0008 and 0010.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from spottrain.contract import EXIT_CODE_OF, Env, Outcome, Reason, TerminationMessage
from spottrain.core import log, run_config
from spottrain.core.preemption import LEAST_BUDGET, POLL_SECONDS, SIGNALS, read_time
from spottrain.lifecycle import termination_message
from spottrain.lifecycle.log_capture.outputs import MARK, Outputs, seconds_for_logs
from spottrain.lifecycle.restart_request import Again
from spottrain.lifecycle.topology import Gang, reserve_port, threads_of_each

FORCED_SHARE: Final = 0.95
"""Of the notice; then what is left is killed. After the ranks' own 0.9, before the kubelet's SIGKILL."""
PEER_SECONDS: Final = 10.0
"""For the others when a rank has failed: they can save nothing without it, but tell and give up HEAD."""
REAP_SECONDS: Final = 0.5
"""For the kernel to end what was killed; a process stuck in a driver is left behind."""
SIGNALLED: Final = 128
"""Plus the signal: the exit code that shells give to a process that died of one."""
OUTCOME_OF: Final = {
    int(code): outcome for outcome, code in EXIT_CODE_OF.items() if outcome is not Outcome.UNTRAINED
}

LAST: Final = (Outcome.BAD_CONFIGURATION, Outcome.SUPERSEDED, Outcome.DONE, Outcome.UNTRAINED)
"""Ends of a rank after which no other is started again: it would end so once more."""

BROKEN: Final = (Outcome.FAILED, Outcome.BAD_CONFIGURATION, Outcome.STORE_UNREACHABLE)
"""Ends of a rank after which its peers can save nothing."""

PR_SET_PDEATHSIG: Final = 1
PR_SET_CHILD_SUBREAPER: Final = 36


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How a rank ended."""

    rank: int
    status: int
    """Exit code, or minus the signal that it died of."""
    killed: bool = False
    """By this launcher, because its time was up."""
    told: bool = False
    """Whether it had been sent SIGTERM before."""
    said: Outcome | None = None
    """The outcome that it has told itself (`lastwords.Outcomes`). It holds, however the process ended."""

    @property
    def outcome(self) -> Outcome:
        """Killed in time or dead of a SIGTERM of ours: what it had not saved is lost."""
        if self.said is not None:
            return self.said
        if self.killed or (self.told and self.status == -signal.SIGTERM):
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
    """The end that is the pod's: among equals the first, for the others followed from it."""
    return min(ended, key=lambda end: termination_message.GRAVEST_FIRST.index(end.outcome))


class Launcher:
    """`command`: script and arguments. `env`: of the ranks, but for what `gang` adds.

    `outputs`: where what they print goes; None: where the launcher's own goes.
    """

    def __init__(
        self,
        gang: Gang,
        command: Sequence[str],
        env: Mapping[str, str],
        *,
        born: float,
        outputs: Outputs | None = None,
    ) -> None:
        self._gang = gang
        self._outputs = outputs
        self._command = command
        self._env = env
        self._born = born
        self._grace = run_config.grace_seconds(env)
        self._deadline_file = run_config.deadline_file(env)
        self._signalled_at: float | None = None
        self._lost: TerminationMessage | None = None
        """Last words of an earlier round that lost steps."""
        self._outcomes = termination_message.Outcomes()
        self._again = Again() if gang.workers == 1 and gang.nproc > 1 else None
        self._begin_round()

    def _begin_round(self) -> None:
        self._alive: dict[int, int] = {}
        """Ranks by process."""
        self._ended: list[Ended] = []
        self._told = False
        self._stopping_since: float | None = None
        self._deadline = float("inf")
        self._peers_until = float("inf")
        self._killed = False
        if self._again is not None:
            self._again.begin()

    def run(self) -> int | None:
        """The exit code, when no rank is left. None in a process that is the one rank."""
        try:
            return self._run()
        finally:
            if self._again is not None:
                self._again.close()
            self._outcomes.close()
            if self._outputs is not None:
                self._outputs.finish(seconds_for_logs(self._deadline))

    def _run(self) -> int | None:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would leave no exit codes
        signal.pthread_sigmask(signal.SIG_BLOCK, {*SIGNALS, signal.SIGCHLD})
        _prctl(PR_SET_CHILD_SUBREAPER, 1)
        if self._outputs is not None:
            self._outputs.take_over()
        while self._round():
            if not self._goes_on:
                return self._conclude()
            self._forget()
        return None

    def _round(self) -> bool:
        """From the start of all ranks to the end of the last; False in a process that is the one rank."""
        with reserve_port() as reserved:
            port = self._gang.port or reserved.getsockname()[1]
            for local_rank in range(self._gang.nproc):
                pid = self._start(local_rank, port)
                if not pid:
                    return False
                self._alive[pid] = self._gang.rank(local_rank)
            if not self._alone:
                log.event("launched", processes=self._gang.nproc, world=self._gang.size, grace=self._grace)
            while self._alive and time.time() < self._kill_at + REAP_SECONDS:
                self._wait()
                self._reap()
                self._watch_time()
        return True

    # --- ranks ----------------------------------------------------------------------------------------
    @property
    def _alone(self) -> bool:
        """Whether there is one rank here; then it tells of itself what there is to tell."""
        return self._gang.nproc == 1

    def _start(self, local_rank: int, port: int) -> int:
        """A group of its own for each: a signal to the pod's first group arrives once, through here.

        Answers its process; 0 in a process that is the one rank.
        """
        env = {**self._env, **self._gang.env_of(local_rank, port), **self._outcomes.env}
        if self._again is not None:
            env.update(self._again.env)
        if self._outputs is not None:
            env.update(MARK)
        env.setdefault("OMP_NUM_THREADS", str(threads_of_each(self._gang.nproc)))
        # Started as a module, Python puts the working folder first on the path; `spottrain run` does not.
        safe = [] if os.getcwd() in sys.path else ["-P"]
        argv = [sys.executable, *safe, "-m", "spottrain", "run", *self._command]
        launcher = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        try:
            self._part(local_rank, launcher)
            if self._alone:
                os.environ.update(self._outcomes.env)
                return 0
            os.execve(sys.executable, argv, env)
        except BaseException:
            os._exit(127)

    def _part(self, local_rank: int, launcher: int) -> None:
        """What makes a forked process a rank."""
        os.setpgid(0, 0)
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # no rank computes on, or writes HEAD, unwatched
        if os.getppid() != launcher:
            os._exit(127)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        if self._outputs is not None:
            self._outputs.give(local_rank)
            self._outputs.leave_to_parent()
        signal.pthread_sigmask(signal.SIG_SETMASK, SIGNALS)  # held until the rank has its handlers

    def _wait(self) -> None:
        found = _next_signal({*SIGNALS, signal.SIGCHLD})
        if found in SIGNALS:
            self._interrupted(time.time() + self._grace)
            self._tell(signal.Signals(found))

    def _reap(self) -> None:
        """Ranks, and at PID 1 whatever else was orphaned."""
        with contextlib.suppress(ChildProcessError):
            while (found := _reap_one(before=self._kill_rest)) is not None:
                pid, status = found
                rank = self._alive.pop(pid, None)
                if rank is not None:
                    self._note(rank, os.waitstatus_to_exitcode(status), self._outcomes.of(pid))
                elif self._outputs is not None and pid == self._outputs.pid:
                    self._outputs.died()

    def _kill_rest(self, pid: int) -> None:
        """Loaders and uploader of a rank that has ended, while its number cannot be another's yet."""
        if pid in self._alive:
            _kill_group(pid)

    def _note(self, rank: int, status: int, said: Outcome | None) -> None:
        killed = self._killed and status == -signal.SIGKILL
        end = Ended(rank=rank, status=status, killed=killed, told=self._told, said=said)
        self._ended.append(end)
        if not self._alone or status < 0:
            log.unhindered("rank-ended", of=rank, status=status if status >= 0 else _name(-status))
        if end.outcome in (Outcome.DONE, Outcome.UNTRAINED):
            return
        broken = end.outcome in BROKEN or self._asked
        if broken and self._stopping_since is None:
            self._peers_until = time.time() + min(PEER_SECONDS, FORCED_SHARE * self._grace)
        self._stop(time.time() + self._grace)
        self._tell(signal.SIGTERM)

    # --- once more ------------------------------------------------------------------------------------
    @property
    def _asked(self) -> bool:
        return self._again is not None and self._again.asked

    @property
    def _goes_on(self) -> bool:
        """Whether all ranks are to be started again: one has asked for it, and nobody wants the pod to end.

        How its peers have ended is no matter: NCCL, for one, aborts a process whose peer is gone.
        """
        nobody = self._signalled_at is None and not self._alive
        return self._asked and nobody and not any(end.outcome in LAST for end in self._ended)

    def _forget(self) -> None:
        """A signal that comes now waits for the ranks of the next round, which it ends."""
        log.event(
            "started-again", processes=self._gang.nproc, codes=",".join(str(e.code) for e in self._ended)
        )
        path = self._env.get(Env.TERMINATION_MESSAGE)
        if path:
            with contextlib.suppress(OSError):
                self._keep_losses(Path(path))
                os.truncate(path, 0)  # else the last words of this round would outrank those to come
        self._begin_round()

    def _keep_losses(self, path: Path) -> None:
        """Steps that this round has lost are lost, also if the next one does not get to do them again."""
        found = termination_message.read(path)
        if found is not None and found.outcome is Outcome.INTERRUPTED_LOST:
            known = self._lost.step if self._lost is not None else None
            self._lost = found if (known or 0) <= (found.step or 0) else self._lost

    def _behind(self, path: Path) -> bool:
        """Whether what an earlier round has lost was not done again."""
        if self._lost is None:
            return False
        found = termination_message.read(path)
        return found is None or (found.step or 0) < (self._lost.step or 0)

    # --- the end --------------------------------------------------------------------------------------
    def _interrupted(self, deadline: float) -> None:
        self._signalled_at = self._signalled_at or time.time()
        self._stop(deadline)

    def _stop(self, deadline: float) -> None:
        self._deadline = min(self._deadline, deadline)
        if self._stopping_since is None:
            self._stopping_since = time.time()

    def _tell(self, signum: signal.Signals) -> None:
        """Once: a second signal to us is none to them."""
        if not self._told:
            self._told = True
            for pid in self._alive:
                os.kill(pid, signum)  # not reaped yet, so it is still this one

    @property
    def _kill_at(self) -> float:
        if self._stopping_since is None:
            return float("inf")
        budget = max(self._deadline - self._stopping_since, LEAST_BUDGET)
        return min(self._stopping_since + FORCED_SHARE * budget, self._peers_until)

    def _watch_time(self) -> None:
        """The ranks read the deadline file themselves; here it sets the time of the kill."""
        deadline = read_time(self._deadline_file)
        if deadline is not None:
            self._interrupted(deadline)
        if self._alive and not self._killed and time.time() >= self._kill_at:
            self._killed = True
            log.unhindered("ranks-killed", ranks=",".join(str(rank) for rank in self._alive.values()))
            for pid in self._alive:
                _kill_group(pid)

    def _conclude(self) -> int:
        self._ended += [
            Ended(rank=rank, status=-signal.SIGKILL, killed=True, said=self._outcomes.of(pid))
            for pid, rank in self._alive.items()
        ]
        worst = gravest(self._ended)
        path = self._env.get(Env.TERMINATION_MESSAGE)
        if worst.outcome is Outcome.INTERRUPTED and path and self._behind(Path(path)):
            worst = replace(worst, status=int(EXIT_CODE_OF[Outcome.INTERRUPTED_LOST]), said=None)
        if path:  # first: nobody may be reading what is printed
            try:
                termination_message.revise(
                    Path(path), lambda found: self._last_words(worst, found), since=self._born
                )
            except OSError as error:
                log.unhindered("termination-message-not-written", path=path, error=str(error))
        if not self._alone or worst.status < 0:
            log.unhindered("launcher-end", code=worst.code, why=worst.words)
        return worst.code

    def _last_words(self, worst: Ended, found: TerminationMessage | None) -> TerminationMessage | None:
        """What the ranks have not told themselves: nothing, too little, or less than the cause."""
        if found is None and worst.outcome is Outcome.DONE:
            return None  # an os._exit(0), say: exit code 0 alone does not mean that the training is done
        if found is not None and not termination_message.graver(worst.outcome, found.outcome):
            failed = found.outcome is worst.outcome is Outcome.FAILED
            told = worst.said is not None or found.reason == Reason.NODE_FAULT
            if not failed or worst.status > 0 or told:
                return None
            # A rank that died without a word is the cause of what its peers say of their failure.
        reason = Reason.SCRIPT_FAILED if worst.outcome is Outcome.FAILED else ""
        attempt = self._env.get(Env.ATTEMPT, "")
        basis = found or TerminationMessage(
            outcome=worst.outcome,
            attempt=int(attempt) if attempt.isdecimal() else 0,
            signalledAt=self._signalled_at,
        )
        then = f" The ranks' own message: {found.message}" if found and found.message else ""
        if self._lost is not None and worst.outcome is Outcome.INTERRUPTED_LOST:
            basis = replace(basis, step=self._lost.step, durableStep=self._lost.durableStep)
            then += f" Before the ranks were started again: {self._lost.message}"
        return replace(basis, outcome=worst.outcome, reason=reason, message=worst.words + then)


def _next_signal(awaited: set[signal.Signals]) -> int | None:
    """One of the blocked signals, taken; None where none comes for a while."""
    if hasattr(signal, "sigtimedwait"):
        found = signal.sigtimedwait(awaited, POLL_SECONDS)
        return None if found is None else found.si_signo
    give_up = time.monotonic() + POLL_SECONDS  # macOS
    while not (pending := signal.sigpending() & awaited):
        if time.monotonic() > give_up:
            return None
        time.sleep(0.01)
    return signal.sigwait(pending)


def _reap_one(before: Callable[[int], None]) -> tuple[int, int] | None:
    """A child that has ended, and its status; None where there is none. Raises ChildProcessError."""
    if not hasattr(os, "waitid"):  # macOS before Python 3.13
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            before(pid)
        return (pid, status) if pid else None
    found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None:
        return None
    before(found.si_pid)
    return found.si_pid, os.waitpid(found.si_pid, 0)[1]


def _name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    """Linux only; elsewhere a killed launcher may leave ranks behind."""
    if sys.platform == "linux":
        _LIBC.prctl(option, value, 0, 0, 0)


_LIBC: Final = ctypes.CDLL(None)

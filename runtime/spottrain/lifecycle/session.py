"""One run of one process: its environment, the ways in which it ends, and its exit.

`spottrain run` creates the session before the script runs. Under `python train.py`, torchrun or `accelerate
launch`, `current()` creates it from the environment. There `install_exit_hooks` makes sure that the process
still writes its termination message and ends in time.

Roles by rank: rank 0 of the gang probes the store at the start, and owns HEAD. The first rank of each pod
serves progress and writes the termination message. Another rank writes it only to report a failure, which may
be the cause of the others. torchrun exits with 1 whatever its processes return, so there only the message
counts. torchrun also kills 30 s after SIGTERM by default (`--shutdown-timeout`); a longer grace period is cut
to that, with a warning.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NoReturn, Protocol

from spottrain.checkpoint.compile_cache import CompileCache, use_folder
from spottrain.checkpoint.head.state import Head
from spottrain.contract import (
    EXIT_CODE_OF,
    HEAD_KEY,
    STORE_WAIT_SECONDS,
    TIME_BEFORE,
    Env,
    ExitCode,
    Outcome,
    Stop,
    TerminationMessage,
)
from spottrain.core import garbage, log, patches, progress, run_config
from spottrain.core.preemption import Preemption
from spottrain.core.time_split import TimeSplitClock, before_this_process, process_start
from spottrain.distributed.world import World
from spottrain.errors import ConfigurationError, PeerLost, RunError
from spottrain.lifecycle import endings, hang_watchdog, parent_signals, termination_message
from spottrain.lifecycle.endings import Ending
from spottrain.lifecycle.gpu_faults import fault_behind
from spottrain.lifecycle.life import Action, Cause, Facts, Phase, on_stop
from spottrain.lifecycle.log_capture.outputs import MARK, CapturedOutputs, capture, seconds_for_logs
from spottrain.lifecycle.outage_report import watched
from spottrain.storage.base import Store
from spottrain.storage.open import open_store
from spottrain.storage.outage import Outage, Silence

LONG_STEPS: Final = 2.0
"""A loop that is this many steps' time away from its last step is taken to do something else."""
RESTARTS: Final = "TORCHELASTIC_RESTART_COUNT"
GROUP_SIGNAL_SECONDS: Final = 0.2
"""Seconds that a failing script waits for a signal to its process group to arrive here too."""


class RunEnded(SystemExit):
    """Leaves a script whose run has ended, with the termination message written. It is not an error."""

    code: int


class ActiveTraining(Protocol):
    """A training of this process, as far as the end of the run concerns it."""

    def peer_gone(self, seconds: float) -> bool:
        """Whether another rank is known to be lost; waits up to the given number of seconds to learn it."""

    def save_and_release(self, *, save: bool, outside: bool = False) -> Ending | None:
        """Saves the last step with `save`, and releases HEAD: within the notice, if there is one.

        Returns how a stop ends the run then. `outside`: in another thread than the one that trains. That one
        may change the state of a custom loop meanwhile: then it returns None, and the training goes on.
        """

    def complete(self) -> None:
        """Marks the job as done, whose result is stored. Raises RunError."""


class FinishableLoop(Protocol):
    """A custom loop, which the end of its script may finish."""

    @property
    def ended_by_itself(self) -> bool:
        """Whether it has done all its steps or epochs."""

    def finish_ended(self) -> None:
        """Finishes such a loop. Raises RunError."""


class Attachment(Protocol):
    """What is attached to in this process."""

    @property
    def serves(self) -> bool:
        """Whether `spottrain run` will attach to the script's training, and no step was done yet."""

    def saved_files(self) -> Mapping[str, Path]:
        """Returns the files of the models that the script has saved after its training, by name."""


class Session:
    """One run. The constructor cannot fail and makes the run interruptible; `prepare` may fail."""

    run: run_config.RunConfig
    store: Store | None = None
    attempt: int = 0
    """0 before `prepare`. In a run outside Kubernetes only rank 0 knows it; other ranks have 1."""

    def __init__(self, env: Mapping[str, str], preemption: Preemption | None = None) -> None:
        self.env = env
        self.world = World()
        with contextlib.suppress(ConfigurationError):  # `prepare` raises it
            self.world = World.from_env(env)
        if self.world.distributed:
            log.rank = self.world.rank
        self.born = process_start()
        before = before_this_process(env, self.born)
        os.environ.pop(TIME_BEFORE, None)  # it is not the time of a process that the script starts
        clock = TimeSplitClock(age=time.time() - self.born, before=before)
        self.board = progress.ProgressBoard(clock=clock)
        self.board.trains = bool(env.get(Env.CHECKPOINT_URI))  # a job whose image saves by itself has none
        self.message: TerminationMessage | None = None
        """The termination message; the first one stays."""
        self.phase = Phase.STARTING
        self.engine: ActiveTraining | None = None
        """The training that has begun."""
        self.loop: FinishableLoop | None = None
        """Its loop, if it is a custom one."""
        self.attachment: Attachment | None = None
        """Set by `spottrain run`, which attaches to the training libraries of the script."""
        self.at_end: list[Callable[[Outcome, float], None]] = []
        """Called with the outcome and the seconds left, once the termination message is written."""
        self.lost_after_training = ""
        """What an interruption between the end of the training and the script's end loses, as a sentence."""
        self.unsaved: Ending | None = None
        """How a stop ends the run while the script does something that nobody saves."""
        self.attached = ""
        """What `spottrain run` has attached to, such as Trainer.train."""
        self.profiled = False
        """Whether a profile of this process was stored."""
        self.training: dict[str, Any] = {}
        """What the checkpoints of that training are recognised by (`integrations.attach`)."""
        self.asked: set[str] = set()
        """Settings of spec.training that the script has requested itself (`training.job_settings`)."""
        self.outage = Outage()
        """Whether the store responds, and whether to wait for it."""
        self.store_wait: float = STORE_WAIT_SECONDS
        """Seconds to wait for the store."""
        self.script = ""
        """The script that `spottrain run` has begun to execute."""
        self.outputs: CapturedOutputs | None = None
        """Set in a process that our launcher did not start."""
        self.compile_cache: CompileCache | None = None
        self._fetching: threading.Thread | None = None
        self._exit_code = 0
        self._message_lock = threading.Lock()
        # Since when (Unix seconds) a message in the file is of this run: of us or a sibling rank.
        self._messages_since = process_start(os.getppid()) if self.world.local_size > 1 else float("inf")
        if preemption is None:
            preemption = Preemption(
                grace=min(run_config.grace_seconds(env), parent_signals.agent_limit(env)),
                deadline_file=run_config.deadline_file(env),
                save_advised_file=run_config.save_advised_file(env),
            )
            preemption.install()
        self.preemption = preemption
        self.preemption.on_stop = self._on_stop

    def prepare(self, script: str) -> None:
        """Reads the environment and probes the store: bad settings end the run early. Raises RunError."""
        self.world = World.from_env(self.env)
        self.run = run_config.RunConfig.from_env(self.env, script=script)
        self.board.update(
            attempt=self.run.attempt or 1,
            job_uid=self.env.get(Env.JOB_UID, ""),
            worker=int(self.env.get(Env.WORKER_INDEX) or 0),
        )
        self._clear_message_of_last_round()
        if warning := parent_signals.grace_warning(run_config.grace_seconds(self.env), self.env):
            log.event("grace-shortened", why=warning)
            self.board.update(warning=warning)
        if Env.JOB_UID in self.env:  # a pod, where the kubelet signals only PID 1
            parent_signals.warn_if_init_is_deaf()
        if self.world.first_here:
            self.serve_progress()
        garbage.collect_rarely()
        if self.run.cache_dir is not None:  # before torch is imported, which reads the variables only once
            use_folder(self.run.cache_dir, os.environ)
        run_config.use_data_cache(self.env, os.environ)
        self.board.heartbeat.timeout = self.run.hang_timeout
        hang_watchdog.watch(self.board)
        self.attempt = self.run.attempt or 1
        if self.run.checkpoint_uri:
            self.store = self.open_store()
            if self.world.first:
                self.store.probe()
                self.attempt = self.run.attempt or self.attempt_after_head(self.store)
        self.board.update(attempt=self.attempt)
        if self.world.first_here:
            self.compile_cache = CompileCache.of(self.store, self.run, os.environ)
        if self.compile_cache is not None:  # fetched during the import of torch
            fetch = self.compile_cache.restore
            self._fetching = threading.Thread(target=fetch, name="spottrain-cache", daemon=True)
            self._fetching.start()
        log.event(
            "start",
            job=self.run.job,
            attempt=self.attempt,
            world=self.world.size if self.world.distributed else None,
            checkpoints=self.run.checkpoint_uri or "none: an interruption loses the run",
            grace=self.preemption.grace,
        )

    def serve_progress(self) -> None:
        if self.run.progress_port is not None:
            port = progress.serve(
                self.board, self.run.progress_port, self._accept_stop_order, host=self.run.bind_address
            )
            log.event("progress-served", port=port)

    # --- a store that does not respond ------------------------------------------------------------------
    def open_store(self) -> Store:
        """Opens the store. Until the training begins, a store that does not respond is waited for."""
        self.store_wait = self.run.store_wait
        self.outage.patient = True
        store = open_store(**self.run.where)
        return watched(store, self.outage, self.board, self._give_up_store, lambda: self.store_wait)

    def open_other(self, uri: str) -> Store:
        """Opens another run's store, to read, with this run's credentials. Waits for it as for this run's."""
        outage = Outage()
        outage.patient = True
        store, limit = open_store(**self.run.where_of_other(uri)), self.run.store_wait
        return watched(store, outage, self.board, self._give_up_store, lambda: limit, head_too=True)

    def _give_up_store(self, silence: Silence) -> None:
        """Ends the process to free the node; the next start tries the store again."""
        if self.preemption.stopping or self.phase is Phase.DONE or self.message is not None:
            return  # it is ending already, in another way
        self.end(endings.store_unreachable(self.board.facts, silence.seconds), at_once=True)

    def _accept_stop_order(self, order: Stop) -> bool:
        """Accepts the operator's stop order, which it sends if a deleted pod's trainer has missed SIGTERM.

        Returns False if the order names another pod.
        """
        meant = bool(order.podUID) and order.podUID == self.env.get(Env.POD_UID)
        if meant:
            self.preemption.stop_by(order.deadline, "operator")
        return meant

    # --- the end ----------------------------------------------------------------------------------------
    def enter(self, phase: Phase) -> None:
        """Notes where the training thread is now. Waits for another thread that is ending the process."""
        with self.preemption.turn:
            self.phase = phase

    def begin_claim(self) -> None:
        self.enter(Phase.CLAIMING)

    def end(self, ending: Ending | RunError, *, at_once: bool = False) -> NoReturn:
        """Ends the run within the grace period, by `RunEnded`: the script's `finally` blocks run.

        In another thread than the main one, or with `at_once`, it ends the process instead.
        """
        code = self.conclude(ending)
        here = threading.current_thread() is threading.main_thread()
        if at_once or (self is _current and not here):
            leave(code)
        self.leave_in_time(code)
        raise RunEnded(int(code))

    def end_idle(self) -> NoReturn:
        """Ends the process before a training has begun."""
        self.end(self._unbegun, at_once=True)

    def leave_in_time(self, code: int) -> None:
        """Ends the process before SIGKILL, or after a grace period, if the script does not end by itself."""
        moment = min(self.preemption.forced_exit_at, time.time() + self.preemption.grace)

        def wait() -> None:
            time.sleep(max(0.0, moment - time.time()))
            leave(code)

        if self is _current:
            threading.Thread(target=wait, name="spottrain-leave", daemon=True).start()

    def exit(self, code: int) -> int:
        """Returns `code`, with which a stop ends the process from here on: the script is over.

        Ends it at once where the interpreter's shutdown would take too long: that may wait for peers and
        threads.
        """
        peerless = self.world.distributed and code != ExitCode.DONE
        if self.preemption.stopping or code == ExitCode.SUPERSEDED or peerless or log.stuck:
            leave(code)
        self._exit_code = code
        self.enter(Phase.OVER)
        return code

    def _on_stop(self, time_up: bool) -> None:
        """Ends the process in another thread than the one that trains, if the phase lets it."""
        action = self._decide(Cause.TIME_UP if time_up else Cause.NOTICE)
        if action is Action.LEAVE:
            leave(self._exit_code)
        if (ending := self._carry_out(action, outside=True)) is not None:
            self.end(ending, at_once=True)

    def script_raised(self, error: BaseException, script: str = "") -> bool:
        """Whether the script raised `error` because of a stop.

        If so, it saves what it can and writes the termination message. A signal reaches all processes of a
        group: a worker of the script dies of it, and then the script fails. Anything raised after a stop
        counts as its consequence. A real bug of the script recurs in the next attempt and counts as a failure
        there.
        """
        with self.preemption.turn:  # another thread may be saving
            if self.message is not None or isinstance(error, RunError) or fault_behind(error):
                return False
            # A signal to the group may have killed a child just before it arrives here.
            give_up = time.monotonic() + GROUP_SIGNAL_SECONDS
            while not self.preemption.stopping and time.monotonic() < give_up:
                time.sleep(0.01)
            ending = self._carry_out(self._decide(Cause.SCRIPT_RAISED))
            if ending is None:
                return False
            what = endings.what_was_raised(error, script or sys.argv[0])
            self.conclude(ending.then(f" After that the script raised {what}"))
        return True

    def lost_peer(self, error: BaseException) -> PeerLost | None:
        """Returns a PeerLost if `error` means that another rank is gone."""
        if not self.world.distributed or "torch" not in sys.modules:
            return None
        from spottrain.distributed.process_group import peer_lost

        gone = self.engine.peer_gone if self.engine is not None else lambda seconds: False
        return peer_lost(error, self.world, gone)

    def fail(self, error: BaseException, script: str) -> ExitCode:
        """Writes the termination message of a script that raised `error`."""
        fault = fault_behind(error)
        error = error if fault else self.lost_peer(error) or error
        with self.preemption.turn:
            if isinstance(error, RunError) and not fault:
                return self.conclude(error, shown=True)
            self.script_raised(error, script)  # its message comes first and stays
            return self.conclude(endings.raised(error, script, fault), shown=log.on_terminal())

    def script_ended(self) -> ExitCode:
        """Completes the training of a script that ended by itself, and writes the termination message."""
        with self.preemption.turn:  # another thread may be saving
            action = self._decide(Cause.SCRIPT_ENDED)
            if action not in (Action.COMPLETE, Action.FINISH, Action.END_UNFINISHED):
                return self.conclude(self._carry_out(action))
        engine, loop = self.engine, self.loop
        assert engine is not None
        try:  # a stop may cut it short
            if action is Action.COMPLETE:
                engine.complete()
            elif action is Action.FINISH and loop is not None:
                loop.finish_ended()
            else:
                saves = self.phase.trains
                self.enter(Phase.ENDED)
                engine.save_and_release(save=saves)
                return self.conclude(endings.unfinished(self.board.facts.step, self.attached))
        except RunError as error:
            return self.conclude(error)
        return self.conclude(self.done)

    def _decide(self, cause: Cause) -> Action:
        clock = self.board.clock
        facts = Facts(
            cause=cause,
            stopping=self.preemption.stopping,
            spent=self.preemption.share_spent(),
            step_near=clock.seconds_since_step < LONG_STEPS * clock.step_seconds,
            alone=not self.world.distributed,
            # At exit of the interpreter no thread may start, so only `spottrain run` finishes a loop.
            loop_over=bool(self.script) and self.loop is not None and self.loop.ended_by_itself,
            told=self.message is not None,
            unsaved=self.unsaved is not None,
        )
        return on_stop(self.phase, facts)

    def _carry_out(self, action: Action, *, outside: bool = False) -> Ending | None:
        """Does what ends the run at a stop. Returns the ending; None: nothing ends it now.

        `outside`: in another thread than the one that trains.
        """
        facts, engine = self.board.facts, self.engine
        if action is Action.END_UNBEGUN:
            return self._unbegun
        if action is Action.END_UNTRAINED:  # exit code 0; in a job checkpoint.managed decides on success
            return endings.PROFILED if Env.JOB_UID not in self.env and self.profiled else endings.UNTRAINED
        if action is Action.END_DONE:
            return self.done
        if action is Action.END_STORED:
            return endings.interrupted_after_training(facts.step, self.lost_after_training)
        if action is Action.END_AS_IT_IS:
            return endings.interrupted(facts, endings.SAVING if facts.state == "Saving" else endings.NO_STEP)
        if engine is None or action in (Action.GO_ON, Action.FAIL, Action.LEAVE):
            return None
        return engine.save_and_release(save=action is Action.SAVE, outside=outside)

    @property
    def _unbegun(self) -> Ending:
        serves = self.attachment is not None and self.attachment.serves
        return self.unsaved or endings.interrupted_before_training("" if serves else self.script)

    def conclude(
        self, ending: Ending | RunError | None = None, *, shown: bool = False, logged: bool = True
    ) -> ExitCode:
        """Writes the termination message, unless there is one, and returns the matching exit code.

        `ending`: or the error that ends the run; None: there is a message. `shown`: whether its text is on
        standard error already. `logged`: False for a command that is refused.
        """
        with self._message_lock:
            if self.message is None:
                assert ending is not None
                if isinstance(ending, RunError):
                    ending = Ending.of(ending, self.board.facts)
                if self.world.distributed and ending.outcome is Outcome.FAILED:
                    ending = replace(ending, text=f"Rank {self.world.rank}: {ending.text}")
                termination_message.report_outcome(self.env, ending.outcome)
                self._exit_code = EXIT_CODE_OF[ending.outcome]  # before the message: a stop may leave by it
                self.message = self.note(ending)  # first: writing to the log may block
                if logged:
                    text = endings.what_is_saved(self.message) if shown else self.message.message
                    log.unhindered(
                        "end",
                        outcome=self.message.outcome,
                        code=int(self._exit_code),
                        reason=self.message.reason or None,
                        step=self.message.step,
                        durable_step=self.message.durableStep,
                        durable_seconds=self.message.durableSeconds,
                        message=text or None,
                    )
            outcome = self.message.outcome
        for each in self.at_end:
            with contextlib.suppress(Exception):  # the process ends in any case
                each(outcome, self.preemption.seconds_left())
        return EXIT_CODE_OF[outcome]

    @property
    def done(self) -> Ending:
        return endings.done(self.board.facts)

    @property
    def outcome(self) -> Outcome:
        """Outcome of a training that has ended. Without a message yet, an error is being raised."""
        if self.message is not None:
            return self.message.outcome
        return Outcome.DONE if self.phase is Phase.DONE else Outcome.FAILED

    def note(self, ending: Ending) -> TerminationMessage:
        """Writes the termination message that holds if the process ends without its final one.

        Such as by os._exit() in the script, after HEAD was released as done.
        """
        message = self.board.message(
            ending.outcome,
            ending.text,
            reason=ending.reason,
            signalledAt=self.preemption.signalled_at,
            durableSeconds=ending.durable_seconds,
        )
        path = self.env.get(Env.TERMINATION_MESSAGE)
        grave = message.outcome in (Outcome.FAILED, Outcome.BAD_CONFIGURATION, Outcome.STORE_UNREACHABLE)
        if path and (self.world.first_here or grave):
            change = termination_message.outranking(message)
            termination_message.revise(Path(path), change, since=self._messages_since)
        return message

    def _clear_message_of_last_round(self) -> None:
        """Deletes the message of the last round when torchrun restarts all ranks; not during a stop."""
        path = self.env.get(Env.TERMINATION_MESSAGE)
        again = self.env.get(RESTARTS, "0") != "0" and not self.preemption.stopping
        if path and again and self.world.first_here:
            with contextlib.suppress(OSError):
                os.truncate(path, 0)

    def attempt_after_head(self, store: Store) -> int:
        """Returns the attempt number outside Kubernetes: a run may continue its own interrupted one."""
        found = self.outage.through("GET HEAD", lambda: store.get(HEAD_KEY))
        return Head.from_json(found.body).attempt + 1 if found else 1

    def cache_ready(self) -> None:
        """Waits for the compile cache. Must come before anything is compiled."""
        if self._fetching is not None:
            self._fetching.join()


_current: Session | None = None


def current() -> Session:
    """Returns the session of this process, and creates it if there is none. Raises RunError."""
    session = _current
    if session is None:
        session = use(Session(os.environ))
        install_exit_hooks(session)
        session.outputs = capture(session.env, [session.world.rank], sys.argv[0], parent=False)
        if session.outputs is not None:
            session.outputs.redirect()
            session.outputs.watch()
            os.environ.update(MARK)
        session.prepare(sys.argv[0])
    return session


def existing() -> Session | None:
    """Returns the session of this process, or None."""
    return _current


def _finish_outputs() -> None:
    """Stores the remaining output before the process ends, when the log capture process may be killed."""
    if _current is not None and _current.outputs is not None:
        _current.outputs.finish(seconds_for_logs(_current.preemption.deadline))


def use(session: Session) -> Session:
    """Makes it the session of this process, which then ends with it."""
    global _current
    _current = session
    return session


def show(error: BaseException, usual: Callable[[], None] = lambda: None) -> None:
    """Prints an error to standard error: the text alone for a RunError, else as usual.

    Where the terminal is gone nothing is printed.
    """
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if isinstance(error, RunError):
            print(f"spottrain: {error}", file=sys.stderr)
        else:
            usual()


def leave(code: int) -> NoReturn:
    """Ends the process at once: exit handlers, hung threads or stuck peers must not use up the notice."""
    log.flush()
    with contextlib.suppress(Exception):
        _finish_outputs()
    # Workers of pools and loaders, which the interpreter ends at a normal exit. A pool's workers wait forever
    # for a parent that is gone. This comes last, because a pool replaces its dead workers.
    with contextlib.suppress(Exception):
        if "multiprocessing" in sys.modules:
            import multiprocessing

            for child in multiprocessing.active_children():
                child.kill()
    os._exit(code)


def install_exit_hooks(session: Session) -> None:
    """Makes a process that `spottrain run` did not start write its termination message and end in time.

    Installs an exception hook and an exit handler. The hook reports an exception when it is raised. The exit
    handler runs among the last, because it was registered early. At its end the process leaves at once if it
    must: what follows destroys process groups and waits for peers that may be gone. A script that ends by
    itself without training writes no message: its exit code, unknown here, is enough.
    """
    usual = sys.excepthook

    def report_exception(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if session.message is not None:
            usual(kind, error, trace)
            return
        show(error, lambda: usual(kind, error, trace))
        session.leave_in_time(session.fail(error, sys.argv[0]))

    def end_process() -> None:
        told = session.message is not None
        if told or session.phase.begun:
            code = session.script_ended()
            if code == ExitCode.BAD_CONFIGURATION or (code and not told):
                leave(code)  # of itself Python would end with another one
            session.exit(code)
        _finish_outputs()

    patches.replace(sys, "excepthook", report_exception)
    atexit.register(end_process)


# --- a stop before a training ---------------------------------------------------------------------------
def of_download() -> Session | None:
    """Returns the session of this process, if it has one or needs one so that a stop ends a download.

    Under `python train.py`, torchrun or Lightning, SIGTERM is the script's responsibility until a Trainer or
    a Run takes it. At PID 1 a signal without a handler is discarded. So the main process of a job that has
    checkpoints takes the signals now, unless it has a handler of its own: there is nothing to save yet.
    """
    if _current is None and Env.JOB_UID in os.environ and Env.CHECKPOINT_URI in os.environ:
        import multiprocessing

        main = multiprocessing.parent_process() is None
        main = main and threading.current_thread() is threading.main_thread()
        held = signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, [])
        if main and not held and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            return current()
    return _current

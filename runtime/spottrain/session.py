"""One run of one process: what it was told, how it may end, and the one place from which it does.

`__main__` makes it before the script runs; `Trainer` takes it from `current()`. Under a plain
`python train.py` there is no `__main__` of ours, and `current()` makes one from the environment.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from spottrain import config, log, progress
from spottrain.contract import EXIT_CODE_OF, HEAD_KEY, Env, ExitCode, Outcome, TerminationMessage
from spottrain.errors import RunError
from spottrain.head import Head
from spottrain.interruption import Interruption
from spottrain.store import Store
from spottrain.store import open as open_store


class Session:
    """Made in two moves: the constructor cannot fail and makes the run interruptible; `prepare` may fail."""

    run: config.Run
    store: Store | None = None
    attempt: int = 0

    def __init__(self, env: Mapping[str, str], interruption: Interruption | None = None) -> None:
        self.env = env
        self.born = _process_start()
        self.board = progress.Board()
        self.completed = False
        """Whether the training reached its end and its weights are stored."""
        self.message: TerminationMessage | None = None
        """The last words; the first ones spoken hold."""
        self._last_words = threading.Lock()
        self.interruption = interruption or install(env)
        self.interruption.forced = self._forced
        self.interruption.let_end(self.end_idle)

    def prepare(self, script: str) -> None:
        """Reads the environment and asks the store: what is bad ends the run early. Raises RunError."""
        self.run = config.Run.from_env(self.env, script=script)
        self.board.update(attempt=self.run.attempt or 1)
        if self.run.progress_port is not None:
            port = progress.serve(self.board, self.run.progress_port)
            log.event("progress-served", port=port)
        self._use_cache_dir()
        if self.run.checkpoint_uri:
            self.store = open_store(self.run.checkpoint_uri, self.run.endpoint)
            self.store.probe()
        self.attempt = self.run.attempt or self._next_attempt()
        self.board.update(attempt=self.attempt)
        log.event(
            "start",
            job=self.run.job,
            attempt=self.attempt,
            checkpoints=self.run.checkpoint_uri or "none: an interruption loses the run",
            grace=self.interruption.grace,
        )

    def end(self, outcome: Outcome, text: str, *, durable_seconds: float | None = None) -> NoReturn:
        """Leaves the script through SystemExit, so that its `finally` blocks run."""
        raise SystemExit(int(self.conclude(outcome, text, durable_seconds=durable_seconds)))

    def end_now(
        self, outcome: Outcome, text: str, *, reason: str = "", durable_seconds: float | None = None
    ) -> NoReturn:
        """Ends the process from any thread."""
        code = self.conclude(outcome, text, reason=reason, durable_seconds=durable_seconds)
        leave(code)

    def fail_now(self, error: RunError) -> NoReturn:
        self.end_now(error.outcome, str(error), reason=error.reason)

    def conclude(
        self, outcome: Outcome, text: str, *, reason: str = "", durable_seconds: float | None = None
    ) -> ExitCode:
        """Writes the termination message, unless there is one, and returns the exit code it calls for."""
        with self._last_words:
            if self.message is None:
                self.message = self.board.message(
                    outcome,
                    text,
                    reason=reason,
                    signalled_at=self.interruption.signalled_at,
                    durable_seconds=durable_seconds,
                )
                self._write(self.message)
            return EXIT_CODE_OF[self.message.outcome]

    def _write(self, message: TerminationMessage) -> None:
        log.event(
            "end",
            outcome=message.outcome,
            code=int(EXIT_CODE_OF[message.outcome]),
            reason=message.reason or None,
            step=message.step,
            durable_step=message.durableStep,
            durable_seconds=message.durableSeconds,
            message=message.message,
        )
        path = self.env.get(Env.TERMINATION_MESSAGE)
        if path:
            try:
                Path(path).write_text(message.to_json())
            except OSError as error:
                log.event("termination-message-not-written", path=path, error=str(error))

    def summary(self) -> str:
        """What a completed run has to say."""
        facts = self.board.facts
        where = f"are at {facts.output_uri}" if facts.output_uri else "were not stored: no checkpoint URI"
        return f"Trained {facts.step} steps; the weights {where}."

    def end_idle(self) -> NoReturn:
        """The end while no training has begun: nothing can be lost."""
        self.end_now(Outcome.INTERRUPTED, "Interrupted before the training began; nothing was lost.")

    def _forced(self) -> None:
        facts = self.board.facts
        if facts.lost_steps > 0:
            self.end_now(
                Outcome.INTERRUPTED_LOST,
                f"Interrupted at step {facts.step}, and the save did not finish in time; "
                f"{facts.lost_steps} step(s) since the last commit are lost.",
            )
        self.end_now(Outcome.INTERRUPTED, f"Interrupted at step {facts.step}; nothing was lost.")

    def _next_attempt(self) -> int:
        """A person's run counts for itself, so that it may go on from its own interrupted or killed one."""
        found = self.store.get(HEAD_KEY) if self.store else None
        return Head.from_json(found.body).attempt + 1 if found else 1

    def _use_cache_dir(self) -> None:
        """Before torch is imported, which reads these once."""
        if self.run.cache_dir is not None:
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(self.run.cache_dir / "inductor"))
            os.environ.setdefault("TRITON_CACHE_DIR", str(self.run.cache_dir / "triton"))


_current: Session | None = None


def current() -> Session:
    global _current
    if _current is None:
        session = Session(os.environ)
        session.prepare(sys.argv[0])
        _current = session
    return _current


def use(session: Session) -> None:
    global _current
    _current = session


def install(env: Mapping[str, str]) -> Interruption:
    interruption = Interruption(grace=config.grace_seconds(env), deadline_file=config.deadline_file(env))
    interruption.install()
    return interruption


def leave(code: int) -> NoReturn:
    """Ends the process at once: no exit handler, hung thread or wedged peer may eat up the notice."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _process_start() -> float:
    """Unix seconds; now, where there is no /proc."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        return time.time() - age
    except (OSError, AttributeError, ValueError, IndexError):
        return time.time()

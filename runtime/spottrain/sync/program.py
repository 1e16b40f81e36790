"""One run of `spottrain sync`: environment, store, signals, and the ways in which it ends.

With a command, this process is its parent, and ends after it. Without one it is a sidecar: it ends by
SIGTERM, which Kubernetes sends once all other containers have ended. A deadline in the deadline file comes
before that. Then it commits what is whole, as long as there is time, and leaves its termination message in
case that no SIGTERM comes.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import stat
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from spottrain.checkpoint.head.owner import ClaimPolicy, Identity
from spottrain.contract import (
    ARGUMENTS_OF_SHELL,
    Env,
    LastExit,
    Outcome,
    Reason,
    SyncEnv,
    SyncResult,
    SyncWhen,
    loses_arguments,
)
from spottrain.core import log
from spottrain.core.preemption import Preemption
from spottrain.core.run_config import RunConfig, deadline_file, grace_seconds, read
from spottrain.core.uri import given, is_path
from spottrain.errors import ConfigurationError, RunError, StoreUnavailable
from spottrain.lifecycle.endings import Ending
from spottrain.lifecycle.notice_budget import COMMIT_SECONDS
from spottrain.lifecycle.session import Session
from spottrain.storage.base import Cancelled
from spottrain.sync.checkpoints import CheckpointFound, SyncedCheckpoints
from spottrain.sync.command import ChildCommand
from spottrain.sync.folder import look
from spottrain.sync.watch import Watcher

POLL_SECONDS: Final = 0.1
STALE_SECONDS: Final = 60.0
"""A deadline that passed so long ago is void. A sidecar outlives it where the node was not taken away."""
RELEASE_SECONDS: Final = 5.0
KILLED: Final = 128
"""The least exit code of a command that a signal has ended."""
COMMAND_REACTION: Final = 0.5
"""Seconds after which it is known that the command has ended."""
SIDECAR_REACTION: Final = 5.0
"""The same of a container beside this one: the kubelet tells it by SIGTERM."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncSettings:
    folder: Path
    when: SyncWhen
    config: RunConfig
    result_file: Path | None = None
    last_exit: LastExit | None = None
    resume_args: tuple[str, ...] = ()
    told: bool | None = None
    """What the script was told of whether its folder is restored, by the operator."""

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> SyncSettings:
        """Reads the environment. Raises ConfigurationError with a sentence."""
        path = env.get(SyncEnv.PATH, "")
        if not path:
            raise ConfigurationError(f"no folder is named; write spottrain sync PATH, or set {SyncEnv.PATH}")
        folder = Path(given(path, SyncEnv.PATH)).absolute()
        config = RunConfig.from_env(env, script=str(folder))
        if not env.get(Env.CHECKPOINT_URI):
            raise ConfigurationError(
                f"no checkpoint URI is named; write spottrain sync PATH --to URI, or set {Env.CHECKPOINT_URI}"
            )
        _require_apart(folder, str(config.where["uri"]))
        result = env.get(SyncEnv.RESULT_FILE)
        of_exit = " must be ATTEMPT:EXITCODE, such as 2:0"
        of_arguments = " (--resume-args) is not quoted as in a shell"
        return cls(
            folder=folder,
            when=read(env, SyncEnv.WHEN, SyncWhen.from_json, SyncWhen()),
            config=config,
            result_file=Path(result) if result else None,
            last_exit=read(env, SyncEnv.LAST_EXIT, LastExit.parse, None, of_exit),
            resume_args=tuple(read(env, SyncEnv.RESUME_ARGS, shlex.split, (), of_arguments)),
            told=None if env.get(SyncEnv.RESUMED) is None else env[SyncEnv.RESUMED] == "true",
        )


def _require_apart(folder: Path, uri: str) -> None:
    """Raises ConfigurationError if the store's folder and the watched one lie in each other."""
    place = Path(uri if is_path(uri) else uri.removeprefix("file://"))
    if not place.is_absolute():
        return
    one, other = folder.resolve(), place.resolve()
    if one == other or one in other.parents or other in one.parents:
        raise ConfigurationError(
            f"the checkpoint URI {uri} and the folder {folder} lie in each other; name two separate folders"
        )


class Program:
    """One run. `command`: empty for a sidecar."""

    def __init__(self, env: Mapping[str, str], command: Sequence[str]) -> None:
        self._env = env
        self._words = command
        self._child: ChildCommand | None = None
        self._watcher: Watcher | None = None
        self._checkpoints: SyncedCheckpoints | None = None
        self.preemption = Preemption(
            grace=grace_seconds(env),
            deadline_file=deadline_file(env),
            stale_after=STALE_SECONDS,
        )
        self._session = Session(env, self.preemption)
        self._board = self._session.board
        self._board.trains = False  # whether it does is not known
        self.preemption.on_stop = lambda time_up: self._forced() if time_up else self._pass_on()

    def run(self) -> int:
        """Returns the exit code. The termination message is written by then."""
        self.preemption.install()
        try:
            return self._run(self._settings())
        except RunError as error:
            if self._child is not None:
                self._child.end(self.preemption.grace)
            return self._session.conclude(error)

    def refuse(self, error: RunError) -> int:
        """Ends before it began, because of the command line. Returns the exit code."""
        return self._session.conclude(error, logged=False)

    def _settings(self) -> SyncSettings:
        """Raises ConfigurationError, also where the arguments of a resume would not reach the program."""
        settings = SyncSettings.from_env(self._env)
        if settings.resume_args and not self._words:
            raise ConfigurationError("--resume-args needs a COMMAND after --, which gets them")
        if settings.resume_args and (text := loses_arguments(self._words)):
            raise ConfigurationError(f"--resume-args with the command {text!r}: {ARGUMENTS_OF_SHELL}")
        return settings

    def _run(self, settings: SyncSettings) -> int:
        try:
            result = self._start(settings)
        except (Cancelled, StoreUnavailable):
            if not self.preemption.stopping:
                raise
            result = None
        if result is None:
            words = "Interrupted before the folder was restored; nothing was lost."
            return self._finish(Ending(Outcome.INTERRUPTED, words))
        assert self._checkpoints is not None, "it has restored the folder"
        self._watcher = Watcher(
            settings.folder,
            settings.when,
            self._checkpoints,
            self._board,
            self._left,
            grace=self.preemption.grace,
            reaction=COMMAND_REACTION if self._words else SIDECAR_REACTION,
        )
        if self._words:
            return self._with_command(self._watcher, settings, result)
        return self._as_sidecar(self._watcher)

    def _start(self, settings: SyncSettings) -> SyncResult | None:
        """Claims the URI and restores the folder. Returns None if stopped first. Raises Cancelled too."""
        config = settings.config
        self._prepare_folder(settings.folder)
        self._session.run = config
        self._board.update(attempt=config.attempt or 1, job_uid=self._env.get(Env.JOB_UID, ""))
        self._session.serve_progress()
        store = self._session.open_store()
        store.probe()
        attempt = config.attempt or self._session.attempt_after_head(store)
        self._board.update(attempt=attempt, state="Gated")
        log.event(
            "start",
            job=config.job,
            attempt=attempt,
            world=None,
            checkpoints=f"{settings.folder} at {config.checkpoint_uri}",
            grace=self.preemption.grace,
        )
        pod = self._env.get(Env.POD_UID, "")
        self._checkpoints = SyncedCheckpoints(
            settings.folder,
            store,
            Identity(job_uid=config.job_uid, job=config.job, attempt=attempt),
            ClaimPolicy(on_existing=config.on_existing, known_durable_step=config.known_durable_step),
            keep=config.keep,
            run=f"{pod}/{attempt}" if pod else f"{os.getpid()}/{time.time_ns()}",
            when=settings.when,
            last_exit=settings.last_exit,
        )
        if not self._checkpoints.claim(config.gate_until, self._stopping, config.store_wait):
            return None
        self._board.update(state="Restoring")
        again = settings.result_file is not None and settings.result_file.exists()
        told = None if again or self._words else settings.told
        try:
            result = self._checkpoints.restore(again=again, told=told, cancelled=self._stopping)
        except CheckpointFound as found:
            self._board.update(step=found.step, durable_step=found.step)
            raise
        self._session.outage.patient = False
        step = result.step or None
        self._board.update(
            state="Training", step=self._checkpoints.step, start_step=step, durable_step=step, key=result.key
        )
        if settings.result_file is not None:
            fresh = settings.result_file.with_name(f".{settings.result_file.name}.new")
            fresh.write_text(result.to_json())
            os.replace(fresh, settings.result_file)
        return result

    # --- two ways to run --------------------------------------------------------------------------------
    def _with_command(self, watcher: Watcher, settings: SyncSettings, result: SyncResult) -> int:
        if self.preemption.stopping:
            return self._finish(Ending(Outcome.INTERRUPTED, "Interrupted before the command began."))
        told: dict[str, str] = {
            SyncEnv.RESUMED: "true" if result.resumed else "false",
            SyncEnv.PATH: str(settings.folder),
            Env.ATTEMPT: str(self._board.facts.attempt),
        }
        more = settings.resume_args if result.resumed else ()
        self._child = child = ChildCommand([*self._words, *more], {**self._env, **told})
        while child.code is None:
            watcher.step()
            child.wait(POLL_SECONDS)
        code = child.code
        if child.running:  # what it has left: it ends in half of the time that is left; the last look follows
            seconds = max(min(self._left(), self.preemption.grace), 0.0) / 2
            log.event("sync-left-running", seconds=seconds)
            child.end(seconds, partial(watcher.step, alive=False))
        stopped = self.preemption.stopping
        give_up_at = time.time() + settings.config.store_wait
        covered = watcher.last(
            everything=code == 0,
            at_end=False,
            until=lambda: self._left() <= 0 or time.time() >= give_up_at,
            killed=code >= KILLED,
        )
        return self._finish(self._ending(watcher, covered, stopped, code), code)

    def _as_sidecar(self, watcher: Watcher) -> int:
        told: Ending | None = None
        while not self.preemption.signal_arrived:
            watcher.step()
            if self.preemption.stopping:  # by the deadline: the others may still run when SIGKILL comes
                ending = self._ending(watcher, watcher.covered, True)
                if ending != told:
                    told = ending
                    self._session.note(ending)
            time.sleep(POLL_SECONDS)
        noticed = self.preemption.source != signal.SIGTERM.name
        covered = watcher.last(everything=True, at_end=True, until=lambda: self._left() <= 0)
        return self._finish(self._ending(watcher, covered, noticed))

    # --- the end ----------------------------------------------------------------------------------------
    def _ending(self, watcher: Watcher, covered: bool, stopped: bool, code: int = 0) -> Ending:
        """Returns how it ends. `code`: the command's, 0 where it is not known."""
        newest = f"checkpoint {watcher.newest}" if watcher.newest else "nothing"
        missing = "" if covered else watcher.left_out()
        left_out = f" Not stored: {missing}." if missing else ""
        if code and not stopped:
            return Ending(
                Outcome.FAILED,
                f"The command ended with {code}. Stored: {newest}.{left_out}",
                Reason.SCRIPT_FAILED,
            )
        if covered:
            outcome = Outcome.INTERRUPTED if stopped else Outcome.DONE
            if watcher.empty and stopped and not watcher.newest:
                return Ending(Outcome.INTERRUPTED_LOST, "Interrupted, and the folder is empty.")
            words = "The folder is empty" if watcher.empty else f"All of the folder is stored as {newest}"
            signalled_at = self.preemption.signalled_at if stopped else None
            seconds = None if signalled_at is None else time.time() - signalled_at
            return Ending(outcome, f"{'Interrupted. ' if stopped else ''}{words}.", durable_seconds=seconds)
        text = f"Stored: {newest}.{left_out}"
        if stopped:
            return Ending(Outcome.INTERRUPTED_LOST, f"Interrupted. {text}")
        if isinstance(watcher.failure, StoreUnavailable):
            return Ending(Outcome.STORE_UNREACHABLE, text, Reason.STORE_UNAVAILABLE)
        return Ending(Outcome.INTERRUPTED_LOST, text)

    def _finish(self, ending: Ending, code: int | None = None) -> int:
        """Releases the URI, and returns the exit code. `code`: the command's, which a failure ends with."""
        with contextlib.suppress(RunError):
            if self._checkpoints is not None:
                if not self.preemption.stopping:  # otherwise the time is short, and the next attempt does it
                    self._checkpoints.collect()
                self._checkpoints.release(RELEASE_SECONDS)
        self._board.update(state="Done")
        ended = self._session.conclude(ending)
        return code if code and ending.outcome is Outcome.FAILED else ended

    def _forced(self) -> None:
        """The time is up. A sidecar has left its message already, and stays: it would be started again."""
        if (not self._words and not self.preemption.signal_arrived) or self._session.message is not None:
            return
        if self._child is not None:
            self._child.kill()
        ending = Ending(Outcome.INTERRUPTED_LOST, "Interrupted. Stored: nothing.")
        if self._watcher is not None:
            ending = self._ending(self._watcher, self._watcher.covered, True)
        self._session.end(ending, at_once=True)

    # --- stops ------------------------------------------------------------------------------------------
    def _stopping(self) -> bool:
        return self.preemption.stopping

    def _pass_on(self) -> None:
        """Passes the request to stop on to the command; called again and again once it has come."""
        self._session.outage.patient = False  # a restore does not wait for the store any more
        if self._child is not None:
            interrupt = self.preemption.source == signal.SIGINT.name
            self._child.stop(signal.SIGINT if interrupt else signal.SIGTERM)

    def _left(self) -> float:
        """Seconds in which a commit must be done; infinite without a deadline."""
        if not self.preemption.stopping:
            return float("inf")
        return self.preemption.seconds_left() - COMMIT_SECONDS / 2

    # --- the start --------------------------------------------------------------------------------------
    def _prepare_folder(self, folder: Path) -> None:
        try:
            make_folder(folder, for_others=not self._words and os.geteuid() == 0)
        except (FileExistsError, NotADirectoryError) as error:
            raise ConfigurationError(f"{folder} is not a folder; name one, or a path that is free") from error
        except OSError as error:
            raise ConfigurationError(
                f"the folder {folder} cannot be made: {error.strerror}; in a pod, mount a volume there"
            ) from error
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ConfigurationError(f"{folder} is not writable for user {os.getuid()}; change its mode")
        look(folder)  # raises FolderError if it cannot be listed


def make_folder(folder: Path, *, for_others: bool) -> None:
    """Makes the folder and its parents. `for_others`: with the owner and mode of the one that is there.

    A script of another user must be able to write where it could make the folder itself.
    """
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for made in reversed(missing if for_others else ()):
        like = made.parent.stat()
        os.chown(made, like.st_uid, like.st_gid)
        made.chmod(stat.S_IMODE(like.st_mode))

"""`spottrain run SCRIPT [ARGS...]`: entry point of the image, PID 1 of its container, and a user's command.

`spottrain profile` is the same with a profile of some steps (`cli/profile.py`). With several GPUs in the pod
it starts one process for each (`launcher`), and each returns here as a rank. With one GPU it runs the script
itself, in a child if the output is stored (`log_capture`). The order matters: block signals, install the
handler, read the configuration, probe the store, run the script in this process. A bad configuration or store
ends the run before any heavy import. Every exit writes the termination message.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
import time
import traceback
from functools import partial
from pathlib import Path
from typing import NoReturn

from spottrain.cli import profile
from spottrain.contract import LOG_FORMAT, Env, OnExisting, Outcome, Reason
from spottrain.core.process_start import process_start
from spottrain.core.run_config import LOG_FORMATS
from spottrain.core.startup_signals import hold_signals, release_signals
from spottrain.errors import ConfigurationError, RunError
from spottrain.lifecycle.launcher import Launcher
from spottrain.lifecycle.log_capture.outputs import MARK, keep
from spottrain.lifecycle.rendezvous import meet
from spottrain.lifecycle.session import Session, install, leave, show, use
from spottrain.lifecycle.topology import Gang, count_gpus

ABOUT = "Training on spot capacity: it saves before it is interrupted and goes on where it was."
DESCRIPTION = """Runs a training script that saves before it is interrupted and goes on where it was.
Outside Kubernetes: Ctrl-C saves; the same command goes on."""


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["checkpoints"]:
        release_signals()
        from spottrain.cli import checkpoints

        return checkpoints.main(words[1:])
    hold_signals()  # blocked already, unless the caller is not `entry`
    try:
        script, args, nproc = _read_command(words)
        _require_script(script)  # before creating a checkpoint folder or ranks for it
        gang = Gang.from_env(os.environ, nproc, lambda: count_gpus(os.environ))
    except RunError as error:
        return _failed(_make_session(), error, "")
    if gang.workers > 1:
        meet(gang, os.environ)  # it also returns on a stop, and the code below ends this process
    ranks = [gang.rank(number) for number in range(gang.nproc)]
    outputs = keep(os.environ, ranks, script, parent=True)
    if gang.nproc > 1 or outputs is not None:
        launcher = Launcher(gang, [script, *args], os.environ, born=process_start(), outputs=outputs)
        code = launcher.run()
        if code is not None:
            leave(code)  # nothing is left to shut down
        os.environ.update(MARK)  # from here on this is the single rank
    os.environ.update(gang.env_of(0, gang.port))
    return _run_here(_make_session(), script, args)


def _make_session() -> Session:
    session = Session(os.environ, install(os.environ))
    use(session)
    return session


def _run_here(session: Session, script: str, args: list[str]) -> int:
    try:
        session.prepare(script)
        session.script = script
        _run(script, args)
        code: int = session.end_of_script()
    except SystemExit as exit_:
        code = _exit_of_script(session, exit_)
    except BaseException as error:  # any exception of the script
        code = _failed(session, error, script)
    if session.must_leave(code):
        leave(code)
    session.preemption.let_end(partial(leave, code))  # a stop need not wait for anything any more
    return int(code)


def _read_command(argv: list[str]) -> tuple[str, list[str], str]:
    """Returns script, arguments and `--nproc`. Sets the environment variables of the other flags."""
    parser = _Parser(prog="spottrain", description=ABOUT)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    run = commands.add_parser("run", help="run a training script", description=DESCRIPTION)
    about = "run a training script and profile some of its steps"
    profiled = commands.add_parser("profile", help=about, description=profile.ABOUT)
    commands.add_parser("checkpoints", help="inspect and manage checkpoints: list, verify, prune, copy, ...")
    names = _add_flags(run)
    profile.add_flags(profiled)
    _add_flags(profiled)
    values = vars(parser.parse_args(argv))
    os.environ.update({name: values[name] for name in names if values[name] is not None})
    if values["command"] == "profile":
        os.environ.update(profile.settings(values, os.environ, time.time()))
    return values["script"], values["args"], values["nproc"]


def _add_flags(parser: argparse.ArgumentParser) -> list[str]:
    """Adds the flags. Returns the names of those that are set as environment variables."""
    on_existing = "where another job left checkpoints at the URI: fail (default), resume from them, or fresh"
    flags: dict[str, tuple[str, str]] = {
        "--checkpoint": (
            Env.CHECKPOINT_URI,
            "folder, s3://bucket/prefix or gs://... (default: checkpoints/<script>)",
        ),
        "--endpoint": (Env.CHECKPOINT_ENDPOINT, "URL of an S3-compatible server"),
        "--interval": (Env.CHECKPOINT_INTERVAL, "between saves: auto, 500steps, 90s, 10m (default) or 1h"),
        "--keep": (Env.CHECKPOINT_KEEP, "checkpoints to keep, at least 2 (default 3)"),
        "--on-existing": (Env.CHECKPOINT_ON_EXISTING, on_existing),
        "--training": (Env.TRAINING, "settings that win over the script's, as JSON: '{\"maxSteps\": 100}'"),
        "--log-format": (LOG_FORMAT, "default: auto, which is text in a terminal and logfmt elsewhere"),
    }
    choices = {"--on-existing": [each.lower() for each in OnExisting], "--log-format": list(LOG_FORMATS)}
    for flag, (name, text) in flags.items():
        parser.add_argument(flag, dest=name, choices=choices.get(flag), help=f"{text} [{name}]")
    nproc = "processes in this pod: auto (default: one per GPU, or one) or a number"
    parser.add_argument("--nproc", default="auto", help=nproc)
    parser.add_argument("script")
    parser.add_argument("args", nargs=argparse.REMAINDER)
    return [name for name, _ in flags.values()]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        raise ConfigurationError(f"{message}; see {self.prog} --help")


def _require_script(script: str) -> None:
    if not Path(script).is_file():
        raise ConfigurationError(
            f"the script {script} is not a file (looked from {Path.cwd()}); give a path that exists there",
            reason=Reason.SCRIPT_NOT_FOUND,
        )


def _run(script: str, args: list[str]) -> None:
    sys.argv = [script, *args]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")


def _failed(session: Session, error: BaseException, script: str) -> int:
    show(error, lambda: traceback.print_exception(error))
    return session.fail(error, script)


def _exit_of_script(session: Session, exit_: SystemExit) -> int:
    """Returns the exit code after SystemExit: of our own end, or of the script's sys.exit."""
    if session.message is not None:
        return session.conclude(session.message.outcome, "")
    if exit_.code is None or exit_.code == 0:
        return session.end_of_script()
    if session.broken_by_stop(exit_):
        return _exit_of_script(session, exit_)
    code = exit_.code if isinstance(exit_.code, int) else 1
    if not isinstance(exit_.code, int):
        print(exit_.code, file=sys.stderr)
    words = f"The script ended itself: sys.exit({exit_.code!r})."
    session.conclude(Outcome.FAILED, words, reason=Reason.SCRIPT_FAILED)
    return code

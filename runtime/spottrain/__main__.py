"""`spottrain run SCRIPT [ARGS...]`: entry point of the image, PID 1 of its container, a person's command.

Order matters: signal handler, then configuration and the store's probe (bad ones end the run before anything
heavy is imported), then the script in this very process. Every way out writes the termination message.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from spottrain.contract import Env, ExitCode, Outcome, Reason
from spottrain.errors import ConfigurationError, RunError
from spottrain.session import Session, install, leave, use

DESCRIPTION = """Runs a training script that saves before it is interrupted and goes on where it was.
Outside Kubernetes: Ctrl-C saves; the same command goes on."""


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["release"]:
        from spottrain import release

        return release.main(words[1:])
    interruption = install(os.environ)  # first: whatever comes before it is deaf to SIGTERM
    session = Session(os.environ, interruption)
    use(session)
    try:
        script, args = _read_command(words)
        session.prepare(script)
        _require_script(script)
        _run(script, args)
        code = _end_of_script(session)
    except RunError as error:
        print(f"spottrain: {error}", file=sys.stderr)
        code = session.conclude(error.outcome, str(error), reason=error.reason)
    except SystemExit as exit_:
        code = _exit_of_script(session, exit_)
    except BaseException as error:  # the script's, whatever it is
        code = _failure_of_script(session, error, script)
    if session.interruption.stopping or code == ExitCode.SUPERSEDED:
        leave(code)
    return int(code)


def _read_command(argv: list[str]) -> tuple[str, list[str]]:
    """Script and arguments. Flags go into the environment: each stands for one of its names."""
    parser = _Parser(prog="spottrain", description=DESCRIPTION)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    run = commands.add_parser("run", help="run a training script", description=DESCRIPTION)
    flags = {
        "--checkpoint": (Env.CHECKPOINT_URI, "folder or s3://bucket/prefix (default: checkpoints/<script>)"),
        "--endpoint": (Env.CHECKPOINT_ENDPOINT, "URL of an S3-compatible server"),
        "--interval": (Env.CHECKPOINT_INTERVAL, "between saves: 500steps, 90s, 10m (default) or 1h"),
        "--keep": (Env.CHECKPOINT_KEEP, "checkpoints to keep, at least 2 (default 3)"),
        "--training": (Env.TRAINING, "settings that win over the script's, as JSON: '{\"maxSteps\": 100}'"),
    }
    for flag, (name, text) in flags.items():
        run.add_argument(flag, dest=name, help=f"{text} [{name}]")
    run.add_argument("script")
    run.add_argument("args", nargs=argparse.REMAINDER)
    values = vars(parser.parse_args(argv))
    os.environ.update({name: values[name] for name, _ in flags.values() if values[name] is not None})
    return values["script"], values["args"]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        raise ConfigurationError(f"{message}; see spottrain run --help")


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


def _end_of_script(session: Session) -> int:
    if session.completed:
        return session.conclude(Outcome.DONE, session.summary())
    return session.conclude(Outcome.DONE, "The script ended by itself, without training.")


def _exit_of_script(session: Session, exit_: SystemExit) -> int:
    """Our own end, which has its message already, or a sys.exit of the script, which keeps its code."""
    if session.message is not None:
        return session.conclude(session.message.outcome, "")
    if not session.attempt:
        return 0  # --help
    if exit_.code is None or exit_.code == 0:
        return _end_of_script(session)
    code = exit_.code if isinstance(exit_.code, int) else 1
    if not isinstance(exit_.code, int):
        print(exit_.code, file=sys.stderr)
    words = f"The script ended itself: sys.exit({exit_.code!r})."
    session.conclude(Outcome.FAILED, words, reason=Reason.SCRIPT_FAILED)
    return code


def _failure_of_script(session: Session, error: BaseException, script: str) -> int:
    traceback.print_exception(error)
    what = traceback.format_exception_only(error)[-1].strip()
    return session.conclude(Outcome.FAILED, f"{what} ({_place(error, script)})", reason=Reason.SCRIPT_FAILED)


def _place(error: BaseException, script: str) -> str:
    """file:line of the innermost frame that is the script's own, else of the innermost of all."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == script] or frames
    return f"{own[-1].filename}:{own[-1].lineno}"


if __name__ == "__main__":
    sys.exit(main())

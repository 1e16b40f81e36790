"""`spottrain run SCRIPT [ARGS...]`: entry point of the image, PID 1 of its container, and a user's command.

`-m MODULE` in place of SCRIPT runs a module as `python -m` does. `spottrain profile SCRIPT` is the same as
`run`, with a profile of some steps. Without --checkpoint it is short and uses a folder of its own,
`profiles/<script>-<time>`: so it neither continues nor ends the training in `checkpoints/<script>`.

With several GPUs in the pod it starts one process for each (`launcher`), and each returns here as a rank.
With one GPU it runs the script itself, in a child if the output is stored (`log_capture`). The order matters:
block signals, install the handler, read the configuration, probe the store, run the script in this process. A
bad configuration or store ends the run before any heavy import. Every exit writes the termination message.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import pkgutil
import re
import runpy
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, NoReturn

from spottrain.cli.output import Parser, exit_code_of_usage, named_by_flags
from spottrain.contract import LOG_FORMAT, Env, OnExisting, Outcome, Reason
from spottrain.core import log, patches
from spottrain.core.run_config import LOG_FORMATS, RunConfig, name_of
from spottrain.core.startup_signals import hold_signals
from spottrain.core.time_split import process_start
from spottrain.core.training_settings import Profile, read_manifest
from spottrain.errors import ConfigurationError, RunError
from spottrain.integrations import attach
from spottrain.lifecycle.endings import Ending
from spottrain.lifecycle.launcher import Launcher
from spottrain.lifecycle.life import Phase
from spottrain.lifecycle.log_capture.outputs import MARK, capture
from spottrain.lifecycle.session import RunEnded, Session, leave, show, use
from spottrain.lifecycle.topology import Gang, count_gpus, meet

ABOUT = "Trains on spot capacity: saves before an interruption, and resumes from there."
DESCRIPTION = """Runs a training script that saves a checkpoint before it is interrupted and resumes from it.
Outside Kubernetes, Ctrl-C saves and stops; the same command resumes."""
ABOUT_PROFILE = """Runs a training script and profiles some of its steps with torch.profiler. Without
--checkpoint it ends after these steps and uses a folder of its own; with it, it is like any other run."""
KINETO, SILENT = "KINETO_LOG_LEVEL", "99"
"""By which torch.profiler's own library writes nothing to the terminal."""
MAX_CHARACTERS: Final = 500
"""Characters of a script's last line that are kept, counted from its end."""
OWN_LINE: Final = re.compile(r'\d{4}-\d\d-\d\dT\S+ (event|step)=|\{"time": |\d\d:\d\d:\d\d ')
"""Beginning of a line of our own log (core/log_format.py), which goes to standard output too."""


class Command(NamedTuple):
    """What to run. `script` is a file; `module` is its module name if it is run by -m, else empty."""

    script: str
    module: str
    args: list[str]
    nproc: str

    @property
    def words(self) -> list[str]:
        """The command without flags, for each rank."""
        return [*(["-m", self.module] if self.module else [self.script]), *self.args]


def main(words: list[str]) -> int:
    hold_signals()  # blocked already, unless the caller is not `entry`
    if words[:1] == ["sync"]:
        from spottrain.cli import sync

        return sync.main(words[1:])
    try:
        command = _read_command(words)
        _require_script(command)  # before creating a checkpoint folder or ranks for it
        gang = Gang.from_env(os.environ, command.nproc, lambda: count_gpus(os.environ))
        began = time.monotonic()
        if gang.workers > 1:
            meet(gang, os.environ)  # it also returns on a stop, and the code below ends this process
    except RunError as error:
        show(error)
        return exit_code_of_usage(use(Session(os.environ)).conclude(error, logged=False))
    waited = time.monotonic() - began
    ranks = [gang.rank(number) for number in range(gang.nproc)]
    outputs = capture(os.environ, ranks, command.script, parent=True)
    if gang.nproc > 1 or outputs is not None:
        born = process_start()
        launcher = Launcher(gang, command.words, os.environ, born=born, outputs=outputs, waited=waited)
        code = launcher.run()
        if code is not None:
            leave(code)  # nothing is left to shut down
        os.environ.update(MARK)  # from here on this is the single rank
        waited = 0.0  # in the split that the launcher gives it
    os.environ.update(gang.env_of(0, gang.port))
    session = use(Session(os.environ))
    session.board.clock.waited(waited)
    return _run_here(session, command)


def _run_here(session: Session, command: Command) -> int:
    last_line = _LastLine()
    try:
        session.prepare(command.script)
        session.script = command.script
        attach.install(session)
        last_line.follow()
        _run(command)
        code: int = session.script_ended()
    except RunEnded as ended:
        code = ended.code
    except SystemExit as exit_:
        code = _exit_of_script(session, exit_, last_line.text)
    except BaseException as error:  # any exception of the script
        error.__traceback__ = _of_script(error, command.script)
        show(error, traceback.print_exc)
        code = session.fail(error, command.script)
    return session.exit(code)


def _read_command(argv: list[str]) -> Command:
    """Parses the command and finds a module's file. Sets the environment variables of the other flags."""
    parser = Parser(prog="spottrain", description=ABOUT)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=Parser)
    run = commands.add_parser("run", help="run a training script", description=DESCRIPTION)
    about = "run a training script and profile some of its steps"
    profiled = commands.add_parser("profile", help=about, description=ABOUT_PROFILE)
    commands.add_parser("sync", help="keep a folder of any program's checkpoints in a store")
    commands.add_parser(
        "checkpoints", help="delete URI: what a job left; the other verbs are in spottrain[cli]"
    )
    commands.add_parser("inject", help="write the runtime to a folder, for an image that lacks it")
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version")
    flags = _add_flags(run)
    for name, text in (
        ("wait", "steps to skip first (compilation, first allocations)"),
        ("warmup", "steps to trace and discard"),
        ("active", "steps to record"),
    ):
        default = str(getattr(Profile(), name))
        profiled.add_argument(
            f"--{name}", default=default, metavar="STEPS", help=f"{text} (default {default})"
        )
    _add_flags(profiled)
    values = vars(parser.parse_args(argv))
    given = {name: flag for name, flag in flags.items() if values[name] is not None}
    os.environ.update({name: values[name] for name in given})
    if values["code"]:
        from spottrain.cli import code

        code.enter(values["code"], os.environ)
    module = values["script"] if values["module"] else ""
    if module:
        values["script"] = _file_of_module(module)
    with named_by_flags(given):
        if values["command"] == "profile":
            os.environ.update(profile_variables(values, os.environ, time.time()))
        RunConfig.from_env(os.environ, script=values["script"])  # before ranks are started
    return Command(values["script"], module, values["args"], values["nproc"])


def _add_flags(parser: argparse.ArgumentParser) -> dict[str, str]:
    """Adds the flags. Returns those that are set as environment variables, by the variable's name."""
    place = "folder, s3://bucket/prefix or gs://bucket/prefix (default: checkpoints/<script>)"
    interval = "time or steps between saves: auto, 500steps, 90s, 10m (default) or 1h"
    on_existing = (
        "if another job left checkpoints at the URI: fail (default), resume from them, or start fresh"
    )
    init_from = "begin from the weights of another run, or of a folder or file; not read after a resume"
    init_ignore = "parameters that --init-from leaves as they are, such as 'head.*,norm.bias'"
    log_format = "default: auto, which is text in a terminal and logfmt elsewhere"
    flags = (
        ("--checkpoint", Env.CHECKPOINT_URI, "URI", place),
        ("--endpoint", Env.CHECKPOINT_ENDPOINT, "URL", "URL of an S3-compatible server"),
        ("--interval", Env.CHECKPOINT_INTERVAL, "INTERVAL", interval),
        ("--keep", Env.CHECKPOINT_KEEP, "N", "number of checkpoints to keep, at least 2 (default 3)"),
        ("--on-existing", Env.CHECKPOINT_ON_EXISTING, None, on_existing),
        ("--init-from", Env.INIT_FROM, "URI_OR_PATH", init_from),
        ("--init-ignore", Env.INIT_IGNORE, "NAMES", init_ignore),
        ("--training", Env.TRAINING, "JSON", "settings that override the script's: '{\"maxSteps\": 100}'"),
        ("--log-format", LOG_FORMAT, None, log_format),
    )
    choices = {"--on-existing": [each.lower() for each in OnExisting], "--log-format": list(LOG_FORMATS)}
    for flag, name, metavar, text in flags:
        parser.add_argument(
            flag,
            dest=name,
            type=str.lower if flag in choices else str,
            metavar=metavar,
            choices=choices.get(flag),
            help=f"{text} [{name}]",
        )
    parser.add_argument(
        attach.FLAG,
        dest=Env.AUTO_ATTACH,
        action="store_const",
        const="false",
        help=f"leave the Trainers of transformers and Lightning as they are [{Env.AUTO_ATTACH}=false]",
    )
    code = "URI of the script's folder as `spottrain submit` has packed it; it becomes the working directory"
    parser.add_argument("--code", metavar="URI", help=code)
    nproc = "number of processes in this pod, or auto (default): one per GPU, at least one"
    parser.add_argument("--nproc", default="auto", metavar="N", help=nproc)
    module = "SCRIPT is a module's name, as of python -m"
    parser.add_argument("-m", dest="module", action="store_true", help=module)
    parser.add_argument("script", metavar="SCRIPT", help="path of the script; with -m, the name of a module")
    parser.add_argument("args", metavar="ARGS", nargs=argparse.REMAINDER, help="arguments of the script")
    return {Env.AUTO_ATTACH: attach.FLAG, **{name: flag for flag, name, _, _ in flags}}


def profile_variables(values: Mapping[str, Any], env: Mapping[str, str], now: float) -> dict[str, str]:
    """Returns the environment variables for these flags, besides those of `run`. `now`: Unix seconds.

    Raises ConfigurationError.
    """
    window = {name: _steps(name, values[name]) for name in ("wait", "warmup", "active")}
    text = env.get(Env.TRAINING) or "{}"
    given, training = read_manifest(text), json.loads(text)
    if (other := training.get("profile")) not in (None, window):
        log.event("override", setting="profile", flags=json.dumps(window), training=json.dumps(other))
    found = {KINETO: env.get(KINETO, SILENT)}
    if not env.get(Env.CHECKPOINT_URI):
        moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now))
        found[Env.CHECKPOINT_URI] = f"profiles/{name_of(values['script'])}-{moment}"
        if "max_steps" not in given:  # a run of these steps, without a warm-up
            rest = {name: value for name, value in training.items() if not name.startswith("warmup")}
            training = rest | {"maxSteps": sum(window.values()), "warmupSteps": 0}
    return found | {Env.TRAINING: json.dumps(training | {"profile": window})}


def _steps(name: str, text: str) -> int:
    if not text.isdecimal():
        raise ConfigurationError(
            f"--{name} {text!r} is not a whole number of steps; see spottrain profile --help"
        )
    return int(text)


class _Version(argparse.Action):
    """Prints the version. It is looked up only now: that takes as long as the other imports together."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from importlib.metadata import version

        print(f"spottrain {version('spottrain')}")
        parser.exit()


def _require_script(command: Command) -> None:
    if not command.module and not Path(command.script).is_file():
        raise ConfigurationError(
            f"the script {command.script} is not a file (looked from {Path.cwd()}); give a path that exists "
            "there, or -m and the name of a module",
            reason=Reason.SCRIPT_NOT_FOUND,
        )


def _file_of_module(name: str) -> str:
    """Returns the file that `python -m name` would run. Raises ConfigurationError if there is none."""
    spec = _find(name) if all(name.split(".")) else None
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _find(f"{name}.__main__")
    if spec is None or not spec.has_location or spec.origin is None:
        raise ConfigurationError(
            f"-m {name}: there is no such module, or it is a package without __main__.py (looked in "
            f"{Path.cwd()} and Python's path); write package.module, without .py",
            reason=Reason.SCRIPT_NOT_FOUND,
        )
    return spec.origin


def _find(name: str) -> ModuleSpec | None:
    """Finds a module as `import` does, but imports no package above it, which may be heavy."""
    package = name.rpartition(".")[0]
    above = _find(package) if package else None
    folders = (above.submodule_search_locations if above else None) if package else [*_path(), *sys.path]
    portions: list[str] = []
    for folder in folders or ():
        finder = pkgutil.get_importer(folder)
        spec = finder.find_spec(name) if finder is not None else None
        if spec is not None and spec.loader is not None:
            return spec
        portions += (spec.submodule_search_locations if spec else None) or []
    if portions:  # a package without __init__.py
        namespace = ModuleSpec(name, None, is_package=True)
        namespace.submodule_search_locations = portions
        return namespace
    return None if package else importlib.util.find_spec(name)  # such as an editable installation


def _path() -> list[str]:
    """Where `python -m` looks first: in the working directory, unless PYTHONSAFEPATH is set."""
    return [] if os.environ.get("PYTHONSAFEPATH") else [os.getcwd()]


def _run(command: Command) -> None:
    sys.argv = [command.script, *command.args]
    if command.module:
        sys.path[:0] = _path()
        # alter_sys: __main__ is the module, with its spec, by which spawned processes import it again.
        runpy.run_module(command.module, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(command.script).resolve().parent))
        runpy.run_path(command.script, run_name="__main__")


def _of_script(error: BaseException, script: str) -> TracebackType | None:
    """Returns the traceback from the script on: what started it says nothing to its author."""
    found = error.__traceback__
    while found is not None and found.tb_frame.f_code.co_filename != script:
        found = found.tb_next
    unread = isinstance(error, SyntaxError) and error.filename == script
    return found if found or unread else error.__traceback__


def _exit_of_script(session: Session, exit_: SystemExit, last_line: str) -> int:
    """Returns the exit code after SystemExit: of our own end, or of the script's sys.exit."""
    # Lightning raises a SystemExit of its own at SIGTERM, which leaves out the rest of the script.
    foreign = session.phase is Phase.STORED and type(exit_) is not SystemExit
    usual = exit_.code is None or exit_.code == 0
    if session.message is not None or ((foreign or not usual) and session.script_raised(exit_)):
        return session.conclude()  # waits for a thread that writes the message
    if usual:
        return session.script_ended()
    code = exit_.code if isinstance(exit_.code, int) else 1
    if not isinstance(exit_.code, int):
        show(exit_, lambda: print(exit_.code, file=sys.stderr))
    last = f" Its last line: {last_line}" if last_line and isinstance(exit_.code, int) else ""
    words = f"The script ended itself: sys.exit({exit_.code!r}).{last}"
    told = not isinstance(exit_.code, int) and log.on_terminal()
    session.conclude(Ending(Outcome.FAILED, words, Reason.SCRIPT_FAILED), shown=told)
    return code


class _LastLine:
    """The last line that a script wrote to standard output or error: `sys.exit(1)` alone does not say why."""

    def __init__(self) -> None:
        self._said: dict[int, str] = {}
        """By stream: its last line."""
        self._begun: dict[int, str] = {}
        """By stream: the part of a line that has no end yet."""

    def follow(self) -> None:
        for number, stream in ((1, sys.stdout), (2, sys.stderr)):
            if hasattr(stream, "__dict__"):  # as of a TextIOWrapper
                patches.replace(stream, "write", self._following(number, stream.write))

    @property
    def text(self) -> str:
        """The last line of standard error, else of standard output; "" without any."""
        for number in (2, 1):
            if line := self._begun.get(number, "").strip() or self._said.get(number, ""):
                return line[-MAX_CHARACTERS:]
        return ""

    def _following(self, number: int, write: Callable[[str], int]) -> Callable[[Any], int]:
        def following(text: Any) -> int:
            if isinstance(text, str):
                self._take(number, text)
            return write(text)

        return following

    def _take(self, number: int, text: str) -> None:
        *lines, begun = re.split(r"[\r\n]", self._begun.get(number, "") + text)
        self._begun[number] = begun[-MAX_CHARACTERS:]
        said = (line.strip() for line in reversed(lines) if not OWN_LINE.match(line))
        self._said[number] = next(filter(None, said), self._said.get(number, ""))

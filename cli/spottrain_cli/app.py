"""The `spottrain` command: its verbs, and what every error of theirs becomes.

Each verb is a thin function in commands/ that imports what does the work only when it is called. The module
of a verb, too, is imported only for it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Annotated, Any, Final, NoReturn

import typer
import typer.main
from spottrain.errors import RunError
from typer.core import TyperGroup

from spottrain_cli import errors

VERBS: Final = {
    "run": ("forwarded:run", "Run a training script, here or in a pod."),
    "sync": ("forwarded:sync", "Keep a folder of any program's checkpoints."),
    "inject": ("forwarded:inject", "Write the runtime to a folder."),
    "init": ("init:init", "Write the manifest of a job, from a script or a Job."),
    "submit": ("submit:submit", "Send a training to the cluster."),
    "rehearse": ("rehearse:rehearse", "Run a job here while its nodes are taken away."),
    "list": ("list:list_jobs", "List jobs."),
    "status": ("status:status", "Show how a job stands, and its attempts."),
    "watch": ("watch:watch", "Watch a job until it ends."),
    "logs": ("logs:logs", "Print what a job has printed, in all attempts."),
    "stop": ("stop:stop", "Stop a job: it saves, and gives its nodes back."),
    "resume": ("stop:resume", "Resume a job that was stopped."),
    "interrupt": ("interrupt:interrupt", "Interrupt a job, as a fire drill."),
    "delete": ("delete:delete", "Delete a job."),
    "checkpoints": ("checkpoints:app", "Get the model; manage checkpoints."),
    "cost": ("cost:cost", "Show what jobs cost, saved and lost."),
    "report": ("report:report", "Write how a job went to one HTML page."),
    "profile": ("profile:profile", "Show where the time of a step goes."),
    "plan": ("plan:app", "Say what a training needs, before it runs."),
    "doctor": ("doctor:doctor", "Check cluster, rights, bucket and a job."),
}
"""Of each verb the module in commands/ with its function or Typer, and what it does. A module may
have HELP in place of the function's docstring, EXAMPLES below its options, and SETTINGS of the context."""
HELP = "Train on spot GPUs as if nobody could take the GPUs away."
EPILOG = (
    "A JOB is NAME or NAMESPACE/NAME. A URI has ://, or is a path that begins with / or a dot. "
    "Exit codes: 0 done, 1 the answer is no, 2 wrong usage, 3 not found, 4 cluster or store unreachable."
)


class Commands(Mapping[str, Any]):
    """The commands by name, each built when it is asked for."""

    def __init__(self) -> None:
        self._built: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._built:
            self._built[name] = _built(name, *VERBS[name][0].split(":"))
        return self._built[name]

    def __iter__(self) -> Iterator[str]:
        return iter(VERBS)

    def __len__(self) -> int:
        return len(VERBS)


def _built(name: str, module: str, what: str) -> Any:
    found = import_module(f"spottrain_cli.commands.{module}")
    verb = getattr(found, what)
    if isinstance(verb, typer.Typer):
        group: Any = typer.main.get_group(verb)
        group.name = name
        return group
    alone = typer.Typer(rich_markup_mode=None, add_completion=False)
    help_, examples, settings = (getattr(found, each, None) for each in ("HELP", "EXAMPLES", "SETTINGS"))
    alone.command(name, help=help_, epilog=examples, context_settings=settings)(verb)
    return typer.main.get_command(alone)


class Verbs(TyperGroup):
    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = Commands()  # type: ignore[assignment]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Lists all verbs without importing one."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, about) for name, (_, about) in VERBS.items()])


app = typer.Typer(
    cls=Verbs,
    help=HELP,
    epilog=EPILOG,
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"spottrain {version('spottrain')}")
        raise typer.Exit


@app.callback()
def _spottrain(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


def main(argv: list[str], *, program: str = "spottrain") -> int:
    """Runs one command. Returns its exit code; every error is one sentence on standard error."""
    try:
        code = app(args=argv, prog_name=program, standalone_mode=False)
        sys.stdout.flush()
    except typer.TyperException as error:
        return _say(_with_help(error, program), error.exit_code)
    except (errors.CommandError, RunError) as error:
        return _say(str(error), errors.exit_code_of(error))
    except typer.Abort:
        return _say("nothing was changed", 1)
    except BrokenPipeError:  # such as by `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except SystemExit as left:  # Typer's own answer to a broken pipe, and the end of a completion
        return left.code if isinstance(left.code, int) and left.code != 1 else 0
    except KeyboardInterrupt:
        return errors.INTERRUPTED
    return code if isinstance(code, int) else 0


def kubectl_plugin() -> NoReturn:
    """`kubectl spottrain`."""
    from spottrain.cli.entry import trains

    words = sys.argv[1:]
    if trains(words):
        from spottrain.cli.main import main as train

        sys.exit(train(words))
    sys.exit(main(words, program="kubectl spottrain"))


def kubectl_complete() -> NoReturn:
    """What kubectl calls for the completion of `kubectl spottrain`."""
    from spottrain_cli.completion import complete

    sys.exit(complete(sys.argv[1:]))


def _with_help(error: typer.TyperException, program: str) -> str:
    context = getattr(error, "ctx", None)
    words = error.format_message().rstrip(".")
    see = f"see {context.command_path if context else program} --help"
    return f"{words} See{see[3:]}" if words.endswith("?") else f"{words}; {see}"


def _say(sentence: str, code: int) -> int:
    print(f"spottrain: {sentence}", file=sys.stderr)
    return code

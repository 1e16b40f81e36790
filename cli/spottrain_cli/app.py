"""The `spottrain` command: its verbs, and what every error of theirs becomes.

Each verb is a thin function in commands/ that imports what does the work only when it is called.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, NoReturn

import typer
from spottrain.errors import RunError

from spottrain_cli import errors
from spottrain_cli.commands import (
    checkpoints,
    cost,
    delete,
    doctor,
    forwarded,
    init,
    interrupt,
    logs,
    plan,
    profile,
    rehearse,
    report,
    status,
    stop,
    submit,
    watch,
)
from spottrain_cli.commands import list as list_

HELP = "Train on spot GPUs as if nobody could take the GPUs away."
EPILOG = (
    "A JOB is NAME or NAMESPACE/NAME. A URI has ://, or is a path that begins with / or a dot. "
    "Exit codes: 0 done, 1 the answer is no, 2 wrong usage, 3 not found, 4 cluster or store unreachable."
)

app = typer.Typer(
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


forwarded.add_to(app)
app.add_typer(checkpoints.app, name="checkpoints")
app.add_typer(plan.app, name="plan")
app.command("init", help=init.HELP)(init.init)
app.command("submit", help=submit.HELP)(submit.submit)
app.command("list")(list_.list_jobs)
app.command("status")(status.status)
app.command("watch")(watch.watch)
app.command("logs")(logs.logs)
app.command("stop")(stop.stop)
app.command("resume")(stop.resume)
app.command("interrupt")(interrupt.interrupt)
app.command("delete")(delete.delete)
app.command("cost")(cost.cost)
app.command("doctor")(doctor.doctor)
app.command("profile")(profile.profile)
app.command("report")(report.report)
app.command("rehearse", epilog=rehearse.EXAMPLES)(rehearse.rehearse)


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
    except KeyboardInterrupt:
        return errors.INTERRUPTED
    return code if isinstance(code, int) else 0


def kubectl_plugin() -> NoReturn:
    """`kubectl spottrain`."""
    from spottrain.cli import verbs

    words = sys.argv[1:]
    if verbs.trains(words):
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
    return f"{words}; see {context.command_path if context else program} --help"


def _say(sentence: str, code: int) -> int:
    print(f"spottrain: {sentence}", file=sys.stderr)
    return code

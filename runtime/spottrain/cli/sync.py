"""`spottrain sync PATH --to URI [-- COMMAND...]`: keeps a folder of any program's checkpoints in a store."""

from __future__ import annotations

import json
import os
from collections.abc import MutableMapping, Sequence

from spottrain.cli.output import Parser, exit_code_of_usage, named_by_flags
from spottrain.contract import LOG_FORMAT, Env, OnExisting, SyncEnv
from spottrain.core.run_config import LOG_FORMATS
from spottrain.errors import ConfigurationError, RunError
from spottrain.lifecycle.session import show
from spottrain.sync.program import Program, SyncSettings

ABOUT = """Restores the newest checkpoint of a folder from a store, starts COMMAND, and uploads what it writes
there once it is whole. COMMAND needs nothing of spottrain. Ctrl-C stops it; the same command resumes. Without
COMMAND it watches until it is told to stop. Each option's environment variable is in brackets."""
QUIET = "quiet"
RESUME_ARGS = "--resume-args"


def main(argv: Sequence[str]) -> int:
    try:
        command = read_command(argv, os.environ)
    except RunError as error:
        show(error)
        return exit_code_of_usage(Program(os.environ, ()).refuse(error))
    return Program(os.environ, command).run()


def read_command(argv: Sequence[str], env: MutableMapping[str, str]) -> list[str]:
    """Sets the environment variables of the options. Returns COMMAND. Raises ConfigurationError."""
    words = list(argv)
    at = words.index("--") if "--" in words else len(words)
    parser = _parser()
    values = vars(parser.parse_args(_with_values(words[:at])))
    if at < len(words) and not words[at + 1 :]:
        raise ConfigurationError("there is no command after --; name one, or leave -- out")
    when = values.pop("when")
    env.update({name: value for name, value in values.items() if value is not None})
    if when is not None:
        env[SyncEnv.WHEN] = when_of(when)
    flags = {each.dest: each.option_strings[-1] for each in parser._actions if each.option_strings}
    with named_by_flags({name: flag for name, flag in flags.items() if values.get(name) is not None}):
        SyncSettings.from_env(env)
    return words[at + 1 :]


def _with_values(words: Sequence[str]) -> list[str]:
    """Lets the value of --resume-args begin with -, which argparse takes for an option."""
    found = list(words)
    if RESUME_ARGS in found[:-1]:
        at = found.index(RESUME_ARGS)
        found[at : at + 2] = [f"{RESUME_ARGS}={found[at + 1]}"]
    return found


def when_of(text: str) -> str:
    """Returns `SyncWhen` as JSON for `quiet=30`, `marker=latest` or `renamed=step_*`."""
    name, found, value = text.partition("=")
    if name not in (QUIET, "marker", "renamed") or not found or not value:
        raise ConfigurationError(
            f"--when {text!r} is not valid: use quiet=SECONDS, marker=NAME or renamed=NAME"
        )
    if name != QUIET:
        return json.dumps({name: value})
    try:
        return json.dumps({"quietSeconds": float(value.removesuffix("s"))}, allow_nan=False)
    except ValueError:
        raise ConfigurationError(f"--when {text!r} is not valid: give seconds, such as quiet=30") from None


def _parser() -> Parser:
    usage = "spottrain sync PATH --to URI [options] [-- COMMAND...]"
    parser = Parser(prog="spottrain sync", usage=usage, description=ABOUT)
    on_existing = "if another job left checkpoints there: fail (default), resume from them, or start fresh"
    resume = "what COMMAND gets in addition where a checkpoint was restored, such as '--resume ckpt.pt'"
    flags = (
        ("--to", Env.CHECKPOINT_URI, "URI", "s3://bucket/prefix, gs://bucket/prefix or a folder"),
        ("--endpoint", Env.CHECKPOINT_ENDPOINT, "URL", "URL of an S3-compatible server"),
        ("--keep", Env.CHECKPOINT_KEEP, "N", "number of checkpoints to keep, at least 2 (default 3)"),
        ("--on-existing", Env.CHECKPOINT_ON_EXISTING, None, on_existing),
        (RESUME_ARGS, SyncEnv.RESUME_ARGS, "ARGS", resume),
        ("--log-format", LOG_FORMAT, None, "default: text in a terminal, logfmt elsewhere"),
    )
    choices = {"--on-existing": [each.lower() for each in OnExisting], "--log-format": list(LOG_FORMATS)}
    parser.add_argument(SyncEnv.PATH, metavar="PATH", nargs="?", help=f"the folder [{SyncEnv.PATH}]")
    for flag, name, metavar, text in flags:
        parser.add_argument(
            flag, dest=name, metavar=metavar, choices=choices.get(flag), help=f"{text} [{name}]"
        )
    about = (
        "what says that a checkpoint is whole: quiet=SECONDS, marker=NAME or renamed=NAME; default: each file"
    )
    parser.add_argument("--when", metavar="RULE", help=f"{about} [{SyncEnv.WHEN}]")
    return parser

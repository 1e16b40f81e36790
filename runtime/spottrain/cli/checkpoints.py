"""`spottrain checkpoints COMMAND --checkpoint URI`: arguments, output, exit codes.

Exit code 0: done; 1: a message says why not, or what is damaged; 2: invalid arguments.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from spottrain.checkpoint.manifest import Damaged
from spottrain.cli.copying import copy
from spottrain.cli.deleting import delete
from spottrain.cli.exporting import FINAL, export
from spottrain.cli.listing import listing
from spottrain.cli.logs import logs
from spottrain.cli.output import Answer
from spottrain.cli.pruning import Wish, prune
from spottrain.cli.reading import BEST, NEWEST, open_existing
from spottrain.cli.storage_lifecycle import FEWEST_DAYS, Cooling, lifecycle
from spottrain.cli.verifying import ALL, verify
from spottrain.core.uri import is_path
from spottrain.errors import ConfigurationError, RunError
from spottrain.storage.base import Store
from spottrain.storage.open import open_store

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def main(argv: list[str]) -> int:
    given = _parser().parse_args(argv)
    try:
        answer: Answer = given.run(given)
        _show(answer, as_json=given.output == "json")
    except (RunError, Damaged) as error:
        print(f"spottrain: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # such as by `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    return 0 if answer.ok else 1


def _show(answer: Answer, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(answer.facts, indent=1))
    elif answer.body is None:
        print("\n".join(answer.lines))
    else:
        for part in answer.body:
            sys.stdout.buffer.write(part)
            sys.stdout.buffer.flush()


# --- arguments ------------------------------------------------------------------------------------------
def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="spottrain checkpoints", description="Looks after checkpoints.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_list(commands)
    _add_verify(commands)
    _add_prune(commands)
    _add_copy(commands)
    _add_export(commands)
    _add_lifecycle(commands)
    _add_delete(commands)
    _add_logs(commands)
    return parser


def _command(commands: Commands, name: str, about: str, *, required: bool = True) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=about, description=about)
    command.add_argument(
        "--checkpoint", required=required, metavar="URI", help="folder or s3://bucket/prefix"
    )
    command.add_argument("--endpoint", metavar="URL", help="URL of an S3-compatible server")
    command.add_argument("-o", "--output", choices=("text", "json"), default="text")
    return command


def _step(text: str) -> str:
    if text not in (NEWEST, BEST, ALL) and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no step; use a number, {NEWEST} or {BEST}")
    return text


def _step_or_final(text: str) -> str:
    return text if text == FINAL else _step(text)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 on")
    return int(text)


def _file(text: str) -> Path:
    if not is_path(text):
        raise argparse.ArgumentTypeError(f"{text!r} is a URI; name a file of this machine")
    return Path(text)


def _store(given: argparse.Namespace) -> Store:
    return open_existing(given.checkpoint, given.endpoint)


# --- the commands ---------------------------------------------------------------------------------------
def _add_list(commands: Commands) -> None:
    command = _command(commands, "list", "Says what is at a URI: HEAD, its checkpoints, and orphans.")
    command.set_defaults(run=lambda given: listing(_store(given), now=time.time()))


def _add_verify(commands: Commands) -> None:
    command = _command(commands, "verify", "Reads checkpoints whole and holds them against their checksums.")
    command.add_argument(
        "--step", type=_step, default=ALL, help=f"a step, {NEWEST}, {BEST} or {ALL} (default)"
    )
    command.set_defaults(run=lambda given: verify(_store(given), given.step))


def _add_prune(commands: Commands) -> None:
    command = _command(commands, "prune", "Deletes old checkpoints, or orphans, of a URI that no job uses.")
    command.add_argument("--keep", type=_count, metavar="N", help="keep the newest N, and the best")
    command.add_argument("--orphans", action="store_true", help="delete the objects that nothing names")
    command.add_argument(
        "--earlier-jobs", action="store_true", help="with --keep: what earlier jobs left, too"
    )
    command.add_argument("--dry-run", action="store_true", help="show what would go, and change nothing")
    command.add_argument("--yes", action="store_true", help="do not ask")
    command.set_defaults(run=_prune)


def _prune(given: argparse.Namespace) -> Answer:
    wish = Wish(
        keep=given.keep,
        orphans=given.orphans,
        earlier_jobs=given.earlier_jobs,
        dry_run=given.dry_run,
        sure=given.yes,
    )
    return prune(_store(given), wish)


def _add_delete(commands: Commands) -> None:
    command = _command(commands, "delete", "Deletes checkpoints, logs and caches of a job that has ended.")
    command.add_argument("--job-uid", required=True, metavar="UID", help="as list shows it")
    command.add_argument("--yes", action="store_true", help="do not ask")
    command.set_defaults(run=lambda given: delete(_store(given), given.job_uid, sure=given.yes))


def _add_copy(commands: Commands) -> None:
    command = _command(
        commands, "copy", "Copies a checkpoint to an empty or finished URI, to move or branch a run."
    )
    command.add_argument("--to", required=True, metavar="URI")
    command.add_argument("--to-endpoint", metavar="URL", help="default: that of the source")
    command.add_argument("--step", type=_step, default=NEWEST, help=f"a step, {NEWEST} (default) or {BEST}")
    command.set_defaults(run=_copy)


def _copy(given: argparse.Namespace) -> Answer:
    source = _store(given)
    return copy(source, open_store(given.to, given.to_endpoint or given.endpoint), given.step)


def _add_export(commands: Commands) -> None:
    command = _command(commands, "export", "Writes the model's weights as one safetensors file.")
    command.add_argument("--to", required=True, type=_file, metavar="FILE")
    about = f"a step, {NEWEST} (default), {BEST}, or {FINAL}: the weights that a finished run has left"
    command.add_argument("--step", type=_step_or_final, default=NEWEST, help=about)
    command.set_defaults(run=lambda given: export(_store(given), given.step, given.to))


def _add_lifecycle(commands: Commands) -> None:
    command = _command(
        commands, "lifecycle", "Shows, or sets, the S3 rule that archives what no job reads again."
    )
    command.add_argument("--days", type=int, default=7, help="after the object's creation; default 7")
    command.add_argument("--storage-class", choices=sorted(FEWEST_DAYS), default="GLACIER")
    command.add_argument("--earlier-jobs", action="store_true", help="act on what earlier jobs left, too")
    command.add_argument("--apply", action="store_true", help="tag the objects and set the rule")
    command.set_defaults(run=_lifecycle)


def _lifecycle(given: argparse.Namespace) -> Answer:
    cooling = Cooling(
        days=given.days,
        storage_class=given.storage_class,
        earlier_jobs=given.earlier_jobs,
        apply=given.apply,
    )
    return lifecycle(_store(given), cooling)


def _add_logs(commands: Commands) -> None:
    about = "Prints what the ranks of a job have printed, as it was kept."
    command = _command(commands, "logs", about, required=False)
    command.add_argument("uri", nargs="?", metavar="URI", help="in place of --checkpoint")
    command.add_argument("--attempt", type=_count, metavar="N", help="default: all")
    command.add_argument("--rank", type=_whole, metavar="R", help="default: all")
    command.set_defaults(run=_logs)


def _logs(given: argparse.Namespace) -> Answer:
    given.checkpoint = given.uri or given.checkpoint
    if given.checkpoint is None:
        raise ConfigurationError("say where the logs are: spottrain checkpoints logs URI")
    return logs(_store(given), attempt=given.attempt, rank=given.rank)

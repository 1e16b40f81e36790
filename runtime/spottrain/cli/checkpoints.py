"""`spottrain checkpoints VERB URI`: arguments, output, exit codes.

Exit code 0: done; 1: a message says why not, or what is damaged; 2: invalid arguments.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
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
from spottrain.cli.release import release
from spottrain.cli.storage_lifecycle import FEWEST_DAYS, Cooling, lifecycle
from spottrain.cli.verifying import ALL, verify
from spottrain.core.uri import is_path
from spottrain.errors import RunError
from spottrain.storage.base import Store
from spottrain.storage.open import open_store

if TYPE_CHECKING:
    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]


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
    parser = argparse.ArgumentParser(
        prog="spottrain checkpoints", description="Inspects and manages the checkpoints at a URI."
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    _add_list(verbs)
    _add_verify(verbs)
    _add_prune(verbs)
    _add_copy(verbs)
    _add_export(verbs)
    _add_release(verbs)
    _add_delete(verbs)
    _add_logs(verbs)
    _add_lifecycle(verbs)
    return parser


def _verb(verbs: Verbs, name: str, about: str) -> argparse.ArgumentParser:
    verb = verbs.add_parser(name, help=about, description=about)
    verb.add_argument("uri", metavar="URI", help="folder, s3://bucket/prefix or gs://bucket/prefix")
    verb.add_argument("--endpoint", metavar="URL", help="URL of an S3-compatible server")
    verb.add_argument(
        "-o", "--output", choices=("text", "json"), default="text", help="format of the output; default text"
    )
    return verb


def _step(*words: str) -> Callable[[str], str]:
    """Returns a parser of `--step`: a number, or one of `words`."""

    def parse(text: str) -> str:
        if text not in words and not text.isdecimal():
            raise argparse.ArgumentTypeError(f"{text!r} is not a step: use a number, {' or '.join(words)}")
        return text

    return parse


def _number(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return parse


def _file(text: str) -> Path:
    if not is_path(text):
        raise argparse.ArgumentTypeError(f"{text!r} is a URI; name a file on this machine")
    return Path(text)


def _store(given: argparse.Namespace) -> Store:
    return open_existing(given.uri, given.endpoint)


# --- the verbs ------------------------------------------------------------------------------------------
def _add_list(verbs: Verbs) -> None:
    verb = _verb(
        verbs, "list", "Shows which job owns a URI, its checkpoints, and objects that none of them uses."
    )
    verb.set_defaults(run=lambda given: listing(_store(given), now=time.time()))


def _add_verify(verbs: Verbs) -> None:
    verb = _verb(verbs, "verify", "Reads checkpoints in full and compares them with their checksums.")
    about = f"a number, {NEWEST}, {BEST} or {ALL}; default {ALL}"
    verb.add_argument("--step", type=_step(NEWEST, BEST, ALL), default=ALL, help=about)
    verb.set_defaults(run=lambda given: verify(_store(given), given.step))


def _add_prune(verbs: Verbs) -> None:
    verb = _verb(
        verbs, "prune", "Deletes old checkpoints, or unused objects, at a URI that no running job owns."
    )
    verb.add_argument(
        "--keep",
        type=_number(1),
        metavar="N",
        help="keep the newest N that can be read, and the best; reads those N in full",
    )
    verb.add_argument(
        "--no-verify", action="store_true", help="with --keep: check object sizes only, and read nothing"
    )
    verb.add_argument("--orphans", action="store_true", help="delete objects that no checkpoint uses")
    verb.add_argument(
        "--earlier-jobs", action="store_true", help="with --keep: also delete checkpoints of earlier jobs"
    )
    verb.add_argument("--dry-run", action="store_true", help="show what would be deleted, and change nothing")
    _add_yes(verb)
    verb.set_defaults(run=_prune)


def _prune(given: argparse.Namespace) -> Answer:
    wish = Wish(
        keep=given.keep,
        verify=not given.no_verify,
        orphans=given.orphans,
        earlier_jobs=given.earlier_jobs,
        dry_run=given.dry_run,
        sure=given.yes,
    )
    return prune(_store(given), wish)


def _add_yes(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--yes", action="store_true", help="do not ask for confirmation")


def _add_copy(verbs: Verbs) -> None:
    verb = _verb(verbs, "copy", "Copies one checkpoint to another URI, to move or branch a run.")
    about = "target: empty, or of a job that is done"
    verb.add_argument("--to", required=True, metavar="URI", help=about)
    verb.add_argument("--to-endpoint", metavar="URL", help="default: the source's endpoint")
    about = f"a number, {NEWEST} or {BEST}; default {NEWEST}"
    verb.add_argument("--step", type=_step(NEWEST, BEST), default=NEWEST, help=about)
    verb.set_defaults(run=_copy)


def _copy(given: argparse.Namespace) -> Answer:
    source = _store(given)
    return copy(source, open_store(given.to, given.to_endpoint or given.endpoint), given.step)


def _add_export(verbs: Verbs) -> None:
    verb = _verb(verbs, "export", "Writes the model's weights as one safetensors file.")
    verb.add_argument(
        "--to", required=True, type=_file, metavar="FILE", help="a file that does not exist yet"
    )
    about = f"a number, {NEWEST}, {BEST}, or {FINAL} (the weights of a finished run); default {NEWEST}"
    verb.add_argument("--step", type=_step(NEWEST, BEST, FINAL), default=NEWEST, help=about)
    verb.set_defaults(run=lambda given: export(_store(given), given.step, given.to))


def _add_release(verbs: Verbs) -> None:
    verb = _verb(verbs, "release", "Frees a URI whose owner died without releasing it.")
    _add_yes(verb)
    verb.set_defaults(run=lambda given: release(_store(given), sure=given.yes))


def _add_delete(verbs: Verbs) -> None:
    verb = _verb(verbs, "delete", "Deletes the checkpoints, logs and caches of a job that has ended.")
    verb.add_argument("--job-uid", required=True, metavar="UID", help="the owner's UID, as list shows it")
    _add_yes(verb)
    verb.set_defaults(run=lambda given: delete(_store(given), given.job_uid, sure=given.yes))


def _add_logs(verbs: Verbs) -> None:
    verb = _verb(verbs, "logs", "Prints the stored output of a job's ranks.")
    verb.add_argument("--attempt", type=_number(1), metavar="N", help="default: all")
    verb.add_argument("--rank", type=_number(0), metavar="R", help="default: all")
    verb.set_defaults(run=lambda given: logs(_store(given), attempt=given.attempt, rank=given.rank))


def _add_lifecycle(verbs: Verbs) -> None:
    verb = _verb(
        verbs, "lifecycle", "Shows or sets the S3 rule that archives objects no job will read again."
    )
    verb.add_argument("--days", type=int, default=7, help="age of an object in days; default 7")
    verb.add_argument(
        "--storage-class", choices=sorted(FEWEST_DAYS), default="GLACIER", help="default GLACIER"
    )
    verb.add_argument("--earlier-jobs", action="store_true", help="also archive checkpoints of earlier jobs")
    verb.add_argument("--apply", action="store_true", help="tag the objects and set the rule")
    verb.set_defaults(run=_lifecycle)


def _lifecycle(given: argparse.Namespace) -> Answer:
    cooling = Cooling(
        days=given.days,
        storage_class=given.storage_class,
        earlier_jobs=given.earlier_jobs,
        apply=given.apply,
    )
    return lifecycle(_store(given), cooling)

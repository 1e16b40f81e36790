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
from spottrain.cli.deleting import delete
from spottrain.cli.output import Answer
from spottrain.cli.reading import BEST, NEWEST, open_existing, open_there
from spottrain.core.uri import is_path
from spottrain.errors import RunError
from spottrain.storage.base import Store

from spottrain_cli import kubectl
from spottrain_cli.checkpoints import jobs_below
from spottrain_cli.checkpoints.copying import copy
from spottrain_cli.checkpoints.exporting import FINAL, export
from spottrain_cli.checkpoints.listing import listing
from spottrain_cli.checkpoints.logs import logs
from spottrain_cli.checkpoints.pruning import prune
from spottrain_cli.checkpoints.release import release
from spottrain_cli.checkpoints.repairing import repair
from spottrain_cli.checkpoints.storage_lifecycle import FEWEST_DAYS, lifecycle
from spottrain_cli.checkpoints.verifying import ALL, verify
from spottrain_cli.errors import CommandError

if TYPE_CHECKING:
    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]
    Run = Callable[[Store, argparse.Namespace], Answer]


def main(argv: list[str]) -> int:
    given = _parser().parse_args(argv)
    try:
        answer: Answer = given.run(open_existing(given.uri, given.endpoint), given)
        _show(answer, as_json=given.output == "json")
    except (CommandError, RunError, Damaged) as error:
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
    about = "Shows which job owns a URI, its checkpoints, and objects that none of them uses."
    _verb(verbs, "list", about, lambda store, given: listing(store, now=time.time()))
    _add_jobs(verbs)
    _add_verify(verbs)
    _add_prune(verbs)
    _add_copy(verbs)
    _add_export(verbs)
    _add_release(verbs)
    _add_repair(verbs)
    _add_delete(verbs)
    _add_logs(verbs)
    _add_lifecycle(verbs)
    return parser


def _verb(verbs: Verbs, name: str, about: str, run: Run) -> argparse.ArgumentParser:
    verb = verbs.add_parser(name, help=about, description=about)
    verb.add_argument("uri", metavar="URI", help="folder, s3://bucket/prefix or gs://bucket/prefix")
    verb.add_argument("--endpoint", metavar="URL", help="URL of an S3-compatible server")
    verb.add_argument(
        "-o", "--output", choices=("text", "json"), default="text", help="format of the output; default text"
    )
    verb.set_defaults(run=run)
    return verb


def _add_yes(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--yes", action="store_true", help="do not ask for confirmation")


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


# --- the verbs ------------------------------------------------------------------------------------------
def _add_jobs(verbs: Verbs) -> None:
    def run(store: Store, given: argparse.Namespace) -> Answer:
        found = jobs_below.find(store)
        if given.deleted:
            found = jobs_below.deleted_only(found, _cluster(given))
        return jobs_below.listing(store, found, now=time.time())

    about = "Lists the checkpoint URIs of jobs below a prefix, such as those that the operator chooses."
    verb = _verb(verbs, "jobs", about, run)
    about = "only those that no TrainingJob in the cluster uses any more; asks the cluster by kubectl"
    verb.add_argument("--deleted", action="store_true", help=about)
    verb.add_argument("--context", default="", metavar="NAME", help="with --deleted: kubectl's context")
    about = "with --deleted: kubectl's configuration"
    verb.add_argument("--kubeconfig", default="", metavar="FILE", help=about)
    about = "with --deleted: JSON by `kubectl get tj -A -o json` instead of a cluster; - is stdin"
    verb.add_argument("--file", default="", metavar="FILE", help=about)


def _cluster(given: argparse.Namespace) -> jobs_below.ClusterJobs:
    if given.file:
        source = "the input" if given.file == kubectl.STDIN else given.file
        return jobs_below.jobs_of(kubectl.read_file(given.file, source), source)
    access = kubectl.Access(context=given.context, kubeconfig=given.kubeconfig, all_namespaces=True)
    return jobs_below.jobs_of(kubectl.get(access), "kubectl's answer")


def _add_verify(verbs: Verbs) -> None:
    about = "Reads checkpoints in full and compares them with their checksums."
    verb = _verb(verbs, "verify", about, lambda store, given: verify(store, given.step))
    about = f"a number, {NEWEST}, {BEST} or {ALL}; default {ALL}"
    verb.add_argument("--step", type=_step(NEWEST, BEST, ALL), default=ALL, help=about)


def _add_prune(verbs: Verbs) -> None:
    def run(store: Store, given: argparse.Namespace) -> Answer:
        return prune(
            store,
            keep=given.keep,
            verify=given.verify,
            orphans=given.orphans,
            earlier_jobs=given.earlier_jobs,
            dry_run=given.dry_run,
            sure=given.yes,
        )

    about = "Deletes old checkpoints, or unused objects, at a URI that no running job owns."
    verb = _verb(verbs, "prune", about, run)
    about = "keep the newest N that can be read, and the best; reads those N in full"
    verb.add_argument("--keep", type=_number(1), metavar="N", help=about)
    about = "with --keep: check object sizes only, and read nothing"
    verb.add_argument("--no-verify", dest="verify", action="store_false", help=about)
    verb.add_argument("--orphans", action="store_true", help="delete objects that no checkpoint uses")
    about = "with --keep: also delete checkpoints of earlier jobs"
    verb.add_argument("--earlier-jobs", action="store_true", help=about)
    verb.add_argument("--dry-run", action="store_true", help="show what would be deleted, and change nothing")
    _add_yes(verb)


def _add_copy(verbs: Verbs) -> None:
    def run(store: Store, given: argparse.Namespace) -> Answer:
        return copy(store, open_there(given.to, given.to_endpoint or given.endpoint), given.step)

    verb = _verb(verbs, "copy", "Copies one checkpoint to another URI, to move or branch a run.", run)
    about = "target: empty, or of a job that is done"
    verb.add_argument("--to", required=True, metavar="URI", help=about)
    verb.add_argument("--to-endpoint", metavar="URL", help="default: the source's endpoint")
    about = f"a number, {NEWEST} or {BEST}; default {NEWEST}"
    verb.add_argument("--step", type=_step(NEWEST, BEST), default=NEWEST, help=about)


def _add_export(verbs: Verbs) -> None:
    about = "Writes the model's weights as one safetensors file, or the folder that spottrain sync stored."
    verb = _verb(verbs, "export", about, lambda store, given: export(store, given.step, given.to))
    about = "a file, or a folder, that does not exist yet"
    verb.add_argument("--to", required=True, type=_file, metavar="FILE", help=about)
    about = f"a number, {NEWEST}, {BEST}, or {FINAL} (the weights of a finished run); default {NEWEST}"
    verb.add_argument("--step", type=_step(NEWEST, BEST, FINAL), default=NEWEST, help=about)


def _add_release(verbs: Verbs) -> None:
    about = "Frees a URI whose owner died without releasing it."
    _add_yes(_verb(verbs, "release", about, lambda store, given: release(store, sure=given.yes)))


def _add_repair(verbs: Verbs) -> None:
    about = "Makes HEAD again, where it was removed or is broken, from the checkpoints that are there."
    _verb(verbs, "repair", about, lambda store, given: repair(store))


def _add_delete(verbs: Verbs) -> None:
    def run(store: Store, given: argparse.Namespace) -> Answer:
        return delete(store, given.job_uid, earlier_jobs=given.earlier_jobs, sure=given.yes)

    verb = _verb(verbs, "delete", "Deletes the checkpoints, logs and caches of a job that has ended.", run)
    about = (
        "the owner's UID, as list shows it, of a job that has ended for certain; without it that is the last "
        "owner, and a URI in use is refused"
    )
    verb.add_argument("--job-uid", default="", metavar="UID", help=about)
    verb.add_argument("--earlier-jobs", action="store_true", help="also checkpoints that earlier jobs left")
    _add_yes(verb)


def _add_logs(verbs: Verbs) -> None:
    def run(store: Store, given: argparse.Namespace) -> Answer:
        return logs(store, attempt=given.attempt, rank=given.rank)

    verb = _verb(verbs, "logs", "Prints the stored output of a job's ranks.", run)
    verb.add_argument("--attempt", type=_number(1), metavar="N", help="default: all")
    verb.add_argument("--rank", type=_number(0), metavar="R", help="default: all")


def _add_lifecycle(verbs: Verbs) -> None:
    def run(store: Store, given: argparse.Namespace) -> Answer:
        return lifecycle(
            store,
            days=given.days,
            storage_class=given.storage_class,
            earlier_jobs=given.earlier_jobs,
            apply=given.apply,
        )

    about = "Shows or sets the S3 rule that archives objects no job will read again."
    verb = _verb(verbs, "lifecycle", about, run)
    verb.add_argument("--days", type=int, default=7, help="age of an object in days; default 7")
    verb.add_argument(
        "--storage-class", choices=sorted(FEWEST_DAYS), default="GLACIER", help="default GLACIER"
    )
    verb.add_argument("--earlier-jobs", action="store_true", help="also archive checkpoints of earlier jobs")
    verb.add_argument("--apply", action="store_true", help="tag the objects and set the rule")

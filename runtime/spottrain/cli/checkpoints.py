"""`spottrain checkpoints delete URI`: what the operator runs in a pod for `deletionPolicy: Delete`.

The other verbs of `spottrain checkpoints` are the command line's (spottrain_cli).
"""

from __future__ import annotations

import argparse
import sys

from spottrain.checkpoint.manifest import Damaged
from spottrain.cli.deleting import delete
from spottrain.cli.reading import open_existing
from spottrain.errors import RunError


def main(argv: list[str]) -> int:
    given = _parser().parse_args(argv)
    try:
        answer = delete(
            open_existing(given.uri, given.endpoint),
            given.job_uid,
            earlier_jobs=given.earlier_jobs,
            sure=given.yes,
        )
    except (RunError, Damaged) as error:
        print(f"spottrain: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print("\n".join(answer.lines))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="spottrain checkpoints")
    verb = parser.add_subparsers(required=True, metavar="delete").add_parser(
        "delete", description="Deletes the checkpoints, logs and caches of a job that has ended."
    )
    verb.add_argument("uri", metavar="URI", help="folder, s3://bucket/prefix or gs://bucket/prefix")
    verb.add_argument("--endpoint", metavar="URL", help="URL of an S3-compatible server")
    about = (
        "the owner's UID, as list shows it, of a job that has ended for certain; without it that is the last "
        "owner, and a URI in use is refused"
    )
    verb.add_argument("--job-uid", default="", metavar="UID", help=about)
    verb.add_argument("--earlier-jobs", action="store_true", help="also checkpoints that earlier jobs left")
    verb.add_argument("--yes", action="store_true", help="do not ask for confirmation")
    return parser

"""Errors of the command line, each with its exit code. `str(error)` is a sentence: what, where, what to do.

0    done
1    the answer is no: the job failed, a check failed, nothing was saved
2    wrong usage, or a file that cannot be used
3    there is no such job, checkpoint or object
4    the cluster or the store did not answer, or refused
130  interrupted by Ctrl-C
"""

from __future__ import annotations

from typing import ClassVar, Final

from spottrain.contract import Reason
from spottrain.errors import (
    BucketNotFound,
    ConfigurationError,
    RunError,
    StoreError,
)

INTERRUPTED: Final = 130


class CommandError(Exception):
    """The answer is no. Every error of this package is one."""

    exit_code: ClassVar[int] = 1


class UsageError(CommandError):
    exit_code = 2


class NotFound(CommandError):
    exit_code = 3


class Unreachable(CommandError):
    """The cluster or the store did not answer, or refused."""

    exit_code = 4


def exit_code_of(error: CommandError | RunError) -> int:
    """The runtime's own errors, by what they mean to a person at a terminal."""
    match error:
        case CommandError():
            return error.exit_code
        case BucketNotFound() | RunError(reason=Reason.CHECKPOINT_MISSING):
            return NotFound.exit_code
        case RunError(reason=Reason.URI_IN_USE):
            return CommandError.exit_code
        case StoreError():
            return Unreachable.exit_code
        case ConfigurationError():
            return UsageError.exit_code
        case _:
            return CommandError.exit_code

"""What commands share: their parser and refusals; output as facts for `-o json`, or lines for people."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

from spottrain.contract import Env
from spottrain.errors import ConfigurationError

WRONG_USAGE: Final = 2


class Parser(argparse.ArgumentParser):
    """Raises ConfigurationError in place of exiting."""

    def error(self, message: str) -> NoReturn:
        words = message.replace("SCRIPT, ARGS", "SCRIPT")
        raise ConfigurationError(f"{words}; see {self.prog} --help")


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    facts: dict[str, Any]
    lines: list[str] = field(default_factory=list)
    ok: bool = True
    """False: exit code 1."""
    body: Iterable[bytes] | None = None
    """Raw bytes in place of `lines`, too many to hold in memory."""


@contextmanager
def named_by_flags(given: Mapping[str, str]) -> Iterator[None]:
    """Has errors name the flag that the user gave. `given`: flags by the environment variables they set."""
    try:
        yield
    except ConfigurationError as error:
        words = str(error)
        for name in sorted(given, key=len, reverse=True):  # one name may begin with another
            flag = given[name]
            words = re.sub(rf"{name}='([^']*)':", rf"{flag} \1", words)
            words = words.replace(name, flag).replace(f"{flag} ({flag})", flag)
        raise ConfigurationError(words, reason=error.reason) from error


def confirm(question: str, *, sure: bool) -> None:
    """Asks for confirmation, unless `sure`. Raises ConfigurationError without a yes."""
    if sure:
        return
    if sys.stdin.isatty():
        print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() in ("y", "yes"):
            return
    raise ConfigurationError("nothing was changed, because nobody confirmed it; --yes confirms it in advance")


def exit_code_of_usage(code: int) -> int:
    """Returns the exit code of a command that is refused: `code` in a job, where it tells the operator that a
    restart would not help; else 2, as of every command.
    """
    return code if Env.JOB_UID in os.environ else WRONG_USAGE

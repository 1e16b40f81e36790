"""What a program says, word for word, in sentences.txt: a change of wording is read there as a diff.

python -m tests.support.sentences tests/unit/runtime    writes that folder's file anew; or tests/unit/cli
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Final

import pytest
from spottrain.errors import RunError

ROOT: Final = Path(__file__).resolve().parents[2]
RENEW: Final = "SPOTTRAIN_RENEW_SENTENCES"
VARYING: Final = (
    (re.escape(sys.prefix), "PREFIX"),
    (r"python3\.\d+", "python3"),
    (r"0x[0-9a-f]+", "0xADDRESS"),
    (r"\b[0-9a-f]{16}\b", "NONCE"),
    (r"127\.0\.0\.1:\d+", "127.0.0.1:PORT"),
    (r"\bprocess \d+", "process PID"),
    (r"\buser \d+", "user UID"),
)
"""What another machine, user or run has in its place."""
MARGIN: Final = "  |"
Told = Callable[[object], None]
"""The fixture that compares a text, an error, or that of a refused call, with what the file has."""


class Sentences:
    """The texts of the file, and those that this run has found, by the test's file and name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "sentences.txt"
        self.renewing = renewing()
        self.known = read(self.file.read_text()) if self.file.exists() else {}
        self.found: dict[tuple[str, str], str] = {}

    def compare(self, file: Path, name: str, text: str) -> None:
        key = (file.relative_to(self.folder).as_posix(), name)
        for pattern, word in VARYING:
            text = re.sub(pattern, word, text)
        text = "\n".join(line.rstrip() for line in text.split("\n"))
        self.found[key] = text
        if not self.renewing:
            command = f"python -m {__name__} {self.folder.relative_to(ROOT)}"
            assert text == self.known.get(key, ""), f"read the diff of `{command}`"

    def close(self) -> None:
        if self.renewing:
            self.file.write_text(written(self.found))


def renewing() -> bool:
    return bool(os.environ.get(RENEW))


@pytest.fixture
def told(
    request: pytest.FixtureRequest, sentences: Sentences, tmp_path_factory: pytest.TempPathFactory
) -> Told:
    """Compares what is said with what sentences.txt has of this test: a text, an error, a refused call's.

    `sentences` is a fixture of the folder's conftest.
    """
    calls = count(1)

    def compare(what: object) -> None:
        number = next(calls)
        name = request.node.name if number == 1 else f"{request.node.name} ({number})"
        if isinstance(what, pytest.ExceptionInfo):
            text = of_error(what.value)
        else:
            text = refusal(what) if callable(what) else str(what)
        if "tmp_path" in request.fixturenames:
            text = text.replace(str(request.getfixturevalue("tmp_path")), "TMP")
        text = text.replace(str(tmp_path_factory.getbasetemp()), "TMP")
        sentences.compare(request.path, name, text)

    return compare


def read(text: str) -> dict[tuple[str, str], str]:
    found: dict[tuple[str, str], str] = {}
    file = name = ""
    for line in text.splitlines():
        if line.startswith(MARGIN):
            text = line.removeprefix(MARGIN).removeprefix(" ")
            found[file, name] = f"{found[file, name]}\n{text}" if (file, name) in found else text
        elif line.endswith(".py"):
            file = line
        else:
            name = line
    return found


def written(found: dict[tuple[str, str], str]) -> str:
    lines, last = [], ""
    for (file, name), text in sorted(found.items()):
        if file != last:
            lines += ["", file]
            last = file
        lines += [name, *(f"{MARGIN} {line}".rstrip() for line in text.split("\n"))]
    return "\n".join(lines[1:]) + "\n"


def of_error(error: BaseException) -> str:
    """Its class, its reason and its sentence."""
    reason = f", {error.reason}" if isinstance(error, RunError) else ""
    return f"{type(error).__name__}{reason}: {error}"


def refusal(act: Callable[[], object]) -> str:
    """The error of a call that must be refused."""
    try:
        act()
    except Exception as error:
        return of_error(error)
    raise AssertionError("it was not refused")


if __name__ == "__main__":
    os.environ[RENEW] = "1"
    sys.exit(pytest.main(["-q", "-n", "0", *sys.argv[1:]]))

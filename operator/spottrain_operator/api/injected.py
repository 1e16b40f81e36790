"""spec.runtime.inject: the commands into which the operator can put the launcher. Pure.

The launcher stands before the script, so it must be known which word is the script. A command that names the
launcher itself is left as it is.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from spottrain.contract import LAUNCHER_FILE

from spottrain_operator.api.template import trainer_path
from spottrain_operator.api.training_job import TrainingJobSpec

FOLDER: Final = "/spottrain"
"""Where the runtime is mounted."""
LAUNCHER: Final = f"{FOLDER}/{LAUNCHER_FILE}"
PYTHON: Final = re.compile(r"python(3(\.\d+)?)?")
ONE_RANK: Final = ("--nproc", "1")
"""Of our launcher under accelerate launch, which says nothing of ranks to a process that it starts alone.
Under torchrun it is not needed, and torchrun takes it for an abbreviation of its own flag."""
MODULE_FLAGS: Final = frozenset({"-m", "--module"})
UNDERSTOOD: Final = "runtime.inject takes python, torchrun or accelerate launch (docs/own-image.md)"


def words_of(trainer: Mapping[str, Any]) -> list[str]:
    return [str(word) for kind in ("command", "args") for word in trainer.get(kind) or ()]


def launched(words: Sequence[str]) -> list[str]:
    """Returns a command with the launcher in it; [] for a command whose script is not known."""
    if any(LAUNCHER in word for word in words):
        return list(words)
    program = posixpath.basename(words[0])
    if program == "torchrun":
        return _before_script(words, 1)
    if program == "accelerate" and words[1:2] == ["launch"]:
        return _before_script(words, 2, *ONE_RANK)
    return _of_python(words) if PYTHON.fullmatch(program) else []


def _of_python(words: Sequence[str]) -> list[str]:
    at = 2 if words[1:2] == ["-u"] else 1
    match words[at:]:
        case ["-m", "torch.distributed.run", *_]:
            return _before_script(words, at + 2)
        case ["-m", "accelerate.commands.launch", *_]:
            return _before_script(words, at + 2, *ONE_RANK)
        case ["-m", "torch.distributed.launch", *_]:  # torchrun has replaced it
            return []
        case ["-m", "spottrain", "run", *more]:
            return [*words[:at], LAUNCHER, *more]
        case ["-m", target, *_] | [target, *_] if not target.startswith("-"):
            return [*words[:at], LAUNCHER, *words[at:]]
    return []


def _before_script(words: Sequence[str], start: int, *ours: str) -> list[str]:
    """Returns the command of torchrun, or accelerate launch, with the launcher as its script.

    No flag of theirs has a value that ends in .py, so the first such word is the script.
    """
    for at, word in enumerate(words[start:], start):
        before, rest = words[:at], words[at + 1 :]
        if word in MODULE_FLAGS and rest and not rest[0].startswith("-"):
            return [*before, LAUNCHER, *ours, "-m", *rest]
        if word.endswith(".py"):
            return [*before, LAUNCHER, *ours, *words[at:]]
    return []


def problem(spec: TrainingJobSpec) -> str:
    """Returns a sentence about a command into which the launcher cannot be put; "" where it can."""
    if not spec.runtime.inject:
        return ""
    trainer, where = spec.trainer, f"{trainer_path(spec.pod)}.command"
    if not trainer.get("command"):
        return (
            f"{where} is required with spec.runtime.inject, because it is not known what the image starts by "
            "itself; write the image's entry point there, such as [python, train.py]"
        )
    if not launched(words_of(trainer)):
        said = " ".join(words_of(trainer))[:80]
        return f"{where} is {said!r}: no script is found; {UNDERSTOOD}"
    return ""

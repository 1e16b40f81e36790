"""Wording of messages."""

from __future__ import annotations

import re
from typing import Final

FLAGS: Final = {
    "uri": "--checkpoint",
    "interval": "--interval",
    "keep": "--keep",
    "onExisting": "--on-existing",
    "initFrom": "--init-from",
    "initFrom.ignore": "--init-ignore",
}
"""Flags of `spottrain run`, by the field of spec.checkpoint that says the same."""
BOTH: Final = re.compile(r"(?:SPOTTRAIN_\w+|(?:spec\.)?checkpoint[\w.]+) \([\w., ]*(--[\w-]+)\)")
"""A name for a manifest and the flag, such as `checkpoint.onExisting (spottrain run --on-existing)`."""
FIELD_OF_CHECKPOINT: Final = re.compile(
    rf"(?<![\w.])(?:spec\.)?checkpoint\.({'|'.join(sorted(FLAGS, key=len, reverse=True))})\b"
)
FIELD_OF_TRAINING: Final = re.compile(r"(?<![\w.])(?:spec\.)?training\.([a-z]\w*(?:\.[a-z]\w*)*)")
PHRASES: Final = (
    (re.compile(r"none of its pods is left \(kubectl [^()]*\)"), "its process is gone"),
    (re.compile(r"; a job that is applied again under the same name is another job"), ""),
    (re.compile(r"set checkpoint\.credentialsSecretRef, "), "set "),
    (re.compile(r"or give the service account a role"), "or run aws configure"),
)
"""What concerns pods and accounts of a cluster, and what stands for it elsewhere."""


def counted(number: int, noun: str) -> str:
    """Returns `1 checkpoint`, `2 checkpoints` and so on."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def without_manifest(words: str) -> str:
    """Returns a sentence for a run outside of Kubernetes: it names flags where a job has fields."""
    words = FIELD_OF_CHECKPOINT.sub(lambda found: FLAGS[found[1]], BOTH.sub(r"\1", words))
    words = FIELD_OF_TRAINING.sub(r"\1 in --training", words).replace("spec.training", "--training")
    for pattern, instead in PHRASES:
        words = pattern.sub(instead, words)
    return words

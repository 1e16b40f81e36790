"""The command line, as a person calls it."""

from __future__ import annotations

from spottrain_cli.app import main


def checkpoints(words: list[str]) -> int:
    """Runs `spottrain checkpoints`. Returns its exit code."""
    return main(["checkpoints", *words])

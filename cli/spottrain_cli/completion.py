"""Completion of `kubectl spottrain` by kubectl's protocol for plugins: one candidate a line, then `:0`."""

from __future__ import annotations

import contextlib
import os


def complete(words: list[str]) -> int:
    """Prints what may follow `words`, whose last one is begun or empty."""
    from spottrain_cli.app import app

    os.environ |= {
        "_SPOTTRAIN_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(["spottrain", *words]),
        "COMP_CWORD": str(len(words)),
    }
    with contextlib.suppress(SystemExit):
        app(args=[], prog_name="spottrain", complete_var="_SPOTTRAIN_COMPLETE")
    print(":0")
    return 0

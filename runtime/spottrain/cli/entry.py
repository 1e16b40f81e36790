"""The `spottrain` command. It blocks signals before anything else is imported."""

from __future__ import annotations

import sys

from spottrain.core.startup_signals import hold_signals, release_signals


def main() -> int:
    hold_signals()
    from spottrain.cli import verbs

    if not verbs.trains(sys.argv[1:]):  # without the imports of a training, which take longer than its own
        release_signals()
        return verbs.run_other(sys.argv[1:])
    from spottrain.cli.main import main

    return main()

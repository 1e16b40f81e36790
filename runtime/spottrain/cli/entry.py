"""The `spottrain` command. It blocks signals before anything else is imported."""

from __future__ import annotations

from spottrain.core.startup_signals import hold_signals


def main() -> int:
    hold_signals()
    from spottrain.cli.main import main

    return main()

"""`python -m spottrain`: the `spottrain` command."""

from __future__ import annotations

import sys

from spottrain.cli.entry import main

if __name__ == "__main__":
    sys.exit(main())

"""Environment for starting a Python module of this package in a child process."""

from __future__ import annotations

import os
from pathlib import Path


def import_path() -> str:
    """Returns a PYTHONPATH with which the child imports the same package as this process."""
    home = str(Path(__file__).resolve().parents[2])
    rest = os.environ.get("PYTHONPATH", "")
    return f"{home}{os.pathsep}{rest}" if rest else home

"""What a program of ours that is started as a process of its own needs. Used by `transfer` and `outputs`."""

from __future__ import annotations

import os
from pathlib import Path


def import_path() -> str:
    """PYTHONPATH by which it finds the very package that this process runs."""
    home = str(Path(__file__).resolve().parents[2])
    rest = os.environ.get("PYTHONPATH", "")
    return f"{home}{os.pathsep}{rest}" if rest else home

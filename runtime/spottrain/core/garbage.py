"""Has Python's garbage collector run rarely until the first counted step. Does not import torch.

An import of torch and its compiler makes objects by the million, of which almost none is garbage. With
Python's own threshold the collector looked at them again and again, for a tenth of a warm start's processor
time.
"""

from __future__ import annotations

import gc
from typing import Final

USUAL: Final = gc.get_threshold()
AT_START: Final = (10_000, *USUAL[1:])


def collect_rarely() -> None:
    """Call it before torch is imported. A threshold that a script has set itself stays."""
    if gc.get_threshold() == USUAL and 0 < USUAL[0] < AT_START[0]:  # 0: the script has switched it off
        gc.set_threshold(*AT_START)


def collect_as_usual() -> None:
    """Call it after the first step."""
    if gc.get_threshold() == AT_START:
        gc.set_threshold(*USUAL)

"""Has Python's garbage collector run rarely until the first counted step, and not while the compiler is
imported. Does not import torch.

An import of torch and its compiler makes objects by the million, of which almost none is garbage. With
Python's own threshold the collector looked at them again and again, for a tenth of a warm start's processor
time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def no_collection() -> Iterator[None]:
    """Context for imports: nothing is collected, and what they made is as old as what was there before.

    Without it, collections take a fifth of the time that the import of torch's compiler takes, and Dynamo
    visits the new objects once more in the first step.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():  # else what a script has frozen would be no longer
            gc.freeze()
            gc.unfreeze()  # puts all objects into the oldest generation, without a visit
        if enabled:
            gc.enable()

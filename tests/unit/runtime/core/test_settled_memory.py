"""What the garbage collector leaves out during a training is released when the process ends."""

from __future__ import annotations

from tests.support.fresh import Fresh

SETTLED = """
import atexit, gc
from spottrain.core.device import settle_memory
atexit.register(lambda: print(gc.get_freeze_count()))  # called after what is registered later
settle_memory()
print(gc.get_freeze_count() > 0)
"""


def test_objects_of_the_first_step_are_left_out_until_the_process_ends(fresh: Fresh) -> None:
    assert fresh.run(SETTLED + "atexit._run_exitfuncs()").split() == ["True", "0"]

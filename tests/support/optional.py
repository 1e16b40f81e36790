"""What an opt-in level says where it lacks something: one sentence with the way out, and no traceback."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from localcluster.shell import ClusterError


def require(config: pytest.Config, items: Sequence[pytest.Item], folder: Path, missing: str) -> None:
    """Ends pytest with `missing` where the folder was named to it; otherwise its tests are skipped with it.

    Args:
        config: pytest's.
        items: all that were collected.
        folder: the level's.
        missing: what it lacks and how to get it; empty where it has all.
    """
    own = [item for item in items if folder in item.path.parents]
    if not (missing and own):
        return
    base = config.invocation_params.dir
    named = [(base / arg.partition("::")[0]).resolve() for arg in config.args]
    worker = hasattr(config, "workerinput")  # of xdist, where an error at this point is its crash
    if not worker and any(folder == path or folder in path.parents for path in named):
        raise pytest.UsageError(missing)
    for item in own:
        item.add_marker(pytest.mark.skip(reason=missing))


@contextmanager
def built() -> Iterator[None]:
    """Around what builds programs: where that fails, the test fails with the builder's sentence alone."""
    try:
        yield
    except ClusterError as error:
        pytest.fail(str(error), pytrace=False)

"""An event loop whose clock jumps to the next timer: what takes minutes is tested at once, and exactly."""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Selector(selectors.SelectSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "everything waits, and no timer is set"
        self.now += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


def run_virtually(work: Coroutine[Any, Any, T]) -> T:
    """Runs it to its end. Waiting for sockets or threads is not possible in it."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


def virtually(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs a test in virtual time."""

    @functools.wraps(test)
    def run(*args: Any, **more: Any) -> None:
        run_virtually(test(*args, **more))

    return run

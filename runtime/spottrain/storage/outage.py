"""Waits for an unreachable store and reports it: at a start, and at the end of a training.

`Outage` tracks how long the store has been silent. While it is `patient`, requests that fail with
StoreUnavailable are retried; a refusal is raised at once. `watch` runs in a separate thread, because an
endpoint that accepts connections and never responds gives no error for minutes.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeVar, cast

from spottrain.contract import COMPILE_CACHE_PREFIX, HEAD_KEY
from spottrain.errors import StoreUnavailable
from spottrain.storage.base import Store

T = TypeVar("T")

TELL_SECONDS: Final = 5.0
"""Seconds of silence after which it is reported."""
LOOK_SECONDS: Final = 0.25
FORGET_SECONDS: Final = 45.0
"""Seconds without another request after which a failure is forgotten. HEAD is read every 30 s."""
FIRST_PAUSE: Final = 0.25
LONGEST_PAUSE: Final = 3.0
WORDS: Final = {
    **dict.fromkeys(("get", "read_into"), "GET"),
    **dict.fromkeys(("put", "put_if_absent", "put_if_match", "upload", "put_part"), "PUT"),
    **dict.fromkeys(("list", "folders"), "LIST"),
    "stat": "HEAD",
    "delete": "DELETE",
    "sweep_uploads": "LIST uploads of",
    "probe": "the first requests",
}
"""The requests of a store, as messages name them."""
RETRIED: Final = frozenset({"get", "read_into", "stat", "list", "folders", "probe"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Silence:
    """The store is not responding."""

    seconds: float
    why: str
    """The last error, or the request that has had no response."""


class Outage:
    """Outage state of one store, as this process sees it. Thread-safe.

    Args:
        clock: Monotonic seconds.
        sleep: Waits between two tries.
    """

    def __init__(
        self, *, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.patient = False
        """Whether a failed request is retried."""
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._asked: dict[int, tuple[float, str]] = {}
        """Requests in progress that should get a response soon: start time and description."""
        self._retried: dict[int, tuple[float, str]] = {}
        """Requests being retried: time of the first failure, and last error. Responses to other requests do
        not end it: a store may be readable but not writable."""
        self._heard = clock()
        self._failed_since: float | None = None
        self._failed_last = 0.0
        self._error = ""

    @contextlib.contextmanager
    def request(self, what: str, *, brief: bool = True) -> Iterator[None]:
        """Tracks one request. `brief`: a long duration indicates an outage; false for large bodies."""
        number, began = next(self._numbers), self._clock()
        if brief:
            with self._lock:
                self._asked[number] = (began, what)
        try:
            yield
        except StoreUnavailable as error:
            self._failed(began if brief else self._clock(), str(error))
            raise
        except BaseException:
            self._responded()  # a refusal, or a condition that did not hold: the store responds
            raise
        else:
            self._responded()
        finally:
            with self._lock:
                self._asked.pop(number, None)

    def through(
        self,
        what: str,
        act: Callable[[], T],
        *,
        brief: bool = True,
        between: Callable[[], None] = lambda: None,
    ) -> T:
        """Calls `act`, and retries it while the store is unreachable and this outage is `patient`.

        `between` is called before each further try. It has no time limit of its own: `watch` gives up.
        """
        pause, number = FIRST_PAUSE, next(self._numbers)
        try:
            while True:
                try:
                    with self.request(what, brief=brief):
                        return act()
                except StoreUnavailable as error:
                    if not self.patient:
                        raise
                    with self._lock:
                        since, _ = self._retried.get(number, (self._clock(), ""))
                        self._retried[number] = since, str(error)
                self._sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
                between()
        finally:
            with self._lock:
                self._retried.pop(number, None)

    @property
    def silence(self) -> Silence | None:
        """The current silence; None while the store responds, or while there are no requests."""
        with self._lock:
            now = self._clock()
            waiting = min(self._asked.values(), default=None)
            failing = self._failed_since
            if failing is not None and now - self._failed_last > FORGET_SECONDS and waiting is None:
                failing = self._failed_since = None
            found = []
            if self._retried:
                since, error = min(self._retried.values())
                found.append(Silence(seconds=now - since, why=error))
            if failing is not None:
                found.append(Silence(seconds=now - max(failing, self._heard), why=self._error))
            if waiting is not None:
                why = f"no response to {waiting[1]}"
                found.append(Silence(seconds=now - max(waiting[0], self._heard), why=why))
            return max(found, key=lambda each: each.seconds, default=None)

    def _responded(self) -> None:
        with self._lock:
            self._heard = self._clock()
            self._failed_since = None

    def _failed(self, since: float, error: str) -> None:
        with self._lock:
            if self._failed_since is None:
                self._failed_since = max(since, self._heard)
            self._failed_last = self._clock()
            self._error = error


def watch(
    outage: Outage,
    tell: Callable[[Silence | None], None],
    give_up: Callable[[Silence], None],
    limit: Callable[[], float],
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Loops for ever. Calls `tell` every LOOK_SECONDS while the store is silent, and once when it responds.

    After `limit()` seconds of silence, if the outage is `patient`, it calls `give_up`, which may decline."""
    told = False
    while True:
        silence, most = outage.silence, limit()
        if silence is not None and silence.seconds >= min(TELL_SECONDS, most):
            told = True
            tell(silence)
            if silence.seconds >= most and outage.patient:
                give_up(silence)
        elif told:
            told = False
            tell(None)
        sleep(LOOK_SECONDS)


def patient_store(store: Store, outage: Outage, *, head_too: bool = False) -> Store:
    """Wraps `store`: tracks its requests, and retries its reads and its probe in an outage.

    Writes are not retried: their callers handle a lost response. HEAD is not: `checkpoint.head.owner` retries
    it itself, and can be stopped. `head_too`: HEAD is retried here as well."""
    return cast(Store, _PatientStore(store, outage, head_too))


class _PatientStore:
    def __init__(self, store: Store, outage: Outage, head_too: bool) -> None:
        self._store, self._outage, self._head_too = store, outage, head_too

    def __getattr__(self, name: str) -> Any:
        act = getattr(self._store, name)
        if name not in WORDS:
            return act

        def request(*args: Any, **options: Any) -> Any:
            key = args[0] if args and isinstance(args[0], str) else ""
            what = f"{WORDS[name]} {key}".rstrip()
            archive = key.startswith(COMPILE_CACHE_PREFIX)  # large
            brief = key == HEAD_KEY or name in ("stat", "probe") or (name == "get" and not archive)
            if name in RETRIED and (key != HEAD_KEY or self._head_too):
                return self._outage.through(what, lambda: act(*args, **options), brief=brief)
            with self._outage.request(what, brief=brief):
                return act(*args, **options)

        return request

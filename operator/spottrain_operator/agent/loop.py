"""Two loops side by side: one only asks the metadata service, the other makes node and pods say the same.

Between them is one view and one flag, so an API server that is slow or away never delays the next question.
Started by __main__.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final, Protocol

from spottrain_operator.agent import plan
from spottrain_operator.agent.api import ApiError
from spottrain_operator.agent.plan import (
    Answer,
    Node,
    NoNotice,
    Notice,
    Patch,
    Pod,
    Unreadable,
    View,
    rfc3339,
)

BACKOFF: Final = (0.2, 0.4, 0.8, 1.6, 3.0)
"""Seconds before each further try of the API server; the last one repeats."""


class MetadataService(Protocol):
    async def read(self) -> Answer: ...


class ApiServer(Protocol):
    async def node(self) -> Node: ...
    async def patch_node(self, patch: Patch) -> None: ...
    async def pods(self) -> list[Pod]: ...
    async def patch_pod(self, pod: Pod, patch: Patch) -> bool: ...


def utc_now() -> datetime:
    return datetime.now(UTC)


def log(event: str, **fields: object) -> None:
    """One JSON line for one event."""
    print(
        json.dumps({"time": rfc3339(utc_now()), "component": "agent", "event": event, **fields}), flush=True
    )


class Agent:
    """The view of one node's future, and the loops that keep it and publish it."""

    def __init__(
        self,
        metadata: MetadataService,
        api: ApiServer,
        *,
        poll_seconds: float = 1.0,
        backoff: tuple[float, ...] = BACKOFF,
        heartbeat: Callable[[], None] = lambda: None,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        self._metadata = metadata
        self._api = api
        self._poll_seconds = poll_seconds
        self._backoff = backoff
        self._heartbeat = heartbeat
        self._now = now
        self._view: View = None
        self._unreadable = False
        self._due = asyncio.Event()

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._poll())
            group.create_task(self._publish())

    # --- asking -----------------------------------------------------------------------------------
    async def _poll(self) -> None:
        while True:
            self._heartbeat()
            self._take(await self._metadata.read())
            await asyncio.sleep(self._poll_seconds)

    def _take(self, answer: Answer) -> None:
        self._log_readability(answer)
        before, self._view = self._view, plan.advance(self._view, answer, self._now())
        if self._view != before:
            _log_view(before, self._view)
        # A notice is published anew each time: a pod may have landed here since.
        if self._view != before or isinstance(self._view, Notice):
            self._due.set()

    def _log_readability(self, answer: Answer) -> None:
        """Once for each change, not once a second."""
        unreadable = isinstance(answer, Unreadable)
        if unreadable != self._unreadable:
            self._unreadable = unreadable
            log("metadataUnreadable" if unreadable else "metadataReadable", why=getattr(answer, "why", ""))

    # --- publishing -------------------------------------------------------------------------------
    async def _publish(self) -> None:
        failures = 0
        while True:
            await self._due.wait()
            self._due.clear()
            failures = 0 if await self._published() else failures + 1
            if failures:
                with suppress(TimeoutError):  # what is new does not wait for the next try
                    await asyncio.wait_for(
                        self._due.wait(), self._backoff[min(failures, len(self._backoff)) - 1]
                    )
                self._due.set()

    async def _published(self) -> bool:
        """Brings node and pods in line with the view; False where something is left to do.

        Pods come first: once the node is marked the operator deletes them, and an annotation written in the
        same instant as a deletion never reaches the pod's file. A failure there does not hold up the node.
        """
        notice = self._view if isinstance(self._view, Notice) else None
        done = [await self._tried(self._mark_pods(notice))] if notice else []
        done.append(await self._tried(self._mark_node(notice)))
        return all(done)

    async def _tried(self, work: Coroutine[Any, Any, None]) -> bool:
        try:
            await work
        except ApiError as e:
            log("apiError", why=str(e))
            return False
        return True

    async def _mark_pods(self, notice: Notice) -> None:
        patches = [(pod, plan.pod_patch(notice, pod)) for pod in await self._api.pods()]
        work = [self._tried(self._mark_pod(notice, pod, patch)) for pod, patch in patches if patch]
        if not all(await asyncio.gather(*work)):
            raise ApiError("not every pod could be told its deadline")

    async def _mark_pod(self, notice: Notice, pod: Pod, patch: Patch) -> None:
        if await self._api.patch_pod(pod, patch):
            log("podMarked", namespace=pod.namespace, pod=pod.name, **_times(notice))

    async def _mark_node(self, notice: Notice | None) -> None:
        patch = plan.node_patch(notice, await self._api.node())
        if patch is None:
            return
        await self._api.patch_node(patch)
        if notice:
            log("nodeMarked", **_times(notice))
        else:
            log("nodeCleared")


def _log_view(before: View, after: View) -> None:
    if isinstance(after, Notice):
        log("noticeSeen", action=after.cause.action, source=plan.AWS_SOURCE, **_times(after))
    elif isinstance(before, Notice) and isinstance(after, NoNotice):
        log("noticeGone", **_times(before))


def _times(notice: Notice) -> dict[str, str]:
    return {"deadline": rfc3339(notice.deadline), "noticeSeen": rfc3339(notice.seen)}

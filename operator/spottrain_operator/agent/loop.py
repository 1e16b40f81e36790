"""The agent's concurrent tasks: one per watch polls the metadata service, one updates node and pods.

They share one view and one event. A slow or unreachable API server therefore never delays the next poll, and
a pending poll delays no other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from datetime import datetime
from typing import Any, Final

from spottrain_operator.agent import plan
from spottrain_operator.agent.api import AgentApiError, Api
from spottrain_operator.agent.findings import Unreadable, rfc3339
from spottrain_operator.agent.log import log, utc_now
from spottrain_operator.agent.plan import Json, Marks, NodeNotice, View
from spottrain_operator.agent.sources.client import Source, Watch

RETRY_SECONDS: Final = 0.5
"""Between two attempts to write what could not be written."""
LONGEST_READ: Final = 300.0
"""Seconds; longer than any watch may take, including Azure's first call. Then the agent ends."""


class Agent:
    """Tracks one node's notices, and publishes them to the node and its pods."""

    def __init__(
        self,
        find: Callable[[], Awaitable[Source]],
        api: Api,
        *,
        poll_seconds: float = 1.0,
        retry_seconds: float = RETRY_SECONDS,
        beat: Callable[[bool], None] = lambda _: None,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        """`find` raises Unreadable with a sentence while no metadata service responds. `beat` is called in
        each interval, with whether the agent is ready."""
        self._find = find
        self._api = api
        self._poll_seconds = poll_seconds
        self._retry_seconds = retry_seconds
        self._beat = beat
        self._now = now
        self._source: Source | None = None
        self._view = View()
        self._marks: Marks | None = None
        """None until every watch has responded once, or one has found something."""
        self._unreadable: set[str] = set()
        """Names of the watches whose last response could not be read."""
        self._due = asyncio.Event()

    async def run(self) -> None:
        """Runs until cancelled. No task ever returns, so the end of one, for any reason, ends the agent."""
        parts = {asyncio.create_task(self._watch_time(), name="time")}
        parts.add(asyncio.create_task(self._publish(), name="publish"))
        try:
            self._source = await self._find_source()
            for watch in self._source.watches:
                parts.add(asyncio.create_task(self._poll(watch), name=watch.name))
            ended, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            part = ended.pop()
            error = None if part.cancelled() else part.exception()
            raise RuntimeError(f"the agent's part {part.get_name()!r} has ended") from error
        finally:
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)

    @property
    def ready(self) -> bool:
        """Whether a notice would be seen now: every watch has responded, the last time as well."""
        return self._all_heard and not self._unreadable

    @property
    def _all_heard(self) -> bool:
        return self._source is not None and all(w.name in self._view.heard for w in self._source.watches)

    # --- polling ----------------------------------------------------------------------------------
    async def _find_source(self) -> Source:
        while True:
            try:
                source = await self._find()
            except Unreadable as e:
                self._note("metadata service", str(e))
                await asyncio.sleep(self._poll_seconds)
            else:
                self._unreadable.clear()
                log("source", platform=source.platform, watches=[w.name for w in source.watches])
                return source

    async def _poll(self, watch: Watch) -> None:
        """Polls one watch until cancelled. An error changes no mark."""
        clock = asyncio.get_running_loop().time
        while True:
            asked = clock()
            try:
                async with asyncio.timeout(LONGEST_READ):
                    findings = await watch.read()
            except Unreadable as e:
                self._note(watch.name, str(e))
            else:
                self._note(watch.name, findings.unclear)
                self._view = plan.advance(self._view, watch.name, findings, self._now())
                self._update_marks()
            # Measured from start to start: after a long poll the next one begins at once.
            await asyncio.sleep(max(0.0, asked + watch.polls * self._poll_seconds - clock()))

    async def _watch_time(self) -> None:
        """Beats, and computes the marks again: ends come near and advice expires with time."""
        while True:
            self._beat(self.ready)
            self._update_marks()
            await asyncio.sleep(self._poll_seconds)

    def _update_marks(self) -> None:
        """Computes the marks from the view, and has them published if they changed."""
        marks, before = plan.marks(self._view, self._now()), self._marks
        # A mark left on the node may still be right until every watch has reported that nothing is pending.
        if before is None and marks.notice is None and not self._all_heard:
            return
        self._marks = marks
        if marks != before:
            _log_marks(before or Marks(), marks)
        # A notice is published again each time: a new pod may have been scheduled here.
        if marks != before or marks.notice:
            self._due.set()

    def _note(self, name: str, why: str) -> None:
        """Logs an unreadable watch once per change, not once per poll. `why` is empty for a readable one."""
        if bool(why) != (name in self._unreadable):
            self._unreadable ^= {name}
            log("metadataUnreadable" if why else "metadataReadable", watch=name, why=why)

    # --- publishing -------------------------------------------------------------------------------
    async def _publish(self) -> None:
        while True:
            await self._due.wait()
            self._due.clear()
            if not await self._write_marks(self._marks or Marks()):
                self._due.set()
                await asyncio.sleep(self._retry_seconds)

    async def _write_marks(self, marks: Marks) -> bool:
        """Writes the marks to node and pods; returns False where a retry is needed.

        Pods come first: once the node is marked the operator deletes them, and an annotation written in the
        same instant as a deletion never reaches the pod's file. A failed pod does not delay the node.
        """
        notice = marks.notice
        done = [await self._tried(self._mark_pods(notice))] if notice else []
        done.append(await self._tried(self._mark_node(marks)))
        return all(done)

    async def _tried(self, work: Coroutine[Any, Any, None]) -> bool:
        try:
            await work
        except AgentApiError as e:
            log("apiError", why=str(e))
            return False
        return True

    async def _mark_pods(self, notice: NodeNotice) -> None:
        async def mark(pod: Json) -> None:
            patch, meta = plan.pod_patch(notice, pod), pod["metadata"]
            if patch is not None and await self._api.patch_pod(pod, patch):
                log("podMarked", namespace=meta["namespace"], pod=meta["name"], **_times(notice))

        if not all(await asyncio.gather(*(self._tried(mark(pod)) for pod in await self._api.pods()))):
            raise AgentApiError("not every pod could be told its deadline")

    async def _mark_node(self, marks: Marks) -> None:
        patch = plan.node_patch(marks, await self._api.node())
        if patch is None:
            return
        await self._api.patch_node(patch)
        if marks.notice:
            log("nodeMarked", **_times(marks.notice))
        else:
            log("nodeAdvised" if marks.advised else "nodeCleared")


def _log_marks(before: Marks, after: Marks) -> None:
    if after.notice and after.notice != before.notice:
        cause = after.notice.cause
        log("noticeSeen", action=cause.action, source=cause.source, **_times(after.notice))
    if before.notice and not after.notice:
        log("noticeGone", **_times(before.notice))
    if after.advised and after.advised != before.advised:
        why = after.advised.cause
        log("saveAdvised", action=why.action, source=why.source, at=rfc3339(after.advised.at))


def _times(notice: NodeNotice) -> dict[str, str]:
    return {"deadline": rfc3339(notice.deadline), "noticeSeen": rfc3339(notice.seen)}

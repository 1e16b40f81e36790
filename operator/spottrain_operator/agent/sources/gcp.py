"""Compute Engine's metadata server: preemption and host maintenance, each by a long poll.

Sources: "View and query VM metadata" (header Metadata-Flavor, wait_for_change, timeout_sec, last_etag; 503
while the server itself is moved: retry), "Create and use Spot VMs" (instance/preempted turns TRUE; the
machine has 30 s from then, or its preemptionNoticeDuration, a preview), "Handle GPU host maintenance events"
(maintenance-event: 60 seconds' notice, a VM with GPUs gets an hour; no time is reported).
"""

from __future__ import annotations

from typing import Final

from spottrain_operator.agent.findings import (
    NOTHING,
    SHOWN,
    Advice,
    Answer,
    NodeEnding,
    Unreadable,
    found,
    unreadable,
)
from spottrain_operator.agent.log import log
from spottrain_operator.agent.sources import Watch
from spottrain_operator.agent.sources.client import Client, Reply, Unanswered
from spottrain_operator.names import NOTICE_WINDOW, Platform

ROOT: Final = "/computeMetadata/v1/"
FLAVOR_HEADER: Final = "Metadata-Flavor"
FLAVOR: Final = "Google"
PREEMPTED: Final = "instance/preempted"
MAINTENANCE: Final = "instance/maintenance-event"
NOTICE_ATTRIBUTE: Final = "instance/attributes/spottrain-preemption-notice-seconds"
"""Custom metadata of the instance: the server does not report its preemptionNoticeDuration."""

WARNING_SECONDS: Final = 30.0
DETECTION_SECONDS: Final = WARNING_SECONDS - NOTICE_WINDOW[Platform.GCP]
MAINTENANCE_SECONDS: Final = 60.0
"""The minimum for every VM. With GPUs it is an hour, but the server does not report whether there are any."""
_LONGEST_NOTICE: Final = 600.0
_WAIT_SECONDS: Final = 20.0
_TERMINATES: Final = frozenset({"TERMINATE_ON_HOST_MAINTENANCE", "SHUTDOWN_ON_HOST_MAINTENANCE"})
"""The second is its name in older documentation."""
_MIGRATES: Final = "MIGRATE_ON_HOST_MAINTENANCE"


class Gcp:
    """The metadata server of this VM."""

    platform: Final = Platform.GCP

    def __init__(self, client: Client, *, wait_seconds: float = _WAIT_SECONDS) -> None:
        self._client = client
        self._preempted = _Value(client, PREEMPTED, wait_seconds)
        self._maintenance = _Value(client, MAINTENANCE, wait_seconds)
        self._notice_seconds: float | None = None
        self.watches = (
            Watch(name=f"GCP {PREEMPTED}", read=self._read_preempted),
            Watch(name=f"GCP {MAINTENANCE}", read=self._read_maintenance),
        )

    async def acknowledge(self, event: str) -> None:
        """Does nothing: Google has no acknowledgement."""

    async def _read_preempted(self) -> Answer:
        if self._notice_seconds is None:
            self._notice_seconds = await self._ask_notice_seconds()
        text = await self._preempted.read()
        if isinstance(text, Unreadable):
            return text
        return parse_preempted(text, notice_seconds=self._notice_seconds or WARNING_SECONDS)

    async def _read_maintenance(self) -> Answer:
        text = await self._maintenance.read()
        return text if isinstance(text, Unreadable) else parse_maintenance(text)

    async def _ask_notice_seconds(self) -> float | None:
        """Returns None where there is no response yet: the default applies, and the query is repeated."""
        try:
            reply = await get(self._client, NOTICE_ATTRIBUTE)
        except Unanswered:
            return None
        if reply.status == 404:
            return WARNING_SECONDS
        if reply.status != 200:
            return None
        try:
            return parse_notice_seconds(reply.text)
        except ValueError as e:
            log("noticeSecondsIgnored", why=f"{NOTICE_ATTRIBUTE}: {e}")
            return WARNING_SECONDS


class _Value:
    """One metadata value: read at once the first time and after an error, else by a long poll."""

    def __init__(self, client: Client, key: str, wait_seconds: float) -> None:
        self._client = client
        self._key = key
        self._wait_seconds = wait_seconds
        self._etag = ""

    async def read(self) -> str | Unreadable:
        try:
            reply = await self._changed() or await get(self._client, self._key)
        except Unanswered as e:
            self._etag = ""
            return Unreadable(why=str(e))
        if reply.status != 200:
            self._etag = ""
            return Unreadable(why=f"GET {ROOT}{self._key} returned {reply.status}")
        self._etag = reply.headers.get("ETag", "")
        return reply.text

    async def _changed(self) -> Reply | None:
        """Returns a long poll's reply; None where it failed, which says nothing about the value."""
        if not self._etag:
            return None
        seconds = f"{self._wait_seconds:g}"
        query = {"wait_for_change": "true", "timeout_sec": seconds, "last_etag": self._etag}
        try:
            reply = await get(
                self._client, self._key, query=query, timeout=self._wait_seconds + self._client.timeout
            )
        except Unanswered:
            return None
        return reply if reply.status == 200 else None


async def get(
    client: Client, key: str, *, query: dict[str, str] | None = None, timeout: float | None = None
) -> Reply:
    """Reads one metadata key. Raises Unanswered, also where the response is not from Google's server."""
    headers = {FLAVOR_HEADER: FLAVOR}
    reply = await client.request("GET", ROOT + key, headers=headers, query=query, timeout=timeout)
    if reply.status == 200 and reply.headers.get(FLAVOR_HEADER) != FLAVOR:
        raise Unanswered(f"GET {ROOT}{key} was not answered by Google's metadata server")
    return reply


def parse_preempted(text: str, *, notice_seconds: float) -> Answer:
    source = f"GCP {PREEMPTED}"
    match text.strip().upper():
        case "FALSE":
            return NOTHING
        case "TRUE":
            return found(
                NodeEnding(source=source, action="preempted", after=notice_seconds - DETECTION_SECONDS)
            )
    return unreadable(source, text)


def parse_maintenance(text: str) -> Answer:
    source, event = f"GCP {MAINTENANCE}", text.strip().upper()
    if event == "NONE":
        return NOTHING
    if event == _MIGRATES:
        return found(Advice(source=source, action=event))
    if event in _TERMINATES:
        return found(NodeEnding(source=source, action=event, after=MAINTENANCE_SECONDS - DETECTION_SECONDS))
    return unreadable(source, text)


def parse_notice_seconds(text: str) -> float:
    """Parses the notice period in seconds. Raises ValueError with a sentence."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not WARNING_SECONDS <= seconds <= _LONGEST_NOTICE:
        raise ValueError(
            f"it must be a number of seconds from {WARNING_SECONDS:g} to {_LONGEST_NOTICE:g}, "
            f"not {text[:SHOWN]!r}; {WARNING_SECONDS:g} is assumed"
        )
    return seconds

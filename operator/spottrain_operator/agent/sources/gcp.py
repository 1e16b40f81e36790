"""Compute Engine's metadata server: preemption and host maintenance, each by a long poll.

Sources: "View and query VM metadata" (header Metadata-Flavor, wait_for_change, timeout_sec, last_etag; 503
while the server itself is moved: retry), "Create and use Spot VMs" (instance/preempted turns TRUE; the
machine has 30 s from then, or its preemptionNoticeDuration, a preview), "Handle GPU host maintenance events"
(maintenance-event: 60 seconds' notice, a VM with GPUs gets an hour; no time is reported).
"""

from __future__ import annotations

from collections.abc import Callable, Container
from contextlib import suppress
from functools import partial
from typing import Final

from spottrain_operator.agent.findings import (
    NOTHING,
    SHOWN,
    Finding,
    Findings,
    Unreadable,
    found,
    unreadable,
)
from spottrain_operator.agent.log import log
from spottrain_operator.agent.sources.client import Client, Reply, Source, Watch
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


class Gcp(Source):
    """The metadata server of this VM."""

    platform = Platform.GCP

    def __init__(self, client: Client, *, wait_seconds: float = _WAIT_SECONDS) -> None:
        self._client = client
        self._wait_seconds = wait_seconds
        self._etags: dict[str, str] = {}
        self._notice_seconds: float | None = None
        self.watches = (
            Watch(name=f"GCP {PREEMPTED}", read=self._read_preempted),
            Watch(name=f"GCP {MAINTENANCE}", read=partial(self._read, MAINTENANCE, parse_maintenance)),
        )

    async def _read_preempted(self) -> Findings:
        self._notice_seconds = self._notice_seconds or await self._ask_notice_seconds()
        seconds = self._notice_seconds or WARNING_SECONDS
        return await self._read(PREEMPTED, partial(parse_preempted, notice_seconds=seconds))

    async def _ask_notice_seconds(self) -> float | None:
        """Returns None where there is no response yet: the default applies, and the query is repeated."""
        try:
            reply = await get(self._client, NOTICE_ATTRIBUTE, expected=(200, 404))
            return WARNING_SECONDS if reply.status == 404 else parse_notice_seconds(reply.text)
        except Unreadable:
            return None
        except ValueError as e:
            log("noticeSecondsIgnored", why=f"{NOTICE_ATTRIBUTE}: {e}")
            return WARNING_SECONDS

    async def _read(self, key: str, parse: Callable[[str], Findings]) -> Findings:
        """Reads a value: at once the first time and after an error, else by a long poll."""
        etag = self._etags.pop(key, "")
        reply = (await self._changed(key, etag) if etag else None) or await get(self._client, key)
        self._etags[key] = reply.headers.get("ETag", "")
        return parse(reply.text)

    async def _changed(self, key: str, etag: str) -> Reply | None:
        """Returns a long poll's reply; None where it failed, which says nothing about the value."""
        wait = self._wait_seconds
        query = {"wait_for_change": "true", "timeout_sec": f"{wait:g}", "last_etag": etag}
        with suppress(Unreadable):
            return await get(self._client, key, query=query, timeout=wait + self._client.timeout)
        return None


async def get(
    client: Client,
    key: str,
    *,
    query: dict[str, str] | None = None,
    timeout: float | None = None,
    expected: Container[int] = (200,),
) -> Reply:
    """Reads one metadata key. Raises Unreadable, also where the response is not from Google's server."""
    reply = await client.request(
        "GET", ROOT + key, headers={FLAVOR_HEADER: FLAVOR}, query=query, timeout=timeout, expected=expected
    )
    if reply.status == 200 and reply.headers.get(FLAVOR_HEADER) != FLAVOR:
        raise Unreadable(f"GET {ROOT}{key} was not answered by Google's metadata server")
    return reply


async def instance_id(client: Client) -> str:
    return (await get(client, "instance/id")).text


def parse_preempted(text: str, *, notice_seconds: float) -> Findings:
    source, value = f"GCP {PREEMPTED}", text.strip().upper()
    if value == "FALSE":
        return NOTHING
    if value == "TRUE":
        after = notice_seconds - DETECTION_SECONDS
        return found(Finding(source=source, action="preempted", after=after))
    raise unreadable(source, text)


def parse_maintenance(text: str) -> Findings:
    source, event = f"GCP {MAINTENANCE}", text.strip().upper()
    if event == "NONE":
        return NOTHING
    if event == _MIGRATES:
        return found(Finding(ends=False, source=source, action=event))
    if event in _TERMINATES:
        return found(Finding(source=source, action=event, after=MAINTENANCE_SECONDS - DETECTION_SECONDS))
    raise unreadable(source, text)


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

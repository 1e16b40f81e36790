"""The API server without faults in between, for those who play the world: kubelets, clouds, people.

Used by kubelet, strike, play and stage.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
from spottrain_operator.names import GROUP, PLURAL, VERSION

from tests.api.kube import JSON, MERGE, Kube, Refused
from tests.api.scene import STRATEGIC

Json = dict[str, Any]
Seen = Callable[[str, Json], None]
"""Told of each event of a watch: ADDED, MODIFIED or DELETED, and the object."""
AGAIN: Final = 0.2
"""Seconds before a write is tried again that met another one."""
TRIES: Final = 20

__all__ = ["JSON", "MERGE", "STRATEGIC", "Api", "Json", "Refused", "node_path", "pod_path"]


def pod_path(namespace: str, name: str = "") -> str:
    return f"/api/v1/namespaces/{namespace}/pods" + (f"/{name}" if name else "")


def job_path(namespace: str, name: str = "") -> str:
    return f"/apis/{GROUP}/{VERSION}/namespaces/{namespace}/{PLURAL}" + (f"/{name}" if name else "")


def node_path(name: str) -> str:
    return f"/api/v1/nodes/{name}"


@dataclass(frozen=True, kw_only=True)
class Api:
    kube: Kube
    session: aiohttp.ClientSession

    async def call(self, method: str, path: str, body: Any = None, *, kind: str = JSON) -> Json:
        """Raises Refused. Where the server is busy for a moment it is asked again."""
        for left in reversed(range(TRIES)):
            try:
                return await self._once(method, path, body, kind)
            except Refused as refused:
                if refused.status not in (429, 500, 503, 504) or not left:
                    raise
            await asyncio.sleep(AGAIN)
        raise AssertionError("not reached")

    async def _once(self, method: str, path: str, body: Any, kind: str) -> Json:
        text = None if body is None else json.dumps(body)
        headers = {"Content-Type": kind, "Accept": JSON}
        url = f"https://{self.kube.host}{path}"
        async with self.session.request(
            method, url, data=text, headers=headers, ssl=self.kube.context
        ) as reply:
            content = await reply.text()
        answer: Json = json.loads(content) if content.startswith("{") else {"message": content}
        if reply.status >= 400:
            raise Refused(reply.status, f"{method} {path}: {answer.get('message', '')}")
        return answer

    async def try_call(self, method: str, path: str, body: Any = None, *, kind: str = JSON) -> Json | None:
        """None where the object is gone, or is another one by now."""
        try:
            return await self.call(method, path, body, kind=kind)
        except Refused as refused:
            if refused.status in (404, 409, 422):
                return None
            raise

    # --- pods ---
    async def patch_pod_status(self, pod: Json, status: Json) -> Json | None:
        meta = pod["metadata"]
        body = {"metadata": {"uid": meta["uid"]}, "status": status}
        path = f"{pod_path(meta['namespace'], meta['name'])}/status?fieldManager=kubelet"
        return await self.try_call("PATCH", path, body, kind=STRATEGIC)

    async def delete_pod(self, pod: Json, grace: int | None = None) -> Json | None:
        meta = pod["metadata"]
        options: Json = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": meta["uid"]}}
        if grace is not None:
            options["gracePeriodSeconds"] = grace
        return await self.try_call("DELETE", pod_path(meta["namespace"], meta["name"]), options)

    # --- watches ---
    async def follow(self, path: str, seen: Seen, *, selector: str = "") -> None:
        """Until cancelled. What vanished while no watch was open is told as DELETED."""
        known: dict[str, Json] = {}
        while True:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, Refused):
                version = await self._relist(path, selector, known, seen)
                async for event in self._watch(path, selector, version):
                    uid = event["object"]["metadata"]["uid"]
                    known[uid] = event["object"]
                    if event["type"] == "DELETED":
                        known.pop(uid)
                    seen(event["type"], event["object"])
            await asyncio.sleep(AGAIN)

    async def _relist(self, path: str, selector: str, known: dict[str, Json], seen: Seen) -> str:
        page = await self.call("GET", f"{path}?labelSelector={selector}")
        live = {item["metadata"]["uid"]: item for item in page["items"]}
        for uid in [uid for uid in known if uid not in live]:
            seen("DELETED", known.pop(uid))
        for uid, item in live.items():
            known[uid] = item
            seen("MODIFIED", item)
        version: str = page["metadata"]["resourceVersion"]
        return version

    async def _watch(self, path: str, selector: str, version: str) -> AsyncIterator[Json]:
        url = f"https://{self.kube.host}{path}?watch=true&labelSelector={selector}&resourceVersion={version}"
        timeout = aiohttp.ClientTimeout(total=None, sock_read=None)
        async with self.session.get(url, ssl=self.kube.context, timeout=timeout) as reply:
            async for line in lines(reply.content):
                event: Json = json.loads(line)
                if event["type"] == "ERROR":
                    return
                yield event


async def lines(stream: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Of any length, which StreamReader's own are not."""
    rest = b""
    async for chunk in stream.iter_any():
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            if line:
                yield line

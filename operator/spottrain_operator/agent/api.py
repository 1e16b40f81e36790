"""The agent's client of the API server: its node, and the trainer pods on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import aiohttp

from spottrain_operator import names
from spottrain_operator.agent.plan import Node, Patch, Pod
from spottrain_operator.environment import Endpoint


class AgentApiError(Exception):
    """A request to the API server failed; the text says which and why. It can be retried."""


class Api:
    """API of one node and its trainer pods."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        endpoint: Endpoint,
        *,
        node: str,
        namespaces: tuple[str, ...] = (),
        timeout: float = 5.0,
    ) -> None:
        self._session = session
        self._endpoint = endpoint
        self._node = node
        self._timeout = aiohttp.ClientTimeout(total=timeout)
        self._lists = [f"/api/v1/namespaces/{n}/pods" for n in namespaces] or ["/api/v1/pods"]

    async def node(self) -> Node:
        path = f"/api/v1/nodes/{self._node}"
        body = await self._call("GET", path)
        with _expected(path, "node"):
            return Node(
                resource_version=body["metadata"]["resourceVersion"],
                taints=tuple(body.get("spec", {}).get("taints") or ()),
                annotations=body["metadata"].get("annotations") or {},
            )

    async def patch_node(self, patch: Patch) -> None:
        await self._call("PATCH", f"/api/v1/nodes/{self._node}", patch=patch)

    async def pods(self, *, cached: bool = True) -> list[Pod]:
        """Lists the trainer pods; `cached` reads the API server's cache, cheap enough for polling."""
        query = {"labelSelector": names.POD_SELECTOR, "fieldSelector": f"spec.nodeName={self._node}"}
        if cached:
            query["resourceVersion"] = "0"
        replies = [await self._call("GET", path, query=query) for path in self._lists]
        with _expected(", ".join(self._lists), "list of pods"):
            return [_pod(item) for reply in replies for item in reply["items"]]

    async def patch_pod(self, pod: Pod, patch: Patch) -> bool:
        """Returns False where the pod is gone. Another pod of the same name is an error (422, other UID)."""
        path = f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}"
        return bool(await self._call("PATCH", path, patch=patch, may_be_gone=True))

    async def _call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        patch: Patch | None = None,
        may_be_gone: bool = False,
    ) -> dict[str, Any]:
        """Returns the reply's JSON; {} for a 404 where the object may be gone."""
        if patch is not None:
            query = {"fieldManager": names.AGENT_FIELD_MANAGER}
        try:
            async with self._session.request(
                method,
                self._endpoint.url + path,
                params=query,
                json=patch,
                headers=self._headers(patch),
                ssl=self._endpoint.tls or True,
                timeout=self._timeout,
            ) as reply:
                if reply.status == 404 and may_be_gone:
                    return {}
                if reply.status >= 300:
                    raise AgentApiError(f"{method} {path}: {reply.status} {(await reply.text())[:300]}")
                body: dict[str, Any] = await reply.json()
                return body
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as e:
            raise AgentApiError(f"{method} {path}: {type(e).__name__} {e}".rstrip()) from e

    def _headers(self, patch: Patch | None) -> dict[str, str]:
        headers = {"Authorization": f"Bearer {self._endpoint.token()}"}
        return headers if patch is None else headers | {"Content-Type": "application/merge-patch+json"}


@contextmanager
def _expected(path: str, what: str) -> Iterator[None]:
    """Converts parse errors to AgentApiError: a proxy may reply 200 with other content."""
    try:
        yield
    except (KeyError, TypeError, AttributeError) as e:
        raise AgentApiError(f"GET {path} did not return a {what}: {type(e).__name__} {e}") from e


def _pod(item: Mapping[str, Any]) -> Pod:
    meta = item["metadata"]
    return Pod(
        namespace=meta["namespace"],
        name=meta["name"],
        uid=meta["uid"],
        phase=item.get("status", {}).get("phase", "Pending"),
        annotations=meta.get("annotations") or {},
    )

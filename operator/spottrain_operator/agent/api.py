"""The agent's client of the API server: its node, and the trainer pods on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import aiohttp

from spottrain_operator import names
from spottrain_operator.agent.plan import Json
from spottrain_operator.environment import Endpoint


class AgentApiError(Exception):
    """A request to the API server failed; the text says which and why. It can be retried."""


class Api:
    """API of one node and its trainer pods. Every method raises AgentApiError."""

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

    async def node(self) -> Json:
        return await self._call("GET", f"/api/v1/nodes/{self._node}", "Node")

    async def patch_node(self, patch: Json) -> None:
        await self._call("PATCH", f"/api/v1/nodes/{self._node}", "Node", patch=patch)

    async def pods(self) -> list[Json]:
        """Lists the trainer pods, from the API server's cache: cheap enough for polling."""
        query = {"labelSelector": names.POD_SELECTOR, "fieldSelector": f"spec.nodeName={self._node}"}
        query["resourceVersion"] = "0"
        lists = [await self._call("GET", path, "PodList", query=query) for path in self._lists]
        return [pod for found in lists for pod in found["items"]]

    async def patch_pod(self, pod: Json, patch: Json) -> bool:
        """Returns False where the pod is gone. Another pod of the same name is an error (422, other UID)."""
        meta = pod["metadata"]
        path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}"
        return bool(await self._call("PATCH", path, "Pod", patch=patch))

    async def _call(
        self,
        method: str,
        path: str,
        kind: str,
        *,
        query: Mapping[str, str] | None = None,
        patch: Json | None = None,
    ) -> Json:
        """Returns an object of this kind; {} for a pod that is gone."""
        headers = {}
        if patch is not None:
            query = {"fieldManager": names.AGENT_FIELD_MANAGER}
            headers["Content-Type"] = "application/merge-patch+json"
        try:
            headers["Authorization"] = f"Bearer {self._endpoint.token()}"
            async with self._session.request(
                method,
                self._endpoint.url + path,
                params=query,
                json=patch,
                headers=headers,
                ssl=self._endpoint.tls or True,
                timeout=self._timeout,
            ) as reply:
                if reply.status == 404 and kind == "Pod":
                    return {}
                if reply.status >= 300:
                    raise AgentApiError(f"{method} {path}: {reply.status} {(await reply.text())[:300]}")
                body: Any = await reply.json()
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as e:
            raise AgentApiError(f"{method} {path}: {type(e).__name__} {e}".rstrip()) from e
        if not isinstance(body, dict) or body.get("kind") != kind:  # a proxy may reply 200 with other content
            raise AgentApiError(f"{method} {path} did not return a {kind}: {str(body)[:300]}")
        return body

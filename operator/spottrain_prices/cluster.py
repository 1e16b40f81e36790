"""The price CronJob's client of the API server: lists nodes, reads and replaces one ConfigMap."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import urlencode

from spottrain_operator.environment import Endpoint

from spottrain_prices.web import Unanswered, call

Json = dict[str, Any]

PAGE: Final = 500
JSON: Final = "application/json"


class ClusterError(Exception):
    """A request to the API server did not succeed; the text says which, why and what to do."""


class Conflict(ClusterError):
    """The ConfigMap has changed since it was read."""


class Cluster:
    """Every method raises ClusterError."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    def nodes(self) -> Iterator[Json]:
        query = {"limit": str(PAGE)}
        while True:
            page = self._call("GET", f"/api/v1/nodes?{urlencode(query)}")
            items = page.get("items")
            if not isinstance(items, list):
                raise ClusterError("GET /api/v1/nodes: the response is not a list of nodes")
            yield from items
            query["continue"] = (page.get("metadata") or {}).get("continue") or ""
            if not query["continue"]:
                return

    def config_map(self, namespace: str, name: str) -> Json:
        return self._call("GET", _config_map(namespace, name))

    def replace_config_map(self, body: Json) -> None:
        """Replaces the ConfigMap if it is still the version that was read; otherwise raises Conflict."""
        meta = body["metadata"]
        self._call("PUT", _config_map(meta["namespace"], meta["name"]), body)

    def _call(self, method: str, path: str, body: Json | None = None) -> Json:
        try:
            headers = {
                "Authorization": f"Bearer {self._endpoint.token()}",
                "Accept": JSON,
                "Content-Type": JSON,
            }
            content = None if body is None else json.dumps(body).encode()
            url = self._endpoint.url + path
            reply = call(method, url, headers=headers, body=content, tls=self._endpoint.tls, direct=True)
            answer = json.loads(reply.body)
        except (Unanswered, OSError, ValueError, RecursionError) as error:
            raise ClusterError(f"request to the API server failed: {method} {path}: {error}") from error
        if reply.status < 300 and isinstance(answer, dict):
            return answer
        raise _refusal(reply.status, f"{method} {path.partition('?')[0]}", answer)


def _refusal(status: int, request: str, answer: Any) -> ClusterError:
    message = answer.get("message", "") if isinstance(answer, dict) else ""
    if status == 409:
        return Conflict(f"{request}: {message}")
    advice = {
        401: ": the ServiceAccount's token is not accepted",
        403: ": the chart's roles allow it with priceJob.enabled",
        404: ": `helm upgrade` with priceJob.enabled makes it",
    }.get(status, "")
    return ClusterError(f"{request}: the API server replied {status}: {message}{advice}")


def _config_map(namespace: str, name: str) -> str:
    return f"/api/v1/namespaces/{namespace}/configmaps/{name}"

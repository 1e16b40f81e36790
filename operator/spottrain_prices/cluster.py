"""The price CronJob's client of the API server: lists nodes, reads and replaces one ConfigMap."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import urlencode

from spottrain_operator.environment import Endpoint

from spottrain_prices.web import Failed, call

Json = dict[str, Any]

PAGE: Final = 500
CONFLICT: Final = 409
"""Status of the answer where the ConfigMap has changed since it was read."""
ADVICE: Final = {
    401: ": the ServiceAccount's token is not accepted",
    403: ": the chart's roles allow it with priceJob.enabled",
    404: ": `helm upgrade` with priceJob.enabled makes it",
}


class Cluster:
    """Every method raises Failed."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    def nodes(self) -> Iterator[Json]:
        query = {"limit": str(PAGE)}
        while True:
            page = self._call("GET", f"/api/v1/nodes?{urlencode(query)}")
            yield from page["items"]
            query["continue"] = page["metadata"].get("continue") or ""
            if not query["continue"]:
                return

    def config_map(self, namespace: str, name: str) -> Json:
        return self._call("GET", _config_map(namespace, name))

    def replace_config_map(self, body: Json) -> None:
        """Replaces the ConfigMap if it is still the version that was read."""
        meta = body["metadata"]
        self._call("PUT", _config_map(meta["namespace"], meta["name"]), body)

    def _call(self, method: str, path: str, body: Json | None = None) -> Json:
        url, tls = self._endpoint.url + path, self._endpoint.tls
        try:
            headers = {"Authorization": f"Bearer {self._endpoint.token()}"}
            found: Json = call(method, url, headers=headers, body=body, tls=tls, direct=True)
            return found
        except OSError as error:
            raise Failed(f"{method} {path}: {error}") from error
        except Failed as error:
            raise Failed(f"{error}{ADVICE.get(error.status, '')}", status=error.status) from error


def _config_map(namespace: str, name: str) -> str:
    return f"/api/v1/namespaces/{namespace}/configmaps/{name}"

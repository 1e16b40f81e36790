"""The operator's client of the API server.

Arguments and results are plain dicts: the client's pydantic models cost memory and time on every object.
Only login, TLS and connections of the official client are used.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any, Protocol
from urllib.parse import quote, urlencode

import aiohttp
from kubernetes.aio import client, config

from spottrain_operator import names
from spottrain_operator.errors import ApiError, ApiFailure
from spottrain_operator.io.metrics import REQUESTS

Json = dict[str, Any]

APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
JSON = "application/json"
SELECTORS = {"pods": names.POD_SELECTOR, "deployments": names.OPERATOR_SELECTOR}
PAGE = 500
SHOWN = 100
"""Maximum number of bytes of an unusable response in an error message."""
TIMEOUT = 30.0
"""Seconds for one request; after a timeout the work queue retries."""


class Cluster(Protocol):
    """Requests to Kubernetes. Every method raises ApiError, whose `kind` says why, on a failure."""

    async def get_job(self, namespace: str, name: str) -> Json | None: ...

    async def get_node(self, name: str) -> Json | None: ...

    async def get_pod(self, namespace: str, name: str) -> Json | None: ...

    async def get_claim(self, namespace: str, name: str) -> Json | None: ...

    async def list_pods(self, namespace: str, selector: str) -> list[Json]: ...

    async def pod_events(self, namespace: str, uid: str) -> list[Json]:
        """Returns the Events about one pod."""

    def every(self, kind: str, namespaces: tuple[str, ...]) -> AsyncIterator[Json]:
        """Lists all jobs, our pods, nodes, Karpenter's NodePools, or operators (deployments), in pages."""

    async def create_pod(self, manifest: Json, *, dry_run: bool = False) -> Json: ...

    async def delete_pod(
        self, namespace: str, name: str, *, uid: str, grace: int | None, resource_version: int | None = None
    ) -> None:
        """Deletes a pod. A conflict: it is another pod, or it has changed since that version."""

    async def annotate_pod(self, namespace: str, name: str, *, uid: str, annotations: Json) -> Json: ...

    async def release_pod(self, namespace: str, name: str, *, uid: str) -> None:
        """Removes our finalizer."""

    async def apply_status(
        self, namespace: str, name: str, *, uid: str, resource_version: int, status: Json
    ) -> Json: ...

    async def create(self, kind: str, manifest: Json, *, group: str = "") -> Json:
        """Creates an object. `kind` is the plural; `group` includes the version, "" is the core group."""

    async def hold_job(self, namespace: str, name: str, *, uid: str, on: bool) -> Json:
        """Adds our finalizer to the job's object, or removes it."""

    async def delete_job(self, namespace: str, name: str, *, uid: str) -> None: ...

    async def create_event(self, namespace: str, event: Json) -> None: ...

    async def served(self, group: str) -> Json | None:
        """Returns the API server's discovery document of a group, or of one version (`group/version`)."""


class KubeCluster:
    """`Cluster` over the official client's asyncio API."""

    def __init__(self, api: client.ApiClient) -> None:
        self._api = api
        self._rest: Any = api.rest_client

    @classmethod
    async def connect(cls) -> KubeCluster:
        """Connects with the service account in a pod, with $KUBECONFIG elsewhere."""
        try:
            config.load_incluster_config()  # type: ignore[no-untyped-call]
        except config.ConfigException:
            await config.load_kube_config()  # type: ignore[no-untyped-call]
        return cls(client.ApiClient())

    async def close(self) -> None:
        await self._api.close()  # type: ignore[no-untyped-call]

    # --- reads ---
    async def get_job(self, namespace: str, name: str) -> Json | None:
        return await self._get(_job(namespace, name))

    async def get_node(self, name: str) -> Json | None:
        return await self._get(f"/api/v1/nodes/{name}")

    async def get_pod(self, namespace: str, name: str) -> Json | None:
        return await self._get(_pods(namespace, name))

    async def get_claim(self, namespace: str, name: str) -> Json | None:
        # A template may contain any claim name: the API server accepts the pod.
        return await self._get(f"/api/v1/namespaces/{namespace}/{names.CLAIMS}/{quote(name, safe='')}")

    async def list_pods(self, namespace: str, selector: str) -> list[Json]:
        items, _ = await self._page(_pods(namespace), {"labelSelector": selector})
        return items

    async def pod_events(self, namespace: str, uid: str) -> list[Json]:
        query = {"fieldSelector": f"involvedObject.uid={uid}", "limit": str(PAGE)}
        items, _ = await self._page(f"/api/v1/namespaces/{namespace}/events", query)
        return items

    async def every(self, kind: str, namespaces: tuple[str, ...]) -> AsyncIterator[Json]:
        for path in _collections(kind, namespaces):
            query: dict[str, str] = {"limit": str(PAGE)}
            if kind in SELECTORS:
                query["labelSelector"] = SELECTORS[kind]
            while True:
                items, query["continue"] = await self._page(path, query)
                for item in items:
                    yield item
                if not query["continue"]:
                    break

    async def served(self, group: str) -> Json | None:
        return await self._get(f"/apis/{group}")

    # --- writes ---
    async def create_pod(self, manifest: Json, *, dry_run: bool = False) -> Json:
        query = {"fieldManager": names.FIELD_MANAGER, "fieldValidation": "Strict"}
        if dry_run:
            query["dryRun"] = "All"
        path = _pods(manifest["metadata"]["namespace"])
        return await self._call("POST", path, query=query, body=manifest)

    async def delete_pod(
        self, namespace: str, name: str, *, uid: str, grace: int | None, resource_version: int | None = None
    ) -> None:
        conditions = {"uid": uid}
        if resource_version is not None:
            conditions["resourceVersion"] = str(resource_version)
        options: Json = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": conditions}
        if grace is not None:
            options["gracePeriodSeconds"] = grace
        await self._call("DELETE", _pods(namespace, name), body=options)

    async def annotate_pod(self, namespace: str, name: str, *, uid: str, annotations: Json) -> Json:
        body = {"metadata": {"uid": uid, "annotations": annotations}}
        return await self._patch(_pods(namespace, name), body, MERGE)

    async def release_pod(self, namespace: str, name: str, *, uid: str) -> None:
        body = {"metadata": {"uid": uid, "$deleteFromPrimitiveList/finalizers": [names.OUTCOME_FINALIZER]}}
        await self._patch(_pods(namespace, name), body, STRATEGIC)

    async def apply_status(
        self, namespace: str, name: str, *, uid: str, resource_version: int, status: Json
    ) -> Json:
        meta = {"name": name, "namespace": namespace, "uid": uid, "resourceVersion": str(resource_version)}
        body = {"apiVersion": names.API_VERSION, "kind": names.KIND, "metadata": meta, "status": status}
        return await self._patch(f"{_job(namespace, name)}/status", body, APPLY, {"force": "true"})

    async def hold_job(self, namespace: str, name: str, *, uid: str, on: bool) -> Json:
        raw = await self._call("GET", _job(namespace, name))
        finalizers = [f for f in raw["metadata"].get("finalizers", ()) if f != names.CHECKPOINTS_FINALIZER]
        meta = {"uid": uid, "resourceVersion": raw["metadata"]["resourceVersion"]}
        finalizers += [names.CHECKPOINTS_FINALIZER] if on else []
        return await self._patch(
            _job(namespace, name), {"metadata": meta | {"finalizers": finalizers}}, MERGE
        )

    async def create(self, kind: str, manifest: Json, *, group: str = "") -> Json:
        root = f"/apis/{group}" if group else "/api/v1"
        path = f"{root}/namespaces/{manifest['metadata']['namespace']}/{kind}"
        query = {"fieldManager": names.FIELD_MANAGER, "fieldValidation": "Strict"}
        return await self._call("POST", path, query=query, body=manifest)

    async def delete_job(self, namespace: str, name: str, *, uid: str) -> None:
        options: Json = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}}
        await self._call("DELETE", _job(namespace, name), body=options | {"propagationPolicy": "Background"})

    async def create_event(self, namespace: str, event: Json) -> None:
        await self._call("POST", f"/api/v1/namespaces/{namespace}/events", body=event)

    # --- one request ---
    async def _patch(self, path: str, body: Json, kind: str, query: dict[str, str] | None = None) -> Json:
        query = {"fieldManager": names.FIELD_MANAGER, **(query or {})}
        return await self._call("PATCH", path, query=query, body=body, kind=kind)

    async def _page(self, path: str, query: dict[str, str]) -> tuple[list[Json], str]:
        """Returns one page of a LIST, and the token of the next page; "": it was the last."""
        page = await self._call("GET", path, query=query)
        items = page["items"] or [] if "items" in page else None
        if not isinstance(items, list):
            raise ApiError(0, f"GET {path}: the response is not a list of objects")
        return items, (page.get("metadata") or {}).get("continue") or ""

    async def _get(self, path: str) -> Json | None:
        try:
            return await self._call("GET", path)
        except ApiError as error:
            if error.kind is ApiFailure.NOT_FOUND:
                return None
            raise

    async def _call(
        self,
        verb: str,
        path: str,
        *,
        query: dict[str, str] | None = None,
        body: Json | None = None,
        kind: str = JSON,
    ) -> Json:
        url = f"{self._api.configuration.host}{path}{'?' + urlencode(query) if query else ''}"
        headers = {"Accept": JSON, "Content-Type": kind, "User-Agent": names.FIELD_MANAGER}
        await self._api.update_params_for_auth(headers, [], ["BearerToken"], path, verb, body)
        try:
            reply = await self._rest.request(verb, url, headers=headers, body=body, _request_timeout=_TIMEOUT)
            answer = _parsed(reply.status, await reply.read())
        except (aiohttp.ClientError, OSError, RecursionError, ValueError) as error:
            REQUESTS.labels(verb, "none").inc()
            raise ApiError(0, f"{verb} {path}: {type(error).__name__} {error}") from error
        REQUESTS.labels(verb, reply.status).inc()
        if reply.status >= 400:
            words = answer.get("message") or f"{verb} {path}: status {reply.status}"
            raise ApiError(reply.status, words, answer.get("details"))
        result: Json = answer
        return result


_TIMEOUT = aiohttp.ClientTimeout(total=TIMEOUT)


def _parsed(status: int, body: bytes) -> Json:
    """Parses a response. Raises ValueError where it is not the API server's, such as a load balancer's page.

    RecursionError: its JSON is nested too deeply.
    The API server itself rejects in plain text what it does not serve, such as a kind without its CRD.
    """
    try:
        answer = json.loads(body or b"{}")
    except ValueError:
        if not 400 <= status < 500:
            raise
        answer = None
    if not isinstance(answer, dict) and status < 400:
        raise ValueError(f"the response is not a JSON object but {body[:SHOWN]!r}")
    return answer if isinstance(answer, dict) else {}


def _pods(namespace: str, name: str = "") -> str:
    return f"/api/v1/namespaces/{namespace}/pods" + (f"/{name}" if name else "")


def _job(namespace: str, name: str) -> str:
    return f"/apis/{names.API_VERSION}/namespaces/{namespace}/{names.PLURAL}/{name}"


def _collections(kind: str, namespaces: tuple[str, ...]) -> list[str]:
    """Returns the paths to list: one per watched namespace, or one for the whole cluster."""
    if kind == names.NODE_POOLS:
        return [f"/apis/karpenter.sh/v1/{kind}"]
    root = {names.PLURAL: f"/apis/{names.API_VERSION}", "deployments": "/apis/apps/v1"}.get(kind, "/api/v1")
    if kind == "nodes" or not namespaces:
        return [f"{root}/{kind}"]
    return [f"{root}/namespaces/{namespace}/{kind}" for namespace in namespaces]

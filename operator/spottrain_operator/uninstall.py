"""`python -m spottrain_operator.uninstall`: removes our finalizers from the remaining trainer pods and jobs.

The chart's post-delete hook starts it when the operator is already gone. An object with a finalizer could
never be deleted, nor could its namespace or the CRD. Pods that still train continue. All namespaces are
searched, because an operator may have served more of them before. Those that another operator serves are
skipped.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Final

from spottrain_operator import names
from spottrain_operator.errors import ApiError, ApiFailure
from spottrain_operator.io.cluster import Cluster, Json, release_pod, set_finalizer
from spottrain_operator.settings import PREFIX

TIME_LIMIT: Final = 200.0
"""Seconds; below the Job's own limit (240), so that the message about what is left is always printed."""
FINALIZERS: Final = {"pods": names.OUTCOME_FINALIZER, names.PLURAL: names.CHECKPOINTS_FINALIZER}


async def uninstall(cluster: Cluster) -> int:
    """Returns the exit code: 0 where no object carries a finalizer any more."""
    left: list[str] = []
    try:
        async with asyncio.timeout(TIME_LIMIT):
            served = await served_by_others(cluster)
            for kind, finalizer in FINALIZERS.items():
                found = [raw["metadata"] async for raw in _everywhere(cluster, kind)]
                alone = [m for m in found if not any(not w or m["namespace"] in w for w in served)]
                held = [m for m in alone if finalizer in (m.get("finalizers") or ())]
                failures = [w for w in await asyncio.gather(*(_release(cluster, kind, m) for m in held)) if w]
                done = len(held) - len(failures)
                print(f"{finalizer}: removed from {done} of {len(held)} {kind}", flush=True)
                left += failures
    except (ApiError, TimeoutError) as e:
        print(f"gave up, run it again: {type(e).__name__} {e}".rstrip(), file=sys.stderr)
        return 1
    for why in left:
        print(f"the finalizer is still on {why}", file=sys.stderr)
    return 1 if left else 0


async def _everywhere(cluster: Cluster, kind: str) -> AsyncIterator[Json]:
    try:
        async for page in cluster.pages(kind, ""):
            for item in page.items:
                yield item
    except ApiError as e:
        if (kind, e.kind) != (names.PLURAL, ApiFailure.NOT_FOUND):
            raise  # without the CRD there are no jobs


async def served_by_others(cluster: Cluster) -> list[frozenset[str]]:
    """Returns the namespaces of each operator of this cluster; empty: all. Raises ApiError."""
    found = []
    async for raw in _everywhere(cluster, "deployments"):
        if "deletionTimestamp" in raw["metadata"]:
            continue
        variables = [e for c in raw["spec"]["template"]["spec"]["containers"] for e in c.get("env") or ()]
        text = next((e.get("value", "") for e in variables if e["name"] == f"{PREFIX}NAMESPACES"), "")
        found.append(frozenset(name.strip() for name in text.split(",") if name.strip()))
        where = ", ".join(sorted(found[-1])) or "all namespaces"
        name = f"{raw['metadata']['namespace']}/{raw['metadata']['name']}"
        print(f"skipped: {where}, served by the operator {name}", flush=True)
    return found


async def _release(cluster: Cluster, kind: str, meta: Json) -> str:
    """Takes our finalizer off an object; returns a sentence about one that still carries it, else ""."""
    name, namespace, uid = meta["name"], meta["namespace"], meta["uid"]
    try:
        if kind == "pods":
            await release_pod(cluster, name, namespace, uid=uid)
        else:
            await set_finalizer(cluster, name, namespace, uid=uid, on=False)
    except ApiError as e:
        return "" if e.kind is ApiFailure.NOT_FOUND else f"{namespace}/{name}: {e}"
    return ""


async def _main() -> int:
    cluster = await Cluster.connect()
    try:
        return await uninstall(cluster)
    finally:
        await cluster.close()


if __name__ == "__main__":
    sys.exit(asyncio.run(_main()))

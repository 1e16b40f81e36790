"""`python -m spottrain_operator.uninstall`: takes our finalizer off every trainer pod that is left.

Run by the chart's post-delete hook, when no operator is there to do it: a pod that keeps the finalizer
could never be deleted, nor could its namespace. Pods that still train go on training.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final, Protocol

from spottrain_operator import names
from spottrain_operator.cluster import Json, KubeCluster
from spottrain_operator.errors import ApiError
from spottrain_operator.settings import Settings

AT_ONCE: Final = 16
TIME_LIMIT: Final = 200.0
"""Seconds, so that the Job's own limit (240) never cuts off the sentence that says what is left."""


class Pods(Protocol):
    """The two calls that are used of `cluster.Cluster`."""

    def every(self, kind: str, namespaces: tuple[str, ...]) -> AsyncIterator[Json]: ...

    async def release_pod(self, namespace: str, name: str, *, uid: str) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """A pod that carries the finalizer: all that is kept of it, for there may be thousands."""

    namespace: str
    name: str
    uid: str


async def held_pods(pods: Pods, namespaces: tuple[str, ...]) -> list[Held]:
    """Raises ApiError."""
    held = []
    async for pod in pods.every("pods", namespaces):
        meta = pod["metadata"]
        if names.OUTCOME_FINALIZER in (meta.get("finalizers") or ()):
            held.append(Held(namespace=meta["namespace"], name=meta["name"], uid=meta["uid"]))
    return held


async def release(pods: Pods, held: list[Held]) -> list[str]:
    """A sentence for each pod that still carries the finalizer afterwards."""
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(pod: Held) -> str:
        async with slots:
            try:
                await pods.release_pod(pod.namespace, pod.name, uid=pod.uid)
            except ApiError as e:
                return "" if e.status == 404 else f"{pod.namespace}/{pod.name}: {e}"
            return ""

    return [sentence for sentence in await asyncio.gather(*map(one, held)) if sentence]


async def uninstall(pods: Pods, namespaces: tuple[str, ...]) -> int:
    """Exit code: 0 where no pod is held any more."""
    try:
        async with asyncio.timeout(TIME_LIMIT):
            held = await held_pods(pods, namespaces)
            print(f"{len(held)} trainer pods carry the finalizer {names.OUTCOME_FINALIZER}", flush=True)
            failed = await release(pods, held)
    except (ApiError, TimeoutError) as e:
        print(f"gave up, run it again: {type(e).__name__} {e}".rstrip(), file=sys.stderr)
        return 1
    print(f"taken off {len(held) - len(failed)} of them" if held else "nothing to do", flush=True)
    for sentence in failed:
        print(f"still held: {sentence}", file=sys.stderr)
    return 1 if failed else 0


async def _main() -> int:
    cluster = await KubeCluster.connect()
    try:
        return await uninstall(cluster, Settings.from_env(os.environ).namespaces)
    finally:
        await cluster.close()


if __name__ == "__main__":
    sys.exit(asyncio.run(_main()))

"""`python -m spottrain_operator.uninstall`: removes our finalizers from the remaining trainer pods and jobs.

The chart's post-delete hook starts it when the operator is already gone. An object with a finalizer could
never be deleted, nor could its namespace or the CRD. Pods that still train continue. All namespaces are
searched, because an operator may have served more of them before. Those that another operator serves are
skipped.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from spottrain_operator import names
from spottrain_operator.errors import ApiError, ApiFailure
from spottrain_operator.io.cluster import Json, KubeCluster
from spottrain_operator.settings import PREFIX

AT_ONCE: Final = 16
TIME_LIMIT: Final = 200.0
"""Seconds; below the Job's own limit (240), so that the message about what is left is always printed."""
FINALIZERS: Final = {"pods": names.OUTCOME_FINALIZER, names.PLURAL: names.CHECKPOINTS_FINALIZER}
WORDS: Final = {"pods": "trainer pods", names.PLURAL: "TrainingJobs"}


class Calls(Protocol):
    """The part of `io.cluster.Cluster` that is needed here."""

    def every(self, kind: str, namespaces: tuple[str, ...]) -> AsyncIterator[Json]: ...

    async def release_pod(self, namespace: str, name: str, *, uid: str) -> None: ...

    async def hold_job(self, namespace: str, name: str, *, uid: str, on: bool) -> Json: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """An object with a finalizer. Only these fields are kept, because there may be thousands."""

    kind: str
    namespace: str
    name: str
    uid: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


async def others(calls: Calls) -> list[tuple[str, frozenset[str]]]:
    """Returns this cluster's other operators with their namespaces (empty: all). Raises ApiError."""
    found = []
    async for raw in calls.every("deployments", ()):
        meta = raw["metadata"]
        if "deletionTimestamp" not in meta:
            found.append((f"{meta['namespace']}/{meta['name']}", _served(raw)))
    return found


def _served(deployment: Json) -> frozenset[str]:
    containers: Iterable[Json] = deployment["spec"]["template"]["spec"]["containers"]
    env: Iterable[dict[str, Any]] = (e for c in containers for e in c.get("env") or ())
    text = next((e.get("value", "") for e in env if e["name"] == f"{PREFIX}NAMESPACES"), "")
    return frozenset(name.strip() for name in text.split(",") if name.strip())


async def held(calls: Calls, kind: str, served: Iterable[frozenset[str]]) -> list[Held]:
    """Returns the objects of a kind that still carry our finalizer. Raises ApiError."""
    found, theirs = [], list(served)
    async for raw in calls.every(kind, ()):
        meta = raw["metadata"]
        served_still = any(not where or meta["namespace"] in where for where in theirs)
        if FINALIZERS[kind] in (meta.get("finalizers") or ()) and not served_still:
            found.append(Held(kind=kind, namespace=meta["namespace"], name=meta["name"], uid=meta["uid"]))
    return found


async def release(calls: Calls, things: list[Held]) -> list[str]:
    """Removes the finalizers; returns a sentence for each object that still carries its own afterwards."""
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(thing: Held) -> str:
        async with slots:
            try:
                if thing.kind == "pods":
                    await calls.release_pod(thing.namespace, thing.name, uid=thing.uid)
                else:
                    await calls.hold_job(thing.namespace, thing.name, uid=thing.uid, on=False)
            except ApiError as e:
                return "" if e.kind is ApiFailure.NOT_FOUND else f"{thing}: {e}"
            return ""

    return [sentence for sentence in await asyncio.gather(*map(one, things)) if sentence]


async def _strip(calls: Calls, kind: str, served: list[frozenset[str]]) -> list[str]:
    try:
        found = await held(calls, kind, served)
    except ApiError as e:
        if kind == names.PLURAL and e.kind is ApiFailure.NOT_FOUND:
            return []  # the CRD is gone, and with it all jobs
        raise
    print(f"{len(found)} {WORDS[kind]} carry the finalizer {FINALIZERS[kind]}", flush=True)
    failed = await release(calls, found)
    print(f"taken off {len(found) - len(failed)} of them" if found else "nothing to do", flush=True)
    if found and kind == names.PLURAL:
        print("their checkpoints are not deleted with them unless an operator is installed again", flush=True)
    return failed


async def uninstall(calls: Calls) -> int:
    """Returns the exit code: 0 where no object carries a finalizer any more."""
    failed: list[str] = []
    try:
        async with asyncio.timeout(TIME_LIMIT):
            there = await others(calls)
            for name, served in there:
                where = ", ".join(sorted(served)) or "all namespaces"
                print(f"left alone, because the operator {name} serves it: {where}", flush=True)
            for kind in FINALIZERS:
                failed += await _strip(calls, kind, [served for _, served in there])
    except (ApiError, TimeoutError) as e:
        print(f"gave up, run it again: {type(e).__name__} {e}".rstrip(), file=sys.stderr)
        return 1
    for sentence in failed:
        print(f"still held: {sentence}", file=sys.stderr)
    return 1 if failed else 0


async def _main() -> int:
    cluster = await KubeCluster.connect()
    try:
        return await uninstall(cluster)
    finally:
        await cluster.close()


if __name__ == "__main__":
    sys.exit(asyncio.run(_main()))

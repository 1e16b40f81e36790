"""What an event of a pod costs, and 10,000 pods in memory, by kopf's on.event and by our informer.

    python bench/informer.py                                      # `make bench-informer`
    python bench/informer.py --listed 500 --events 500 --rounds 1

A server in a process of its own serves the same LIST and the same watch to both. Each side is a process of
its own, in turn, and makes of each event what the operator does: a view in the cache, the job in the queue.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import resource
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Final

import aiohttp
import kopf
from aiohttp import web
from kubernetes.aio import client
from spottrain_operator.api.views import pod_view
from spottrain_operator.control.caches import Caches
from spottrain_operator.control.handlers import tune
from spottrain_operator.control.informer import Informer
from spottrain_operator.control.lister import PODS
from spottrain_operator.control.work_queue import WorkQueue
from spottrain_operator.io.cluster import KubeCluster
from spottrain_operator.names import API_VERSION, ATTEMPT_LABEL, JOB_UID_LABEL, KIND, POD_SELECTOR

Json = dict[str, Any]
PODS_LISTED: Final = 10_000
EVENTS: Final = 10_000
ROUNDS: Final = 3
PAGE: Final = 500
LIMIT: Final = 300.0
"""Seconds of one side."""


# --- the server ---------------------------------------------------------------------------------------
def pod(number: int, version: int) -> Json:
    """As the API server has one of ours: about 5 KB, a third of it managedFields."""
    labels = dict(label.split("=") for label in POD_SELECTOR.split(","))
    labels |= {ATTEMPT_LABEL: "1", JOB_UID_LABEL: f"uid-{number // 8}", "spottrain.io/rank": str(number % 8)}
    owner = {"apiVersion": API_VERSION, "kind": KIND, "name": f"job-{number // 8}", "controller": True}
    env: Json = {f'k:{{"name":"VARIABLE_{n}"}}': {".": {}, "f:name": {}, "f:value": {}} for n in range(10)}
    fields = {"f:metadata": {"f:labels": {f"f:{k}": {} for k in labels}}, "f:spec": {"f:containers": env}}
    mounts = [{"name": f"volume-{n}", "mountPath": f"/mnt/{n}"} for n in range(4)]
    container = {
        "name": "trainer",
        "image": "example.com/train:1",
        "env": [{"name": f"VARIABLE_{n}", "value": "x" * 24} for n in range(15)],
        "resources": {"limits": {"nvidia.com/gpu": "8", "memory": "64Gi"}},
        "volumeMounts": mounts,
    }
    times = {"lastProbeTime": None, "lastTransitionTime": "2026-03-01T11:50:00Z"}
    kinds = ("PodScheduled", "Initialized", "Ready", "ContainersReady")
    state = {"running": {"startedAt": "2026-03-01T11:50:00Z"}}
    return {
        "kind": "Pod",
        "apiVersion": "v1",
        "metadata": {
            "name": f"job-{number}",
            "namespace": "ml",
            "uid": f"00000000-0000-0000-0000-{number:012}",
            "resourceVersion": str(version),
            "creationTimestamp": "2026-03-01T11:50:00Z",
            "labels": labels,
            "ownerReferences": [owner | {"uid": f"uid-{number // 8}"}],
            "finalizers": ["spottrain.io/outcome"],
            "managedFields": [
                {"manager": who, "operation": "Update", "fieldsV1": fields} for who in ("a", "b")
            ],
        },
        "spec": {
            "nodeName": f"node-{number}",
            "terminationGracePeriodSeconds": 110,
            "containers": [container],
            "volumes": [{"name": f"volume-{n}", "emptyDir": {}} for n in range(4)],
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}] * 3,
        },
        "status": {
            "phase": "Running",
            "podIP": "10.0.0.1",
            "startTime": "2026-03-01T11:50:00Z",
            "conditions": [{"type": kind, "status": "True", **times} for kind in kinds],
            "containerStatuses": [{"name": "trainer", "state": state, "ready": True, "restartCount": 0}],
        },
    }


def serve(port: Any, listed: int, events: int) -> None:
    """Serves `listed` pods, and one watch with `events` changes of them."""
    pages = {
        start: json.dumps(
            {
                "kind": "PodList",
                "apiVersion": "v1",
                "metadata": {"resourceVersion": "100000"}
                | ({"continue": str(start + PAGE)} if start + PAGE < listed else {}),
                "items": [pod(n, 1000 + n) for n in range(start, min(start + PAGE, listed))],
            }
        ).encode()
        for start in range(0, listed, PAGE)
    }
    changes = [
        json.dumps({"type": "MODIFIED", "object": pod(n % listed, 200_000 + n)}).encode() + b"\n"
        for n in range(events)
    ]

    go = asyncio.Event()
    """Whether the client has seen the whole LIST."""

    async def begin(_: web.Request) -> web.Response:
        go.set()
        return web.Response()

    async def pods(request: web.Request) -> web.StreamResponse:
        if request.query.get("watch") != "true":
            page = pages[int(request.query.get("continue") or 0)]
            return web.Response(body=page, content_type="application/json")
        reply = web.StreamResponse()
        await reply.prepare(request)
        await go.wait()
        go.clear()
        for start in range(0, events, 20):
            await reply.write(b"".join(changes[start : start + 20]))
        await asyncio.sleep(LIMIT)
        return reply

    async def run() -> None:
        crds = {"name": "apiextensions.k8s.io", "versions": [{"version": "v1"}]}
        answers: dict[str, Json] = {  # kopf asks for namespaces and CRDs, which it then does not read
            "/api": {"versions": ["v1"]},
            "/apis": {"groups": [crds | {"preferredVersion": {"version": "v1"}}]},
            "/api/v1": {"resources": [_resource("pods", "Pod"), _resource("namespaces", "Namespace")]},
            "/apis/apiextensions.k8s.io/v1": {
                "resources": [_resource("customresourcedefinitions", "CustomResourceDefinition")]
            },
        }
        app = web.Application()
        for path, answer in answers.items():
            app.router.add_get(path, _answering(answer))
        app.router.add_get("/api/v1/pods", pods)
        app.router.add_get("/go", begin)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port.send(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(run())


def _resource(name: str, kind: str) -> Json:
    verbs = {"namespaced": kind == "Pod", "verbs": ["list", "watch", "patch"]}
    return {"name": name, "kind": kind, "singularName": kind.lower(), **verbs}


def _answering(answer: Json) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handle(_: web.Request) -> web.Response:
        return web.json_response(answer)

    return handle


@contextmanager
def server(listed: int, events: int) -> Iterator[str]:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, listed, events))
    process.start()
    try:
        yield f"http://127.0.0.1:{ours.recv()}"
    finally:
        process.kill()
        process.join()


# --- both sides ---------------------------------------------------------------------------------------
class Meter:
    """Processor time of the LIST and of the events, and memory."""

    def __init__(self, url: str, listed: int, events: int) -> None:
        self.url, self.listed, self.events = url, listed, events
        self.seen = 0
        self.done = asyncio.Event()
        self.caches, self.queue = Caches(), WorkQueue()
        self.begin_mib = resident_mib()
        self.began = self.list_over = self.over = time.process_time()

    def saw(self) -> None:
        self.seen += 1
        if self.seen == self.listed:
            self.going = asyncio.create_task(self._list_is_over())
        if self.seen == self.listed + self.events:
            self.over = time.process_time()
            self.done.set()

    async def _list_is_over(self) -> None:
        self.listed_mib = resident_mib()
        self.list_over = time.process_time()
        async with aiohttp.ClientSession() as session, session.get(f"{self.url}/go"):
            pass

    def figures(self) -> Json:
        assert len(self.caches.pods.keys()) == self.listed
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        return {
            "event_us": round((self.over - self.list_over) / self.events * 1e6, 1),
            "list_s": round(self.list_over - self.began, 2),
            "listed_mib": round(self.listed_mib - self.begin_mib, 1),
            "peak_mib": round(peak - self.begin_mib, 1),
            "process_mib": round(peak, 1),
        }


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


async def by_kopf(url: str, meter: Meter) -> None:
    registry, settings = kopf.OperatorRegistry(), kopf.OperatorSettings()
    tune(settings)
    settings.watching.label_selectors["pods"] = POD_SELECTOR

    @kopf.on.login(registry=registry)
    def login(**_: Any) -> kopf.ConnectionInfo:
        return kopf.ConnectionInfo(server=url)

    @kopf.on.event("", "v1", "pods", registry=registry)
    async def seen(event: kopf.RawEvent, **_: Any) -> None:
        view = pod_view(event["object"])
        if view is not None and meter.caches.pods.put(view):
            meter.queue.add(view.job)
        meter.saw()

    stop = asyncio.Event()
    operator = kopf.operator(
        registry=registry, settings=settings, clusterwide=True, standalone=True, stop_flag=stop
    )
    task = asyncio.create_task(operator)
    await meter.done.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def by_informer(url: str, meter: Meter) -> None:
    cluster = KubeCluster(client.ApiClient(client.Configuration(host=url)))

    def changed(view: Any) -> None:
        meter.queue.add(view.job)
        meter.saw()

    informer = Informer(PODS, cluster=cluster, cache=meter.caches.pods, changed=changed)
    task = asyncio.create_task(informer.run())
    await meter.done.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await cluster.close()


SIDES: Final = {"kopf": by_kopf, "informer": by_informer}


async def measure(side: str, url: str, listed: int, events: int) -> None:
    meter = Meter(url, listed, events)
    async with asyncio.timeout(LIMIT):
        await SIDES[side](url, meter)
    print(json.dumps(meter.figures()), flush=True)


def one(side: str, url: str, options: argparse.Namespace) -> Json:
    command = [sys.executable, __file__, "--side", side, "--url", url]
    command += ["--listed", str(options.listed), "--events", str(options.events)]
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=LIMIT + 30, check=True).stdout
    figures: Json = json.loads(said.splitlines()[-1])
    print(f"{side:>9}: {figures}", flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--listed", type=int, default=PODS_LISTED)
    parser.add_argument("--events", type=int, default=EVENTS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        asyncio.run(measure(options.side, options.url, options.listed, options.events))
        return
    found: dict[str, list[Json]] = {side: [] for side in SIDES}
    with server(options.listed, options.events) as url:
        for turn in range(options.rounds):
            for side in sorted(SIDES, reverse=turn % 2 == 1):
                found[side].append(one(side, url, options))
    middle = {s: {name: median(f[name] for f in each) for name in each[0]} for s, each in found.items()}
    ratio = {n: round(middle["informer"][n] / middle["kopf"][n], 3) for n in middle["kopf"]}
    sizes = {"listed": options.listed, "events": options.events, "rounds": options.rounds}
    print(json.dumps({**sizes, **middle, "informer_over_kopf": ratio}))


if __name__ == "__main__":
    main()

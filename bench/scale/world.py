"""A control plane with fake nodes, the operator as its real process, and what both cost in processor time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import aiohttp
from localcluster.apiserver import ApiServer, api_server, running
from localcluster.controllers import ALL, controller_manager
from localcluster.fakenodes import fake_nodes
from localcluster.fakepods import pod_stages
from spottrain_operator.names import API_VERSION, GPU_RESOURCE, KIND, PLURAL, Phase

from bench import needs
from bench.scale.client import AGENT, Api, Json, Timeout, each, seen, wait
from bench.scale.metrics import value
from tests.api.kube import Kube
from tests.chaosop.process import free_port

CRD: Final = needs.ROOT / "crds" / "trainingjobs.yaml"
FAST: Final = ("--kube-api-qps=2000", "--kube-api-burst=4000")
"""Raised client limits: with its own 20 requests a second a controller of Kubernetes' is no measure."""
NAMESPACE: Final = "bench"
TICK: Final = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, kw_only=True)
class Size:
    nodes: int = 200
    gpus: int = 8
    zones: int = 1
    stop_seconds: float = 0.0
    """From the DELETE of a pod until its trainer has ended."""


@dataclass(kw_only=True)
class World:
    server: ApiServer
    api: Api
    operator: Operator
    nodes: list[str]
    began: int
    """Unix seconds from which the trainers count their steps."""

    def cpu(self) -> dict[str, float]:
        """Seconds of processor time of each program that this process has started, but the trainers' stub."""
        found = cpu_of_children() | {"operator": self.operator.cpu}
        return {name: seconds for name, seconds in found.items() if not name.startswith("python")}


@asynccontextmanager
async def world(size: Size) -> AsyncIterator[World]:
    """Everything but jobs; the operator is there and not started."""
    _end_at_sigterm()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    began = int(time.time()) - 1
    stages = pod_stages(epoch=began, stop_seconds=size.stop_seconds) + _KWOK
    limits = ("--max-requests-inflight=4000", "--max-mutating-requests-inflight=2000")
    with contextlib.ExitStack() as programs:
        server = programs.enter_context(api_server(flags=limits))
        kube = Kube.from_kubeconfig(server.kubeconfig)
        await asyncio.to_thread(kube.install, CRD)  # first: the garbage collector asks for kinds at its start
        fakes = fake_nodes(server, more=stages, kwok_flags=[f"--cidr={needs.PODS}"], scheduler_flags=FAST)
        programs.enter_context(fakes)
        manager = controller_manager(server, ALL, *FAST)
        programs.enter_context(running(manager, server.logs / "controller-manager.log"))
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, headers={"User-Agent": AGENT}) as session:
            api = Api(kube=kube, session=session)
            await api.call("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
            operator = Operator(server=server)
            nodes = await _make_nodes(api, size)
            trainers = [sys.executable, "-m", "bench.scale.trainers", str(server.kubeconfig), str(began)]
            with running(["env", f"PYTHONPATH={paths()}", *trainers], server.logs / "trainers.log"):
                try:
                    yield World(server=server, api=api, operator=operator, nodes=nodes, began=began)
                finally:
                    operator.end()


def _end_at_sigterm() -> None:
    """As at Control-C: what was started ends, and temporary folders go."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


_KWOK: Final = """---
apiVersion: config.kwok.x-k8s.io/v1alpha1
kind: KwokConfiguration
options: {podPlayStageParallelism: 16, nodePlayStageParallelism: 16}
"""


# --- nodes --------------------------------------------------------------------------------------------
async def _make_nodes(api: Api, size: Size) -> list[str]:
    names = [f"node-{number}" for number in range(size.nodes)]
    bodies = [node(name, size.gpus, number % size.zones) for number, name in enumerate(names)]
    async with seen(api, "/api/v1/nodes", _usable) as found:
        await each(lambda body: api.call("POST", "/api/v1/nodes", body), bodies)
        missing = lambda: f"{len(found.fitting)} of {size.nodes} nodes are ready and without a taint"  # noqa: E731
        await wait(missing, lambda: len(found.fitting) == size.nodes, seconds=600)
    return names


def node(name: str, gpus: int, zone: int) -> Json:
    """A spot node of EKS, as the cloud provider labels it."""
    labels = {
        "kubernetes.io/hostname": name,
        "kubernetes.io/os": "linux",
        "kubernetes.io/arch": "amd64",
        "node.kubernetes.io/instance-type": "p4d.24xlarge",
        "topology.kubernetes.io/region": "us-east-1",
        "topology.kubernetes.io/zone": f"us-east-1{'abcdef'[zone]}",
        "eks.amazonaws.com/capacityType": "SPOT",
    }
    has = {"cpu": "96", "memory": "1152Gi", "pods": "110", GPU_RESOURCE: str(gpus)}
    return {
        "metadata": {"name": name, "labels": labels},
        "spec": {"providerID": f"aws:///us-east-1{'abcdef'[zone]}/i-{abs(hash(name)):017x}"},
        "status": {"capacity": has, "allocatable": has},
    }


def _usable(item: Json) -> bool:
    conditions = item["status"].get("conditions") or ()
    ready = any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
    return ready and not item["spec"].get("taints")


# --- jobs ---------------------------------------------------------------------------------------------
def training_job(name: str, workers: int, *, annotations: dict[str, str] | None = None) -> Json:
    template: Json = {"spec": {"containers": [_container()]}}
    if annotations:
        template["metadata"] = {"annotations": annotations}
    spec = {"workers": workers, "template": template, "checkpoint": {"uri": f"s3://checkpoints/{name}"}}
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}, "spec": spec}


def says_running(job: Json) -> bool:
    """Whether a TrainingJob's status says that all its pods run."""
    status, workers = job.get("status") or {}, job["spec"]["workers"]
    runs = any(c["type"] == "Running" and c["status"] == "True" for c in status.get("conditions") or ())
    return runs and status.get("readyWorkers") == workers


def trains(job: Json) -> bool:
    """Whether its status says that its trainer has answered: at a notice it would be replaced early."""
    return (job.get("status") or {}).get("phase") == Phase.RUNNING


def built_in_job(name: str, workers: int) -> Json:
    """The same pods, by Kubernetes' own Job controller."""
    container = _container() | {"resources": {"limits": {GPU_RESOURCE: "1"}}}
    template = {"metadata": {"labels": {"job": name}}, "spec": _pod(container)}
    spec = {"completionMode": "Indexed", "completions": workers, "parallelism": workers}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": spec | {"backoffLimit": 1000, "template": template},
    }


def job_says_running(job: Json) -> bool:
    """Whether an Indexed Job's status says that all its pods run."""
    ready, wanted = (job.get("status") or {}).get("ready"), job["spec"]["parallelism"]
    return bool(ready == wanted)


def _pod(container: Json) -> Json:
    return {"restartPolicy": "Never", "terminationGracePeriodSeconds": 110, "containers": [container]}


def _container() -> Json:
    return {
        "name": "trainer",
        "image": "registry.example.com/team/train:1",
        "command": ["spottrain", "run", "train.py"],
        "env": [{"name": "EPOCHS", "value": "3"}],
    }


def jobs_path(kind: str) -> str:
    group = f"/apis/{API_VERSION}" if kind == PLURAL else "/apis/batch/v1"
    return f"{group}/namespaces/{NAMESPACE}/{kind}"


PODS: Final = f"/api/v1/namespaces/{NAMESPACE}/pods"


# --- processes ----------------------------------------------------------------------------------------
def paths() -> str:
    more = os.environ.get("PYTHONPATH", "")
    found = (*(str(needs.ROOT / each) for each in ("", "operator", "runtime", "dev")), more)
    return ":".join(path for path in found if path)


@dataclass(kw_only=True)
class Operator:
    """`python -m spottrain_operator` with the settings that the chart installs."""

    server: ApiServer
    name: str = "operator"
    settings: Mapping[str, str] = field(default_factory=dict)
    """Environment variables, without their prefix."""
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        return self.server.logs / f"{self.name}.log"

    def start(self) -> None:
        env = os.environ | {
            "KUBECONFIG": str(self.server.kubeconfig),
            "PYTHONPATH": paths(),
            "SPOTTRAIN_OPERATOR_HEALTH_PORT": str(self.port),
        }
        env |= {f"SPOTTRAIN_OPERATOR_{name}": value for name, value in self.settings.items()}
        command = ["setpriv", "--pdeathsig", "KILL", sys.executable, "-m", "spottrain_operator"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, env=env, stdout=log, stderr=log)

    async def ready(self, session: aiohttp.ClientSession, *, seconds: float = 120) -> None:
        """Waits until it says that its caches are filled."""
        end = time.monotonic() + seconds
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(f"http://127.0.0.1:{self.port}/readyz") as reply:
                    if reply.status == 200:
                        return
            if not self.alive or time.monotonic() > end:
                raise Timeout(f"{self.name} is not ready:\n{self.log.read_text()[-3000:]}")
            await asyncio.sleep(0.02)

    async def leads(self, session: aiohttp.ClientSession, *, seconds: float = 60) -> None:
        """Waits until it leads."""
        end = time.monotonic() + seconds
        while value(await self.metrics(session), "spottrain_leader") != 1:
            if time.monotonic() > end:
                raise Timeout(f"{self.name} does not lead:\n{self.log.read_text()[-3000:]}")
            await asyncio.sleep(0.1)

    async def metrics(self, session: aiohttp.ClientSession) -> str:
        async with session.get(f"http://127.0.0.1:{self.port}/metrics") as reply:
            return await reply.text()

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def cpu(self) -> float:
        return cpu_seconds(self.process.pid) if self.process is not None else 0.0

    @property
    def resident_mib(self) -> float:
        return memory_mib(self.process.pid, "VmRSS") if self.process is not None else 0.0

    @property
    def greatest_mib(self) -> float:
        """Most that it ever had at once."""
        return memory_mib(self.process.pid, "VmHWM") if self.process is not None else 0.0

    def end(self, *, by: signal.Signals = signal.SIGTERM) -> None:
        process, self.process = self.process, None
        if process is None:
            return
        process.send_signal(by)
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=10)


def cpu_seconds(pid: int) -> float:
    """Of a process; 0 where it has ended."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0.0
    return (int(words[11]) + int(words[12])) / TICK


def memory_mib(pid: int, field: str) -> float:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.partition(f"{field}:")[2].split()[0]) / 1024


def cpu_of_children() -> dict[str, float]:
    """By the name of the program."""
    found: dict[str, float] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            before, _, after = (entry / "stat").read_text().rpartition(")")
            if int(after.split()[1]) == os.getpid():
                name = before.partition("(")[2]
                found[name] = found.get(name, 0.0) + cpu_seconds(int(entry.name))
    return found


def spent(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {name: round(after[name] - before.get(name, 0.0), 2) for name in sorted(after)}


def load() -> float:
    return round(os.getloadavg()[0], 1)


def say(text: str) -> None:
    print(text, flush=True)

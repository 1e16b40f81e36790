"""One job in a test, what the world does to it, and the operator's process.

Used by the tests of this folder.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import tempfile
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

from spottrain_operator import names
from spottrain_operator.api.bookkeeping import DATA_KEY
from spottrain_operator.names import (
    API_VERSION,
    DEADLINE_ANNOTATION,
    KIND,
    NOTICE_SEEN_ANNOTATION,
    POD_SELECTOR,
    SOURCE_ANNOTATION,
)

from tests.api.forks import Forks
from tests.api.kube import APPLY, MERGE, Json, Kube, jobs, wait_for

STRATEGIC = "application/strategic-merge-patch+json"
_nodes = itertools.count(1)


def job_body(name: str, **spec: Any) -> Json:
    container = {"name": "trainer", "image": "example.com/train:1"}
    body = {"containers": [container], "securityContext": {"runAsNonRoot": True}}
    defaults = {"template": {"spec": body}, "checkpoint": {"uri": "s3://bucket/run"}}
    return {"metadata": {"name": name}, "spec": defaults | {"failurePolicy": {"backoffSeconds": 1}} | spec}


@dataclass(frozen=True, kw_only=True)
class Scene:
    kube: Kube
    namespace: str
    job: str
    nodes: list[str] = field(default_factory=list)

    # --- the job ---
    def create(self, **spec: Any) -> Json:
        return self.kube.create_job(self.namespace, job_body(self.job, **spec))

    def raw(self) -> Json:
        raw = self.kube.get(jobs(self.namespace, self.job))
        assert raw is not None, f"job {self.job} is gone"
        return raw

    def status(self) -> Json:
        status: Json = self.raw().get("status", {})
        return status

    def books(self) -> Json:
        """The bookkeeping in the job's ConfigMap; empty before it is written."""
        name = names.object_name(self.job, self.raw()["metadata"]["uid"], suffix="-books")
        raw = self.kube.get(f"/api/v1/namespaces/{self.namespace}/configmaps/{name}")
        found: Json = json.loads(raw["data"][DATA_KEY]) if raw is not None else {}
        return found

    def condition(self, kind: str) -> Json:
        found = (c for c in self.status().get("conditions", ()) if c["type"] == kind)
        return next(found, {})

    def wait_condition(self, kind: str, status: str, reason: str = "") -> Json:
        def look() -> Json | None:
            found = self.condition(kind)
            fits = found.get("status") == status and (not reason or found["reason"] == reason)
            return found if fits else None

        found: Json = wait_for(f"{self.job}: {kind}={status} {reason}", look)
        return found

    def wait_attempt(self, number: int) -> Json:
        """Its pod."""
        pod: Json = wait_for(f"the pod of attempt {number} of {self.job}", lambda: self.pod(number))
        return pod

    def run(self, **spec: Any) -> Json:
        """Creates the job; its first pod, which runs."""
        self.create(**spec)
        pod = self.wait_attempt(1)
        self.bind(pod)
        return pod

    def counters(self) -> tuple[int, int, int]:
        status = self.status()
        return status["attempt"], status["failures"], status["interruptions"]

    # --- its pods ---
    def pods(self) -> list[Json]:
        selector = f"{POD_SELECTOR},spottrain.io/job={self.job}"
        path = f"/api/v1/namespaces/{self.namespace}/pods?labelSelector={selector}"
        pods: list[Json] = self.kube.call("GET", path)["items"]
        return pods

    def pod(self, attempt: int) -> Json | None:
        return next(
            (p for p in self.pods() if p["metadata"]["labels"]["spottrain.io/attempt"] == str(attempt)), None
        )

    def wait_gang(self, attempt: int, size: int) -> list[Json]:
        """Its pods, by rank, when all are there."""

        def look() -> list[Json] | None:
            of = [p for p in self.pods() if p["metadata"]["labels"]["spottrain.io/attempt"] == str(attempt)]
            found = sorted(of, key=lambda p: int(p["metadata"]["labels"]["spottrain.io/rank"]))
            return found if len(found) == size else None

        pods: list[Json] = wait_for(f"{size} pods of attempt {attempt} of {self.job}", look)
        return pods

    def change(self, **spec: Any) -> None:
        self.kube.call("PATCH", jobs(self.namespace, self.job), {"spec": spec}, kind=MERGE)

    def annotate(self, name: str, value: str) -> None:
        change = {"metadata": {"annotations": {name: value}}}
        self.kube.call("PATCH", jobs(self.namespace, self.job), change, kind=MERGE)

    def path(self, pod: Json) -> str:
        return f"/api/v1/namespaces/{self.namespace}/pods/{pod['metadata']['name']}"

    # --- the world ---
    def add_node(self) -> str:
        name = f"node-{next(_nodes)}"
        self.kube.call(
            "POST", "/api/v1/nodes", {"metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}}}
        )
        self.kube.call("PATCH", f"/api/v1/nodes/{name}/status", _ready(True), kind=STRATEGIC)
        return name

    def bind(self, pod: Json, node: str = "") -> str:
        """The scheduler's and the kubelet's part: bound, and running."""
        node = node or self.add_node()
        meta = {"name": pod["metadata"]["name"]}
        self.kube.call(
            "POST", f"{self.path(pod)}/binding", {"metadata": meta, "target": {"kind": "Node", "name": node}}
        )
        self.report_running(pod)
        return node

    def report_running(self, pod: Json) -> None:
        """The kubelet's part alone, where a scheduler has bound it."""
        self._report(pod, "Running", {"running": {"startedAt": _now()}})

    def see_runtime(self) -> None:
        """As if the trainer had answered the operator's poll: nothing serves progress in these pods."""
        body = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {"name": self.job},
            "status": {"progress": {"state": "Training"}},
        }
        path = f"{jobs(self.namespace, self.job)}/status?fieldManager=runtime"
        self.kube.call("PATCH", path, body, kind=APPLY)

    def report_waiting(self, pod: Json, reason: str, message: str) -> None:
        self._report(pod, "Pending", {"waiting": {"reason": reason, "message": message}})

    def end(self, pod: Json, code: int, message: str = "") -> None:
        """The kubelet's report of the trainer's end; then it lets go of a pod that is to be deleted."""
        before = (self.kube.get(self.path(pod)) or {}).get("status", {}).get("containerStatuses") or [{}]
        began = before[0].get("state", {}).get("running", {}).get("startedAt", _now())
        times = {"startedAt": began, "finishedAt": _now()}
        state = {"terminated": {"exitCode": code, "message": message} | times}
        self._report(pod, "Failed" if code else "Succeeded", state)
        live = self.kube.get(self.path(pod))
        if live is not None and "deletionTimestamp" in live["metadata"]:
            self.delete(pod, 0)

    def delete(self, pod: Json, grace: int = 30) -> None:
        self.kube.call(
            "DELETE",
            self.path(pod),
            {"kind": "DeleteOptions", "apiVersion": "v1", "gracePeriodSeconds": grace},
        )

    def give_notice(self, node: str, seconds: float = 60) -> None:
        """What the agent writes."""
        now = datetime.now(UTC)
        notes = {
            DEADLINE_ANNOTATION: (now + timedelta(seconds=seconds)).isoformat(),
            SOURCE_ANNOTATION: "AWS spot/instance-action",
            NOTICE_SEEN_ANNOTATION: now.isoformat(),
        }
        self.kube.call("PATCH", f"/api/v1/nodes/{node}", {"metadata": {"annotations": notes}}, kind=MERGE)

    def _report(self, pod: Json, phase: str, state: Json) -> None:
        container = {
            "name": pod["spec"]["containers"][0]["name"],
            "image": "x",
            "imageID": "",
            "ready": False,
            "restartCount": 0,
            "state": state,
        }
        status = {"status": {"phase": phase, "containerStatuses": [container]}}
        self.kube.call("PATCH", f"{self.path(pod)}/status", status, kind=MERGE)


def _ready(ready: bool) -> Json:
    return {"status": {"conditions": [{"type": "Ready", "status": str(ready)}]}}


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class OperatorProcess:
    """`python -m spottrain_operator` for a namespace. SIGKILL is its only end in tests that ask for one."""

    def __init__(self, *, kubeconfig: Path, namespace: str, **settings: str) -> None:
        self.namespace = namespace
        self._env = os.environ | {
            "KUBECONFIG": str(kubeconfig),
            "SPOTTRAIN_OPERATOR_NAMESPACES": namespace,
            "SPOTTRAIN_OPERATOR_HEALTH_PORT": "0",
            "SPOTTRAIN_OPERATOR_DEAD_SLACK_SECONDS": "1",
            "SPOTTRAIN_OPERATOR_DEFAULT_POOL": '{"platform": "AWS"}',
        }
        self._env |= {f"SPOTTRAIN_OPERATOR_{name.upper()}": value for name, value in settings.items()}
        self.log = Path(tempfile.mkstemp(prefix="operator-", suffix=".log")[1])
        self._pid: int | None = None
        self._code: int | None = None
        self._begin = 0
        """Where in the log the process' own part begins."""

    def start(self, *, ahead: float = 0) -> None:
        """`ahead`: seconds that its clock is ahead, as if it had been started so much later."""
        self._begin = self.log.stat().st_size
        self._code, self._pid = None, forks().start(self._env, self.log, ahead=ahead)

    def kill(self) -> None:
        if self.running:
            self._signal(signal.SIGKILL)
            self.wait_end()
        self._pid = None

    @property
    def running(self) -> bool:
        if self._pid is not None and self._code is None:
            self._code = forks().poll(self._pid)
        return self._pid is not None and self._code is None

    def wait_ready(self) -> None:
        def look() -> bool:
            assert self.running, f"the operator has ended:\n{self.log.read_text()[-3000:]}"
            return b"caches are filled" in self.log.read_bytes()[self._begin :]

        try:
            wait_for("the operator to be ready", look)
        except AssertionError as waited:
            raise AssertionError(f"{waited}; its log ends with:\n{self.log.read_text()[-3000:]}") from None

    def pause(self) -> None:
        """Nothing of it runs until `resume`; its connections stay."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def wait_end(self) -> int:
        """Its exit status, when it has ended by itself."""
        wait_for("the operator to end", lambda: not self.running)
        assert self._code is not None
        return self._code

    def terminate(self) -> None:
        """By SIGTERM, as the kubelet does it; does not wait for the end."""
        self._signal(signal.SIGTERM)

    def stop(self) -> int:
        self.terminate()
        return self.wait_end()

    def _signal(self, number: signal.Signals) -> None:
        assert self._pid is not None and self._code is None, "the operator does not run"
        os.kill(self._pid, number)

    def __enter__(self) -> OperatorProcess:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.kill()
        if kind is None:
            self.log.unlink()


@cache
def forks() -> Forks:
    """One for all operators of this test process."""
    return Forks()

"""The life of one pod on a node: volumes, init containers, containers, and its end, as a kubelet does it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from spottrain.contract import BIND_ADDRESS
from spottrain_operator.names import SERVICE_ACCOUNT_VARIABLE

from processcluster import volumes
from processcluster.container import IMAGE_REASONS, Container
from processcluster.kube import STRATEGIC, Json, Refused, now
from processcluster.refusals import NOT_ENFORCED, why_not
from processcluster.volumes import FAILED_MOUNT, NotYet, Volumes

if TYPE_CHECKING:
    from processcluster.node import Node

_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
_TOKEN_SECONDS = 30 * 24 * 3600
"""No container here renews its token, and a cluster to play with may run for days."""
_ALWAYS = "Always"


class Pod:
    """One thread lives the pod's life; `update` and `stop` are called from the node's."""

    def __init__(self, node: Node, raw: Json, address: str) -> None:
        self.node, self.raw, self.address = node, raw, address
        self.uid = str(raw["metadata"]["uid"])
        self.root = node.folder / self.uid
        self.root.mkdir(parents=True, exist_ok=True)
        self.volumes = Volumes(pod=self)
        self.inits = [Container(pod=self, raw=c) for c in raw["spec"].get("initContainers") or ()]
        self.mains = [Container(pod=self, raw=c) for c in raw["spec"]["containers"]]
        self.phase, self.start_time = "Pending", now()
        self._refusal = why_not(raw, node.images)
        self._kill_at: float | None = None
        self._news, self._lock = threading.Event(), threading.RLock()
        self._sent: Json = {}
        self.thread = threading.Thread(target=self._live, name=f"pod-{raw['metadata']['name']}", daemon=True)
        self.thread.start()

    @property
    def containers(self) -> list[Container]:
        return self.inits + self.mains

    @property
    def namespace_path(self) -> str:
        return f"/api/v1/namespaces/{self.raw['metadata']['namespace']}"

    @property
    def path(self) -> str:
        return f"{self.namespace_path}/pods/{self.raw['metadata']['name']}"

    # --- what the API server says ---
    def update(self, raw: Json) -> None:
        """The object as it is now: annotations may have changed, or it is to end."""
        self.raw = raw
        meta = raw["metadata"]
        if meta.get("deletionTimestamp"):
            end = time.monotonic() + (meta.get("deletionGracePeriodSeconds") or 0)
            first = self._kill_at is None
            self._kill_at = end if self._kill_at is None else min(end, self._kill_at)
            if first:
                for container in [*self.mains, *(c for c in self.inits if not _is_sidecar(c))]:
                    container.terminate()
        try:
            self.volumes.refresh()
        except NotYet as problem:
            self.event(problem.reason, str(problem))
        self._news.set()

    def stop(self) -> None:
        """Everything of it ends now; nobody is told."""
        for container in self.containers:
            container.kill()

    # --- its life ---
    def _live(self) -> None:
        self.report()
        if self._refusal is not None:
            self._refuse(self._refusal)
        elif self._retried(self.volumes.make) and self._initialised():
            self._run()
        self._end_sidecars()
        for container in self.containers:
            container.kill()
            container.poll()
        if self.node.over.is_set():
            return
        self.phase = "Failed" if any(c.code != 0 for c in self.mains) else "Succeeded"
        self.report()
        self._wait(lambda: bool(self.raw["metadata"].get("deletionTimestamp")), also_when_ending=True)
        self._delete()

    def _refuse(self, sentence: str) -> None:
        for container in self.containers:
            container.waiting = ("CreateContainerConfigError", sentence)
        self.event("Failed", f"Error: {sentence}")
        self.report()
        self._wait(lambda: False)

    def _initialised(self) -> bool:
        """Runs the init containers in their order; a sidecar need only be up."""
        for container in self.inits:
            if not self._retried(container.start):
                return False
            self.report()
            if _is_sidecar(container):
                if not self._wait(partial(self._is_up, container)):
                    return False
            elif not self._completed(container):
                return False
        return True

    def _is_up(self, sidecar: Container) -> bool:
        return sidecar.up or not self._lives(sidecar)

    def _completed(self, container: Container) -> bool:
        while True:
            if not self._wait(container.poll):
                return False
            self.report()
            if container.code == 0:
                return True
            if self.raw["spec"].get("restartPolicy", _ALWAYS) == "Never" or not self._restarted(container):
                return False

    def _run(self) -> None:
        """Starts the containers and looks after them, until all have ended for good."""
        for container in self.mains:
            if not self._retried(container.start):
                return
        self.phase = "Running"
        self.report()
        while any(c.code is None for c in self.mains) and not self.node.over.is_set():
            self._news.wait(0.02)
            self._news.clear()
            for container in [*self.mains, *filter(_is_sidecar, self.inits)]:
                self._lives(container)
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                for container in self.mains:
                    container.kill()

    def _lives(self, container: Container) -> bool:
        """Whether it runs still or again."""
        if container.poll():
            policy = _ALWAYS if _is_sidecar(container) else self.raw["spec"].get("restartPolicy", _ALWAYS)
            again = policy == _ALWAYS or (policy == "OnFailure" and container.code != 0)
            if again and self._kill_at is None:
                self._restarted(container)
            self.report()
        return container.running

    def _restarted(self, container: Container) -> bool:
        """Starts it again; from the second time on after 10, 20, 40 ... 300 s, as a kubelet does."""
        pause = 0 if container.restarts == 0 else min(300, 10 * 2 ** (container.restarts - 1))
        container.last_state = container.state()
        container.process, container.code = None, None
        container.waiting = ("CrashLoopBackOff", f"back-off {pause}s restarting failed container")
        container.restarts += 1
        self.report()
        end = time.monotonic() + pause
        return self._wait(lambda: time.monotonic() >= end) and self._retried(container.start)

    def _end_sidecars(self) -> None:
        """Last of all, the newest first, within what is left of the grace period."""
        grace = self.raw["spec"].get("terminationGracePeriodSeconds", 30)
        end = self._kill_at or time.monotonic() + grace
        for container in reversed(self.inits):
            container.terminate()
            while container.running and not container.poll() and time.monotonic() < end:
                time.sleep(0.02)

    def _delete(self) -> None:
        options = {"kind": "DeleteOptions", "apiVersion": "v1", "gracePeriodSeconds": 0}
        options |= {"preconditions": {"uid": self.uid}}
        self._attempted(lambda: self.node.kube.send("DELETE", self.path, options))

    # --- waiting ---
    def _wait(self, done: Callable[[], bool], *, also_when_ending: bool = False) -> bool:
        """False where the node went, or the pod was to end, before it was done."""
        while not done():
            ending = self._kill_at is not None and not also_when_ending
            if self.node.over.is_set() or (ending and self._ended_in_grace()):
                return False
            self._news.wait(0.05)
            self._news.clear()
        return True

    def _ended_in_grace(self) -> bool:
        """For a pod that ends before it ran: what has been started gets the grace period."""
        for container in self.containers:
            container.poll()
        over = self._kill_at is not None and time.monotonic() >= self._kill_at
        return over or not any(c.running for c in self.containers if not _is_sidecar(c))

    def _retried(self, act: Callable[[], None]) -> bool:
        """Tries until it succeeds; says why not, once for each reason."""
        said = ""

        def succeeds() -> bool:
            nonlocal said
            try:
                act()
            except NotYet as problem:
                self._say_waiting(problem, said)
                said = str(problem)
                time.sleep(0.3)
                return False
            return True

        return self._wait(succeeds)

    def _say_waiting(self, problem: NotYet, said: str) -> None:
        if str(problem) == said:
            return
        if problem.reason == FAILED_MOUNT:  # a kubelet says it in an Event alone
            self.event(problem.reason, str(problem))
            return
        for container in self.containers:
            if container.process is None:
                container.waiting = (problem.reason, str(problem))
        if problem.reason in IMAGE_REASONS:
            self._refusal = str(problem)
        self.event("Failed", f"Error: {problem}")
        self.report()

    # --- what its containers ask ---
    def field(self, path: str) -> str:
        """A field of the downward API."""
        meta, spec = self.raw["metadata"], self.raw["spec"]
        for group in ("annotations", "labels"):
            if path.startswith(f"metadata.{group}['"):
                key = path.partition("'")[2].removesuffix("']")
                return str((meta.get(group) or {}).get(key, ""))
            if path == f"metadata.{group}":
                return "\n".join(f"{k}={json.dumps(v)}" for k, v in sorted((meta.get(group) or {}).items()))
        fields = {
            "metadata.name": meta["name"],
            "metadata.namespace": meta["namespace"],
            "metadata.uid": self.uid,
            "spec.nodeName": self.node.name,
            "spec.serviceAccountName": spec.get("serviceAccountName", "default"),
            "status.hostIP": self.node.address,
            "status.podIP": self.address,
            "status.podIPs": self.address,
        }
        if path not in fields:
            raise NotYet("CreateContainerConfigError", f"the field {path} is not known here")
        return str(fields[path])

    def data_of(self, kind: str, name: str, *, optional: bool) -> dict[str, bytes]:
        return volumes.data_of(self, kind, name, optional=optional)

    def token(self) -> str:
        """A token of the pod's service account, bound to it, so that admission policies see its node."""
        meta = self.raw["metadata"]
        bound = {"kind": "Pod", "apiVersion": "v1", "name": meta["name"], "uid": self.uid}
        spec = {"expirationSeconds": _TOKEN_SECONDS, "boundObjectRef": bound}
        account = self.raw["spec"].get("serviceAccountName") or "default"
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        try:
            path = f"{self.namespace_path}/serviceaccounts/{account}/token"
            return str(self.node.kube.call("POST", path, body)["status"]["token"])
        except Refused as refused:
            raise NotYet(FAILED_MOUNT, str(refused)) from None

    def identity(self) -> dict[str, str]:
        """What stands for the pod's own network, its /tmp and its mounted service account."""
        temporary = self.root / "tmp"
        temporary.mkdir(exist_ok=True)
        found = {
            "HOME": str(temporary),
            "TMPDIR": str(temporary),
            "HOSTNAME": str(self.raw["spec"].get("hostname") or self.raw["metadata"]["name"]),
            BIND_ADDRESS: self.address,
        }
        mounts = [m for c in self.containers for m in c.raw.get("volumeMounts") or ()]
        account = next((m["name"] for m in mounts if m["mountPath"] == _ACCOUNT), None)
        if account is None:
            return found
        return found | {
            "KUBERNETES_SERVICE_HOST": self.node.kube.host,
            "KUBERNETES_SERVICE_PORT": str(self.node.kube.port),
            SERVICE_ACCOUNT_VARIABLE: str(self.volumes.folders[account]),
        }

    # --- what it reports ---
    def report(self) -> None:
        """Writes the status where it has changed."""
        with self._lock:
            status = self._status()
            if status == self._sent or self.node.over.is_set():
                return
            body = {"metadata": {"uid": self.uid}, "status": status}
            if self._attempted(
                lambda: self.node.kube.send("PATCH", f"{self.path}/status", body, kind=STRATEGIC)
            ):
                self._sent = status

    def _status(self) -> Json:
        ready = self.phase == "Running" and all(c.ready for c in self.mains)
        begun = all(c.code == 0 or (_is_sidecar(c) and c.up) for c in self.inits)
        states = {
            "PodReadyToStartContainers": (self._refusal is None, "", ""),
            "Initialized": (begun, "", ""),
            "ContainersReady": (ready, "", ""),
            "Ready": (ready, "", ""),
            "spottrain.dev/ProcessNode": (
                (True, "NotAllEnforced", NOT_ENFORCED)
                if self._refusal is None
                else (False, "NotOnAProcessNode", self._refusal)
            ),
        }
        return {
            "phase": self.phase,
            "hostIP": self.node.address,
            "podIP": self.address,
            "podIPs": [{"ip": self.address}],
            "startTime": self.start_time,
            "conditions": [self._condition(kind, *state) for kind, state in states.items()],
            "initContainerStatuses": [c.status() for c in self.inits],
            "containerStatuses": [c.status() for c in self.mains],
        }

    def _condition(self, kind: str, true: bool, reason: str, message: str) -> Json:
        value = "True" if true else "False"
        before: Json = next((c for c in self._sent.get("conditions", []) if c["type"] == kind), {})
        since = before["lastTransitionTime"] if before.get("status") == value else now()
        words = {"reason": reason, "message": message} if reason else {}
        return {"type": kind, "status": value, "lastTransitionTime": since} | words

    def event(self, reason: str, message: str, part: str = "", *, kind: str = "Warning") -> None:
        """An Event of the pod, or of one part of it."""
        meta = self.raw["metadata"]
        about = {"kind": "Pod", "apiVersion": "v1", "uid": self.uid}
        about |= {"name": meta["name"], "namespace": meta["namespace"], "fieldPath": part}
        body: Json = {
            "metadata": {"generateName": f"{meta['name']}."},
            "involvedObject": about,
            "reason": reason,
            "message": message[:1024],
            "type": kind,
            "count": 1,
            "firstTimestamp": now(),
            "lastTimestamp": now(),
            "source": {"component": "kubelet", "host": self.node.name},
        }
        self._attempted(lambda: self.node.kube.send("POST", f"{self.namespace_path}/events", body))

    def _attempted(self, write: Callable[[], Any]) -> bool:
        """Writes are tried again while the API server does not answer; one that it refuses is logged."""
        while not self.node.over.is_set():
            try:
                write()
                return True
            except Refused as refused:
                self.node.note(f"{self.raw['metadata']['name']}: {refused}")
                return False
            except OSError:
                time.sleep(0.2)
        return False


def _is_sidecar(container: Container) -> bool:
    return container.raw.get("restartPolicy") == _ALWAYS

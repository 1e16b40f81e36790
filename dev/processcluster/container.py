"""One container of a pod: a process of this machine, its environment, its probes and its status."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from localcluster.processes import end_with_parent

from processcluster import marks
from processcluster.images import Image, repository
from processcluster.kube import Json, now
from processcluster.names import with_port_of_its_own
from processcluster.probes import LIVENESS, READINESS, STARTUP, Probe, failure
from processcluster.volumes import NotYet
from processcluster.words import expanded, translated

if TYPE_CHECKING:
    from processcluster.pod import Pod

METADATA_SERVICE: Final = "http://169.254.169.254"
IMAGE_REASONS: Final = ("ErrImageNeverPull", "ImagePullBackOff")
_MESSAGE_BYTES: Final = 4096


@dataclass(kw_only=True)
class Container:
    pod: Pod
    raw: Json
    process: subprocess.Popen[bytes] | None = None
    started_at: str = ""
    finished_at: str = ""
    code: int | None = None
    waiting: tuple[str, str] = ("ContainerCreating", "")
    ready: bool = False
    up: bool = False
    """Its startup probe has succeeded, or it has none."""
    restarts: int = 0
    last_state: Json = field(default_factory=dict)
    out_of_memory: bool = False

    @property
    def name(self) -> str:
        return str(self.raw["name"])

    @property
    def running(self) -> bool:
        return self.process is not None and self.code is None

    @property
    def mark(self) -> str:
        return f"{self.pod.uid}/{self.name}"

    def log(self, *, previous: bool = False) -> Path:
        return self.pod.root / "logs" / f"{self.name}-{self.restarts - previous}.log"

    # --- start ---
    def start(self) -> None:
        """Starts the process. Raises NotYet where something that it needs is not there."""
        image = self._image()
        paths, given = self._paths(image), self._environment()
        environment = self._translated(image, given, paths)
        environment |= {marks.CLUSTER: str(self.pod.node.site), marks.CONTAINER: self.mark}
        names = self.pod.node.names
        command, args = (
            [names.resolved(translated(word, paths)) for word in self._words(part, given)]
            for part in ("command", "args")
        )
        words = [*(command or image.entrypoint), *args]
        folder = translated(self.raw["workingDir"], paths) if "workingDir" in self.raw else self.pod.root
        self.code, self.out_of_memory, self.up, self.ready = (
            None,
            False,
            "startupProbe" not in self.raw,
            False,
        )
        self._message_file.parent.mkdir(exist_ok=True)
        self._message_file.write_bytes(b"")
        self.log().parent.mkdir(exist_ok=True)
        try:
            with self.log().open("ab") as out:
                self.process = subprocess.Popen(
                    words, env=environment, cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                    start_new_session=True, preexec_fn=self._before_exec(),
                )  # fmt: skip
        except OSError as error:
            raise NotYet("RunContainerError", f"{words[0]} cannot be started: {error}") from None
        self.started_at, self.finished_at = now(), ""
        self.pod.event("Started", f"Started container {self.name}", kind="Normal")
        threading.Thread(target=self._probe_until_end, daemon=True).start()

    def _image(self) -> Image:
        name = str(self.raw["image"])
        image = self.pod.node.images.get(repository(name))
        if image is None:
            known = ", ".join(sorted(self.pod.node.images))
            why = (
                f"images here are programs of the checkout ({known}); spottrain-runtime:checkout runs a "
                "script with the checkout's packages, an image of your own needs a real cluster"
            )
            never, back_off = IMAGE_REASONS
            if self.raw.get("imagePullPolicy") == "Never":
                said = f'Container image "{name}" is not present with pull policy of Never'
                raise NotYet(never, f"{said}: {why}")
            raise NotYet(back_off, f'Back-off pulling image "{name}": {why}')
        return image

    def _paths(self, image: Image) -> dict[str, str]:
        message = {self.raw.get("terminationMessagePath", "/dev/termination-log"): str(self._message_file)}
        metadata = {METADATA_SERVICE: self.pod.node.metadata_url}
        return dict(image.folders) | self.pod.volumes.paths(self.raw) | message | metadata

    def _translated(self, image: Image, given: dict[str, str], paths: dict[str, str]) -> dict[str, str]:
        """The whole environment. What is in words of this machine already stays as it is."""
        names = self.pod.node.names
        words = {name: names.resolved(translated(value, paths)) for name, value in given.items()}
        settings = {name: translated(value, paths) for name, value in image.settings.items()}
        return dict(image.environment) | settings | self.pod.identity() | with_port_of_its_own(words)

    def _words(self, part: str, environment: dict[str, str]) -> list[str]:
        return [expanded(word, environment) for word in self.raw.get(part) or ()]

    def _environment(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for source in self.raw.get("envFrom") or ():
            for kind, key in (("configmaps", "configMapRef"), ("secrets", "secretRef")):
                if wanted := source.get(key):
                    optional = bool(wanted.get("optional"))
                    data = self.pod.data_of(kind, wanted["name"], optional=optional)
                    found |= {source.get("prefix", "") + k: v.decode() for k, v in data.items()}
        for item in self.raw.get("env") or ():
            text = self._from(item["valueFrom"]) if "valueFrom" in item else item.get("value") or ""
            found[item["name"]] = text if "valueFrom" in item else expanded(text, found)
        return found

    def _from(self, source: Json) -> str:
        if wanted := source.get("fieldRef"):
            return self.pod.field(wanted["fieldPath"])
        if wanted := source.get("resourceFieldRef"):
            return self._resource(wanted)
        for kind, key in (("configmaps", "configMapKeyRef"), ("secrets", "secretKeyRef")):
            if wanted := source.get(key):
                optional = bool(wanted.get("optional"))
                data = self.pod.data_of(kind, wanted["name"], optional=optional)
                if wanted["key"] not in data and not optional:
                    what = f"{kind.removesuffix('s')} {wanted['name']}"
                    raise NotYet("CreateContainerConfigError", f"couldn't find key {wanted['key']} in {what}")
                return data.get(wanted["key"], b"").decode()
        raise NotYet(
            "CreateContainerConfigError", f"valueFrom of the kind {', '.join(source)} is not known here"
        )

    def _resource(self, wanted: Json) -> str:
        part, _, name = wanted["resource"].partition(".")
        amount = ((self.raw.get("resources") or {}).get(part) or {}).get(name, "0")
        return str(math.ceil(marks.quantity(amount) / marks.quantity(wanted.get("divisor") or "1")))

    def _before_exec(self) -> Callable[[], None]:
        """Of limits.cpu the whole cores hold, by affinity; the node's threads end with their pods'
        processes.
        """
        cpus = sorted(os.sched_getaffinity(0))
        if limit := self.limits.get("cpu"):
            cpus = cpus[: max(1, math.ceil(marks.quantity(limit)))]

        def prepare() -> None:
            end_with_parent()
            os.sched_setaffinity(0, cpus)

        return prepare

    @property
    def limits(self) -> dict[str, str]:
        return dict((self.raw.get("resources") or {}).get("limits") or {})

    # --- end ---
    def terminate(self) -> None:
        """SIGTERM to the container's first process, as a kubelet sends it."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to all of it."""
        if self.process is not None:
            if self.process.poll() is None:
                marks.kill(self.process.pid, group=True)
            marks.kill_marked(marks.CONTAINER, self.mark)

    def poll(self) -> bool:
        """Whether it has ended since the last look. What its first process left behind ends with it."""
        if not self.running or self.process is None or (code := self.process.poll()) is None:
            return False
        self.kill()
        self.code, self.finished_at = (128 - code if code < 0 else code), now()
        self.ready = self.up = False
        return True

    def end_when_out_of_memory(self) -> None:
        """What the kernel does to a container at its memory limit; looked at once a second, so it may
        overshoot.
        """
        limit = self.limits.get("memory")
        if limit and self.running and self.process is not None:
            self.out_of_memory = marks.memory_bytes(self.process.pid) > marks.quantity(limit)
            if self.out_of_memory:
                self.kill()

    # --- status ---
    @property
    def _message_file(self) -> Path:
        return self.pod.root / "messages" / self.name

    def _message(self) -> str:
        text = self._message_file.read_text(errors="replace")[:_MESSAGE_BYTES]
        if not text and self.code and self.raw.get("terminationMessagePolicy") == "FallbackToLogsOnError":
            lines = self.log().read_text(errors="replace").splitlines(keepends=True)
            text = "".join(lines[-80:])[-2048:]
        return text

    def state(self) -> Json:
        if self.code is not None:
            reason = "OOMKilled" if self.out_of_memory else "Error" if self.code else "Completed"
            ended = {"exitCode": self.code, "reason": reason, "message": self._message()}
            times = {"startedAt": self.started_at, "finishedAt": self.finished_at}
            return {"terminated": ended | times | {"containerID": self._id}}
        if self.process is not None:
            return {"running": {"startedAt": self.started_at}}
        return {"waiting": {"reason": self.waiting[0], "message": self.waiting[1]}}

    @property
    def _id(self) -> str:
        return f"process://{self.process.pid}" if self.process else ""

    def status(self) -> Json:
        return {
            "name": self.name,
            "image": self.raw["image"],
            "imageID": self.raw["image"],
            "containerID": self._id,
            "ready": self.ready,
            "started": self.running and self.up,
            "restartCount": self.restarts,
            "state": self.state(),
            "lastState": self.last_state,
        }

    # --- probes ---
    def _probe_until_end(self) -> None:
        """The startup probe first; then readiness and liveness, each at its own times."""
        process = self.process
        probes = [Probe(kind=k, raw=self.raw[k]) for k in (STARTUP, READINESS, LIVENESS) if k in self.raw]
        while process is self.process and self.running and not self.pod.node.over.is_set():
            if self.up and READINESS not in self.raw:
                self._set_ready(True)
            asked = [p for p in probes if (p.kind == STARTUP) != self.up]
            if not asked:
                return
            first = min(asked, key=lambda p: p.due)
            wait = first.due - time.monotonic()
            if wait > 0:
                process and _sleep_while(lambda: process.poll() is None, wait)
            elif self._has_failed(first):
                self._end_in_grace()
                return

    def _has_failed(self, probe: Probe) -> bool:
        """Asks it once; whether the container must end for it."""
        why = failure(probe.raw, self.pod.address, self._port, self._runs)
        too_often = probe.note(why)
        if probe.kind == READINESS:
            if too_often or not why:
                self._set_ready(not why)
            return False
        if probe.kind == STARTUP:
            self.up = not why
        if too_often and self.running:
            where = f"spec.containers{{{self.name}}}"
            self.pod.event("Unhealthy", probe.event(why), where)
            self.pod.event("Killing", probe.end(self.name), where, kind="Normal")
        return too_often

    def _set_ready(self, ready: bool) -> None:
        if self.running and ready != self.ready:
            self.ready = ready
            self.pod.report()

    def _end_in_grace(self) -> None:
        self.terminate()
        grace = self.pod.raw["spec"].get("terminationGracePeriodSeconds", 30)
        process = self.process
        if process is not None and _sleep_while(lambda: process.poll() is None, grace):
            self.kill()

    def _runs(self, command: list[str], seconds: float) -> int:
        image = self._image()
        paths = self._paths(image)
        environment = self._translated(image, self._environment(), paths)
        words = [translated(word, paths) for word in command]
        done = subprocess.run(words, env=environment, cwd=self.pod.root, timeout=seconds, capture_output=True)
        return done.returncode

    def _port(self, port: int | str) -> int:
        named = {p.get("name"): p["containerPort"] for p in self.raw.get("ports") or ()}
        return int(named.get(port, port))


def _sleep_while(going: Callable[[], bool], seconds: float) -> bool:
    """Whether it still goes on after `seconds`."""
    end = time.monotonic() + seconds
    while going() and time.monotonic() < end:
        time.sleep(0.05)
    return going()

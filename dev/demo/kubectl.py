"""kubectl and helm as the demo and the cluster tests call them: one-shot calls, and watches in threads."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Raw = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Kubectl:
    """Calls against one cluster and one namespace. Raises RuntimeError with what the program said."""

    binary: str
    helm_binary: str
    kubeconfig: str
    namespace: str

    def run(self, *args: str, stdin: str | None = None, timeout: float = 60) -> str:
        return self._call([self.binary, "-n", self.namespace, *args], stdin, timeout)

    def helm(self, *args: str, timeout: float = 240) -> str:
        return self._call([self.helm_binary, *args], None, timeout)

    def get(self, kind: str, name: str) -> Raw | None:
        """The object, or None where there is none."""
        text = self.run("get", kind, name, "-o", "json", "--ignore-not-found")
        return json.loads(text) if text.strip() else None

    def items(self, kind: str, *args: str) -> list[Raw]:
        items: list[Raw] = json.loads(self.run("get", kind, "-o", "json", *args))["items"]
        return items

    def apply(self, *objects: Raw) -> str:
        body = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        return self.run("apply", "-f", "-", stdin=json.dumps(body))

    def popen(self, *args: str) -> subprocess.Popen[str]:
        command = [self.binary, "-n", self.namespace, *args]
        return subprocess.Popen(
            command, env=self._env(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def _call(self, command: list[str], stdin: str | None, timeout: float) -> str:
        done = subprocess.run(
            command,
            env=self._env(),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(
                f"{' '.join(command[:6])} … exited {done.returncode}: "
                f"{done.stderr.strip()[-2000:]}\n{done.stdout.strip()[-2000:]}"
            )
        return done.stdout

    def _env(self) -> dict[str, str]:
        return {**os.environ, "KUBECONFIG": self.kubeconfig}


class Watch:
    """Follows `kubectl get KIND --watch` in a thread and hands each event to `on_event(type, object)`."""

    def __init__(self, kubectl: Kubectl, kind: str, on_event: Callable[[str, Raw], None]) -> None:
        self._process = kubectl.popen("get", kind, "--watch", "--output-watch-events", "-o", "json")
        self._on_event = on_event
        self._thread = threading.Thread(target=self._follow, name=f"watch-{kind}", daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:  # with --output-watch-events kubectl writes an event a line
            for line in lines:
                event = json.loads(line)
                self._on_event(event["type"], event["object"])

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(timeout=10)
        self._thread.join(timeout=10)


class LogFollower:
    """Follows one pod's log in a thread, line by line, until it ends."""

    def __init__(self, kubectl: Kubectl, pod: str, container: str, on_line: Callable[[str], None]) -> None:
        self._process = kubectl.popen("logs", "-f", pod, "-c", container)
        self._on_line = on_line
        self._thread = threading.Thread(target=self._follow, name=f"logs-{pod}", daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._on_line(line.rstrip("\n"))

    def join(self, timeout: float) -> None:
        self._thread.join(timeout)
        self._process.terminate()
        self._process.wait(timeout=10)

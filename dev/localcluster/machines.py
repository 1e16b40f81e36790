"""The life of one node's machine: notice, end at the deadline, and a fresh one of the same name.

Used by control.py.

Runs in the supervisor; every public method may be called from any thread.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from localcluster import cgroups, network, processes, store
from localcluster.kubeapi import KubeApi
from localcluster.layout import Node, Paths
from localcluster.shell import discard, read_json, start_daemon, wait_until, write_json

_NAMESPACES = ("--pid", "--fork", "--kill-child", "--mount", "--mount-proc", "--net", "--uts")


@dataclass(kw_only=True, slots=True)
class Machine:
    """One node: its processes, its pending deadline, and the lock that keeps two calls apart."""

    node: Node
    paths: Paths
    api: KubeApi
    _process: subprocess.Popen[bytes] | None = None
    _deadline: threading.Timer | None = None
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def reclaim(self, seconds: float) -> dict[str, Any]:
        """Publishes the notice now; the machine ends `seconds` later."""
        with self._lock:
            if not self._is_up():
                raise RuntimeError(f"{self.node.name} is gone; restore it first")
            if self._deadline is not None:
                raise RuntimeError(f"{self.node.name} has its notice already; cancel it first")
            notice = self._publish(seconds)
            self._deadline = threading.Timer(notice["deadline"] - time.time(), self._on_deadline)
            self._deadline.daemon = True
            self._deadline.start()
            return notice

    def _publish(self, seconds: float) -> dict[str, Any]:
        now = time.time()
        end = datetime.fromtimestamp(now + seconds, UTC)
        notice = {
            "action": "terminate",
            "time": end.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "deadline": now + seconds,
            "published_at": now,
        }
        write_json(self.paths.node(self.node.name).notice, notice)
        self._note("notice", **notice)
        return notice

    def _on_deadline(self) -> None:
        with self._lock:
            if self._deadline is not None:
                self._end(delete_node=True)

    def cancel(self) -> None:
        """Takes a pending notice back."""
        with self._lock:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None
                self._note("cancelled")
            self.paths.node(self.node.name).notice.unlink(missing_ok=True)

    def vanish(self, *, delete_node: bool = True) -> None:
        """Ends the machine at once, without a notice."""
        with self._lock:
            if self._is_up():
                self._end(delete_node=delete_node)

    def _end(self, *, delete_node: bool) -> None:
        """As the cloud does it: all on the machine stops between two instructions, then its Node goes."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self._kill()
        self._note("killed")
        if delete_node:
            self.api.delete_node(self.node.name)
            self._note("deleted")
        cgroups.remove(self.node.name)

    def _kill(self) -> None:
        if self._process is None:
            return
        first = processes.child_of(self._process.pid)
        if first is not None:
            processes.kill(first)
        else:
            self._process.kill()
        self._process.wait(timeout=20)  # returns when the last process of the node is gone
        self._process = None

    def restore(self) -> float:
        """A fresh machine of the same name, with the images on it; gives the seconds until Ready."""
        started = time.monotonic()
        with self._lock:
            self.cancel()
            if self._is_up() and self.api.node_is_ready(self.node.name):
                return 0.0
            self._kill()
            self._clear()
            self._boot()
            wait_until(f"the node {self.node.name}", self._registered, seconds=60, log=self._kubelet_log)
            wait_until(f"{self.node.name} Ready", self._ready, seconds=60, log=self._kubelet_log)
            self._note("restored")
        return time.monotonic() - started

    def _clear(self) -> None:
        self.api.delete_node(self.node.name)
        self.api.end_orphans(self.node.name)
        cgroups.remove(self.node.name)
        cgroups.make(self.node.name)
        discard(self.paths.node(self.node.name).root, self.paths.trash)
        store.clone(self.paths, self.paths.node(self.node.name))

    def _boot(self) -> None:
        command = ["unshare", *_NAMESPACES, sys.executable, "-m", "localcluster.node", self.node.name]
        log = self.paths.logs / f"{self.node.name}.log"
        process = start_daemon([*command, self.paths.state], log=log)
        self._process = process
        found: list[int] = []

        def first() -> bool:
            found.extend(pid for pid in [processes.child_of(process.pid)] if pid is not None)
            return bool(found)

        wait_until(f"the first process of {self.node.name}", first, seconds=10, log=log, process=process)
        network.link_node(self.node, found[0])

    @property
    def _kubelet_log(self) -> Any:
        return self.paths.logs / f"{self.node.name}-kubelet.log"

    def _registered(self) -> bool:
        self._must_be_up()
        return self.api.set_gpus(self.node.name)

    def _ready(self) -> bool:
        self._must_be_up()
        return self.api.node_is_ready(self.node.name)

    def _must_be_up(self) -> None:
        if not self._is_up():
            raise RuntimeError(
                f"{self.node.name} ended at its start; see {self.paths.logs}/{self.node.name}*.log"
            )

    def _is_up(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def status(self) -> dict[str, Any]:
        notice = read_json(self.paths.node(self.node.name).notice)
        return {
            "up": self._is_up(),
            "ready": self._is_up() and self.api.node_is_ready(self.node.name),
            "notice": notice if self._is_up() else None,
        }

    def _note(self, event: str, **more: Any) -> None:
        line = json.dumps({"at": time.time(), "node": self.node.name, "event": event, **more})
        with self.paths.events.open("a") as out:
            out.write(line + "\n")

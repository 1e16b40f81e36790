"""The life of one node's machine: notice, end at the deadline, and a fresh one of the same name.

Runs in the supervisor; every public method may be called from any thread. What a machine is made of is said
by `kubelet_machine` (namespaces with a real kubelet) and by `processcluster.machine` (processes).
"""

from __future__ import annotations

import json
import threading
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from localcluster.kubeapi import KubeApi
from localcluster.layout import Node, Paths
from localcluster.shell import read_json, write_json


@dataclass(kw_only=True)
class Machine(ABC):
    """One node: its pending deadline, and the lock that keeps two calls apart."""

    node: Node
    paths: Paths
    api: KubeApi
    _deadline: threading.Timer | None = None
    _lock: threading.RLock = field(default_factory=threading.RLock)

    @abstractmethod
    def _is_up(self) -> bool: ...

    @abstractmethod
    def _boot(self) -> None:
        """Starts a fresh machine, and returns when its Node is Ready."""

    @abstractmethod
    def _kill(self) -> None:
        """Everything on it stops between two instructions. Nothing happens where it is not up."""

    @abstractmethod
    def _clean(self) -> None:
        """Takes away what is left of a killed machine."""

    def reclaim(self, seconds: float) -> dict[str, Any]:
        """Publishes the notice now; the machine ends `seconds` later."""
        with self._lock:
            if not self._is_up():
                raise RuntimeError(f"{self.node.name} is gone; restore it first")
            if self._deadline is not None:
                raise RuntimeError(
                    f"{self.node.name} has its notice already, and is about to end; restore it then"
                )
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
        self._clean()

    def restore(self) -> float:
        """A fresh machine of the same name; gives the seconds until Ready."""
        started = time.monotonic()
        with self._lock:
            self.cancel()
            if self._is_up() and self.api.node_is_ready(self.node.name):
                return 0.0
            self._kill()
            self.api.delete_node(self.node.name)
            self.api.end_orphans(self.node.name)
            self._clean()
            self._boot()
            self._note("restored")
        return time.monotonic() - started

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

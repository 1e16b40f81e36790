"""A machine with a real kubelet: the first process of namespaces of its own. Used by the supervisor."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from localcluster import cgroups, network, processes, store
from localcluster.machines import Machine
from localcluster.shell import discard, start_daemon, wait_until

_NAMESPACES = ("--pid", "--fork", "--kill-child", "--mount", "--mount-proc", "--net", "--uts")


@dataclass(kw_only=True)
class KubeletMachine(Machine):
    _process: subprocess.Popen[bytes] | None = None

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

    def _clean(self) -> None:
        cgroups.remove(self.node.name)

    def _boot(self) -> None:
        cgroups.make(self.node.name)
        discard(self.paths.node(self.node.name).root, self.paths.trash)
        store.clone(self.paths, self.paths.node(self.node.name))
        self._start()
        wait_until(f"the node {self.node.name}", self._registered, seconds=60, log=self._kubelet_log)
        wait_until(f"{self.node.name} Ready", self._ready, seconds=60, log=self._kubelet_log)

    def _start(self) -> None:
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
    def _kubelet_log(self) -> Path:
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

"""A machine whose node runs containers as processes. Used by the supervisor."""

from __future__ import annotations

import os
import shutil
import ssl
from collections.abc import Callable
from dataclasses import dataclass

from localcluster.machines import Machine
from localcluster.metadata import Metadata
from localcluster.shell import wait_until

from processcluster.images import known_images
from processcluster.kube import Kube
from processcluster.names import Names
from processcluster.node import Node


@dataclass(kw_only=True)
class ProcessMachine(Machine):
    kube: Kube
    tls: ssl.SSLContext
    new_address: Callable[[], str]
    names: Names
    _node: Node | None = None

    def _is_up(self) -> bool:
        return self._node is not None

    def _kill(self) -> None:
        if self._node is not None:
            self._node.power_off()
            self._node = None

    def _clean(self) -> None:
        shutil.rmtree(self.paths.node(self.node.name).root, ignore_errors=True)

    def _boot(self) -> None:
        paths = self.paths.node(self.node.name)
        paths.root.mkdir(parents=True, exist_ok=True)
        node = Node(
            name=self.node.name,
            address=self.node.address,
            kube=self.kube,
            site=self.paths.state,
            folder=paths.root / "pods",
            images=known_images(),
            labels=self.node.labels,
            tls=self.tls,
            new_address=self.new_address,
            names=self.names,
            metadata=Metadata(node=self.node, paths=paths, instance_id=f"i-{os.urandom(8).hex()}0"),
        )
        node.start()
        self._node = node
        wait_until(f"{self.node.name} Ready", lambda: self.api.node_is_ready(self.node.name), seconds=30)

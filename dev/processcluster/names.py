"""Names of pods in place of DNS: the pods of a gang call rank 0 by the name that its Service gives it."""

from __future__ import annotations

import ipaddress
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from spottrain.contract import Env

from processcluster.kube import Json
from processcluster.volumes import NotYet

_NAME: Final = re.compile(r"\b([a-z0-9-]+)\.([a-z0-9-]+)\.([a-z0-9-]+)\.svc(?:\.cluster\.local)?\b")


@dataclass(kw_only=True)
class Names:
    """Addresses of a cluster's pods by HOSTNAME.SUBDOMAIN.NAMESPACE. Safe for threads."""

    _addresses: dict[tuple[str, str, str], str] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, pod: Json, address: str) -> None:
        """A pod with a host name and a subdomain; others have no name. The newest of a name counts."""
        spec = pod["spec"]
        if spec.get("hostname") and spec.get("subdomain"):
            with self._lock:
                key = (spec["hostname"], spec["subdomain"], pod["metadata"]["namespace"])
                self._addresses[key] = address

    def resolved(self, text: str) -> str:
        """With addresses in place of names. Raises NotYet where a name has no pod yet."""

        def address(found: re.Match[str]) -> str:
            with self._lock:
                known = self._addresses.get((found[1], found[2], found[3]))
            if known is None:
                raise NotYet(
                    "ContainerCreating", f"there is no pod {found[1]} yet, which this one calls by name"
                )
            return known

        return _NAME.sub(address, text)


_FIRST_PORT: Final = 20_000
_PAIRS: Final = 4_500
"""Below the ports that a Linux gives to clients."""


def with_port_of_its_own(environment: Mapping[str, str]) -> dict[str, str]:
    """With another MASTER_PORT for each gang, the same in all its pods, by the address of its rank 0.

    torch's store listens on all addresses of the machine, whatever address it is told. A gang uses its port
    and the one after it.
    """
    if Env.RENDEZVOUS not in environment:
        return dict(environment)
    host, _, _ = environment[Env.RENDEZVOUS].rpartition(":")
    port = str(_FIRST_PORT + 2 * (int(ipaddress.ip_address(host)) % _PAIRS))
    ports = dict.fromkeys(("MASTER_PORT", "PET_MASTER_PORT"), port)
    return {**environment, **ports, Env.RENDEZVOUS: f"{host}:{port}"}

"""Configuration of the node's programs, as text.

Called by node.py and store.py; nothing here touches the system.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from localcluster import cgroups, layout
from localcluster.layout import Node, NodePaths, Paths

CNI_PLUGINS = "/usr/lib/cni"


def containerd(root: Path, state: str, socket: Path, *, cni: Path | None) -> str:
    """containerd's configuration; without `cni` only its image store runs."""
    lines = [
        "version = 2",
        f'root = "{root}"',
        f'state = "{state}"',
        "oom_score = 0",
        f'[grpc]\n  address = "{socket}"',
        '[plugins."io.containerd.internal.v1.opt"]\n  path = "%s"' % (root / "opt"),
    ]
    if cni is None:
        return "\n".join(['disabled_plugins = ["io.containerd.grpc.v1.cri"]', *lines]) + "\n"
    return "\n".join([*lines, _cri(cni)]) + "\n"


def _cri(cni: Path) -> str:
    # restrict_oom_score_adj: without CAP_SYS_RESOURCE runc otherwise dies with "can't get final child's PID".
    return f"""[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{layout.PAUSE_IMAGE}"
  restrict_oom_score_adj = true
  disable_apparmor = true
  stream_server_address = "127.0.0.1"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{CNI_PLUGINS}"
    conf_dir = "{cni}"
"""


def pod_network(node: Node) -> str:
    """Pods of a node hang on its bridge; no masquerading, because every subnet here is routed."""
    bridge = {
        "type": "bridge",
        "bridge": "cni0",
        "isGateway": True,
        "hairpinMode": True,
        "ipam": {
            "type": "host-local",
            "ranges": [[{"subnet": node.pod_subnet, "gateway": node.pod_gateway}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        },
    }
    plugins = [bridge, {"type": "portmap", "capabilities": {"portMappings": True}}]
    return json.dumps({"cniVersion": "0.4.0", "name": "pods", "plugins": plugins})


def kubelet(node: Node, paths: NodePaths, authority: Path) -> dict[str, Any]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {"anonymous": {"enabled": False}, "x509": {"clientCAFile": str(authority)}},
        "authorization": {"mode": "Webhook"},
        "address": node.address,
        "containerRuntimeEndpoint": f"unix://{paths.socket}",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": cgroups.of_node(node.name),
        "failCgroupV1": False,
        "failSwapOn": False,
        "enforceNodeAllocatable": [],
        "clusterDNS": [layout.CONTROL_ADDRESS],
        "clusterDomain": layout.DNS_DOMAIN,
        "resolvConf": "",  # the machine's own name servers and search domains are not for pods
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        # On a disk with under 15 % free the defaults would evict every pod.
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "serializeImagePulls": False,
        "maxPods": 110,
    }


def corefile(paths: Paths) -> str:
    """Names of Services and their pods, and nothing else: no name is asked for outside the machine.

    Without a cache, so that a pod which looks for its rank 0 too early finds it at the next try. Every other
    name is said not to exist; a refusal would be read as "try again later".
    """
    return f"""{layout.DNS_DOMAIN}:{layout.DNS_PORT} in-addr.arpa:{layout.DNS_PORT} {{
    bind {layout.CONTROL_ADDRESS}
    errors
    kubernetes {layout.DNS_DOMAIN} in-addr.arpa {{
        kubeconfig {paths.pki / "coredns.kubeconfig"}
        ttl 1
    }}
}}
.:{layout.DNS_PORT} {{
    bind {layout.CONTROL_ADDRESS}
    errors
    template ANY ANY {{
        rcode NXDOMAIN
    }}
}}
"""

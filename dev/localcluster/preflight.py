"""What must be true before anything starts, said in one sentence where it is not. Called by `up`."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from localcluster import binaries, cgroups
from localcluster.disk import free_gb
from localcluster.layout import Paths
from localcluster.shell import ClusterError, run, say

# Debian package -> a file that shows it is there.
PACKAGES = {
    "containerd": "/usr/bin/containerd",
    "runc": "/usr/sbin/runc",
    "containernetworking-plugins": "/usr/lib/cni/bridge",
    "iptables": "/usr/sbin/iptables",
    "iproute2": "/usr/sbin/ip",
    "conntrack": "/usr/sbin/conntrack",
    "buildah": "/usr/bin/buildah",
    "skopeo": "/usr/bin/skopeo",
    "debootstrap": "/usr/sbin/debootstrap",
    "openssl": "/usr/bin/openssl",
    "util-linux": "/usr/bin/setpriv",
}
NEEDED_MEMORY_GB = 6.0
COLD_GB, COLD_MINUTES = 25.0, 20
WARM_GB, WARM_MINUTES = 2.0, 1
_LONGEST_SOCKET_PATH = 90


def check(paths: Paths, *, cold: bool) -> None:
    """Raises with the first thing that is missing; packages are handled by `ensure_packages`."""
    _machine()
    _memory()
    _disk(paths, cold=cold)
    if len(str(paths.state)) > _LONGEST_SOCKET_PATH - len("/run/nodes/spot-a/cri.sock"):
        raise ClusterError(
            f"the path {paths.state} is too long for a socket in it; set SPOTTRAIN_DEV_DIR to a shorter one"
        )


def _machine() -> None:
    if sys.platform != "linux":
        raise ClusterError(f"the local cluster needs Linux namespaces; this is {platform.system()}")
    if os.geteuid() != 0:
        raise ClusterError(
            "the local cluster needs root (namespaces, mounts, control groups); run it with sudo -E"
        )
    if platform.machine() not in ("x86_64", "aarch64"):
        raise ClusterError(f"no pinned program runs on {platform.machine()}")
    found = cgroups.hierarchies()
    if not found:
        raise ClusterError("no control groups are mounted under /sys/fs/cgroup, and a kubelet needs them")
    note = " (untried: only v1 was at hand)" if cgroups.version() == 2 else ""
    say(f"Linux {platform.release()}, {platform.machine()}, cgroup v{cgroups.version()}{note}")


def _memory() -> None:
    text = Path("/proc/meminfo").read_text()
    available = (
        next(int(line.split()[1]) for line in text.splitlines() if line.startswith("MemAvailable")) / 1e6
    )
    if available < NEEDED_MEMORY_GB:
        raise ClusterError(
            f"{available:.1f} GB of memory are available and the cluster needs {NEEDED_MEMORY_GB:.0f}"
        )


def _disk(paths: Paths, *, cold: bool) -> None:
    needed, minutes = (COLD_GB, COLD_MINUTES) if cold else (WARM_GB, WARM_MINUTES)
    free = free_gb(paths.state)
    start = "cold" if cold else "warm"
    say(f"needs about {needed:.0f} GB and {minutes} min here ({start}); {free:.0f} GB are free")
    if free < needed:
        raise ClusterError(
            f"{paths.state} has {free:.1f} GB free and needs {needed:.0f}; SPOTTRAIN_DEV_DIR can move it"
        )


def is_cold(paths: Paths) -> bool:
    return (
        bool(binaries.missing(paths, binaries.CLUSTER_PROGRAMS))
        or not (paths.golden / "loaded.json").exists()
    )


def ensure_packages() -> None:
    """Installs what is missing after asking; never beside a container runtime of another origin."""
    missing = [name for name, file in PACKAGES.items() if not Path(file).exists()]
    if not missing:
        return
    _refuse_foreign_runtime(missing)
    if shutil.which("apt-get") is None:
        raise ClusterError(f"missing here, and this is no Debian to install them on: {', '.join(missing)}")
    _ask(missing)
    _install(missing)


def _refuse_foreign_runtime(missing: list[str]) -> None:
    for package in ("containerd.io", "docker-ce"):
        if "containerd" in missing and _is_installed(package):
            raise ClusterError(
                f"the package {package} is installed and Debian's containerd would replace parts of it; "
                "use a machine or VM without Docker's own packages"
            )


def _is_installed(package: str) -> bool:
    done = subprocess.run(["dpkg-query", "-W", "-f", "${Status}", package], capture_output=True, text=True)
    return "install ok installed" in done.stdout


def _ask(missing: list[str]) -> None:
    say(f"missing Debian packages: {' '.join(missing)}")
    if os.environ.get("YES") == "1":
        return
    if not sys.stdin.isatty():
        raise ClusterError("nobody is here to ask; YES=1 installs them")
    if input("install them with apt-get? [y/N] ").strip().lower() not in ("y", "yes"):
        raise ClusterError("nothing was installed")


def _install(missing: list[str]) -> None:
    """policy-rc.d keeps Debian from starting containerd's own service: the cluster runs its own ones."""
    policy = Path("/usr/sbin/policy-rc.d")
    own = not policy.exists()
    if own:
        policy.write_text("#!/bin/sh\nexit 101\n")
        policy.chmod(0o755)
    try:
        run(["apt-get", "update", "-qq"], timeout=300)
        quiet = {"DEBIAN_FRONTEND": "noninteractive"}
        run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing], env=quiet, timeout=600)
    finally:
        if own:
            policy.unlink()

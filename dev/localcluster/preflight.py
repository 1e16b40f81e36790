"""What must be true before anything starts, said in one sentence where it is not. Called by `up`."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from localcluster import binaries, cgroups, layout
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
    "util-linux": "/usr/bin/setpriv",
}
NEEDED_MEMORY_GB = 6.0
COLD_GB, COLD_MINUTES = 25.0, 20
WARM_GB, WARM_MINUTES = 2.0, 1
_LONGEST_SOCKET_PATH = 90


def main() -> int:
    """Says all that is missing, before anything is downloaded or built. Needs the standard library alone."""
    paths = layout.default_paths()
    try:
        check(paths, cold=is_cold(paths))
    except ClusterError as error:
        say(f"error: {error}")
        return 2
    return 0


def check(paths: Paths, *, cold: bool) -> None:
    """Raises with all that is missing and how to go on."""
    found = [*_machine(), *_memory(), *_disk(paths, cold=cold), *_packages(), *_socket_path(paths)]
    if found:
        raise ClusterError(
            "the cluster of containers cannot start here:\n"
            + "\n".join(f"  - {problem}" for problem in found)
            + "\n`make demo` needs none of it: real control plane, containers are processes."
        )


def _machine() -> Iterator[str]:
    if sys.platform != "linux":
        yield f"it needs Linux namespaces, and this is {platform.system()}"
        return
    if os.geteuid() != 0:
        yield "it needs root (namespaces, mounts, control groups): run it with sudo -E"
    if platform.machine() not in ("x86_64", "aarch64"):
        yield f"no pinned program runs on {platform.machine()}"
    if not cgroups.hierarchies():
        yield "no control groups are mounted under /sys/fs/cgroup, and a kubelet needs them"


def _memory() -> Iterator[str]:
    rows = Path("/proc/meminfo").read_text().splitlines() if sys.platform == "linux" else []
    for row in rows:
        if row.startswith("MemAvailable") and (gigabytes := int(row.split()[1]) / 1e6) < NEEDED_MEMORY_GB:
            yield f"{gigabytes:.1f} GB of memory are available, and it needs {NEEDED_MEMORY_GB:.0f}"


def _disk(paths: Paths, *, cold: bool) -> Iterator[str]:
    needed, minutes = (COLD_GB, COLD_MINUTES) if cold else (WARM_GB, WARM_MINUTES)
    free = free_gb(paths.state)
    say(f"The cluster of containers needs {needed:.0f} GB and {minutes} min here; {free:.0f} GB are free.")
    if free < needed:
        yield (f"{paths.state} has {free:.1f} GB free: SPOTTRAIN_DEV_DIR names another folder")


def _packages() -> Iterator[str]:
    missing = missing_packages()
    if not missing:
        return
    names = " ".join(missing)
    if shutil.which("apt-get") is None:
        yield f"these are missing, and this is no Debian to install them on: {names}"
    elif foreign := [package for package in ("containerd.io", "docker-ce") if _is_installed(package)]:
        yield (
            f"the package {foreign[0]} is installed, and Debian's containerd would replace parts of it: "
            "use a machine or VM without Docker's own packages"
        )
    elif os.environ.get("YES") != "1" and not sys.stdin.isatty():
        yield f"these Debian packages are missing: {names}; YES=1 in the environment lets it install them"


def _socket_path(paths: Paths) -> Iterator[str]:
    if len(str(paths.state)) > _LONGEST_SOCKET_PATH - len("/run/nodes/spot-a/cri.sock"):
        yield f"the path {paths.state} is too long for a socket in it: set SPOTTRAIN_DEV_DIR to a shorter one"


def missing_packages() -> list[str]:
    return [name for name, file in PACKAGES.items() if not Path(file).exists()]


def is_cold(paths: Paths) -> bool:
    return (
        bool(binaries.missing(paths, binaries.CONTAINER_PROGRAMS))
        or not (paths.golden / "loaded.json").exists()
    )


def ensure_packages() -> None:
    """Installs what is missing, after asking where YES=1 is not set."""
    if missing := missing_packages():
        if os.environ.get("YES") != "1":
            say(f"missing Debian packages: {' '.join(missing)}")
            if input("install them with apt-get? [y/N] ").strip().lower() not in ("y", "yes"):
                raise ClusterError("nothing was installed")
        _install(missing)


def _is_installed(package: str) -> bool:
    done = subprocess.run(["dpkg-query", "-W", "-f", "${Status}", package], capture_output=True, text=True)
    return "install ok installed" in done.stdout


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


if __name__ == "__main__":
    sys.exit(main())

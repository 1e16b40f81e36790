"""kube-apiserver and kube-scheduler of another version than the pinned one, built when a test asks for it.

Used by tests that `make test` leaves out (tests/native, `make test-with X=kubernetes`): a build takes a
quarter of an hour on two cores. Go's checksum database takes the place of a go.sum of ours.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Final

from localcluster import binaries, layout
from localcluster.layout import Paths
from localcluster.shell import locked, run, say

NAMES: Final = ("kube-apiserver", "kube-scheduler")
_PACKAGE: Final = "k8s.io/kubernetes/cmd"
_STAMP: Final = "k8s.io/component-base/version"


def programs(version: str, paths: Paths | None = None) -> Path:
    """A folder with both programs of e.g. 1.37.1, and the pinned etcd."""
    paths = paths or layout.default_paths()
    folder = paths.state / "kubernetes" / version
    with locked(paths.state / "lock"):
        if missing := [name for name in NAMES if not (folder / name).exists()]:
            _build(version, missing, folder, paths)
    link = folder / "etcd"
    link.unlink(missing_ok=True)
    link.symlink_to(paths.bin / "etcd")
    return folder


def _build(version: str, names: list[str], folder: Path, paths: Paths) -> None:
    go, module = binaries.find_go(paths), folder / "module"
    env = binaries.go_env(paths) | {"GOFLAGS": "-buildvcs=false -modcacherw -mod=mod"}
    log = paths.state / "build.log"
    module.mkdir(parents=True, exist_ok=True)
    major, minor = version.split(".")[:2]
    stamps = {"gitVersion": f"v{version}", "gitMajor": major, "gitMinor": minor}
    flags = " ".join(["-s", "-w", *(f"-X {_STAMP}.{name}={value}" for name, value in stamps.items())])
    try:
        (module / "tools.go").write_text(_tools())
        (module / "go.mod").write_text(_go_mod(version, go, env, module))
        run([go, "mod", "tidy"], cwd=module, env=env, log=log, timeout=600)
        for name in names:
            say(f"building {name} {version} (once)")
            made = folder / f"{name}.partial"
            words: list[str | Path] = [go, "build", "-trimpath", "-ldflags", flags, "-o", made]
            run([*words, f"{_PACKAGE}/{name}"], cwd=module, env=env, log=log, timeout=3600)
            made.replace(folder / name)
    finally:
        for cache in ("build", "mod"):
            shutil.rmtree(paths.go / cache, ignore_errors=True)


def _tools() -> str:
    imports = "".join(f'\t_ "{_PACKAGE}/{name}"\n' for name in NAMES)
    return f"//go:build tools\n\npackage tools\n\nimport (\n{imports})\n"


def _go_mod(version: str, go: Path, env: dict[str, str], folder: Path) -> str:
    """Kubernetes replaces its staging modules by folders; here by their releases, v0.37.1 for 1.37.1."""
    (folder / "go.mod").write_text("module spottrain.dev/kubernetes\n")
    words: list[str | Path] = [go, "mod", "download", "-json", f"k8s.io/kubernetes@v{version}"]
    theirs = Path(json.loads(run(words, cwd=folder, env=env, timeout=600))["GoMod"]).read_text()
    language = re.search(r"^go .*$", theirs, re.MULTILINE)
    staging = re.findall(r"(k8s\.io/[a-z0-9-]+) => \./staging", theirs)
    replaced = "".join(f"\t{name} => {name} v0.{version.removeprefix('1.')}\n" for name in staging)
    head = f"module spottrain.dev/kubernetes\n\n{language[0] if language else ''}\n"
    return f"{head}\nrequire k8s.io/kubernetes v{version}\n\nreplace (\n{replaced})\n"

"""Builds the project's images with buildah and loads them to the nodes.

Called by `up`, `build` and `load-images`; the cluster tests have an image more, by `bring`.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path

from localcluster import layout, store
from localcluster.disk import Meter
from localcluster.layout import NodePaths, Paths
from localcluster.progress import Progress
from localcluster.shell import ClusterError, locked, run, say, write_json

_HOST_BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")
_INNER_BUNDLE = "/run/host-ca.crt"
# More than this is not copied into each running node; nodes that start afterwards share it.
_LARGEST_SENT_GB = 1.0
PROJECT_IMAGES = {
    layout.OPERATOR_IMAGE: "operator",
    layout.RUNTIME_IMAGE: "runtime",
    layout.SYNC_IMAGE: "sync",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Builder:
    """buildah with a storage folder of our own."""

    paths: Paths
    meter: Meter

    @property
    def log(self) -> Path:
        return self.paths.buildah / "build.log"

    def buildah(self, *words: str | Path, timeout: float = 60, log: Path | None = None) -> str:
        folders = ("--root", self.paths.buildah / "storage", "--runroot", self.paths.buildah / "run")
        # In a mount namespace of its own: a build that was killed leaves no mounts behind.
        command = ("unshare", "--mount", "buildah", *folders, "--storage-driver", "overlay", *words)
        env = {"BUILDAH_ISOLATION": "chroot", "TMPDIR": str(self.paths.buildah / "tmp")}
        return run(command, env=env, timeout=timeout, log=log).strip()

    def image_id(self, name: str) -> str | None:
        try:
            return self.buildah("inspect", "--type", "image", "--format", "{{.FromImageID}}", name)
        except ClusterError:
            return None


def build_all(builder: Builder, targets: dict[str, str] | None = None) -> None:
    """Builds pause, base and the project's images; what has not changed comes from buildah's cache."""
    shutil.rmtree(builder.paths.buildah / "tmp", ignore_errors=True)
    (builder.paths.buildah / "tmp").mkdir(parents=True)
    builder.log.unlink(missing_ok=True)
    build_pause(builder)
    if targets is None:
        targets = PROJECT_IMAGES
    if targets and builder.image_id(layout.BASE_IMAGE) is None:
        with (
            builder.meter.step("base image"),
            Progress("Building the base image by debootstrap, once", usual=28),
        ):
            _build_base(builder)
    for name, target in targets.items():
        with builder.meter.step(f"build image {target}"), Progress(f"Building the image {name}", usual=60):
            _build_target(builder, name, target)


def bring(paths: Paths, name: str, target: str) -> None:
    """Builds and loads one image that `up` does not."""
    builder = Builder(paths=paths, meter=Meter(state=paths.state, file=paths.measures))
    with locked(paths.state / "lock"):
        build_all(builder, {name: target})
        load_all(builder, [name])


def build_pause(builder: Builder) -> None:
    if builder.image_id(layout.PAUSE_IMAGE) is not None:
        return
    container = builder.buildah("from", "scratch")
    builder.buildah("copy", container, (builder.paths.bin / "pause").resolve(), "/pause")
    builder.buildah("config", "--entrypoint", '["/pause"]', container)
    builder.buildah("commit", "--rm", container, layout.PAUSE_IMAGE)


def _build_base(builder: Builder) -> None:
    """A Debian root file system, as the image that the Dockerfile starts from."""
    tree, archive = builder.paths.buildah / "tmp" / "tree", builder.paths.buildah / "tmp" / "tree.tar"
    run(["debootstrap", "--variant=minbase", "bookworm", tree, *_mirror()], log=builder.log, timeout=600)
    for leftover in [*tree.glob("var/cache/apt/archives/*.deb"), *tree.glob("var/lib/apt/lists/*_*")]:
        leftover.unlink()
    run(["tar", "-C", tree, "--numeric-owner", "-cf", archive, "."], timeout=120)
    shutil.rmtree(tree)
    container = builder.buildah("from", "scratch")
    builder.buildah("add", container, archive, "/", timeout=120)  # unpacks it and keeps the owners
    builder.buildah("commit", "--rm", container, layout.BASE_IMAGE, timeout=120)
    archive.unlink()


def _mirror() -> list[str]:
    """The mirror that this machine itself uses."""
    found = run(
        ["apt-get", "indextargets", "--format", "$(SITE) $(CODENAME) $(REPO_URI)", "Codename: bookworm"]
    )
    rows = [line.split() for line in found.splitlines() if line.strip()]
    return [rows[0][-1]] if rows else []


def _build_target(builder: Builder, name: str, target: str) -> None:
    repository = layout.repository()
    trust: list[str] = []
    if _HOST_BUNDLE.exists():  # a machine behind a proxy has its proxy's certificate in here
        trust = [
            "--volume",
            f"{_HOST_BUNDLE}:{_INNER_BUNDLE}:ro",
            "--build-arg",
            f"CA_BUNDLE={_INNER_BUNDLE}",
        ]
    builder.buildah(
        *("bud", "--layers", "--target", target, "--tag", name),
        *("--build-arg", f"BASE_IMAGE={layout.BASE_IMAGE}", *trust),
        *("--file", repository / "Dockerfile", repository),
        timeout=1800,
        log=builder.log,
    )


def load_all(builder: Builder, names: list[str]) -> None:
    """Brings images into the golden store and into every running node; what is there already is skipped."""
    wanted = {name: image for name in names if (image := builder.image_id(name))}
    nodes = _running_nodes(builder.paths)
    held = [store.loaded(builder.paths), *(json.loads(paths.loaded.read_text()) for paths in nodes)]
    stale = [name for name, image in wanted.items() if any(have.get(name) != image for have in held)]
    if not stale:
        return
    with store.golden_daemon(builder.paths) as golden:
        for name in stale:
            _load(builder, name, wanted[name], golden)


def _running_nodes(paths: Paths) -> list[NodePaths]:
    """A node that was taken leaves its socket behind, and nobody answers there."""
    return [node for known in layout.NODES if _answers(node := paths.node(known.name))]


def _answers(node: NodePaths) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(node.socket)) == 0


def _load(builder: Builder, name: str, image: str, golden: Path) -> None:
    with (
        builder.meter.step(f"load {name.rpartition('/')[2]}"),
        Progress(f"Loading the image {name}", usual=60),
    ):
        try:
            _transfer(builder, name, image, golden)
        except ClusterError as error:
            # The old image's name is gone before the new one is unpacked: a garbage collection in between
            # takes the layers that both share ("parent snapshot does not exist").
            say(f"  once more, because {str(error).splitlines()[0]}")
            _transfer(builder, name, image, golden)


def _transfer(builder: Builder, name: str, image: str, golden: Path) -> None:
    folder = builder.paths.state / "layout"
    try:
        _export(builder, name, folder)
        _import_everywhere(builder.paths, name, image, folder, golden)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _export(builder: Builder, name: str, folder: Path) -> None:
    """An OCI layout. The blobs that the store has are linked in first: only new ones are written."""
    shutil.rmtree(folder, ignore_errors=True)
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    have = store.golden_root(builder.paths) / store.BLOBS
    for digest in store.blobs_of(store.golden_root(builder.paths)):
        os.link(have / digest, blobs / digest)
    # skopeo, not `buildah push`: for an OCI layout buildah 1.28 compresses whatever it is told (minutes).
    storage = f"[overlay@{builder.paths.buildah / 'storage'}+{builder.paths.buildah / 'run'}]"
    source = f"containers-storage:{storage}{name}"
    words = ("--dest-oci-accept-uncompressed-layers", source, f"oci:{folder}:{name}")
    command = ("unshare", "--mount", "skopeo", "--insecure-policy", "copy", "--quiet", *words)
    run(command, env={"TMPDIR": str(builder.paths.buildah / "tmp")}, timeout=600, log=builder.log)


def _import_everywhere(paths: Paths, name: str, image: str, folder: Path, golden: Path) -> None:
    """Nodes first: the last one, the golden store, may consume the files."""
    log = paths.golden / "import.log"
    for node in _running_nodes(paths):
        _import_to_node(node, name, image, folder, log)
    root = store.golden_root(paths)
    if (
        name in store.loaded(paths)
        and store.missing_gb(folder, name, store.blobs_of(root)) > _LARGEST_SENT_GB
    ):
        store.forget_image(golden, name)  # first the old one goes, or both would be on disk
    have = store.blobs_of(root)
    store.import_image(golden, folder, name, have, log=log, consume=True)
    write_json(paths.golden / "loaded.json", {**store.loaded(paths), name: image})


def _import_to_node(node: NodePaths, name: str, image: str, folder: Path, log: Path) -> None:
    have = store.blobs_of(node.containerd)
    if store.missing_gb(folder, name, have) > _LARGEST_SENT_GB:
        say(f"{node.root.name} is up and {name} is large: it has it after `vanish` and `restore`")
        return
    store.import_image(node.socket, folder, name, have, log=log, consume=False)
    write_json(node.loaded, {**json.loads(node.loaded.read_text()), name: image})

"""The image store that every node starts from, and loading of images. Called by images.py and the supervisor.

As a cloud's nodes start from a machine image, a node here starts from a copy of `golden`: hard links for
layers and blobs (which nothing ever changes in place), real copies of the two small data bases.
"""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from localcluster import configs
from localcluster.layout import NodePaths, Paths
from localcluster.shell import ClusterError, read_json, run, start_daemon, tail, wait_until, write_json

BLOBS = Path("io.containerd.content.v1.content") / "blobs" / "sha256"


def golden_root(paths: Paths) -> Path:
    return paths.golden / "containerd"


def loaded(paths: Paths) -> dict[str, str]:
    """Image name to image id, as the golden store holds them."""
    return dict(read_json(paths.golden / "loaded.json") or {})


def clone(paths: Paths, node: NodePaths) -> None:
    """Gives a node its image store: seconds, and next to no disk."""
    shutil.rmtree(node.containerd, ignore_errors=True)
    node.root.mkdir(parents=True, exist_ok=True)
    run(["cp", "-al", golden_root(paths), node.containerd], timeout=120)
    for base in golden_root(paths).rglob("*.db"):  # written in place, so never shared
        own = node.containerd / base.relative_to(golden_root(paths))
        own.unlink()
        shutil.copy2(base, own)
    write_json(node.loaded, loaded(paths))


@contextmanager
def golden_daemon(paths: Paths) -> Iterator[Path]:
    """containerd over the golden store, without its Kubernetes half; gives its socket."""
    paths.golden.mkdir(parents=True, exist_ok=True)
    socket, log = paths.golden / "ctr.sock", paths.golden / "containerd.log"
    socket.unlink(missing_ok=True)
    config = paths.golden / "containerd.toml"
    config.write_text(configs.containerd(golden_root(paths), str(paths.golden / "state"), socket, cni=None))
    # A mount namespace of its own: what it mounts while it unpacks goes with it, also after a crash.
    command: list[str | Path] = [
        "unshare",
        "--mount",
        "setpriv",
        "--pdeathsig",
        "KILL",
        "containerd",
        "--config",
        config,
    ]
    process = start_daemon(command, log=log)
    try:
        wait_until("the image store's socket", lambda: _answers(socket), seconds=30, log=log)
        yield socket
    finally:
        process.terminate()
        process.wait(timeout=20)


def _answers(socket: Path) -> bool:
    if not socket.exists():
        return False
    try:
        run(["ctr", "--address", socket, "--timeout", "5s", "version"], timeout=10)
    except ClusterError:
        return False
    return True


def blobs_of(root: Path) -> set[str]:
    folder = root / BLOBS
    return {file.name for file in folder.iterdir()} if folder.exists() else set()


def import_image(
    socket: Path, layout_folder: Path, name: str, have: set[str], *, log: Path, consume: bool
) -> None:
    """Sends one image of an OCI layout to a containerd, but only the blobs that it lacks.

    With `consume` each blob is deleted once it was sent, so that a large one is on disk twice only briefly.
    """
    command = ["ctr", f"--address={socket}", "--namespace=k8s.io", "images", "import", "--all-platforms", "-"]
    with log.open("ab") as out:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out, stderr=out)
        assert process.stdin is not None
        try:
            _send(process.stdin, layout_folder, name, have, consume)
            process.stdin.close()
        except BrokenPipeError:
            pass  # it ended early; its own words are in the log
        if process.wait(timeout=600) != 0:
            raise ClusterError(f"importing {name} failed:\n{tail(log)}")


def _send(out: IO[bytes], folder: Path, name: str, have: set[str], consume: bool) -> None:
    index = image_index(folder, name)
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        _add_text(tar, "oci-layout", {"imageLayoutVersion": "1.0.0"})
        for digest in digests(folder, index):
            if digest not in have:
                file = folder / "blobs" / "sha256" / digest
                tar.add(file, f"blobs/sha256/{digest}")
                if consume:
                    file.unlink()
        _add_text(tar, "index.json", index)


def forget_image(socket: Path, name: str) -> None:
    """Takes an image and what only it needs out of a store."""
    run(["ctr", f"--address={socket}", "--namespace=k8s.io", "images", "rm", "--sync", name], timeout=120)


def missing_gb(folder: Path, name: str, have: set[str]) -> float:
    """How much an image's new blobs are."""
    lacking = [digest for digest in digests(folder, image_index(folder, name)) if digest not in have]
    return sum((folder / "blobs" / "sha256" / digest).stat().st_size for digest in lacking) / 1e9


def image_index(folder: Path, name: str) -> dict[str, Any]:
    """An index of this one image, under the name by which Kubernetes asks for it."""
    whole = json.loads((folder / "index.json").read_text())
    for manifest in whole["manifests"]:
        if manifest.get("annotations", {}).get("org.opencontainers.image.ref.name") == name:
            named = {**manifest, "annotations": {"io.containerd.image.name": name}}
            return {"schemaVersion": 2, "manifests": [named]}
    raise ClusterError(f"the layout {folder} holds no image {name}")


def digests(folder: Path, index: dict[str, Any]) -> list[str]:
    """Manifest, configuration and layers of the index's one image; the manifest first, while it is there."""
    manifest = index["manifests"][0]["digest"].partition(":")[2]
    content = json.loads((folder / "blobs" / "sha256" / manifest).read_text())
    below = [content["config"]["digest"], *(layer["digest"] for layer in content["layers"])]
    return [*(digest.partition(":")[2] for digest in below), manifest]


def _add_text(tar: tarfile.TarFile, name: str, value: dict[str, Any]) -> None:
    content = json.dumps(value).encode()
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    tar.addfile(entry, io.BytesIO(content))

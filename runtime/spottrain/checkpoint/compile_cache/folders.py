"""The compiler's folders on this node: finds them, lists finished files, packs and unpacks them.

This module does not import torch, so `use_folder` can run before that import.
"""

from __future__ import annotations

import fcntl
import getpass
import gzip
import io
import os
import re
import shutil
import stat
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Final

INDUCTOR_VARIABLE: Final = "TORCHINDUCTOR_CACHE_DIR"
TRITON_VARIABLE: Final = "TRITON_CACHE_DIR"
UNPACKED_LIMIT: Final = 2**30
"""Largest total size of the files in bytes. Archives are made and read in memory, within the pod's limit."""
LEVEL: Final = 1
"""gzip level. Most data is one precompiled header of 158 MB: 27 MB in 0.8 s; at level 6, 23 MB in 2.8 s."""
BUILD_SUFFIX: Final = "_CxxBuild"
"""Suffix of the folder beside a C++ library during its build; it remains if the build is killed."""

Folders = Mapping[str, Path]
"""Label (the first part of a member's name) -> folder."""
Listing = Mapping[str, tuple[int, int]]
"""`label/path` -> (bytes, mtime in ns), sorted."""


def use_folder(cache_dir: Path, environ: MutableMapping[str, str]) -> None:
    """Sets the cache folders of torch and Triton below `cache_dir`, unless the user has set others.

    Must be called before torch is imported. The caches (FX graphs, AOTAutograd, autotuning) are on by default
    in torch 2.15.
    """
    environ.setdefault(INDUCTOR_VARIABLE, str(cache_dir / "inductor"))
    environ.setdefault(TRITON_VARIABLE, str(cache_dir / "triton"))


def folders_of(environ: Mapping[str, str]) -> Folders:
    """Returns the folders set by `use_folder`, and that of the precompiled headers."""
    return {
        "inductor": Path(environ[INDUCTOR_VARIABLE]).absolute(),
        "triton": Path(environ[TRITON_VARIABLE]).absolute(),
        "headers": header_folder(),
    }


def header_folder() -> Path:
    """Returns inductor's folder of precompiled C++ headers, below the temporary folder.

    TORCHINDUCTOR_CACHE_DIR does not change it. inductor needs the headers even if every kernel is cached:
    without them, one header takes 5 of a warm start's 8 s on a CPU. The path follows the rule of
    torch._inductor.codecache._HEADER_DIR, which is not available before the import of torch.
    """
    try:
        user = getpass.getuser()
    except (KeyError, ImportError, OSError):
        user = f"uid_{os.getuid()}"
    name = "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user)
    return Path(tempfile.gettempdir()) / name / "precompiled_headers"


def listing(places: Folders) -> Listing:
    return dict(sorted(found for label, root in places.items() for found in _files(label, root)))


def _files(label: str, root: Path) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yields the finished regular files."""
    for folder, below, names in os.walk(root):
        halves = tuple(name.removesuffix(BUILD_SUFFIX) + "." for name in below if name.endswith(BUILD_SUFFIX))
        below[:] = [name for name in below if not name.endswith(BUILD_SUFFIX) and not _passing(name)]
        for name in names:
            facts = _stat(Path(folder, name))
            if facts is None or not stat.S_ISREG(facts.st_mode) or _passing(name) or name.startswith(halves):
                continue
            path = Path(folder, name).relative_to(root)
            yield f"{label}/{path.as_posix()}", (facts.st_size, facts.st_mtime_ns)


def _passing(name: str) -> bool:
    """Returns whether it is a lock or a temporary file (torch: `.pid.thread.tmp`; Triton: `tmp.pid_*`)."""
    return name.startswith((".", "tmp.pid_")) or name.endswith(".lock") or name in ("locks", "__pycache__")


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except FileNotFoundError:
        return None  # renamed in the meantime


def compiling(places: Folders) -> bool:
    """Returns whether a process holds one of torch's locks; C++ libraries are written in place under them."""
    return any(_held(path) for root in places.values() for path in root.rglob("*.lock"))


def _held(path: Path) -> bool:
    try:
        with path.open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


def pack(places: Folders, files: Listing) -> memoryview:
    """Returns a tar.gz of the files; equal files give equal bytes. Raises ValueError above UNPACKED_LIMIT."""
    total = sum(size for size, _ in files.values())
    if total > UNPACKED_LIMIT:
        raise ValueError(
            f"the compiled files have {total} bytes, more than the {UNPACKED_LIMIT} that are kept at most"
        )
    buffer = io.BytesIO()
    with (
        gzip.GzipFile("", "wb", LEVEL, buffer, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w") as tar,
    ):
        for name, (size, _) in files.items():
            label, _, path = name.partition("/")
            member = tarfile.TarInfo(name)
            member.size = size
            with (places[label] / path).open("rb") as file:
                tar.addfile(member, file)
    return buffer.getbuffer()


def unpack(body: bytes, places: Folders) -> None:
    """Extracts the archive's files into the folders, never over an existing file.

    The whole archive is read before the first file is renamed into place, so that a concurrent compile sees
    only whole files. Raises ValueError, OSError or tarfile's errors.
    """
    staging: dict[str, Path] = {}
    try:
        for label, folder in places.items():
            folder.mkdir(parents=True, exist_ok=True)
            staging[label] = Path(tempfile.mkdtemp(prefix=".restoring-", dir=folder))
        with tarfile.open(fileobj=io.BytesIO(body), mode="r:gz") as tar:
            _extract(tar, staging)
        for label, folder in places.items():
            _move(staging[label], folder)
    finally:
        for folder in staging.values():
            shutil.rmtree(folder, ignore_errors=True)


def _extract(tar: tarfile.TarFile, staging: Folders) -> None:
    """Extracts regular files only. Raises ValueError for any member that `pack` does not create.

    tarfile's `filter="data"` does the same, but needs Python 3.11.4, and an image may have an older one.
    """
    left = UNPACKED_LIMIT
    for member in tar:
        label, *path = member.name.split("/")
        left -= member.size
        led_astray = not path or not {"", ".", ".."}.isdisjoint(path)
        if not member.isreg() or label not in staging or led_astray or left < 0:
            raise ValueError(
                f"the archive contains {member.name!r}, which does not belong to a compile cache"
            )
        target = staging[label].joinpath(*path)
        target.parent.mkdir(parents=True, exist_ok=True)
        source = tar.extractfile(member)
        assert source is not None, "a regular file"
        with source, target.open("wb") as file:
            shutil.copyfileobj(source, file)


def _move(source: Path, target: Path) -> None:
    for folder, _, names in os.walk(source):
        place = target / Path(folder).relative_to(source)
        place.mkdir(parents=True, exist_ok=True)
        for name in names:
            if not (place / name).exists():
                os.replace(Path(folder, name), place / name)

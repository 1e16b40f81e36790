"""The compiler's folders on this node: where they are, what in them is finished, packing and unpacking.

Called by `CompileCache`, and by `session` before torch is imported (`use_folder`).
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
"""Bytes of files. An archive is made and read in memory, within the pod's limit."""
LEVEL: Final = 1
"""Of gzip. Most of it is one precompiled header of 158 MB: 27 MB in 0.8 s; with level 6, 23 MB in 2.8 s."""
BUILD_SUFFIX: Final = "_CxxBuild"
"""Of the folder beside a C++ library that is being built; it stays behind if the build is killed."""

Folders = Mapping[str, Path]
"""Label, the first part of a member's name -> folder."""
Listing = Mapping[str, tuple[int, int]]
"""`label/path` -> (bytes, time of change in ns), in order."""


def use_folder(cache_dir: Path, environ: MutableMapping[str, str]) -> None:
    """Points torch and Triton below `cache_dir`, unless the user has pointed them elsewhere.

    To be called before torch is imported. The caches themselves (FX graphs, AOTAutograd, autotuning) are on
    by default in torch 2.15.
    """
    environ.setdefault(INDUCTOR_VARIABLE, str(cache_dir / "inductor"))
    environ.setdefault(TRITON_VARIABLE, str(cache_dir / "triton"))


def folders_of(environ: Mapping[str, str]) -> Folders:
    """What `use_folder` has set, and the precompiled headers."""
    return {
        "inductor": Path(environ[INDUCTOR_VARIABLE]).absolute(),
        "triton": Path(environ[TRITON_VARIABLE]).absolute(),
        "headers": header_folder(),
    }


def header_folder() -> Path:
    """Where inductor precompiles C++ headers: below the temporary folder, whatever its variable says.

    It looks for them even where every kernel is cached: without them 5 of a warm start's 8 s on a CPU go into
    one header. The rule is torch._inductor.codecache._HEADER_DIR's, which cannot be asked before the import.
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
    """The finished regular files."""
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
    """Locks, and what a writer renames in the end (torch: `.pid.thread.tmp`; Triton: `tmp.pid_*`)."""
    return name.startswith((".", "tmp.pid_")) or name.endswith(".lock") or name in ("locks", "__pycache__")


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except FileNotFoundError:
        return None  # renamed meanwhile


def compiling(places: Folders) -> bool:
    """Whether somebody holds one of torch's locks: under them C++ libraries are written in place."""
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
    """A tar.gz of the files; equal files give equal bytes. Raises ValueError above UNPACKED_LIMIT."""
    total = sum(size for size, _ in files.values())
    if total > UNPACKED_LIMIT:
        raise ValueError(f"the compiled files are {total} bytes, and {UNPACKED_LIMIT} at most are kept")
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
    """Puts the archive's files into the folders, never over one that is there.

    All of it is read before the first file is moved in, by rename: a compile beside it sees whole files only.
    Raises ValueError, OSError or tarfile's errors.
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
    """Refuses all that `pack` does not make; so plain files are written, and nothing is left to tarfile.

    Its `filter="data"` would say the same, but came with Python 3.11.4, and an image may have an older one.
    """
    left = UNPACKED_LIMIT
    for member in tar:
        label, *path = member.name.split("/")
        left -= member.size
        led_astray = not path or not {"", ".", ".."}.isdisjoint(path)
        if not member.isreg() or label not in staging or led_astray or left < 0:
            raise ValueError(f"the archive holds {member.name!r}, which is no file of a compile cache")
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

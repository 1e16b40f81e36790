"""The script's folder as one archive, named by its content, which the pod fetches and unpacks.

What git would commit is packed: tracked files and new ones, without those that .gitignore or .spottrainignore
names. The same files are the same archive, so they are sent once.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import os
import stat
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from spottrain_cli.errors import CommandError, UsageError

IGNORE: Final = ".spottrainignore"
LIMIT: Final = 100 * 2**20
"""Bytes of files. Each start of the job fetches them; data belong into a bucket or on spec.dataCache."""
LEFT_OUT: Final = frozenset({"__pycache__", "node_modules"})
"""Folders that are never code, where git does not say it. So are those that begin with a dot."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    folder: Path
    names: tuple[str, ...]
    """Of its files, relative to the folder."""
    body: bytes
    digest: str

    @property
    def key(self) -> str:
        return f"code/{self.digest}.tar.gz"


def pack(folder: Path) -> Packed:
    """Raises UsageError where the folder is too large, or has a link that leads out of it."""
    names = sorted(_names(folder))
    _limit(folder, names)
    body = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=body, mode="wb", filename="", mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name in names:
            _add(archive, folder, name)
    packed = body.getvalue()
    digest = hashlib.sha256(packed).hexdigest()
    return Packed(folder=folder, names=tuple(names), body=packed, digest=digest)


def send(packed: Packed, prefix: str, endpoint: str) -> str:
    """Puts the archive below a prefix, unless it is there. Returns its URI. Raises StoreError."""
    from spottrain.cli.reading import open_there
    from spottrain.storage.base import AlreadyExists

    store = open_there(prefix, endpoint or None)
    if store.stat(packed.key) is None:
        with contextlib.suppress(AlreadyExists):  # somebody else has sent the same
            store.put_if_absent(packed.key, packed.body)
    return f"{prefix.rstrip('/')}/{packed.key}"


def _add(archive: tarfile.TarFile, folder: Path, name: str) -> None:
    """Adds a file without what differs from machine to machine: owner, times, modes."""
    path = folder / name
    entry = tarfile.TarInfo(name)
    if path.is_symlink():
        target = os.readlink(path)
        inside = Path(os.path.normpath(path.parent / target))
        if os.path.isabs(target) or not inside.is_relative_to(folder):
            raise UsageError(
                f"{name} is a link to {target}, outside of {folder}; name it in {IGNORE}, or put a copy there"
            )
        entry.type, entry.linkname = tarfile.SYMTYPE, target
        archive.addfile(entry)
        return
    try:
        status = path.stat()
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror}; name it in {IGNORE} if it is no code"
        ) from error
    entry.size = len(content)
    entry.mode = 0o755 if status.st_mode & stat.S_IXUSR else 0o644
    archive.addfile(entry, io.BytesIO(content))


def _limit(folder: Path, names: list[str]) -> None:
    sizes = {name: (folder / name).lstat().st_size for name in names}
    total = sum(sizes.values())
    if total > LIMIT:
        largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:3]
        shown = ", ".join(f"{name} ({_mib(sizes[name])})" for name in largest)
        raise UsageError(
            f"{folder} has {_mib(total)} of files, at most {_mib(LIMIT)} are packed: name what is no code "
            f"in {IGNORE}, such as {shown}; or build it into the image and give --no-pack"
        )


def _mib(number: int) -> str:
    return f"{number / 2**20:,.1f} MiB"


# --- which files ---------------------------------------------------------------------------------------
def _names(folder: Path) -> Iterator[str]:
    """Yields the paths of the files, relative to the folder."""
    listed = _of_git(folder)
    if listed is None:
        if (folder / IGNORE).exists():
            raise UsageError(
                f"{folder / IGNORE} is read by git, which is not on the PATH or fails; install it"
            )
        yield from _walked(folder)
        return
    for name in listed:
        path = folder / name
        if path.is_dir() and not path.is_symlink():  # a submodule
            yield from (f"{name.rstrip('/')}/{inner}" for inner in _names(path))
        elif path.is_symlink() or path.is_file():  # else deleted, and not committed yet
            yield name


def _of_git(folder: Path) -> list[str] | None:
    """Returns what git would commit, without what IGNORE names; None outside of a checkout."""
    if _git(folder, "rev-parse", "--is-inside-work-tree") is None:
        return _with_ignore_alone(folder)
    found = _git(folder, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    if found is None:
        return None
    ignored: list[str] = []
    if (folder / IGNORE).is_file():
        for kind in ("--cached", "--others"):
            ignored += _git(folder, "ls-files", "-z", kind, "--ignored", f"--exclude-from={IGNORE}") or []
    return [name for name in dict.fromkeys(found) if name not in set(ignored)]


def _with_ignore_alone(folder: Path) -> list[str] | None:
    """Returns the files of a folder without git, by its ignore file; None where it has none."""
    if not (folder / IGNORE).is_file():
        return None
    import tempfile

    with tempfile.TemporaryDirectory() as empty:
        if _git(Path(empty), "init", "--quiet", "--bare", ".") is None:
            return None
        where = (f"--git-dir={empty}", f"--work-tree={folder}")
        ignored = _git(folder, *where, "ls-files", "-z", "--others", "--ignored", f"--exclude-from={IGNORE}")
    return None if ignored is None else [name for name in _walked(folder) if name not in set(ignored)]


def _git(folder: Path, *words: str) -> list[str] | None:
    """Returns git's output, split at zero bytes; None where there is no git, or it fails."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, check=False, timeout=60
        )
    except FileNotFoundError:
        return None
    except subprocess.TimeoutExpired:
        raise CommandError(f"git did not list the files of {folder} within 60 s") from None
    if done.returncode:
        return None
    return [name for name in os.fsdecode(done.stdout).rstrip("\n").split("\0") if name]


def _walked(folder: Path) -> Iterator[str]:
    for above, folders, files in os.walk(folder):
        folders[:] = sorted(each for each in folders if each not in LEFT_OUT and not each.startswith("."))
        for name in files:
            if not name.startswith(".") and not name.endswith(".pyc"):
                yield str((Path(above) / name).relative_to(folder))

"""`spottrain run --code URI`: a folder that `spottrain submit` has packed becomes the working directory.

The archive's name is its SHA-256, so what runs is what was sent: another content is refused.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Final

from spottrain.cli.reading import open_there
from spottrain.contract import Env
from spottrain.errors import ConfigurationError

NAME: Final = re.compile(r"([0-9a-f]{64})\.tar\.gz")


def enter(uri: str, env: Mapping[str, str]) -> None:
    """Unpacks the archive at `uri`, and makes its folder the working directory.

    Raises:
        ConfigurationError: there is none, or it is not what its name says, or it cannot be unpacked.
        StoreError: the store does not respond, or refuses.
    """
    place, _, name = uri.rpartition("/")
    found = NAME.fullmatch(name)
    if found is None:
        raise ConfigurationError(f"--code {uri} names no packed folder; it must end with /SHA256.tar.gz")
    above = env.get(Env.CACHE_DIR)
    folder = Path(above or tempfile.mkdtemp(prefix="spottrain-")) / "code" / found[1]
    if not folder.is_dir():
        unpack(_fetched(place, name, found[1], env.get(Env.CHECKPOINT_ENDPOINT)), folder, uri)
    os.chdir(folder)


def unpack(body: bytes, folder: Path, uri: str) -> None:
    """Writes what an archive holds to `folder`, which appears whole. Raises ConfigurationError."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, ignore_cleanup_errors=True) as made:
            new = Path(made) / "new"
            with tarfile.open(fileobj=io.BytesIO(body), mode="r:gz") as archive:
                extract(archive, new)
            if not folder.is_dir():  # another rank was faster
                new.rename(folder)
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        if not folder.is_dir():
            raise ConfigurationError(f"--code {uri} cannot be unpacked to {folder}: {error}") from error


def _fetched(place: str, name: str, digest: str, endpoint: str | None) -> bytes:
    found = open_there(place, endpoint).get(name)
    if found is None:
        raise ConfigurationError(f"--code {place}/{name} is not there; send it again with spottrain submit")
    if hashlib.sha256(found.body).hexdigest() != digest:
        raise ConfigurationError(
            f"--code {place}/{name} has another content than its name says; it is not run"
        )
    return found.body


def extract(archive: tarfile.TarFile, folder: Path) -> None:
    """Writes files, folders and links to `folder`, which is made. Owners and times are not kept.

    tarfile's `filter="data"` does the same, but needs Python 3.11.4, and Debian 12 has 3.11.2.

    Raises:
        tarfile.TarError: a member lies outside of the folder, links to there, or is a device.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for member in archive:
        _place(archive, member, folder.resolve())


def _place(archive: tarfile.TarFile, member: tarfile.TarInfo, root: Path) -> None:
    target = root / member.name
    if PurePosixPath(member.name).is_absolute() or not _within(target, root):
        raise tarfile.TarError(f"{member.name!r} lies outside of the folder")
    if member.isdir():
        target.mkdir(parents=True, exist_ok=True)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if member.issym():
        if os.path.isabs(member.linkname) or not _within(target.parent / member.linkname, root):
            raise tarfile.TarError(f"{member.name!r} links to {member.linkname!r}, outside of the folder")
        target.symlink_to(member.linkname)
    elif member.isreg():
        source = archive.extractfile(member)
        assert source is not None, "a regular file"
        with source, target.open("wb") as file:
            shutil.copyfileobj(source, file)
        target.chmod(0o755 if member.mode & 0o100 else 0o644)
    else:
        raise tarfile.TarError(f"{member.name!r} is neither a file, a folder nor a link")


def _within(path: Path, root: Path) -> bool:
    """Links that are there already are followed."""
    return Path(os.path.realpath(path)).is_relative_to(root)

"""Extracts a tar archive of folders, files and links, and nothing outside of the target.

tarfile's `filter="data"` does the same, but needs Python 3.11.4, and Debian 12 has 3.11.2.
"""

from __future__ import annotations

import os
import shutil
import tarfile
from pathlib import Path, PurePosixPath


def extract(archive: tarfile.TarFile, folder: Path) -> None:
    """Writes the members to `folder`, which is made. Owners and times are not kept, the right to run is.

    Raises:
        tarfile.TarError: a member lies outside of the folder, links to there, or is a device.
    """
    folder.mkdir(parents=True, exist_ok=True)
    root = folder.resolve()
    for member in archive:
        _place(archive, member, root)


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

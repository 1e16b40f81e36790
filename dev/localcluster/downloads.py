"""Files from the network, each with its SHA-256 pinned. The standard library alone: there may be no pip."""

from __future__ import annotations

import hashlib
import http.client
import shutil
import tarfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from localcluster.shell import ClusterError

TRY_SECONDS: Final = 5.0
"""For the first byte. A machine behind a closed network must not wait for each file."""
_STALL_SECONDS: Final = 30.0


class NotReached(ClusterError):
    """The server could not be reached, or has no such file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Download:
    """A file, and what to take out of it: the path below each archive in turn; empty for the file itself."""

    url: str
    sha256: str
    members: Sequence[str] = ()

    @property
    def host(self) -> str:
        return urlsplit(self.url).netloc


def fetch(files: Mapping[Path, Download]) -> None:
    """Downloads one archive, checks it, and unpacks from it what each of the paths is to hold.

    Raises NotReached where the server does not answer, and ClusterError where the content is another one.
    """
    first, download = next(iter(files.items()))
    first.parent.mkdir(parents=True, exist_ok=True)
    archive = first.with_name(f".{first.name}.download")
    try:
        _copy(download, archive)
        for into, wanted in files.items():
            _unpack(archive, wanted.members, into)
    finally:
        archive.unlink(missing_ok=True)


def _unpack(archive: Path, members: Sequence[str], into: Path) -> None:
    """Through one archive after the other, whole or not at all."""
    layers = [archive]
    partial = into.with_name(f".{into.name}.partial")
    try:
        for member in members:
            inner = into.with_name(f".{into.name}.{len(layers)}")
            _extract(layers[-1], member, inner)
            layers.append(inner)
        shutil.copyfile(layers[-1], partial)
        partial.chmod(0o755)
        partial.replace(into)
    finally:
        for made in [*layers[1:], partial]:
            made.unlink(missing_ok=True)


def _copy(download: Download, into: Path) -> None:
    digest = hashlib.sha256()
    try:
        with urllib.request.urlopen(download.url, timeout=TRY_SECONDS) as reply, into.open("wb") as out:
            _allow_stalls(reply)
            while block := reply.read(1 << 20):
                digest.update(block)
                out.write(block)
    except (OSError, http.client.HTTPException) as error:
        raise NotReached(f"{download.url} cannot be downloaded: {error}") from None
    if digest.hexdigest() != download.sha256:
        raise ClusterError(
            f"{download.url} has the SHA-256 {digest.hexdigest()}, and {download.sha256} is pinned: "
            "a proxy may have changed it; nothing of it was used"
        )


def _allow_stalls(reply: http.client.HTTPResponse) -> None:
    """The short limit was for the answer; a slow line may pause in the middle."""
    raw = getattr(reply.fp, "raw", None)
    sock = getattr(raw, "_sock", None)
    if sock is not None:
        sock.settimeout(_STALL_SECONDS)


def _extract(archive: Path, member: str, into: Path) -> None:
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as opened, opened.open(member) as source, into.open("wb") as out:
            shutil.copyfileobj(source, out)
        return
    with tarfile.open(archive) as packed:
        found = packed.extractfile(member)
        if found is None:
            raise ClusterError(f"{member} of {archive.name} is not a file")
        with found as source, into.open("wb") as out:
            shutil.copyfileobj(source, out)

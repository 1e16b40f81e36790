"""`spottrain run --code URI`: a folder that `spottrain submit` has packed becomes the working directory.

The archive's name is its SHA-256, so what runs is what was sent: another content is refused.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import tarfile
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from spottrain.cli.reading import open_there
from spottrain.contract import Env
from spottrain.core.archives import extract
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

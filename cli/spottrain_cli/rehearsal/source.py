"""The folder of a manifest: what of it goes into each pod, as `spottrain submit` would send it."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

from spottrain.cli.code import extract

from spottrain_cli.submit.pack import pack


def copy_beside(manifest: Path, to: Path) -> None:
    """Copies what lies beside the manifest. Raises UsageError where it is too large."""
    packed = pack(manifest.parent)
    with tarfile.open(fileobj=io.BytesIO(packed.body)) as archive:
        extract(archive, to)

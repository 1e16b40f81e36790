"""What `spottrain checkpoints export` and `copy` do with a folder that `spottrain sync` has stored."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Final

from spottrain.checkpoint.head.state import Entry
from spottrain.cli.output import Answer
from spottrain.contract import MANIFEST_NAME, blobs_of
from spottrain.core.log_format import counted
from spottrain.errors import ConfigurationError
from spottrain.storage.base import Store
from spottrain.sync.manifest import OtherKind, SyncManifest, digest_of, read_manifest
from spottrain.sync.restore import explained, read_content, restore

from spottrain_cli.figures import size

AT_END: Final = (
    "It was stored when its program had ended, and the exit code is not known here: if the program was "
    "killed in a save, its last file may be cut off"
)


def folder_of(store: Store, entry: Entry) -> SyncManifest | None:
    """Returns the manifest of a folder; None if `spottrain run` wrote the checkpoint.

    Raises Damaged.
    """
    try:
        return read_manifest(store, entry.key)
    except OtherKind:
        return None


def write(store: Store, entry: Entry, folder: SyncManifest, target: Path) -> Answer:
    """Writes a stored folder to `target`, which appears, or is filled, when all is there. Claims nothing.

    Raises Damaged.
    """
    if target.is_dir():
        with explained(target):
            restore(store, folder, target, movable=lambda path: False)
    else:
        _write_new(store, folder, target)
    files = counted(len(folder.files), "file")
    facts = {"step": entry.step, "folder": str(target), "bytes": folder.size, "files": len(folder.files)}
    line = f"{target}: {files} of checkpoint {entry.step}, {size(folder.size)}"
    return Answer(facts=facts, lines=[line, *note(folder)])


def _write_new(store: Store, folder: SyncManifest, target: Path) -> None:
    part = target.with_name(target.name + ".part")
    try:
        part.mkdir(parents=True)
    except OSError as error:
        raise ConfigurationError(f"{part} cannot be made: {error.strerror}; name another folder") from error
    try:
        with explained(part):
            restore(store, folder, part, movable=lambda path: False)
            part.rename(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def copy(source: Store, folder: SyncManifest, target: Store, key: str) -> None:
    """Copies contents and then the manifest, one content at a time in memory. Raises Damaged."""
    sizes = {chunk: count for file in folder.files.values() for chunk, _, count in folder.chunks_of(file)}
    copies = {chunk: blobs_of(key) + digest_of(chunk) for chunk in sizes}
    sent: set[str] = set()
    for chunk, count in sizes.items():
        if copies[chunk] not in sent:
            body = memoryview(bytearray(count))
            for _ in read_content(source, chunk, count, body):
                pass  # all of it is in `body`, and verified at the end
            target.upload(copies[chunk], body)
            sent.add(copies[chunk])
    files = {
        path: replace(file, chunks=tuple(copies[chunk] for chunk in file.chunks))
        for path, file in folder.files.items()
    }
    target.put_if_absent(key + MANIFEST_NAME, replace(folder, files=files, atEnd=False).to_bytes())


def note(folder: SyncManifest) -> list[str]:
    """Returns what to say of a folder that need not be whole."""
    return [AT_END] if folder.atEnd else []

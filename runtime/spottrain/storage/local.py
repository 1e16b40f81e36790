"""Store in a folder, for laptops, shared file systems and tests.

It has the same guarantees as S3. A write appears completely or not at all (temporary file, fsync, rename).
Conditional writes are serialized by flock on one lock file. The ETag is the content's SHA-256. Nothing is
created before the first write or probe, so reading a mistyped path leaves no trace.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from typing import BinaryIO, Final

from spottrain.contract import CHUNK_BYTES
from spottrain.errors import ConfigurationError, StoreDenied, StoreUnavailable
from spottrain.storage.base import (
    AlreadyExists,
    Body,
    Cancelled,
    FilePart,
    KeyMissing,
    Object,
    PreconditionFailed,
    Stat,
    Truncated,
    never,
)
from spottrain.storage.requests import Filling, slices

PRIVATE: Final = ".spottrain"
"""Folder of the lock and the temporary files; it holds no keys."""
LOCK: Final = "lock"
STALE_SECONDS: Final = 86400.0
"""Age in seconds from which a temporary file is abandoned."""
WRITERS: Final = 4
"""Chunks of one upload that are written and hashed at once."""
BLOCK: Final = 4096
"""A direct write is of so many bytes or a multiple, as is its place in memory and in the file."""
NO_DIRECT: Final = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP}
"""What a file system answers that has no writes past the page cache, or not of these bytes."""
HOPELESS: Final = {errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP}
"""Errors of a folder that can never be written, so retries will not help."""


class FolderStore:
    endpoint = ""

    def __init__(self, root: Path, *, uri: str = "", chunk_bytes: int = CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes
        self.uri = uri or root.as_uri()
        self._root = root
        self._private = root / PRIVATE
        self._seen = os.path.isdir(self._private)
        """Whether our folder has existed: if so, its absence is a loss."""

    def get(self, key: str) -> Object | None:
        with self._translating(key):
            try:
                body = self._path(key).read_bytes()
            except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
                self._require_not_lost()
                return None
        return Object(body=body, etag=_etag(body))

    def put(self, key: str, body: Body) -> None:
        self._publish(key, _writes(body))

    def put_if_absent(self, key: str, body: Body) -> str:
        self._publish(key, _writes(body), _absent)
        return _etag(body)

    def put_if_match(self, key: str, body: Body, etag: str) -> str:
        def matches(path: Path) -> None:
            if not path.is_file():
                raise KeyMissing(key)
            if _etag(path.read_bytes()) != etag:
                raise PreconditionFailed(key)

        self._publish(key, _writes(body), matches)
        return _etag(body)

    def upload(
        self, key: str, body: memoryview, *, cancelled: Callable[[], bool] = never
    ) -> builtins.list[str]:
        view = body.cast("B")
        digests: list[str] = []

        def write(file: BinaryIO) -> None:
            def written(start: int) -> str:
                chunk = view[start : start + self._chunk_bytes]
                _write_at(file.fileno(), direct, chunk, start)
                return hashlib.sha256(chunk).hexdigest()

            file.truncate(len(view))  # a direct write waits for the others if it extends the file
            direct = _open_direct(file.name)
            pool = ThreadPoolExecutor(WRITERS, thread_name_prefix="spottrain-write")
            try:
                for digest in pool.map(written, range(0, len(view), self._chunk_bytes)):
                    if cancelled():
                        raise Cancelled(key)
                    digests.append(digest)
            finally:
                pool.shutdown(cancel_futures=True)
                os.close(direct)

        self._publish(key, write, _absent)
        return digests

    def put_part(self, key: str, part: FilePart, *, cancelled: Callable[[], bool] = never) -> None:
        def write(file: BinaryIO) -> None:
            for each in slices(part):
                if cancelled():
                    raise Cancelled(key)
                file.write(each)

        self._publish(key, write)

    def read_into(self, key: str, offset: int, *buffers: memoryview, hashed: bool = False) -> str:
        filling = Filling(buffers, hashed=hashed)
        end = offset + filling.left
        with self._translating(key), self._opened(key) as file:
            file.seek(offset)
            filling.read(file.readinto)
        if filling.left:
            raise Truncated(f"{self._root}/{key} ends before byte {end}")
        return filling.sha256

    def stat(self, key: str) -> Stat | None:
        with self._translating(key):
            try:
                with self._opened(key) as file:
                    found = os.fstat(file.fileno())
            except KeyMissing:
                return None
        return Stat(
            bytes=found.st_size, storage_class="", archived=False, restoring=False, modified=found.st_mtime
        )

    def sweep_uploads(self, prefix: str, doomed: Callable[[str], bool]) -> builtins.list[str]:
        """Deletes all abandoned temporary files; which keys they were for is not known."""
        with self._translating(prefix):
            if self._require_not_lost():
                with self._locked():
                    self._sweep_temporaries()
        return []

    def list(self, prefix: str) -> builtins.list[str]:
        with self._translating(prefix):
            self._require_not_lost()
            return sorted(key for key in self._keys() if key.startswith(prefix))

    def folders(self, prefix: str) -> builtins.list[str]:
        with self._translating(prefix):
            self._require_not_lost()
            try:
                found = [entry.name for entry in os.scandir(self._root / prefix) if entry.is_dir()]
            except (FileNotFoundError, NotADirectoryError):
                return []
            return sorted(f"{prefix}{name}/" for name in found if name != PRIVATE)

    def delete(self, keys: Sequence[str]) -> None:
        with self._translating(f"({len(keys)} keys)"):
            if not self._require_not_lost() and not self._root.is_dir():
                return
            self._make()
            with self._locked():
                for key in keys:
                    self._remove(self._path(key))

    def probe(self) -> None:
        with self._translating(""), self._usable(HOPELESS):
            self._make()
            with _temporary(self._private, _writes(b"probe")), self._locked():
                self._sweep_temporaries()

    def _make(self) -> None:
        """Creates the folder, once only: recreating one that disappeared later would start another store."""
        if self._seen:
            return
        with self._usable({errno.ENOENT, *HOPELESS}):
            self._private.mkdir(parents=True, exist_ok=True)
        self._seen = True

    def _require_not_lost(self) -> bool:
        """Returns whether our folder exists. Raises if it has disappeared: unmounted does not mean empty."""
        try:
            self._private.stat()
        except FileNotFoundError:
            if self._seen:
                raise
            return False
        self._seen = True
        return True

    def _sweep_temporaries(self) -> None:
        """Deletes the files of killed processes; a live process's file is seconds old."""
        for path in self._private.iterdir():
            with contextlib.suppress(FileNotFoundError):  # its process has just moved or deleted it
                if path.name != LOCK and path.stat().st_mtime < time.time() - STALE_SECONDS:
                    path.unlink()

    @contextlib.contextmanager
    def _opened(self, key: str) -> Iterator[FileIO]:
        try:
            file = self._path(key).open("rb", buffering=0)
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            self._require_not_lost()
            raise KeyMissing(f"{self._root}/{key}") from None
        with file:
            yield file

    def _publish(
        self,
        key: str,
        write: Callable[[BinaryIO], None],
        condition: Callable[[Path], None] = lambda path: None,
    ) -> None:
        """Writes a temporary file, then renames it to `key` unless `condition` raises (under the lock)."""
        path = self._path(key)
        with self._translating(key):
            self._make()
            with _temporary(self._private, write) as written, self._locked():
                condition(path)
                path.parent.mkdir(parents=True, exist_ok=True)
                os.replace(written, path)
                _fsync_folders(path.parent, self._root)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """flock belongs to the open file, so it works between threads as well as between processes."""
        with (self._private / LOCK).open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                yield
            finally:  # closing is not enough: a process forked in the meantime has the file open too
                fcntl.flock(lock, fcntl.LOCK_UN)

    def _path(self, key: str) -> Path:
        parts = key.split("/")
        if not all(parts) or not {".", "..", PRIVATE}.isdisjoint(parts):
            raise ValueError(f"invalid key {key!r}: it has empty, relative or reserved parts")
        return self._root / key

    def _keys(self) -> Iterator[str]:
        for folder, folders, names in os.walk(self._root):
            if Path(folder) == self._root and PRIVATE in folders:
                folders.remove(PRIVATE)
            for name in names:
                yield (Path(folder) / name).relative_to(self._root).as_posix()

    def _remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        for folder in path.parents:
            if folder == self._root or not folder.is_dir() or any(folder.iterdir()):
                return
            folder.rmdir()

    @contextlib.contextmanager
    def _usable(self, hopeless: set[int]) -> Iterator[None]:
        """On the first use of a folder: raises ConfigurationError for errors that retries will not fix."""
        try:
            yield
        except OSError as error:
            if error.errno not in hopeless:
                raise
            raise ConfigurationError(
                f"{self._root} cannot store checkpoints: {error.strerror}; use a folder that can be "
                "created and written (in a pod: below the mount of a volume)"
            ) from error

    @contextlib.contextmanager
    def _translating(self, key: str) -> Iterator[None]:
        """Translates the file system's errors to the store's."""
        where = f"{self._root}/{key}"
        try:
            yield
        except (FileExistsError, NotADirectoryError) as error:
            raise ConfigurationError(
                f"{where} cannot be used: {error.strerror}; remove the file of that name, or use "
                "another folder"
            ) from error
        except PermissionError as error:
            raise StoreDenied(
                f"{where}: {error.strerror}; check the owner and mode of the folder for user {os.getuid()}"
            ) from error
        except OSError as error:
            raise StoreUnavailable(f"{where}: {error.strerror or error}") from error


def _open_direct(path: str) -> int:
    """Opens a file for writes past the page cache, or for ordinary ones where its file system has no others.

    A write through the page cache costs more processor time than the hash, and waits for the disk at the end.
    """
    flag = getattr(os, "O_DIRECT", 0)  # Linux
    try:
        return os.open(path, os.O_WRONLY | flag)
    except OSError as error:
        if error.errno not in NO_DIRECT:
            raise
        return os.open(path, os.O_WRONLY)


def _write_at(file: int, direct: int, view: memoryview, offset: int) -> None:
    """Writes whole blocks by `direct`. Writes the rest by `file`, and all of a view that is not aligned."""
    done, blocks = 0, len(view) // BLOCK * BLOCK
    try:
        while done < blocks:
            done += os.pwrite(direct, view[done:blocks], offset + done)
    except OSError as error:
        if error.errno not in NO_DIRECT:
            raise
    while done < len(view):
        done += os.pwrite(file, view[done:], offset + done)


def _writes(body: Body) -> Callable[[BinaryIO], None]:
    def write(file: BinaryIO) -> None:
        file.write(body)

    return write


def _absent(path: Path) -> None:
    if path.exists():
        raise AlreadyExists(str(path))


@contextlib.contextmanager
def _temporary(folder: Path, write: Callable[[BinaryIO], None]) -> Iterator[Path]:
    path = folder / secrets.token_hex(8)
    try:
        with path.open("xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        yield path
    finally:
        path.unlink(missing_ok=True)


def _fsync_folders(folder: Path, root: Path) -> None:
    """Makes a rename durable: it is once its folder is synced, and a new folder once its parent is."""
    for each in (folder, *folder.parents):
        handle = os.open(each, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
        if each == root:
            return


def _etag(body: Body) -> str:
    return hashlib.sha256(body).hexdigest()

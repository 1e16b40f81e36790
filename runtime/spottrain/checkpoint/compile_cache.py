"""The compiler's cache folders, stored beside the checkpoints: a restarted pod does not compile again.

torch is pointed at the folders before it is imported. The first process of each node restores them in a
thread, during the import of torch and the checkpoint download. It saves them after the first steps and at the
end. No error here ends a run: the kernels are compiled again, in this attempt or in the next one.

    compile-cache/{key}-{contents}.tar.gz    key: what the code was compiled for; contents: names and sizes

**An archive is code.** Anyone who can write the prefix can run code in the pod (docs/cluster/security.md). So
it is read only from the job's own URI, never from the URI that a job starts from.

This module must not import torch.
"""

from __future__ import annotations

import fcntl
import getpass
import gzip
import hashlib
import importlib.metadata
import io
import json
import os
import platform
import re
import shutil
import stat
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any, Final

from spottrain.contract import COMPILE_CACHE_PREFIX, CompileCacheMode, is_own
from spottrain.core import log
from spottrain.core.run_config import RunConfig
from spottrain.storage.base import Store

FORMAT: Final = 3
"""Format version of the stored objects."""
KEYS_KEPT: Final = 8
"""Number of machine types whose caches are kept. A fleet has a few; daily image changes create many."""
INDUCTOR_VARIABLE: Final = "TORCHINDUCTOR_CACHE_DIR"
TRITON_VARIABLE: Final = "TRITON_CACHE_DIR"
UNPACKED_LIMIT: Final = 2**30
"""Largest total size of the files in bytes. Archives are made and read in memory, within the pod's limit."""
LEVEL: Final = 1
"""gzip level. Most data is one precompiled header of 158 MB: 27 MB in 0.8 s; at level 6, 23 MB in 2.8 s."""
BUILD_SUFFIX: Final = "_CxxBuild"
"""Suffix of the folder beside a C++ library during its build; it remains if the build is killed."""
MODEL_WORDS: Final = (
    *("vendor_id", "cpu family", "model", "model name"),  # x86
    *("CPU implementer", "CPU variant", "CPU part"),  # ARM
)

Folders = Mapping[str, Path]
"""Label (the first part of a member's name) -> folder."""
Listing = Mapping[str, tuple[int, int]]
"""`label/path` -> (bytes, mtime in ns), sorted."""


class CompileCache:
    """The compile cache of one node. `restore` and `save_if_changed` are thread-safe and never raise."""

    def __init__(self, *, store: Store, places: Folders, key: str, drop: bool = False) -> None:
        self.key = key
        self._store = store
        self._places = places
        self._drop = drop
        self._seen: Listing = {}
        """Files that this process has saved or found saved; another node may have replaced them since."""
        self._unusable = False
        """Whether the stored cache could not be restored, so that the next save replaces it."""
        self._one_at_a_time = threading.Lock()

    @classmethod
    def of(cls, store: Store | None, run: RunConfig, environ: Mapping[str, str]) -> CompileCache | None:
        """Returns the run's cache; None if it is off, or if there is no store or no separate cache folder.

        Without SPOTTRAIN_CACHE_DIR torch compiles into a folder that all programs of the user share.
        Must be called after `use_folder`, which sets the variables in `environ` that torch reads.
        """
        if run.compile_cache is CompileCacheMode.OFF or store is None or run.cache_dir is None:
            return None
        return cls(
            store=store,
            places=folders_of(environ),
            key=cache_key(compile_target(run.image_digest)),
            drop=run.compile_cache is CompileCacheMode.DROP,
        )

    def restore(self) -> int:
        """Unpacks the stored files into the folders. Returns the archive's bytes, 0 if there is none to use.

        Must be called before the first compile.
        """
        began = time.time()
        try:
            if self._drop:
                self._forget()
            stored = [key for key in self._stored() if self._is_mine(key)]
            found = self._store.get(max(stored, key=self._modified)) if stored else None
            if found is None:
                log.event("compile-cache-restored", hit=False, key=self.key[:12])
                return 0
            files = unpack(found.body, self._places)
        except Exception as error:
            # Any error has the same effect: the kernels are compiled.
            self._unusable = True
            log.event("compile-cache-unusable", key=self.key[:12], why=f"{type(error).__name__}: {error}")
            return 0
        size, seconds = len(found.body), time.time() - began
        log.event(
            "compile-cache-restored", hit=True, key=self.key[:12], files=files, bytes=size, seconds=seconds
        )
        return size

    def save_if_changed(self) -> bool:
        """Stores the folders if their files differ from the stored ones; returns whether it did.

        Nothing is stored while the compiler is writing; the next call tries again.
        """
        if not self._one_at_a_time.acquire(blocking=False):
            return False
        try:
            return self._save()
        except Exception as error:
            log.event("compile-cache-not-saved", key=self.key[:12], why=f"{type(error).__name__}: {error}")
            return False
        finally:
            self._one_at_a_time.release()

    def _save(self) -> bool:
        began = time.time()
        files = listing(self._places)
        # While a compile lock is held, the files may be incomplete.
        if not files or files == self._seen or compiling(self._places):
            return False
        sizes = {name: size for name, (size, _) in files.items()}
        key = f"{COMPILE_CACHE_PREFIX}{self.key}-{_sha256(sizes)}.tar.gz"
        before = self._stored()
        if key in before and not self._unusable:  # by an earlier attempt or another node of the gang
            self._seen = files
            return False
        body = pack(self._places, files)
        if listing(self._places) != files or compiling(self._places):
            return False  # the archive may hold an incomplete file
        self._store.put(key, body)
        # Only what was there before: of two writers at once one archive stays, and no fence is needed.
        replaced = [each for each in before if self._is_mine(each) and each != key]
        self._store.delete([*replaced, *self._of_oldest_machines(before)])
        self._seen, self._unusable = files, False
        seconds = time.time() - began
        log.event(
            "compile-cache-saved", key=self.key[:12], files=len(files), bytes=len(body), seconds=seconds
        )
        return True

    def _stored(self) -> list[str]:
        return [key for key in self._store.list(COMPILE_CACHE_PREFIX) if is_own(key)]

    def _is_mine(self, key: str) -> bool:
        return key.startswith(COMPILE_CACHE_PREFIX + self.key)

    def _modified(self, key: str) -> float:
        found = self._store.stat(key)
        return found.modified if found else 0.0

    def _of_oldest_machines(self, keys: list[str]) -> list[str]:
        """Returns the objects of the machine types beyond KEYS_KEPT, never this machine's own."""
        machines: dict[str, list[str]] = {}
        for key in keys:
            if not self._is_mine(key):
                machines.setdefault(key.removeprefix(COMPILE_CACHE_PREFIX)[: len(self.key)], []).append(key)
        surplus = len(machines) + 1 - KEYS_KEPT
        if surplus <= 0:
            return []
        oldest = sorted(machines.values(), key=lambda each: max(map(self._modified, each)))[:surplus]
        return [key for each in oldest for key in each]

    def _forget(self) -> None:
        """Deletes the stored caches of all machine types.

        If this attempt dies before it saves, the next one must not restore a harmful cache on any machine.
        """
        keys = self._stored()
        self._store.delete(keys)
        log.event("compile-cache-dropped", objects=len(keys))


# --- what compiled code is valid for ----------------------------------------------------------------------
def compile_target(image: str, proc: Path = Path("/proc")) -> dict[str, Any]:
    """Returns what compiled code depends on and torch's own cache keys do not reliably cover.

    torch keys its entries by graph, configuration, threads and GPU. But it builds C++ kernels with
    `-march=native`, by the compiler and against the libraries of the image. The folder's path is not
    included: a moved folder still hits (tests/unit/runtime/checkpoint/test_compile_cache.py).
    """
    cpu, flags = parse_cpuinfo(_text(proc / "cpuinfo"))
    return {
        "torch": _torch(),
        "triton": _version("triton"),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()),
        "cpu": cpu,
        "flags": flags,
        "devices": gpus(proc),
        "image": image,
    }


def cache_key(target: Mapping[str, Any]) -> str:
    return _sha256({"format": FORMAT, **target})


def _sha256(value: Mapping[str, Any]) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def parse_cpuinfo(text: str) -> tuple[str, tuple[str, ...]]:
    """Returns model and flags of the first processor in /proc/cpuinfo."""
    fields: dict[str, str] = {}
    for line in text.split("\n\n", 1)[0].splitlines():
        name, _, value = line.partition(":")
        fields[name.strip()] = value.strip()
    model = " ".join(fields[word] for word in MODEL_WORDS if fields.get(word))
    return model, tuple(sorted((fields.get("flags") or fields.get("Features") or "").split()))


def gpus(proc: Path) -> tuple[str, ...]:
    """Returns the models of the NVIDIA GPUs; a model implies its compute capability.

    If the driver lists none, torch's and Triton's own keys still distinguish GPUs.
    """
    texts = [_text(path) for path in proc.glob("driver/nvidia/gpus/*/information")]
    found = [re.search(r"^Model:[ \t]*(.+?)[ \t]*$", text, re.MULTILINE) for text in texts]
    return tuple(sorted(match[1] for match in found if match))


def _torch() -> str:
    """Returns torch's version with its build (+cpu, +cu132), which the package's metadata omits."""
    try:
        written = importlib.metadata.distribution("torch").locate_file("torch/version.py")
    except importlib.metadata.PackageNotFoundError:
        return ""
    match = re.search(r"^__version__ = '([^']+)'", _text(Path(str(written))), re.MULTILINE)
    return match[1] if match else _version("torch")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


# --- the compiler's folders on this node ------------------------------------------------------------------
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
            path = Path(folder, name)
            try:
                facts = path.lstat()
            except FileNotFoundError:
                continue  # renamed in the meantime
            if stat.S_ISREG(facts.st_mode) and not _passing(name) and not name.startswith(halves):
                yield f"{label}/{path.relative_to(root).as_posix()}", (facts.st_size, facts.st_mtime_ns)


def _passing(name: str) -> bool:
    """Returns whether it is a lock or a temporary file (torch: `.pid.thread.tmp`; Triton: `tmp.pid_*`)."""
    return name.startswith((".", "tmp.pid_")) or name.endswith(".lock") or name in ("locks", "__pycache__")


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


def unpack(body: bytes, places: Folders) -> int:
    """Extracts the archive's files into the folders, never over an existing file. Returns their number.

    The whole archive is read before the first file is renamed into place, so that a concurrent compile sees
    only whole files. Raises ValueError, OSError or tarfile's errors.
    """
    staging: dict[str, Path] = {}
    try:
        for label, folder in places.items():
            folder.mkdir(parents=True, exist_ok=True)
            staging[label] = Path(tempfile.mkdtemp(prefix=".restoring-", dir=folder))
        with gzip.open(io.BytesIO(body)) as packed:
            with tarfile.open(fileobj=packed, mode="r:") as tar:
                _extract(tar, staging)
                count = len(tar.getmembers())
            while packed.read(2**20):  # up to the end, where gzip compares the checksum
                pass
        for label, folder in places.items():
            _move(staging[label], folder)
        return count
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

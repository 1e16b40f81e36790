"""The environment that compiled code is valid for, and the cache key derived from it.

This module does not import torch, because the cache is restored while torch is being imported.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

FORMAT: Final = 2
"""Format version of the stored objects."""
MODEL_WORDS: Final = (
    *("vendor_id", "cpu family", "model", "model name"),  # x86
    *("CPU implementer", "CPU variant", "CPU part"),  # ARM
)


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileTarget:
    """Dependencies of compiled code that torch's own cache keys do not reliably cover.

    torch keys its entries by graph, configuration, threads and GPU. But it builds C++ kernels with
    `-march=native`, by the compiler and against the libraries of the image. The folder's path is not
    included: a moved folder still hits (tests/unit/runtime/checkpoint/test_compile_cache.py).
    """

    torch: str
    triton: str
    python: str
    machine: str
    libc: str
    cpu: str
    flags: tuple[str, ...]
    devices: tuple[str, ...]
    image: str

    @classmethod
    def here(cls, image: str, proc: Path = Path("/proc")) -> CompileTarget:
        cpu, flags = parse_cpuinfo(_text(proc / "cpuinfo"))
        return cls(
            torch=_torch(),
            triton=_version("triton"),
            python=f"{platform.python_implementation()} {platform.python_version()}",
            machine=platform.machine(),
            libc=" ".join(platform.libc_ver()),
            cpu=cpu,
            flags=flags,
            devices=gpus(proc),
            image=image,
        )

    def key(self) -> str:
        return hashlib.sha256(canonical({"format": FORMAT, **asdict(self)})).hexdigest()


def canonical(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


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

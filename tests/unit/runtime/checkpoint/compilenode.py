"""A pod with compiled files, for the tests of the compile cache."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spottrain.checkpoint.compile_cache.cache import CompileCache
from spottrain.checkpoint.compile_cache.key import CompileTarget
from spottrain.contract import COMPILE_CACHE_PREFIX
from spottrain.storage.local import FolderStore

FACTS = CompileTarget(
    torch="2.15.0+cpu",
    triton="",
    python="CPython 3.11.7",
    machine="x86_64",
    libc="glibc 2.36",
    cpu="AuthenticAMD 25 17 AMD EPYC",
    flags=("avx2", "avx512f"),
    devices=(),
    image="sha256:1",
)
COMPILED = {
    "inductor/ab/cab.main.so": b"library",
    "inductor/fxgraph/x/y": b"graph",
    "triton/K/k.cubin": b"kernel",
    "headers/h.h.gch": b"header",
}


class Node:
    """A pod's folders and its compile cache, on a store that it shares with other nodes."""

    def __init__(self, root: Path, store: FolderStore, **options: Any) -> None:
        self.root = root
        self.store = store
        places = {label: root / label for label in ("inductor", "triton", "headers")}
        self.cache = CompileCache(store=store, places=places, **{"facts": FACTS, **options})

    def compile(self, files: dict[str, bytes]) -> Node:
        for name, body in files.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(body)
        return self

    def files(self) -> dict[str, bytes]:
        found = (path for path in self.root.rglob("*") if path.is_file())
        return {path.relative_to(self.root).as_posix(): path.read_bytes() for path in found}

    def keys(self) -> list[str]:
        return self.store.list(COMPILE_CACHE_PREFIX)

    def entry(self) -> dict[str, Any]:
        found = self.store.get(f"{COMPILE_CACHE_PREFIX}{self.cache.key}.json")
        assert found is not None
        return dict(json.loads(found.body))


Nodes = Callable[..., Node]

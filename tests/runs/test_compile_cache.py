"""The compile cache with PyTorch's own compiler: what one pod compiled, the next one finds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from spottrain.contract import Env

COMPILE = """\
import json, os
from pathlib import Path
from spottrain.checkpoint.compile_cache import CompileCache, header_folder, use_folder
from spottrain.core import run_config
from spottrain.storage.open import open_store

use_folder(Path(os.environ["SPOTTRAIN_CACHE_DIR"]), os.environ)
run = run_config.RunConfig.from_env(os.environ, script="train.py")
cache = CompileCache.of(open_store(**run.where), run, os.environ)
restored = cache.restore()

import torch
from torch._dynamo.utils import counters
from torch._inductor import codecache

assert str(header_folder()) == codecache._HEADER_DIR
compiled = torch.compile(lambda x: (x.sin() * x.cos()).sum())
value = compiled(torch.arange(64.0))
print(json.dumps({
    "restored": restored > 0,
    "value": value.item(),
    "hits": counters["inductor"]["fxgraph_cache_hit"],
    "misses": counters["inductor"]["fxgraph_cache_miss"],
    "saved": cache.save_if_changed(),
}))
"""


def compile_in_a_new_pod(tmp_path: Path, name: str) -> dict[str, Any]:
    """A process with folders of its own, at another path than any pod before."""
    (tmp_path / name / "tmp").mkdir(parents=True)
    env = {key: value for key, value in os.environ.items() if "CACHE_DIR" not in key} | {
        Env.CACHE_DIR: str(tmp_path / name / "cache"),
        Env.CHECKPOINT_URI: str(tmp_path / "store"),
        "TMPDIR": str(tmp_path / name / "tmp"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], env=env, stdout=subprocess.PIPE, text=True, timeout=600, check=True
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.heavy
def test_the_second_pod_compiles_nothing_and_computes_the_same(tmp_path: Path) -> None:
    cold = compile_in_a_new_pod(tmp_path, "cold")
    warm = compile_in_a_new_pod(tmp_path, "warm-elsewhere")
    assert (cold["restored"], cold["hits"], cold["saved"]) == (False, 0, True) and cold["misses"] > 0
    assert (warm["restored"], warm["misses"], warm["saved"]) == (True, 0, False)
    assert warm["hits"] == cold["misses"]
    assert warm["value"] == cold["value"]

"""Runs the pinned Helm on this repository's chart."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from localcluster import layout
from localcluster.apiserver import ensure_programs

from tests.support import optional

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "spottrain"
NAMESPACE = "spottrain-system"
KUBERNETES = ("--kube-version", layout.KUBERNETES_VERSION)

Object = dict[str, Any]


def helm(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([_program(), *words], capture_output=True, text=True, timeout=60)


@cache
def _program() -> Path:
    paths = layout.default_paths()
    if not (paths.bin / "helm").exists():
        with optional.built():
            ensure_programs(paths, frozenset({"helm"}))
    return paths.bin / "helm"


@cache
def template(*settings: str, release: str = "spottrain") -> subprocess.CompletedProcess[str]:
    sets = [word for setting in settings for word in ("--set-json", setting)]
    return helm("template", release, CHART, "--namespace", NAMESPACE, *KUBERNETES, *sets)


def render(*settings: str, release: str = "spottrain") -> list[Object]:
    """The chart's objects; `settings` are path=JSON."""
    done = template(*settings, release=release)
    assert done.returncode == 0, done.stderr
    return [body for body in yaml.load_all(done.stdout, Loader=yaml.CSafeLoader) if body]


def find(objects: list[Object], kind: str, name: str) -> Object:
    found = [o for o in objects if o["kind"] == kind and o["metadata"]["name"] == name]
    assert len(found) == 1, f"{kind} {name}: {len(found)} of it"
    return found[0]

"""What an image brings may be too old, for pip does not check it without extras: a sentence says so."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import botocore
import pytest
import torch
from spottrain.core.device import OLDEST_TORCH, require_torch
from spottrain.storage.open import open_store

from tests.support.sentences import Told

ROOT = Path(__file__).resolve().parents[4]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize(
    "version", ["2.6.0", "2.6.0a0+ecf3bae40a.nv25.01", "2.15.0+cu130", "3.0.0", "unknown"]
)
def test_a_torch_that_is_new_enough_is_taken(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    require_torch()


@pytest.mark.parametrize("version", ["2.5.1", "1.13.0+cu117"])
def test_a_torch_that_is_too_old_is_refused(
    monkeypatch: pytest.MonkeyPatch, version: str, told: Told
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    told(lambda: require_torch())


def test_the_wheel_and_the_docs_name_the_same_oldest_versions() -> None:
    oldest = ".".join(map(str, OLDEST_TORCH))
    assert PROJECT["optional-dependencies"]["torch"] == [f"torch>={oldest}"]
    page = (ROOT / "docs" / "own-image.md").read_text()
    assert f"| torch | {oldest} and newer" in page
    assert f"| Python | {PROJECT['requires-python'].removeprefix('>=')} and newer" in page


def test_a_botocore_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch, told: Told) -> None:
    monkeypatch.setattr(botocore, "__version__", "1.35.99")
    monkeypatch.setitem(sys.modules, "spottrain.storage.s3", None)  # boto3 cannot even be imported beside it
    told(lambda: open_store("s3://bucket/prefix", "http://127.0.0.1:9"))

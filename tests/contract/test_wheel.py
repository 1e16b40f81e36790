"""`make wheel`: the runtime alone, for an image that has its own torch."""

from __future__ import annotations

import email
import re
import subprocess
import sys
import tomllib
import zipfile
from email.message import Message
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built as the Makefile builds it, in another folder."""
    folder = tmp_path_factory.mktemp("dist")
    [recipe] = re.findall(r"^\t\$\(PY\) (-m hatchling build .*) dist$", (ROOT / "Makefile").read_text(), re.M)
    subprocess.run([sys.executable, *recipe.split(), str(folder)], cwd=ROOT, check=True, capture_output=True)
    [file] = folder.iterdir()
    assert file.name == f"spottrain-{PROJECT['version']}-py3-none-any.whl"
    return zipfile.ZipFile(file)


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    [name] = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return email.message_from_bytes(wheel.read(name))


def test_it_holds_the_runtime_alone(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"spottrain", f"spottrain-{PROJECT['version']}.dist-info"}
    sources = {str(path.relative_to(ROOT / "runtime")) for path in (ROOT / "runtime").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == sources
    assert "spottrain/py.typed" in names


def test_it_has_the_command(wheel: zipfile.ZipFile) -> None:
    [name] = [name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt")]
    assert "spottrain = spottrain.cli.entry:main" in wheel.read(name).decode()


def test_it_requires_nothing_and_no_extra_pins_torch(metadata: Message) -> None:
    assert metadata["Requires-Python"] == PROJECT["requires-python"]
    needs = metadata.get_all("Requires-Dist") or []
    assert all("extra ==" in need for need in needs)
    extras = set(metadata.get_all("Provides-Extra") or [])
    assert extras == {"s3", "gcs", "gpu", "weights", "cli", "torch", "runtime"}, "none of the operator's"
    assert {need.split(";")[0].strip() for need in needs if need.startswith("torch")} == {"torch>=2.6"}
    for extra in ("s3", "gcs", "gpu", "weights"):  # none replaces the torch or NumPy of one's own image
        mine = [need for need in needs if f"extra == '{extra}'" in need]
        assert mine and not any(need.startswith(("torch", "numpy", "spottrain")) for need in mine)

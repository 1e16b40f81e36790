"""What the runtime image installs is what the runtime needs, by Dockerfile and lock; nothing is built."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def extra(name: str) -> set[str]:
    """Packages that the lock has for that extra of ours, those that they need not followed."""
    locked = tomllib.loads((ROOT / "uv.lock").read_text())["package"]
    ours = next(package for package in locked if package["name"] == "spottrain")
    known = {package["name"] for package in locked}
    wanted = {each["name"] for each in ours["optional-dependencies"][name]}
    assert wanted <= known
    return wanted


def test_the_runtime_image_has_nvml_and_the_operator_image_has_not() -> None:
    assert "nvidia-ml-py" in extra("runtime") and "nvidia-ml-py" not in extra("operator")


def test_both_layers_of_the_runtime_image_are_the_extra_runtime() -> None:
    exported = re.findall(r"\$export (.*) > /out/(\w+)\.txt", DOCKERFILE)
    layers = {name: options for options, name in exported}
    assert layers["runtime"] == "--extra runtime"
    assert layers["cuda"].split(" --no-emit-package ") == ["--extra runtime", "torch", "triton"]


def test_the_build_of_the_image_ends_where_nvml_cannot_be_imported() -> None:
    assert re.search(
        r'python3 -c "import [^"]*\bpynvml\b', DOCKERFILE.partition("FROM packages AS runtime")[2]
    )

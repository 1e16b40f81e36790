"""A Python environment as of a PyTorch image: torch and what it needs; no spottrain, no boto3, no NumPy."""

from __future__ import annotations

import subprocess
import sys
import venv
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ABSENT = ("spottrain", "boto3", "botocore", "urllib3", "numpy", "safetensors")


def plain_python(folder: Path, *more: str) -> Path:
    """Makes the environment in `folder`, with links to this one's packages. Returns its Python.

    `more`: packages that it has too; what they need is then not absent.
    """
    venv.create(folder, symlinks=True)
    packages = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    present = [package for name in ("torch", *more) for package in _with_needs(name)]
    for package in present:
        for name in {file.parts[0] for file in package.files or () if file.parts[0] != ".."}:
            if not (packages / name).exists():
                (packages / name).symlink_to(Path(str(package.locate_file(name))).resolve())
    python = folder / "bin" / "python"
    absent = set(ABSENT) - {canonicalize_name(package.name) for package in present}
    find = f"import importlib.util as u; print([n for n in {absent!r} if u.find_spec(n)])"
    found = subprocess.run([python, "-c", find], capture_output=True, text=True, check=True).stdout.strip()
    assert found == "[]", f"the environment has {found}"
    return python


def _with_needs(name: str) -> list[Distribution]:
    found: dict[str, Distribution] = {}
    wanted = [name]
    while wanted:
        if (name := canonicalize_name(wanted.pop())) in found:
            continue
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:  # such as setuptools, which torch names and does not need here
            continue
        needs = [Requirement(line) for line in found[name].requires or ()]
        wanted += [each.name for each in needs if each.marker is None or each.marker.evaluate({"extra": ""})]
    return list(found.values())

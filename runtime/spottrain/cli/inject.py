"""`spottrain inject FOLDER`: writes the runtime to a folder, for an image that has torch but not spottrain.

    FOLDER/launch.py   starts `spottrain run`: `python FOLDER/launch.py train.py`
    FOLDER/lib/        spottrain, boto3 and what boto3 needs

All of it is Python source, so one folder serves every processor and every Python that spottrain supports. It
is readable for every user. An init container writes it to a volume that the trainer's container mounts.

Exit code 0: written; 1: a sentence says why not; 2: invalid arguments.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Final

import spottrain
from spottrain.contract import LAUNCHER_FILE
from spottrain.errors import ConfigurationError, RunError

ABOUT: Final = "Writes the runtime and a launcher to a folder, for an image that has torch but not spottrain."
NEEDED: Final = ("boto3",)
"""Packages that come along with what they need: s3:// URIs work in any image."""
WELCOME: Final = ("nvidia-ml-py",)
"""Packages that come along if they are installed here: how busy the GPU is."""
LAUNCHER: Final = Path(__file__).with_name(LAUNCHER_FILE)
"""Not imported: it blocks signals."""
COMPILED: Final = (".so", ".pyd", ".dylib")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="spottrain inject", description=ABOUT)
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="an existing folder, or one to make")
    folder = parser.parse_args(argv).folder
    try:
        names = inject(folder)
    except RunError as error:
        print(f"spottrain: {error}", file=sys.stderr)
        return 1
    print(
        f"{folder} has spottrain and {', '.join(names)}; start a script by: python {folder}/launch.py SCRIPT"
    )
    return 0


def inject(folder: Path) -> list[str]:
    """Writes the folder, or replaces what an earlier call wrote. The launcher comes last, so it finds all.

    Returns:
        The names of the packages that came along.

    Raises:
        ConfigurationError: The folder cannot be written, or a package is missing or has compiled parts.
    """
    packages = needed_packages()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix="new-") as new:
            lib = Path(new) / "lib"
            for package in packages:
                _copy_package(package, lib)
            _copy_ourselves(lib)
            _put_in_place(Path(new), folder)
    except OSError as error:
        raise ConfigurationError(
            f"cannot write the runtime to {folder}: {error}; name a folder that this user "
            f"(UID {os.getuid()}) may write to and that has 50 MB left"
        ) from error
    return sorted(package.name for package in packages)


def needed_packages() -> list[Distribution]:
    """Returns the packages to copy: `NEEDED`, `WELCOME` and what they need. Raises ConfigurationError."""
    found: dict[str, Distribution] = {}
    wanted = [*((name, True) for name in NEEDED), *((name, False) for name in WELCOME)]
    while wanted:
        name, needed = wanted.pop()
        if name in found:
            continue
        try:
            found[name] = distribution(name)
        except PackageNotFoundError as error:
            if not needed:
                continue
            raise ConfigurationError(
                f"the package {name} is not installed beside spottrain in {sys.prefix}, and an injected "
                "runtime needs it; install spottrain[s3] there"
            ) from error
        wanted += _requirements(found[name])
    return list(found.values())


def _requirements(package: Distribution) -> Iterator[tuple[str, bool]]:
    """Yields each name that a package requires, and whether in every environment. Extras are left out."""
    for line in package.requires or ():
        requirement, _, condition = line.partition(";")
        name = re.match(r"[A-Za-z0-9._-]+", requirement)
        if name is not None and "extra" not in condition:
            yield re.sub(r"[-_.]+", "-", name[0]).lower(), not condition


def _copy_package(package: Distribution, lib: Path) -> None:
    for file in package.files or ():
        if (
            ".." in file.parts or "__pycache__" in file.parts
        ):  # a command beside Python, compiled for this one
            continue
        if file.suffix in COMPILED:
            raise ConfigurationError(
                f"{package.name} has {file}, compiled for this image's Python and processor, so it cannot be "
                f"used in another image; install {package.name} without compiled parts"
            )
        target = lib.joinpath(*file.parts)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(str(file.locate()), target)


def _copy_ourselves(lib: Path) -> None:
    """Copies this package, and its metadata if it is installed as one: they hold its entry points."""
    home = Path(spottrain.__file__).parent
    shutil.copytree(home, lib / home.name, ignore=shutil.ignore_patterns("__pycache__"))
    try:
        ours = distribution("spottrain")
    except PackageNotFoundError:  # a checkout on Python's path
        return
    metadata = lib / f"spottrain-{ours.version}.dist-info"
    metadata.mkdir()
    for name in ("METADATA", "entry_points.txt"):
        if text := ours.read_text(name):
            (metadata / name).write_text(text)


def _put_in_place(new: Path, folder: Path) -> None:
    for path in [new / "lib", *(new / "lib").rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    launcher = folder / LAUNCHER_FILE
    launcher.unlink(missing_ok=True)
    shutil.rmtree(folder / "lib", ignore_errors=True)
    (new / "lib").rename(folder / "lib")
    shutil.copyfile(LAUNCHER, new / LAUNCHER_FILE)
    (new / LAUNCHER_FILE).chmod(0o644)
    (new / LAUNCHER_FILE).rename(launcher)

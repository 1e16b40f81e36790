"""The files of a release, in dist/: wheels, chart, bills of materials, notes, checksums.

    python dev/release.py [oci://REGISTRY/PATH]

With an address the chart is pushed there as well; PLAIN_HTTP=1 is for a registry on this machine. TAG=vX.Y.Z
(a tagged build) refuses any other version. Images are built from docker-bake.hcl.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Final

from localcluster import binaries, layout
from localcluster.shell import ClusterError

ROOT: Final = layout.repository()
CHART: Final = ROOT / "charts" / "spottrain"
EXPORT: Final = re.compile(r"\$export (.*) > /out/(operator|prices|sync|runtime)\.txt")
"""What an image installs: the options by which the Dockerfile reads the lock."""


def main(words: list[str]) -> int:
    try:
        version = agreed_version(os.environ.get("TAG", ""))
        chart = build(version, ROOT / "dist")
        for address in words:
            push(chart, address, plain_http=bool(os.environ.get("PLAIN_HTTP")))
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"error: `{' '.join(map(str, error.cmd))}` ended with {error.returncode}", file=sys.stderr)
        return 1
    return 0


def agreed_version(tag: str) -> str:
    """The one version that all files name. Raises ClusterError where they differ, or the tag does."""
    command_line = project(ROOT / "cli" / "pyproject.toml")
    chart = (CHART / "Chart.yaml").read_text()
    named = {
        "pyproject.toml": project(ROOT / "pyproject.toml")["version"],
        "cli/pyproject.toml": command_line["version"],
        "cli/pyproject.toml, its spottrain": re.findall(r"==(.*)", command_line["dependencies"][0])[0],
        "Chart.yaml, version": re.findall(r"^version: (.*)$", chart, re.M)[0],
        "Chart.yaml, appVersion": re.findall(r"^appVersion: (.*)$", chart, re.M)[0],
    }
    if tag:
        named["the tag"] = tag.removeprefix("v")
    if len(set(named.values())) > 1:
        raise ClusterError("a release has one version: " + ", ".join(f"{k} {v}" for k, v in named.items()))
    version: str = named["pyproject.toml"]
    if tag and not notes(version):
        raise ClusterError(f"CHANGELOG.md has no section ## {version}: rename Unreleased to it")
    return version


def build(version: str, dist: Path) -> Path:
    """Makes all files anew. Returns the chart."""
    wheels, release = dist / "wheels", dist / "release"
    for folder in (wheels, release):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    for source in (ROOT, ROOT / "cli"):
        hatchling: list[str | Path] = [
            sys.executable,
            "-m",
            "hatchling",
            "build",
            "--target",
            "wheel",
            "--directory",
            wheels,
        ]
        subprocess.run(hatchling, cwd=source, check=True, stdout=subprocess.DEVNULL)
    helm("package", CHART, "--destination", release)
    for options, image in EXPORT.findall((ROOT / "Dockerfile").read_text()):
        bill_of_materials(options.split(), release / f"spottrain-{image}.cdx.json")
    (release / "NOTES.md").write_text(notes(version) or notes("Unreleased"))
    files = sorted([*wheels.iterdir(), *release.iterdir()])
    sums = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}" for file in files]
    (release / "SHA256SUMS").write_text("\n".join(sums) + "\n")
    print("\n".join(str(file.relative_to(dist.parent)) for file in [*files, release / "SHA256SUMS"]))
    return release / f"spottrain-{version}.tgz"


def bill_of_materials(options: list[str], file: Path) -> None:
    """CycloneDX, from the lock: the Python packages of an image. Debian's are in its base image's own."""
    uv = shutil.which("uv") or ROOT / ".tools" / "bin" / "uv"
    export = [uv, "export", "--quiet", "--frozen", "--no-dev", "--format", "cyclonedx1.5", *options]
    subprocess.run([*export, "--output-file", file], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def push(chart: Path, address: str, *, plain_http: bool = False) -> None:
    helm("push", chart, address, *(["--plain-http"] if plain_http else []))


def helm(*words: str | Path) -> None:
    paths = layout.default_paths()
    binaries.ensure(paths, {"helm"})
    subprocess.run([paths.bin / "helm", *words], check=True, stdout=subprocess.DEVNULL)


def notes(version: str) -> str:
    """The changelog's section of that version; empty: there is none."""
    sections = re.split(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), flags=re.M)
    return dict(zip(sections[1::2], sections[2::2], strict=True)).get(version, "").strip()


def project(file: Path) -> dict[str, str]:
    found: dict[str, str] = tomllib.loads(file.read_text())["project"]
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

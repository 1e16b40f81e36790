"""What the runtime image installs is what the runtime needs, by Dockerfile and lock; nothing is built."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from spottrain.errors import StoreDenied
from spottrain.storage.open import open_store

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()


LAYERS = {name: options for options, name in re.findall(r"\$export (.*) > /out/(\w+)\.txt", DOCKERFILE)}


@cache
def locked() -> dict[str, Any]:
    """The packages of the lock, by name."""
    return {each["name"]: each for each in tomllib.loads((ROOT / "uv.lock").read_text())["package"]}


def extra(name: str) -> set[str]:
    """Packages that the lock has for that extra of ours, those that they need not followed."""
    wanted = {each["name"] for each in locked()["spottrain"]["optional-dependencies"][name]}
    assert wanted <= locked().keys()
    return wanted


def group(name: str) -> set[str]:
    """The same for a dependency group."""
    return {each["name"] for each in locked()["spottrain"]["dev-dependencies"][name]}


def extras_in(layer: str) -> set[str]:
    """What the extras of a layer bring."""
    return set().union(*(extra(name) for name in re.findall(r"--extra (\w+)", LAYERS[layer])))


def test_the_runtime_image_has_nvml_and_the_operator_image_has_not() -> None:
    assert "nvidia-ml-py" in extra("runtime") and "nvidia-ml-py" not in group("operator")


def test_both_layers_of_the_runtime_image_are_the_extra_runtime() -> None:
    assert LAYERS["runtime"] == "--extra runtime --extra gcs"
    assert LAYERS["cuda"].split(" --no-emit-package ") == [LAYERS["runtime"], "torch", "triton"]


LIBRARIES = {"s3": ("boto3", "boto3"), "gs": ("google-cloud-storage", "google.cloud.storage"), "file": None}
"""By scheme of a checkpoint URI: the package that its store needs, and the module that it imports."""


def test_each_store_that_a_manifest_may_name_has_its_library_in_the_runtime_image() -> None:
    crd = yaml.safe_load((ROOT / "crds" / "trainingjobs.yaml").read_text())
    spec = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    accepted = spec["checkpoint"]["properties"]["uri"]["x-kubernetes-validations"][0]["rule"]
    schemes = set(re.findall(r"(\w+)://", accepted))
    assert schemes == set(LIBRARIES)
    installed = extras_in("runtime")
    tried = DOCKERFILE.partition("FROM packages AS runtime")[2].partition("\nFROM ")[0]
    for package, module in filter(None, (LIBRARIES[scheme] for scheme in schemes)):
        assert package in installed
        assert re.search(rf'python3 -c "import [^"]*\b{re.escape(module)}\b', tried), (
            "the build says if it lacks"
        )


@pytest.mark.parametrize("scheme", LIBRARIES)
def test_the_runtime_opens_each_store_that_a_manifest_may_name(scheme: str, tmp_path: Path) -> None:
    uri = f"file://{tmp_path}" if scheme == "file" else f"{scheme}://bucket/prefix"
    with contextlib.suppress(StoreDenied):  # no credentials here
        assert open_store(uri, "http://127.0.0.1:9").uri.startswith(scheme)


def test_the_sidecars_image_has_the_library_of_each_store_what_is_injected_and_no_torch() -> None:
    assert extras_in("sync") == {library[0] for library in LIBRARIES.values() if library} | {"nvidia-ml-py"}
    assert re.search(r"for foreign in [^;]*\btorch\b", stage("sync"))
    assert 'ENTRYPOINT ["spottrain", "sync"]' in stage("sync")


def test_the_build_of_the_image_ends_where_nvml_cannot_be_imported() -> None:
    assert re.search(
        r'python3 -c "import [^"]*\bpynvml\b', DOCKERFILE.partition("FROM packages AS runtime")[2]
    )


def stage(name: str) -> str:
    """The lines of one target, with continued lines joined."""
    return DOCKERFILE.partition(f" AS {name}\n")[2].partition("\nFROM ")[0].replace("\\\n", " ")


def test_the_price_image_has_boto3_and_the_operator_image_has_not() -> None:
    assert group("prices") == {"boto3", "pydantic-settings"} and "boto3" not in group("operator")
    assert (LAYERS["prices"], LAYERS["operator"]) == ("--only-group prices", "--only-group operator")
    assert re.search(r"for foreign in [^;]*\bkubernetes\b", stage("prices"))


def copied(target: str, folder: Path) -> None:
    """Copies to a folder what the Dockerfile copies of ours into an image."""
    for line in re.findall(r"^COPY ((?:runtime|operator)/.*)$", stage(target), re.M):
        *sources, place = line.split()
        place = folder / place.removeprefix("/opt/spottrain/lib/")
        for source in map(ROOT.joinpath, sources):
            if source.is_dir():
                shutil.copytree(source, place)
            else:
                place.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, place)


IMPORTS = {"operator": "spottrain_operator.__main__", "prices": "spottrain_prices.__main__"}
FOREIGN = {"operator": {"torch", "boto3"}, "prices": {"torch", "kopf", "kubernetes", "aiohttp"}}


@pytest.mark.parametrize("target", IMPORTS)
def test_what_an_image_copies_of_ours_can_be_imported_without_the_rest(target: str, tmp_path: Path) -> None:
    copied(target, tmp_path)
    words = (
        f"import sys, spottrain.contract, {IMPORTS[target]}; "
        f"print(spottrain.__file__, sorted({FOREIGN[target]} & sys.modules.keys()))"
    )
    env = os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1"}
    found = subprocess.run(
        [sys.executable, "-c", words], env=env, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith(str(tmp_path)) and found.stdout.endswith(" []\n")


def test_the_build_context_has_all_that_the_dockerfiles_copy() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    sent = {line.removeprefix("!") for line in lines if line.startswith("!")}
    own = (ROOT / "examples" / "own-image" / "Dockerfile").read_text()
    copies = re.findall(r"^COPY (?!--from)(.*) \S+$", (DOCKERFILE + own).replace("\\\n", " "), re.M)
    tops = {path.split("/")[0] for line in copies for path in line.split()}
    assert tops == sent

"""`make release`: the chart is pushed to a real registry on this machine and installed from it.

The registry is built when it is missing (minutes, once).
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import release
from localcluster.apiserver import api_server, ensure_programs
from localcluster.layout import default_paths
from localcluster.shell import ClusterError

from tests.api.kube import Kube, wait_for
from tests.support import optional
from tests.support.helm import NAMESPACE, helm
from tests.support.ports import free_port

VERSION = release.agreed_version("")
DEPLOYMENTS = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments"


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of an empty registry."""
    paths = default_paths()
    with optional.built():
        ensure_programs(paths, frozenset({"helm", "registry"}))
    folder, address = tmp_path_factory.mktemp("registry"), f"127.0.0.1:{free_port()}"
    configuration = {
        "version": 0.1,
        "storage": {"filesystem": {"rootdirectory": str(folder)}},
        "http": {"addr": address},
    }
    (folder / "config.yml").write_text(json.dumps(configuration))
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [paths.bin / "registry", "serve", folder / "config.yml"],
            env={"PATH": os.environ["PATH"], "OTEL_TRACES_EXPORTER": "none"},
            stdout=log,
            stderr=log,
        )
        wait_for("the registry", lambda: process.poll() is not None or _answers(address))
        yield address
        process.terminate()
        process.wait(30)


def _answers(address: str) -> bool:
    connection = http.client.HTTPConnection(address, timeout=5)
    try:
        connection.request("GET", "/v2/")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def test_the_chart_is_installed_from_where_the_release_pushed_it(registry: str, tmp_path: Path) -> None:
    chart = release.build(VERSION, tmp_path / "dist")
    release.push(chart, f"oci://{registry}/charts", plain_http=True)

    files = {path.name: path for path in (tmp_path / "dist").rglob("*") if path.is_file()}
    lines = [line.split("  ") for line in files.pop("SHA256SUMS").read_text().splitlines()]
    sums = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}
    assert {name: digest for digest, name in lines} == sums
    names = zipfile.ZipFile(files[f"spottrain_cli-{VERSION}-py3-none-any.whl"]).namelist()
    assert "spottrain_cli/app.py" in names and not any(name.startswith("spottrain/") for name in names)
    bill = json.loads(files["spottrain-operator.cdx.json"].read_text())
    packages = {part["name"] for part in bill["components"]}
    assert "kopf" in packages and not packages & {"torch", "boto3"}

    with api_server() as server:
        place = ("--namespace", NAMESPACE, "--create-namespace", "--kubeconfig", server.kubeconfig)
        source = (f"oci://{registry}/charts/spottrain", "--version", VERSION, "--plain-http")
        done = helm("install", "spottrain", *source, *place)
        assert done.returncode == 0, done.stderr
        found = Kube.from_kubeconfig(server.kubeconfig).call("GET", DEPLOYMENTS)["items"]
        images = [c["image"] for item in found for c in item["spec"]["template"]["spec"]["containers"]]
        assert f"spottrain-operator:{VERSION}" in images


def test_a_tag_of_another_version_or_without_notes_is_refused() -> None:
    with pytest.raises(ClusterError, match=r"the tag 9\.9\.9"):
        release.agreed_version("v9.9.9")
    assert release.notes("no such version") == ""
